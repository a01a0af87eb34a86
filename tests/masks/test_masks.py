"""What each mask means, pair by pair; planes, kinds, identity, and what a million tokens cost."""

import functools
import gc
import operator
import pickle
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.masks import (
    Causal,
    ChunkedCausal,
    Chunks,
    Dense,
    Documents,
    FirstKeys,
    Full,
    Padding,
    PerHead,
    PrefixLM,
    Slices,
    SlidingWindow,
    parse,
)
from tilewise.masks.bitmap import Bitmap, Recent
from tilewise.masks.dense import Packed
from tilewise.masks.mask import KEPT
from tilewise.masks.tiles import lower


def causal(sq, sk, i, j):
    return j <= i + sk - sq


MEANINGS = {
    "Full()": (Full(), lambda sq, sk, i, j: True),
    "Causal": (Causal(), causal),
    "top left": (Causal(align="top_left"), lambda sq, sk, i, j: j <= i),
    "window": (SlidingWindow(3, 1), lambda sq, sk, i, j: -3 <= j - (i + sk - sq) <= 1),
    "window top left": (SlidingWindow(3, 1, align="top_left"), lambda sq, sk, i, j: -3 <= j - i <= 1),
    "causal, moved": (Causal(offset=-3), lambda sq, sk, i, j: j <= i + sk - sq - 3),
    "top left, moved": (Causal("top_left", 2), lambda sq, sk, i, j: j <= i + 2),
    "window without its query": (SlidingWindow(6, 0, offset=-3), lambda sq, sk, i, j: -9 <= j - (i + sk - sq) <= -3),
    "window of later keys": (SlidingWindow(1, None, "top_left", 4), lambda sq, sk, i, j: j - i >= 3),
    "window of earlier keys": (SlidingWindow(9, -3), lambda sq, sk, i, j: -9 <= j - (i + sk - sq) <= -3),
    "window of later keys, negative": (SlidingWindow(-2, 4, "top_left", -1), lambda sq, sk, i, j: 2 <= j - i + 1 <= 4),
    "before the diagonal": (SlidingWindow(None, -1), lambda sq, sk, i, j: j < i + sk - sq),
    "behind the diagonal": (SlidingWindow(-1, None), lambda sq, sk, i, j: j > i + sk - sq),
    "padding": (Padding(start=[0]) & Padding([0], inner=Causal()), lambda sq, sk, i, j: False),
    "left unbounded": (SlidingWindow(None, 2), lambda sq, sk, i, j: j <= i + sk - sq + 2),
    "right unbounded": (SlidingWindow(0, None), lambda sq, sk, i, j: j >= i + sk - sq),
    "unbounded": (SlidingWindow(None, None), lambda sq, sk, i, j: True),
    "first keys": (FirstKeys(3), lambda sq, sk, i, j: j < 3),
    "prefix": (PrefixLM(4), lambda sq, sk, i, j: j < 4 or causal(sq, sk, i, j)),
    "chunks": (ChunkedCausal(4), lambda sq, sk, i, j: causal(sq, sk, i, j) and j // 4 == (i + sk - sq) // 4),
    "whole chunks": (Chunks(4), lambda sq, sk, i, j: j // 4 == (i + sk - sq) // 4),
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


INNERS = [
    Full(),
    Causal(),
    Causal(align="top_left"),
    Causal(offset=-2),
    SlidingWindow(2, 1),
    SlidingWindow(1, 1, "top_left", offset=2),
    PrefixLM(2),
    FirstKeys(1),
    ChunkedCausal(3),
    Chunks(3),
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
    assert mask.pairs(13, 16) == expected.sum()
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


@pytest.mark.parametrize(
    "mask", [Causal(), Dense(torch.ones(6, 7).bool()), Dense(torch.ones(6, 7).bool()) & FirstKeys(4), Causal() | FirstKeys(2)], ids=str
)
def test_a_mask_of_no_batch_entries_or_heads_has_a_plane(mask):
    whole = mask.dense(6, 7)
    for batch, heads in ((0, 2), (3, 0), (0, 0)):
        ((entries, members, region),) = mask.planes(6, 7, batch, heads)
        assert 0 in (len(entries), len(members)) and torch.equal(torch.from_numpy(region.dense()), whole)


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
    apart = (PerHead({(0, 1): Causal(), (1, 2): Full()}) & Causal()).planes(4, 4, 0, 2)
    assert [(plane.batch, plane.heads) for plane in apart] == [(range(0), range(1)), (range(0), range(1, 2))]


@pytest.mark.parametrize("combined", [lambda one: one & Full(), lambda one: ~~one, lambda one: one.transpose().transpose() | Causal()])
def test_the_only_head_is_no_sign_of_masks_that_are_alike(combined):
    mask = combined(PerHead({(0, 1): Causal()}))
    assert mask.extent == (1, 1) and not mask.alike and torch.equal(mask.dense(3, 5).view(3, 5), Causal().dense(3, 5))
    for wrong in (lambda: mask.planes(3, 5, heads=2), lambda: mask.resolve(3, 5), lambda: Documents([0, 3], inner=mask)):
        with pytest.raises(ValueError, match="cover 1 heads, the call has heads 2|differs by batch entry or head|the same for every head"):
            wrong()


def test_a_written_tensor_is_read_again():
    given = torch.zeros(3, 3, dtype=torch.bool)
    assert Dense(given).pairs(3, 3) == 0
    given[0] = True
    assert Dense(given).pairs(3, 3) == 3
    with torch.inference_mode():
        given[1] = True
        assert Dense(given).pairs(3, 3) == 6
    given.data = torch.ones(3, 3, dtype=torch.bool)
    assert Dense(given).pairs(3, 3) == 9


def test_a_written_inference_tensor_is_read_again():
    """Inference tensors count no writes; equality and hash, the bits, and what was resolved before all follow the values."""
    with torch.inference_mode():
        given = torch.ones(2, 2, dtype=torch.bool)
        mask = Dense(given)
        both = mask & Causal()
        assert (mask.pairs(2, 2), both.pairs(2, 2)) == (4, 3) and mask == Dense(torch.ones(2, 2, dtype=torch.bool))
        given[0] = False
        assert (mask.pairs(2, 2), both.pairs(2, 2)) == (2, 2) and mask != Dense(torch.ones(2, 2, dtype=torch.bool))
        packed = torch.full((1, 1, 2, 1), 0b11000000, dtype=torch.uint8)
        assert Packed(packed, 2).pairs(2, 2) == 4
        packed[..., 1, :] = 0
        assert Packed(packed, 2).pairs(2, 2) == 2


@pytest.mark.parametrize("around", [lambda mask: mask, lambda mask: PerHead({(0, 1): mask & Causal()}), lambda mask: ~mask.transpose()])
def test_what_was_resolved_does_not_keep_the_tensor(around):
    given = torch.rand(40, 40) > 0.5
    mask = around(Dense(given))
    mask.pairs(40, 40)
    equal, planes, gone = Dense(given.clone()), mask.planes(40, 40), weakref.ref(given)
    del mask, given
    gc.collect()
    assert gone() is None
    assert around(equal).planes(40, 40) is planes


@pytest.mark.parametrize("make", [lambda n: PrefixLM(n), lambda n: Dense(torch.rand(40, 40) < 0.5)], ids=["bands", "bits"])
def test_what_was_derived_from_masks_goes_with_them(make):
    """Without waiting for Python's collector of cycles: it may be memory of a GPU."""
    gc.disable()
    try:
        made = []
        for n in range(KEPT + 40):
            (plane,) = make(n).planes(40, 40)
            made.append(weakref.ref(lower(plane.region.transpose(), 16, 16)))
            del plane
        assert sum(runs() is not None for runs in made) == KEPT
    finally:
        gc.enable()


def test_bitmaps_are_kept_by_their_bytes():
    made = []
    recent = Recent(4, 1000, Bitmap.nbytes)

    def get(key, rows):
        return recent.get(key, lambda: made.append(key) or Bitmap(np.zeros((rows, 8), np.uint8), rows, 64))

    small = get("a", 25)
    assert small.nbytes() == 200 and get("a", 25) is small and made == ["a"]
    get("b", 50)
    get("a", 25)
    get("c", 50)  # 1000 bytes together
    assert list(recent.values) == ["b", "a", "c"]
    get("d", 1)
    assert list(recent.values) == ["a", "c", "d"]
    small.transpose()
    assert small.nbytes() == 200 + 64 * 4
    lower(small, 16, 64)
    tiles = lower(small.transpose(), 64, 16).bitmaps.nbytes + lower(small, 16, 64).bitmaps.nbytes
    assert small.nbytes() == 200 + 64 * 4 + tiles
    get("e", 200)
    assert list(recent.values) == ["e"]
    get("f", 0), get("g", 0), get("h", 0), get("i", 0)
    assert len(recent.values) <= 4 and "i" in recent.values


def test_chains_longer_than_the_stack():
    windows = [Slices([[i, i + 1]], [[i, i + 2]], [0]) for i in range(1000)]
    held = Dense(torch.zeros(1000, 1001, dtype=torch.bool))
    for first in (FirstKeys(0), held):
        mask = functools.reduce(operator.or_, windows, first)
        tensors = []
        text = mask.text(tensors)
        assert "((" not in text and text.count("|") == 1000
        again = parse(text, tensors)
        assert again == mask and pickle.loads(pickle.dumps(mask)) == mask
        assert again.pairs(1000, 1001) == 2000 and mask.transpose().pairs(1001, 1000) == 2000


def test_only_a_left_operand_of_the_same_operation_goes_without_brackets():
    a, b, c = FirstKeys(1), FirstKeys(2), FirstKeys(3)
    texts = [(a | b | c), (a - b - c), (a & b | c), (a | b) & c, a - (b - c), a | (b | c), (a - b - c) | a | b]
    assert [mask.source.replace("FirstKeys", "") for mask in texts] == [
        "(1)|(2)|(3)", "(1)-(2)-(3)", "((1)&(2))|(3)", "((1)|(2))&(3)", "(1)-((2)-(3))", "(1)|((2)|(3))", "((1)-(2)-(3))|(1)|(2)",
    ]  # fmt: skip
    for mask in texts:
        assert parse(mask.source) == mask and torch.equal(parse(mask.source).dense(4, 4), mask.dense(4, 4))


def test_sizes_are_plain_integers_on_the_cpu():
    assert SlidingWindow(np.int64(3), np.int32(0)).source == "SlidingWindow(3,0)" and type(SlidingWindow(np.int64(3), 0).left) is int
    assert PerHead([([np.int64(0), 2], Causal())]).masks == (((0, 2), Causal()),)
    assert Causal().pairs(np.int64(4), 4) == 10
    with torch.device("meta"):  # as under torch.set_default_device
        assert Causal().dense(4, 4).device.type == "cpu"


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
        Chunks(2),
        Slices([], [], []),
        PerHead({(0, 1): Full()}),
    )
    assert [mask.kind for mask in runs] == ["runs"] * len(runs)
    assert [mask.kind for mask in (dense, dense & Causal(), PerHead({(0, 1): dense}), dense.transpose())] == ["bitmap"] * 4
    for mask in (Full(), Causal(), Causal() & SlidingWindow(3, 3)):
        for lengths in [(1, 1), (4, 9), (9, 4)]:
            assert len(mask.resolve(*lengths)) <= 1


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
