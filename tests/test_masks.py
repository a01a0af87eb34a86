"""The mask language against dense booleans: meaning, algebra, text, identity, cost, and messages for bad input."""

import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.band_tables import areas, canonical
from tilewise.bands import INF, Band, Bands, within
from tilewise.bitmap import Bitmap
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import (
    Causal,
    ChunkedCausal,
    Dense,
    Documents,
    FirstKeys,
    Full,
    PerHead,
    PrefixLM,
    Slices,
    SlidingWindow,
    parse,
)

lengths = st.integers(0, 14)


@st.composite
def bands(draw, seqlen_q, seqlen_k, most=5):
    def one():
        q0, q1 = sorted(draw(st.tuples(st.integers(0, seqlen_q), st.integers(0, seqlen_q))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, seqlen_k), st.integers(0, seqlen_k))))
        diagonal = st.integers(-seqlen_q - 1, seqlen_k + 1)
        return Band(q0, q1, k0, k1, draw(st.just(-INF) | diagonal), draw(st.just(INF) | diagonal))

    return [one() for _ in range(draw(st.integers(0, most)))]


@st.composite
def framed(draw, sets=1):
    """Lengths and lists of bands that may overlap."""
    seqlen_q, seqlen_k = draw(lengths), draw(lengths)
    return seqlen_q, seqlen_k, *(draw(bands(seqlen_q, seqlen_k)) for _ in range(sets))


def matrix(listed, seqlen_q, seqlen_k):
    """The definition: every pair tried against every band."""
    out = np.zeros((seqlen_q, seqlen_k), dtype=bool)
    for band in listed:
        for q in range(band.q0, band.q1):
            for k in range(band.k0, band.k1):
                out[q, k] |= band.lo <= k - q <= band.hi
    return out


def agrees(region, expected):
    """The region is `expected`, counts it, holds each pair in one band, and is canonical."""
    assert (region.dense() == expected).all()
    assert region.pairs() == expected.sum()
    count = sum((within(band, 0, region.seqlen_q, 0, region.seqlen_k).astype(int) for band in region), np.zeros(expected.shape, int))
    assert (count == expected).all()
    assert (canonical(region.table) == region.table).all()
    assert (areas(region.table) > 0).all()


@settings(max_examples=300, deadline=None)
@given(framed(sets=2))
def test_algebra_is_that_of_dense_booleans(case):
    seqlen_q, seqlen_k, one, two = case
    a, b = Bands.of(one, seqlen_q, seqlen_k), Bands.of(two, seqlen_q, seqlen_k)
    x, y = matrix(one, seqlen_q, seqlen_k), matrix(two, seqlen_q, seqlen_k)
    agrees(a, x)
    agrees(b, y)
    agrees(a & b, x & y)
    agrees(a | b, x | y)
    agrees(a - b, x & ~y)
    agrees(~a, ~x)
    agrees(a.transpose(), x.T)
    assert a.transpose().transpose() is a


@settings(max_examples=200, deadline=None)
@given(framed(), st.tuples(*[st.integers(-3, 16)] * 4), st.integers(-16, 16), st.integers(-16, 16))
def test_crop_rows_and_shift(case, box, dq, dk):
    seqlen_q, seqlen_k, listed = case
    region, expected = Bands.of(listed, seqlen_q, seqlen_k), matrix(listed, seqlen_q, seqlen_k)
    q0, q1, k0, k1 = box
    inside = np.zeros_like(expected)
    inside[max(q0, 0) : max(q1, 0), max(k0, 0) : max(k1, 0)] = True
    agrees(region.crop(*box), expected & inside)
    agrees(region.rows(2, 7), expected & (np.arange(seqlen_q) >= 2)[:, None] & (np.arange(seqlen_q) < 7)[:, None])
    moved = np.zeros((seqlen_q + 2, seqlen_k + 1), dtype=bool)
    for q, k in np.argwhere(expected):
        if 0 <= q + dq < seqlen_q + 2 and 0 <= k + dk < seqlen_k + 1:
            moved[q + dq, k + dk] = True
    agrees(region.shift(dq, dk, seqlen_q + 2, seqlen_k + 1), moved)


def test_neighbours_merge_so_that_algebra_does_not_fragment():
    whole = Bands.of([Band(0, 100, 0, 100, -INF, 0)], 100, 100)
    rows = [whole.rows(i, i + 10) for i in range(0, 100, 10)]
    union = rows[0]
    for part in rows[1:]:
        union = union | part
    assert union.table.tolist() == whole.table.tolist()
    assert len(whole | ~whole) == 1
    left, right = whole.crop(0, 100, 0, 37), whole.crop(0, 100, 37, 100)
    assert len(left | right) <= 2
    assert len(~Bands.of([Band(i, i + 10, 0, i + 10) for i in range(0, 100, 10)], 100, 100)) == 9


def test_frames_must_agree():
    with pytest.raises(ShapeError, match="10 x 10 and 10 x 11; they must agree: shift one"):
        _ = Full().resolve(10, 10) & Full().resolve(10, 11)
    with pytest.raises(ShapeError, match="must agree"):
        _ = Bitmap.of(np.ones((2, 3), bool)) | Bitmap.of(np.ones((3, 3), bool))


def causal(sq, sk, i, j):
    return j <= i + sk - sq


MEANINGS = {
    "Full()": (Full(), lambda sq, sk, i, j: True),
    "Causal": (Causal(), causal),
    "top left": (Causal(align="top_left"), lambda sq, sk, i, j: j <= i),
    "window": (SlidingWindow(3, 1), lambda sq, sk, i, j: -3 <= j - (i + sk - sq) <= 1),
    "window top left": (SlidingWindow(3, 1, align="top_left"), lambda sq, sk, i, j: -3 <= j - i <= 1),
    "left unbounded": (SlidingWindow(None, 2), lambda sq, sk, i, j: j <= i + sk - sq + 2),
    "right unbounded": (SlidingWindow(0, None), lambda sq, sk, i, j: j >= i + sk - sq),
    "unbounded": (SlidingWindow(None, None), lambda sq, sk, i, j: True),
    "first keys": (FirstKeys(3), lambda sq, sk, i, j: j < 3),
    "prefix": (PrefixLM(4), lambda sq, sk, i, j: j < 4 or causal(sq, sk, i, j)),
    "chunks": (ChunkedCausal(4), lambda sq, sk, i, j: causal(sq, sk, i, j) and j // 4 == (i + sk - sq) // 4),
    "huge": (SlidingWindow(1 << 70, 1 << 70) & PrefixLM(1 << 70) & ChunkedCausal(1 << 70), causal),
    "transposed": (Causal().transpose(), lambda sq, sk, i, j: i <= j + sq - sk),
    "expression": (
        (SlidingWindow(2, 0) | FirstKeys(2)) - Causal(align="top_left"),
        lambda sq, sk, i, j: (-2 <= j - (i + sk - sq) <= 0 or j < 2) and not j <= i,
    ),
    "not": (~PrefixLM(2), lambda sq, sk, i, j: not (j < 2 or causal(sq, sk, i, j))),
}


@pytest.mark.parametrize("name", MEANINGS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(9, 9), (5, 12), (12, 5), (1, 9), (9, 1), (0, 4), (4, 0), (0, 0)])
def test_each_constructor_means_what_it_says(name, seqlen_q, seqlen_k):
    mask, sees = MEANINGS[name]
    expected = torch.tensor([[sees(seqlen_q, seqlen_k, i, j) for j in range(seqlen_k)] for i in range(seqlen_q)], dtype=torch.bool)
    expected = expected.reshape(seqlen_q, seqlen_k)
    assert torch.equal(mask.dense(seqlen_q, seqlen_k), expected)
    assert mask.pairs(seqlen_q, seqlen_k) == expected.sum()
    assert mask.pairs(seqlen_q, seqlen_k, batch=2, heads=3) == 6 * expected.sum()
    assert torch.equal(mask.transpose().dense(seqlen_k, seqlen_q), expected.T)
    agrees(mask.resolve(seqlen_q, seqlen_k), expected.numpy())


INNERS = [
    Full(),
    Causal(),
    Causal(align="top_left"),
    SlidingWindow(2, 1),
    PrefixLM(2),
    FirstKeys(1),
    ChunkedCausal(3),
    Slices([[0, 1]], [[0, 1]], [0]),
]
INNERS += [SlidingWindow(1, 0) | FirstKeys(1), ~Causal(), Full() - FirstKeys(1), Causal().transpose()]


@pytest.mark.parametrize("inner", INNERS, ids=repr)
def test_documents_resolve_inner_by_each_documents_lengths(inner):
    cu_q, cu_k = [0, 3, 8, 12], [0, 4, 5, 14]
    expected = torch.zeros(13, 16, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        expected[q0:q1, k0:k1] = inner.dense(q1 - q0, k1 - k0)
    mask = Documents(cu_q, cu_k, inner)
    assert torch.equal(mask.dense(13, 16), expected)
    agrees(mask.resolve(13, 16), expected.numpy())
    nested = Documents([0, 13], [0, 16], inner=mask)
    assert torch.equal(nested.dense(13, 16), expected)


def test_documents_from_tensors_arrays_and_without_documents():
    expected = Documents([0, 2, 2, 5], inner=Causal())
    assert Documents(torch.tensor([0, 2, 2, 5], dtype=torch.int32), inner=Causal()) == expected
    assert Documents(np.array([0, 2, 2, 5]), (0, 2, 2, 5), inner=Causal()) == expected
    assert expected.source == "Documents([0,2,2,5],inner=Causal())"
    assert Documents([0]).pairs(4, 4) == 0


KINDS = [lambda i, j, q, k: True, lambda i, j, q, k: j - k[1] <= i - q[1], lambda i, j, q, k: j - k[0] >= i - q[0]]
KINDS.append(lambda i, j, q, k: KINDS[1](i, j, q, k) and KINDS[2](i, j, q, k))
pair = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(pair, pair, st.integers(0, 3)), max_size=5))
def test_slices_count_overlaps_once_and_come_back(listed):
    expected = torch.zeros(12, 12, dtype=torch.bool)
    for q, k, kind in listed:
        for i in range(*q):
            for j in range(*k):
                expected[i, j] |= KINDS[kind](i, j, q, k)
    mask = Slices([q for q, _, _ in listed], [k for _, k, _ in listed], [kind for *_, kind in listed])
    assert torch.equal(mask.dense(12, 12), expected)
    back = Slices.from_mask(mask, 12, 12)
    assert torch.equal(back.dense(12, 12), expected)
    assert (
        sum(Slices([q], [k], [kind]).pairs(12, 12) for q, k, kind in zip(back.q_ranges, back.k_ranges, back.kinds, strict=True))
        == expected.sum()
    )


@pytest.mark.parametrize("name", MEANINGS)
def test_every_mask_of_bands_is_slices(name):
    mask = MEANINGS[name][0]
    for seqlen_q, seqlen_k in [(9, 9), (5, 12), (12, 5), (0, 3)]:
        assert torch.equal(Slices(*mask.slices(seqlen_q, seqlen_k)).dense(seqlen_q, seqlen_k), mask.dense(seqlen_q, seqlen_k))


def test_dense_and_per_head_masks_give_planes():
    torch.manual_seed(0)
    two, four = torch.rand(6, 7) > 0.5, torch.rand(2, 3, 6, 7) > 0.5
    assert torch.equal(Dense(two).dense(6, 7), two)
    assert Dense(two).pairs(6, 7, batch=2, heads=3) == 6 * two.sum()
    assert torch.equal(Dense(four).dense(6, 7), four)
    assert Dense(four).pairs(6, 7, batch=2, heads=3) == four.sum()
    assert [plane[:2] for plane in Dense(two).planes(6, 7, 2, 3)] == [(range(0, 2), range(0, 3))]
    assert [plane[:2] for plane in Dense(four[:, :1]).planes(6, 7, 2, 3)] == [(range(0, 1), range(0, 3)), (range(1, 2), range(0, 3))]
    heads = PerHead({(1, 3): FirstKeys(2), (0, 1): Causal()})
    assert [plane[:2] for plane in heads.planes(6, 7, 2, 3)] == [(range(0, 2), range(0, 1)), (range(0, 2), range(1, 3))]
    per_head = heads.dense(6, 7)
    assert per_head.shape == (1, 3, 6, 7)
    assert torch.equal(per_head[0, 0], Causal().dense(6, 7)) and torch.equal(per_head[0, 2], FirstKeys(2).dense(6, 7))
    for mixed, expected in [
        (Dense(four) & heads, four & per_head),
        (Causal() | Dense(two), Causal().dense(6, 7) | two),
        (heads - Dense(two), per_head & ~two),
        (~Dense(four), ~four),
        ((Dense(four) & heads).transpose().transpose() | Full() & Dense(two), (four & per_head) | two),
        (
            PerHead({(0, 2): Dense(four[:, :1]), (2, 3): Causal()}),
            torch.cat([four[:, :1].expand(2, 2, 6, 7), Causal().dense(6, 7).expand(2, 1, 6, 7)], 1),
        ),
    ]:
        assert torch.equal(mixed.dense(6, 7), expected)
        assert mixed.pairs(6, 7, *mixed.extent) == expected.sum()
        assert torch.equal(mixed.transpose().dense(7, 6), expected.mT)
    for plane in (Dense(four) & heads).planes(6, 7, 2, 3):
        assert torch.equal(torch.from_numpy(plane.region.dense()), (four & per_head)[plane.batch[0], plane.heads[0]])


def test_a_row_of_keys_stands_for_every_query():
    keys = torch.tensor([[True, True, False], [True, False, False]])
    mask = Dense(keys[:, None, None, :])
    assert torch.equal(mask.dense(4, 3), keys[:, None, None, :].expand(2, 1, 4, 3))
    assert torch.equal(mask.transpose().dense(3, 4), keys[:, None, :, None].expand(2, 1, 3, 4))
    assert mask.pairs(0, 3, batch=2) == 0
    assert torch.equal((Dense(keys[:1]) & Causal()).dense(3, 3), keys[:1] & Causal().dense(3, 3))


def test_planes_of_empty_batches_and_heads():
    assert Full().pairs(4, 4, batch=0, heads=2) == 0
    assert (PerHead({(0, 1): Causal(), (1, 2): Full()}) & Causal()).planes(4, 4, 0, 2) == ()


def test_a_written_tensor_is_read_again():
    given = torch.zeros(3, 3, dtype=torch.bool)
    assert Dense(given).pairs(3, 3) == 0
    given[0] = True
    assert Dense(given).pairs(3, 3) == 3
    with torch.inference_mode():
        assert Dense(torch.ones(2, 2, dtype=torch.bool)).pairs(2, 2) == 4


def test_kind_is_known_without_lengths():
    dense = Dense(torch.ones(2, 2, dtype=torch.bool))
    assert [mask.kind for mask in (Full(), SlidingWindow(None, None), Full() & Full())] == ["full"] * 3
    assert [mask.kind for mask in (Causal(), SlidingWindow(1, 0), Causal() & SlidingWindow(3, 3), Full() & Causal())] == ["band"] * 4
    runs = (
        Documents([0, 2]),
        PrefixLM(1),
        Causal() | FirstKeys(1),
        ~Causal(),
        ChunkedCausal(2),
        Slices([], [], []),
        PerHead({(0, 1): Full()}),
    )
    assert [mask.kind for mask in runs] == ["runs"] * len(runs)
    assert [mask.kind for mask in (dense, dense & Causal(), PerHead({(0, 1): dense}), dense.transpose())] == ["bitmap"] * 4
    for mask in (Full(), Causal(), Causal() & SlidingWindow(3, 3)):
        for lengths in [(1, 1), (4, 9), (9, 4)]:
            assert len(mask.resolve(*lengths)) <= 1


leaves = st.sampled_from(
    [
        Full(),
        Causal(),
        Causal(align="top_left"),
        SlidingWindow(3, 0),
        SlidingWindow(None, 2, align="top_left"),
        PrefixLM(3),
        FirstKeys(2),
        ChunkedCausal(4),
        Slices([[0, 5], [2, 8]], [[0, 4], [1, 7]], [1, 2]),
        Documents([0, 3, 7], [0, 5, 6], SlidingWindow(1, 1) | FirstKeys(1)),
        Dense(torch.eye(8, dtype=torch.bool)),
        Dense(torch.ones(1, 3, 8, 8, dtype=torch.bool)),
        PerHead({(0, 2): Causal(), (2, 3): Full()}),
    ]
)
expressions = st.recursive(
    leaves,
    lambda masks: st.one_of(
        st.tuples(st.sampled_from("&|-"), masks, masks).map(lambda e: {"&": e[1] & e[2], "|": e[1] | e[2], "-": e[1] - e[2]}[e[0]]),
        masks.map(lambda mask: ~mask),
        masks.map(lambda mask: mask.transpose()),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(expressions)
def test_text_pickle_hash_and_cache(mask):
    tensors = []
    text = mask.text(tensors)
    again = parse(text, tensors)
    assert again == mask and hash(again) == hash(mask) and (again.kind, again.extent, again.source) == (mask.kind, mask.extent, mask.source)
    assert (mask.source is None) == bool(tensors)
    assert pickle.loads(pickle.dumps(mask)) == mask
    planes = mask.planes(8, 8, *mask.extent)
    assert again.planes(8, 8, *mask.extent) is planes
    assert torch.equal(again.dense(8, 8), mask.dense(8, 8))
    assert not torch.equal((~mask).dense(8, 8), mask.dense(8, 8))


def test_text_takes_tensors_for_lists_and_refuses_anything_else():
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    mask = parse("Documents(#0,#1,inner=Causal(align='bottom_right'))&SlidingWindow(1023,0)", [cu, cu])
    assert mask.text([]) == "Documents([0,3,8],inner=Causal())&SlidingWindow(1023,0)"
    assert parse("~Causal()") == ~Causal()
    assert parse("PerHead({(0,2):Causal(),(2,3):Full()})") is parse("PerHead({(0,2):Causal(),(2,3):Full()})")
    held = [cu]
    assert Dense(torch.ones(1, 1, dtype=torch.bool)).text(held) == "Dense(#1)" and len(held) == 2
    for text in [
        "__import__('os')",
        "Causal",
        "Causal().kind",
        "[x for x in (1,)]",
        "Causal(**{})",
        "Causal(*[])",
        "1 if 1 else 2",
        "lambda: 1",
        "1.5",
    ]:
        with pytest.raises(ValueError, match="is not understood"):
            parse(text)
    for text in ["7", "'Causal()'", "[Causal()]", "~1"]:
        with pytest.raises(ValueError, match="is not a mask but"):
            parse(text)
    for text in ["Causal(1,2,3)", "1&Causal()", "~'a'", "{[]:1}", "Causal(aligned=1)"]:
        with pytest.raises(ValueError, match=r"^mask text"):
            parse(text)
    for text in ["", "Causal(", "Causal();Full()"]:
        with pytest.raises(ValueError, match="is not an expression"):
            parse(text)
    with pytest.raises(ValueError, match=r"tensor #2, but only 1 were given"):
        parse("Dense(#2)", [cu])


def test_masks_differ_by_meaning_and_are_immutable():
    assert Causal() != Causal(align="top_left") and Causal() != "Causal()" and len({Causal(), parse("Causal()"), Full()}) == 2
    one, two = torch.zeros(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)
    assert Dense(one) != Dense(two) and Dense(one) == Dense(one.clone()) and Dense(one) != Dense(one.view(1, 1, 2, 2))
    assert repr(Causal() & Dense(one)) == "Causal()&Dense(<2x2>)"
    with pytest.raises(AttributeError):
        Causal().align = "top_left"
    with pytest.raises(ValueError, match="read-only"):
        Causal().resolve(4, 4).table[0] = 0
    with pytest.raises(TypeError):
        _ = Causal() & torch.ones(2, 2, dtype=torch.bool)
    assert pickle.loads(pickle.dumps(Causal().resolve(4, 5))).table.tolist() == Causal().resolve(4, 5).table.tolist()


BAD = [
    (lambda: SlidingWindow(-1, 0), ValueError, r"SlidingWindow: left must be an integer, 0 or more, or None for unbounded, got -1"),
    (lambda: SlidingWindow(0, 1.5), ValueError, r"SlidingWindow: right .* got 1.5"),
    (lambda: SlidingWindow(True, 0), ValueError, r"left must be an integer"),
    (lambda: Causal("middle"), ValueError, r"align must be 'bottom_right' or 'top_left', got 'middle'"),
    (lambda: FirstKeys(-2), ValueError, r"FirstKeys: n must be an integer, 0 or more, got -2"),
    (lambda: PrefixLM("3"), ValueError, r"PrefixLM: n must be an integer, 0 or more, got '3'"),
    (lambda: ChunkedCausal(0), ValueError, r"ChunkedCausal: n must be an integer, 1 or more, got 0"),
    (lambda: Documents([0, 5, 3]), ShapeError, r"cu_seqlens_q must not decrease, got 5 followed by 3 at index 2; pass cumulated lengths"),
    (lambda: Documents([1, 5]), ShapeError, r"cu_seqlens_q must begin with 0"),
    (lambda: Documents([]), ShapeError, r"cu_seqlens_q must begin with 0"),
    (lambda: Documents([0, 2], [0, 1, 2]), ShapeError, r"cu_seqlens_k describes 2 documents and cu_seqlens_q 1"),
    (lambda: Documents(torch.tensor([0.0, 1.0])), ShapeError, r"cu_seqlens_q\[0\] must be an integer of at most 2\*\*31 - 1, got 0.0"),
    (lambda: Documents([0, 1 << 40]), ShapeError, r"cu_seqlens_q\[1\] must be an integer of at most"),
    (lambda: Documents(7), ShapeError, r"cu_seqlens_q must be a list, array or tensor of integers with 1 dimension, got 7"),
    (lambda: Documents(torch.zeros(2, 2, dtype=torch.int32)), ShapeError, r"cu_seqlens_q\[0\] must be an integer"),
    (lambda: Documents([0, 2], inner="causal"), ValueError, r"inner must be a mask, got str 'causal'"),
    (lambda: Documents([0, 2], inner=PerHead({(0, 2): Causal()})), ValueError, r"same for every head.*write Documents\(...\) & Dense"),
    (lambda: Documents([0, 2], inner=Dense(torch.ones(2, 2, dtype=torch.bool))), ValueError, r"must be made of bands"),
    (lambda: Documents([0, 9]).resolve(8, 9), ShapeError, r"cu_seqlens_q reaches position 9, but seqlen_q is 8"),
    (lambda: Documents([0, 9]).resolve(9, 8), ShapeError, r"cu_seqlens_k reaches position 9, but seqlen_k is 8"),
    (lambda: Slices([[0, 2]], [[0, 2]], [4]), ValueError, r"kinds\[0\] is 4; expected 0 full, 1 causal, 2 inverse causal or 3 both"),
    (lambda: Slices([[3, 2]], [[0, 2]], [0]), ShapeError, r"q_ranges\[0\] must be a half-open range .* got \[3, 2\]"),
    (lambda: Slices([[0, 2]], [[-1, 2]], [0]), ShapeError, r"k_ranges\[0\] must be a half-open range"),
    (lambda: Slices([[0, 2, 3]], [[0, 2]], [0]), ShapeError, r"q_ranges\[0\] must be a half-open range"),
    (lambda: Slices([0, 2], [[0, 2]], [0]), ShapeError, r"q_ranges\[0\] must be a list, array or tensor"),
    (lambda: Slices([[0, 2]], [[0, 2]], []), ShapeError, r"must have one entry a slice, got 1, 1 and 0"),
    (lambda: Slices([[0, 9]], [[0, 2]], [0]).resolve(8, 8), ShapeError, r"q_ranges reaches position 9, but seqlen_q is 8"),
    (lambda: Dense([[True]]), ShapeError, r"expected a bool tensor, got list; convert it with torch.as_tensor"),
    (lambda: Dense(torch.ones(2, 2)), ShapeError, r"expected a strided bool tensor, got torch.float32.*pass scores to add as bias="),
    (lambda: Dense(torch.ones(2, 2, dtype=torch.bool).to_sparse()), ShapeError, r"torch.sparse_coo"),
    (lambda: Dense(torch.ones(2, 2, 2, dtype=torch.bool)), ShapeError, r"got shape \(2, 2, 2\)"),
    (
        lambda: Dense(torch.ones(2, 3, dtype=torch.bool)).resolve(3, 3),
        ShapeError,
        r"the mask is 2 x 3, the call has seqlen_q 3 and seqlen_k 3",
    ),
    (lambda: Dense(torch.ones(2, 1, 3, 3, dtype=torch.bool)).planes(3, 3, batch=4), ShapeError, r"made for batch 2, the call has batch 4"),
    (
        lambda: Dense(torch.ones(2, 1, 3, 3, dtype=torch.bool)).resolve(3, 3),
        ShapeError,
        r"differs by batch entry or head \(2, 1\); use planes\(\)",
    ),
    (
        lambda: Dense(torch.ones(2, 1, 3, 3, dtype=torch.bool)) & Dense(torch.ones(3, 1, 3, 3, dtype=torch.bool)),
        ShapeError,
        r"batch sizes, \[2, 3\]",
    ),
    (lambda: PerHead({(0, 2): Causal(), (1, 3): Full()}), ValueError, r"cover every head once.*starts at 2, got \(1, 3\)"),
    (lambda: PerHead({(0, 2): Causal(), (3, 4): Full()}), ValueError, r"starts at 2, got \(3, 4\)"),
    (lambda: PerHead({(1, 2): Causal()}), ValueError, r"starts at 0, got \(1, 2\)"),
    (lambda: PerHead({(0, 0): Causal()}), ValueError, r"half open"),
    (lambda: PerHead({}), ValueError, r"no head ranges given"),
    (lambda: PerHead({(0, 1): "causal"}), ValueError, r"need a mask that is the same for every head, got 'causal'"),
    (lambda: PerHead({(0, 1): PerHead({(0, 2): Causal()})}), ValueError, r"need a mask that is the same for every head"),
    (lambda: PerHead({0: Causal()}), ValueError, r"half-open head ranges \(first, last\)"),
    (lambda: PerHead(5), ValueError, r"half-open head ranges \(first, last\)"),
    (lambda: PerHead({(0, 2): Causal()}).planes(4, 4, heads=8), ShapeError, r"made for heads 2, the call has heads 8"),
    (lambda: PerHead({(0, 1): Causal()}).planes(4, 4, heads=8), ShapeError, r"cover 1 heads, the call has heads 8"),
    (lambda: PerHead({(0, 2): Causal()}).pairs(4, 4), ShapeError, r"made for heads 2, the call has heads 1"),
    (lambda: Causal().planes(-1, 4), ValueError, r"seqlen_q must be an integer, 0 or more, got -1"),
    (lambda: Causal().pairs(4, 4, batch=-1), ValueError, r"batch must be an integer, 0 or more, got -1"),
    (lambda: Causal().dense(4, 4.5), ValueError, r"seqlen_k must be an integer, 0 or more, got 4.5"),
    (lambda: Dense(torch.ones(2, 2, dtype=torch.bool, device="meta")).resolve(2, 2), ShapeError, r"on the meta device has no values"),
    (lambda: Dense(torch.ones(2, 2, dtype=torch.bool)).slices(2, 2), ShapeError, r"slices cannot describe"),
    (
        lambda: parse("Packed(#0,9)", [torch.zeros(1, 1, 2, 1, dtype=torch.uint8)]),
        ShapeError,
        r"expected a uint8 tensor .*seqlen_q, 2\), got",
    ),
    (
        lambda: parse("Packed(#0,7)", [torch.full((1, 1, 2, 1), 255, dtype=torch.uint8)]).resolve(2, 7),
        ShapeError,
        r"bits beyond seqlen_k 7 are set",
    ),
    (
        lambda: Bitmap(np.zeros((1, 1), np.uint8), 1 << 20, 1 << 20),
        UnsupportedError,
        r"at most 65536 x 65536 pairs.*describe the mask by bands",
    ),
]


@pytest.mark.parametrize("make, error, message", BAD, ids=[f"{at}" for at in range(len(BAD))])
def test_bad_input_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_five_hundred_documents_over_a_million_tokens():
    """Fractions of the time that python loops over bands or pairs would take; the limits have room for a slow, busy machine."""
    rng = np.random.default_rng(0)
    total = 1 << 20
    cu, other = ([0, *sorted(rng.integers(0, total, 499).tolist()), total] for _ in range(2))
    start = time.perf_counter()
    region = Documents(cu, inner=Causal()).resolve(total, total)
    assert time.perf_counter() - start < 0.2
    assert len(region) == len({*cu}) - 1
    sizes = np.diff(cu)
    assert region.pairs() == int((sizes * (sizes + 1) // 2).sum())
    full = Documents(other).resolve(total, total)
    start = time.perf_counter()
    both, either, rest = region & full, region | full, ~region
    assert time.perf_counter() - start < 1.0
    assert both.pairs() + either.pairs() == region.pairs() + full.pairs()
    assert rest.pairs() == total**2 - region.pairs()
    assert len(both) < 1100 and len(either) < 1100 and len(rest) < 1100


def test_bitmaps_of_long_bands_and_their_transpose():
    mask = Documents([0, 1000, 2500, 3001], inner=Causal())
    bitmap = Bitmap.of_bands(mask.resolve(3001, 3001))
    assert bitmap.pairs() == mask.pairs(3001, 3001)
    assert (bitmap.transpose().dense() == mask.dense(3001, 3001).numpy().T).all()
    assert bitmap.transpose().transpose() is bitmap
    assert pickle.loads(pickle.dumps(bitmap)).pairs() == bitmap.pairs()


def test_masks_are_built_and_written_inside_a_traced_graph():
    """torch.compile traces constructors, `& | -` and text without a break; what reaches the graph is a string and tensors."""
    held = torch.eye(4, dtype=torch.bool)
    texts = []

    def traced(x, held):
        tensors = []
        band = Causal() & SlidingWindow(3, 0)
        texts.append(band.source)
        texts.append((Full() - FirstKeys(2) | PrefixLM(3) | ChunkedCausal(4) | Slices([[0, 1]], [[0, 1]], [0])).text(tensors))
        texts.append(Documents([0, 3, 8], inner=Causal()).text(tensors))
        texts.append((PerHead({(0, 1): Causal()}) & Dense(held)).text(tensors))
        return x + tensors[0].sum()

    assert torch.compile(traced, fullgraph=True, backend="eager")(torch.zeros(1), held) == 4
    compiled, texts = texts, []
    traced(torch.zeros(1), held)
    assert compiled == texts and len(texts) == 4
