"""decode and append: every way to lay a cache out and to say what is seen, held to the oracle; all that may not be read is NaN."""

import math

import pytest
import torch

import tilewise as tw
from tilewise import ShapeError
from tilewise.problem import Call
from tilewise.runtime import append_operator, cache_values, decode_operator
from tilewise.testing import poison, tolerance

HEADS, DIMS, PAGE = (6, 2), (40, 24), 7
LENGTHS, QUERIES = (130, 0, 5, 1100, 33), (3, 1, 2, 17, 0)
NEW = 5


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def permutation(n, seed=0):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


class Cache:
    """Sequences of LENGTHS tokens in a pool that is NaN elsewhere, and the words that say where they lie."""

    def __init__(self, layout: str, dtype=torch.float32, lengths=LENGTHS, index=torch.int32, spare: int = NEW):
        self.lengths, self.capacity = lengths, max(lengths) + spare
        batch, self.words = len(lengths), {"cache_seqlens": torch.tensor(lengths, dtype=index)}
        at = torch.arange(self.capacity)
        if layout == "pages":
            width = -(-self.capacity // PAGE)
            table = permutation(batch * width + 3)[: batch * width].view(batch, width)
            self.slots = [(table[b, at // PAGE], at % PAGE) for b in range(batch)]
            table = table.clone()
            for b, n in enumerate(lengths):
                table[b, -(-(n + spare) // PAGE) :] = torch.tensor([-1, 2**31 - 1])[b % 2]  # never looked at
            self.words["page_table"] = table.to(index)
            shape = (batch * width + 3, PAGE)
        else:
            entries = permutation(batch + 2)[:batch] if layout == "rows" else torch.arange(batch)
            self.slots = [(entries[b].expand_as(at), at) for b in range(batch)]
            shape = (batch + 2 * (layout == "rows"), self.capacity)
            if layout == "rows":
                self.words["cache_batch_idx"] = entries.to(index)
        self.k, self.v = (torch.full((*shape, HEADS[1], dim), math.nan, dtype=dtype) for dim in DIMS)
        for seed, cache in enumerate((self.k, self.v)):
            for b, n in enumerate(lengths):
                cache[self.at(b, 0, n)] = randn(n, *cache.shape[2:], seed=seed + 10 * b, dtype=dtype)

    def at(self, b, start, end):
        return tuple(x[start:end] for x in self.slots[b])

    def sequence(self, b, end=None):
        """(1, length, heads_k, dim) of keys and values."""
        return tuple(cache[self.at(b, 0, self.lengths[b] if end is None else end)][None] for cache in (self.k, self.v))


def hold(o, lse, q, k, v, mask, **fields):
    """(queries, heads, dim) and (heads, queries) against the oracle for one sequence."""
    slopes = fields.pop("alibi_slopes", None)
    call = Call(q=q[None], k=k, v=v, mask=mask, scale=q.shape[-1] ** -0.5, alibi_slopes=None if slopes is None else slopes[None], **fields)
    tolerance.check_outputs(call, o[None], lse[None])


MASKS = {"causal": None, "window": tw.SlidingWindow(20, 0), "prefix": tw.PrefixLM(4) & tw.SlidingWindow(60, 0)}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["plain", "rows", "pages"])
def test_packed_queries(layout, mask, dtype):
    """Sequences of no, one and many queries in one call, and rows that are no sequence's."""
    cache = Cache(layout, dtype)
    bounds = torch.tensor((0, *QUERIES)).cumsum(0, dtype=torch.int32)
    q, slopes, sink = (
        randn(int(bounds[-1]) + 2, HEADS[0], DIMS[0], seed=5, dtype=dtype),
        randn(5, HEADS[0]).abs() / 8,
        randn(HEADS[0], seed=6),
    )
    more = {"softcap": 4.0, "sink": sink} if mask == "window" else {}
    o, lse = tw.decode(
        q, cache.k, cache.v, cu_seqlens_q=bounds, alibi_slopes=slopes, mask=MASKS[mask], return_lse=True, **cache.words, **more
    )
    assert o.shape == (*q.shape[:2], DIMS[1]) and lse.shape == (HEADS[0], q.shape[0])
    for b, n in enumerate(QUERIES):
        rows = slice(int(bounds[b]), int(bounds[b]) + n)
        shown = tw.Causal() if MASKS[mask] is None else MASKS[mask] & tw.Causal()
        hold(o[rows], lse[:, rows], q[rows], *cache.sequence(b), shown, alibi_slopes=slopes[b], **more)
    assert (o[-2:] == 0).all() and (lse[:, -2:] == -math.inf).all()


def dense(queries, length, first=0, tree=None):
    """Which pairs are visible, by definition."""
    shown = torch.zeros(queries, length, dtype=torch.bool)
    for i in range(queries):
        for j in range(length):
            position = length - queries + i
            shown[i, j] = first <= j <= position
            if tree is not None and min(position, j) >= length - tree.shape[0]:
                shown[i, j] &= tree[position - length, j - length]
    return shown


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("layout", ["plain", "pages"])
def test_trees_and_padding(layout, dtype, per_sequence):
    """Padded keys hold NaN; keys of other branches too, so that a hidden one must not be added as 0 times NaN."""
    lengths = (130, 3, 40, 1027)
    cache, batch, queries = Cache(layout, dtype, lengths), len(lengths), 4
    trees = (randn(batch if per_sequence else 1, NEW, NEW, seed=3) > -0.3) | torch.eye(NEW, dtype=torch.bool)
    trees[..., NEW - 2] = False  # nobody but itself sees it, and its query is not in this call's first rows
    trees[:, NEW - 2, NEW - 2] = True
    leftpad = torch.tensor([7, 0, 40, 1001], dtype=torch.int32)
    for b, first in enumerate(leftpad.tolist()):
        cache.k[cache.at(b, 0, first)] = cache.v[cache.at(b, 0, first)] = math.nan
    q = randn(batch, queries, HEADS[0], DIMS[0], seed=5, dtype=dtype)
    o, lse = tw.decode(q, cache.k, cache.v, tree=trees, leftpad=leftpad, return_lse=True, **cache.words)
    for b, (n, first) in enumerate(zip(lengths, leftpad.tolist(), strict=True)):
        shown = dense(queries, n, first, trees[b if per_sequence else 0])
        hold(o[b], lse[b], q[b], *cache.sequence(b), tw.Dense(shown))
    v = cache.v.clone()
    for b, n in enumerate(lengths):
        v[tuple(x[n - 2] for x in cache.slots[b])] = math.nan
    spoilt = tw.decode(q, cache.k, v, tree=trees, leftpad=leftpad, **cache.words)
    others = torch.tensor([0, 1, 3])
    assert torch.equal(spoilt[:, others], o[:, others]) and spoilt[0, 2].isnan().all()


def test_a_tree_alone_equals_its_branches():
    """Each leaf sees what it would see if its ancestors alone had been appended."""
    parents, n = (-1, 0, 0, 1, 2, 4), 50
    tree = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            tree[node] |= tree[parent]
    cache = Cache("plain", lengths=(n,), spare=6)
    q, k, v = randn(1, 6, HEADS[0], DIMS[0]), randn(1, 6, HEADS[1], DIMS[0], seed=1), randn(1, 6, HEADS[1], DIMS[1], seed=2)
    o = tw.decode(q, cache.k, cache.v, cache_seqlens=n, k=k, v=v, tree=tree[None])
    for node in range(6):
        path = tree[node].nonzero().flatten()
        keys, values = (torch.cat((old[:, :n], new[:, path]), 1) for old, new in ((cache.k, k), (cache.v, v)))
        torch.testing.assert_close(o[:, node : node + 1], tw.attention(q[:, node : node + 1], keys, values), atol=1e-5, rtol=1e-5)


def turned(x, positions, cos, sin, interleaved):
    """x (tokens, heads, dim) rotated, as complex numbers in fp64."""
    half = cos.shape[1]
    first = x[..., : 2 * half].double()
    pairs = first.unflatten(-1, (half, 2)) if interleaved else first.unflatten(-1, (2, half)).transpose(-1, -2)
    z = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    pairs = torch.view_as_real(z)
    first = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat((first.to(x.dtype), x[..., 2 * half :]), -1)


@pytest.mark.parametrize("rotary", [None, False, True], ids=["", "halves", "interleaved"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("layout", ["plain", "rows", "pages"])
def test_appending(layout, packed, rotary):
    """New tokens are written, rotated, and attended; nothing else is written, and nothing is written twice."""
    cache = Cache(layout)
    batch, counts = len(LENGTHS), QUERIES if packed else (NEW - 1,) * len(LENGTHS)
    counts = tuple(min(n, NEW) for n in counts)
    bounds, total = torch.tensor((0, *counts)).cumsum(0, dtype=torch.int32), sum(counts)
    q, k, v = randn(total, HEADS[0], DIMS[0], seed=5), randn(total, HEADS[1], DIMS[0], seed=6), randn(total, HEADS[1], DIMS[1], seed=7)
    angles = randn(1200, 8, seed=8)
    words = dict(cache.words)
    if rotary is not None:
        words |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "interleaved": rotary}
    before = cache.k.clone(), cache.v.clone()
    shape = (lambda x: x) if packed else (lambda x: x.unflatten(0, (batch, -1)))
    words |= {"cu_seqlens_q": bounds} if packed else {}
    o, lse = tw.decode(shape(q), cache.k, cache.v, k=shape(k), v=shape(v), return_lse=True, **words)
    if not packed:
        o, lse = o.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert cache.words["cache_seqlens"].tolist() == list(LENGTHS)
    for b, (n, new) in enumerate(zip(LENGTHS, counts, strict=True)):
        rows, places = slice(int(bounds[b]), int(bounds[b]) + new), cache.at(b, n, n + new)
        one, keys = q[rows], k[rows]
        if rotary is not None:
            one, keys = (turned(x, torch.arange(n, n + new), angles.cos(), angles.sin(), rotary) for x in (one, keys))
        torch.testing.assert_close(cache.k[places], keys)
        assert torch.equal(cache.v[places], v[rows])
        if rotary is None:
            hold(o[rows], lse[:, rows], one, *cache.sequence(b, n + new), tw.Causal())
        elif new:
            expected = tw.attention(one[None], *cache.sequence(b, n + new), causal=True)[0]
            torch.testing.assert_close(o[rows], expected, atol=2e-5, rtol=2e-5)
        for x in (cache.k, cache.v, *before):
            x[places] = 0.0
    for x, kept in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(x.nan_to_num(7.0), kept.nan_to_num(7.0))


def test_tokens_behind_the_last_sequence_have_no_position():
    """Rotary tables need not reach them, and what they hold is nobody's."""
    cache, angles = Cache("pages", lengths=(3, 5)), randn(7, 4)
    k, v = (randn(9, HEADS[1], dim, seed=dim) for dim in DIMS)
    k[3:] = v[3:] = math.nan
    words = cache.words | {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    tw.append(cache.k, cache.v, k, v, cu_seqlens=torch.tensor([0, 1, 3]), **words)
    torch.testing.assert_close(cache.k[cache.at(1, 5, 7)], turned(k[1:3], torch.tensor([5, 6]), angles.cos(), angles.sin(), False))
    assert cache.k.isfinite().all(-1).sum() == HEADS[1] * (3 + 5 + 3)
    longer = torch.tensor([0, 1, 4])
    with pytest.raises(ShapeError, match="cos and sin have 7 positions, but x reaches position 7"):
        tw.append(cache.k, cache.v, k, v, cu_seqlens=longer, **words)


def test_appending_through_strides_and_int_lengths():
    both = torch.zeros(3, 2, HEADS[1], 9, DIMS[0])
    k_cache, v_cache = (x.transpose(1, 2) for x in both.unbind(1))
    k = randn(3, 2, HEADS[1], DIMS[0])
    assert tw.append(k_cache, v_cache, k, k, cache_seqlens=4) is None
    assert torch.equal(both[:, 0, :, 4:6], k.transpose(1, 2)) and both.count_nonzero() == 2 * k.numel()


def test_tokens_behind_the_last_sequence_need_not_be_alike():
    """Where values are the first columns of keys."""
    cache, k = torch.zeros(2, 7, 1, 12, dtype=torch.float32), randn(5, 1, 12)
    v = k[..., :8].clone()
    v[3:] = 7.0
    tw.append(cache, cache[..., :8], k, v, cache_seqlens=1, cu_seqlens=torch.tensor([0, 1, 3]))
    assert torch.equal(cache[1, 1:3], k[1:3]) and torch.equal(cache[0, 1], k[0])
    v[2] = 7.0
    with pytest.raises(ShapeError, match=r"v must be k\[..., :8\]"):
        tw.append(cache, cache[..., :8], k, v, cache_seqlens=1, cu_seqlens=torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_caches_whose_numbers_lie_apart_are_attended_as_they_are_after_appending(dtype):
    """Backends get a copy of such caches, which has to have the new tokens, too."""
    apart = [torch.full((2, 9, HEADS[1], dim, 2), math.nan, dtype=dtype)[..., 0] for dim in DIMS]
    caches = [torch.full((2, 9, HEADS[1], dim), math.nan, dtype=dtype) for dim in DIMS]
    q, new = randn(2, 3, HEADS[0], DIMS[0], dtype=dtype), [randn(2, 3, HEADS[1], dim, seed=dim, dtype=dtype) for dim in DIMS]
    found = [tw.decode(q, *x, k=new[0], v=new[1], cache_seqlens=0) for x in (apart, caches)]
    assert found[1].isfinite().all() and torch.equal(*found)


@pytest.mark.parametrize("layout", ["plain", "pages"])
def test_a_sequence_has_its_bits_whatever_else_is_in_the_batch(layout):
    """Alone, padded with others, in another order, packed, as part of a larger table: the same bits."""
    lengths, queries = (1500, 3, 700, 2100), 2
    cache = Cache(layout, torch.bfloat16, lengths)
    q = randn(4, queries, HEADS[0], DIMS[0], seed=5, dtype=torch.bfloat16)
    words = {"split": 256, "return_lse": True}
    o, lse = tw.decode(q, cache.k, cache.v, **words, **cache.words)
    for rows in ([2], [3, 0], [1, 1, 2]):
        some = {name: x[rows] for name, x in cache.words.items()}
        caches = (cache.k, cache.v) if layout == "pages" else (cache.k[rows], cache.v[rows])
        for got, expected in zip(tw.decode(q[rows], *caches, **words, **some), (o[rows], lse[rows]), strict=True):
            assert torch.equal(got, expected)
    bounds = torch.arange(5, dtype=torch.int32) * queries
    packed, packed_lse = tw.decode(q.flatten(0, 1), cache.k, cache.v, cu_seqlens_q=bounds, **words, **cache.words)
    assert torch.equal(packed, o.flatten(0, 1)) and torch.equal(packed_lse, lse.transpose(0, 1).flatten(1))


def test_many_queries_have_their_bits_too():
    """A piece of a prompt between single tokens, and alone."""
    cache, counts = Cache("pages", torch.bfloat16, (500, 30, 1200)), (90, 1, 40)
    bounds, q = torch.tensor((0, *counts)).cumsum(0, dtype=torch.int32), randn(131, HEADS[0], DIMS[0], seed=5, dtype=torch.bfloat16)
    o, lse = tw.decode(q, cache.k, cache.v, cu_seqlens_q=bounds, return_lse=True, **cache.words)
    for b in range(3):
        rows, some = slice(*bounds[b : b + 2].tolist()), {name: x[b : b + 1] for name, x in cache.words.items()}
        hold(o[rows], lse[:, rows], q[rows], *cache.sequence(b), tw.Causal())
        alone, alone_lse = tw.decode(q[None, rows], cache.k, cache.v, return_lse=True, **some)
        assert torch.equal(alone[0], o[rows]) and torch.equal(alone_lse[0], lse[:, rows])


def test_page_size_layout_and_index_types_change_no_bit():
    plain, pages, rows = Cache("plain"), Cache("pages", index=torch.int64), Cache("rows", index=torch.int64)
    q = randn(len(LENGTHS), 3, HEADS[0], DIMS[0], seed=5)
    expected = tw.decode(q, plain.k, plain.v, **plain.words)
    assert torch.equal(tw.decode(q, pages.k, pages.v, **pages.words), expected)
    assert torch.equal(tw.decode(q, rows.k, rows.v, **rows.words), expected)
    assert torch.equal(tw.decode(q.transpose(0, 1).contiguous().transpose(0, 1), plain.k, plain.v, **plain.words), expected)


def test_a_shared_prefix_changes_nothing():
    cache = Cache("pages", lengths=(40, 40, 40))
    table = cache.words["page_table"].clone()
    table[:, :3] = table[0, :3]
    q = randn(3, 1, HEADS[0], DIMS[0])
    words = cache.words | {"page_table": table}
    expected = tw.decode(q, cache.k, cache.v, **words)
    assert torch.equal(tw.decode(q, cache.k, cache.v, shared_prefix=3 * PAGE, **words), expected)
    for b in range(3):
        k, v = (x[table[b, : -(-40 // PAGE)].long()].flatten(0, 1)[None, :40] for x in (cache.k, cache.v))
        torch.testing.assert_close(expected[b : b + 1], tw.attention(q[b : b + 1], k, v), atol=1e-5, rtol=1e-5)


def test_growing_sequences_equal_one_attention():
    """Tokens appended one by one, and by twos, give the rows of causal attention over the whole."""
    n = 37
    q, k, v = randn(2, n, HEADS[0], DIMS[0]), randn(2, n, HEADS[1], DIMS[0], seed=1), randn(2, n, HEADS[1], DIMS[1], seed=2)
    table = permutation(12).view(2, 6).int()
    k_cache, v_cache = (torch.full((12, PAGE, HEADS[1], dim), math.nan) for dim in DIMS)
    whole, at = tw.attention(q, k, v, causal=True), 0
    for step in (1, 2, 1, 5, 1, 1, 7, 2, 9, 1, 7):
        new = slice(at, at + step)
        lengths = torch.full((2,), at, dtype=torch.int32)
        o = tw.decode(q[:, new], k_cache, v_cache, k=k[:, new], v=v[:, new], cache_seqlens=lengths, page_table=table)
        torch.testing.assert_close(o, whole[:, new], atol=1e-5, rtol=1e-5)
        at += step
    assert at == n


def test_masks_of_the_general_path():
    """A dense mask and one that differs by head, with packed queries, padding and a tree."""
    lengths, counts = (12, 4, 9), (2, 1, 3)
    cache, bounds = Cache("pages", lengths=lengths), torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    q, leftpad = randn(6, HEADS[0], DIMS[0]), torch.tensor([2, 0, 9])
    tree = torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    width = cache.words["page_table"].shape[1] * PAGE
    shown = randn(3, 1, 1, width) > 0
    per_head = {(0, 4): tw.Causal(), (4, 6): tw.SlidingWindow(2, 0)}
    for mask in (tw.Dense(shown), per_head):
        words = {"cu_seqlens_q": bounds, "leftpad": leftpad, "tree": tree, "mask": mask, "return_lse": True}
        o, lse = tw.decode(q, cache.k, cache.v, **words, **cache.words)
        for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
            rows, visible = (
                slice(int(bounds[b]), int(bounds[b + 1])),
                dense(count, n, int(leftpad[b]), tree[0]).expand(1, HEADS[0], count, n),
            )
            visible = visible & (shown[b, :, :, :n] if isinstance(mask, tw.Dense) else tw.PerHead(mask).dense(count, n))
            hold(o[rows], lse[:, rows], q[rows], *cache.sequence(b), tw.Dense(visible))


@pytest.mark.parametrize("packed", [False, True])
def test_fresh_memory_is_never_read(packed):
    cache = Cache("pages", lengths=(1500, 0, 40))
    q = randn(3, 2, HEADS[0], DIMS[0])
    words = cache.words | {
        "sink": randn(HEADS[0], seed=6),
        "tree": torch.eye(2, dtype=torch.bool)[None],
        "leftpad": torch.tensor([9, 0, 1]),
    }
    if packed:
        q, words["cu_seqlens_q"] = q.flatten(0, 1), torch.tensor([0, 1, 1, 5])
    expected = tw.decode(q, cache.k, cache.v, return_lse=True, **words)
    with poison.memory():
        got = tw.decode(q, cache.k, cache.v, return_lse=True, **words)
    assert all(map(torch.equal, got, expected)) and got[0].isfinite().all()


def test_random_replays_of_one_program_equal_fresh_calls():
    """Lengths grow and start again, tables are dealt anew, in the tensors that the program was made with."""
    torch._dynamo.reset()
    generator, page, width = torch.Generator().manual_seed(0), 4, 6
    pool_k, pool_v = (torch.full((20, page, HEADS[1], dim), math.nan) for dim in DIMS)
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.full((3, width), -1, dtype=torch.int32)
    program = torch.compile(
        lambda q, k, v: tw.decode(q, pool_k, pool_v, k=k, v=v, cache_seqlens=lengths, page_table=table), fullgraph=True, backend="eager"
    )
    kept: list[list] = [[], [], []]
    for step in range(60):
        for b in range(3):
            if step == 0 or len(kept[b]) == page * width or torch.rand(1, generator=generator) < 0.05:  # a new sequence
                kept[b] = []
                free = [
                    p for p in torch.randperm(20, generator=generator).tolist() if p not in table[torch.arange(3) != b].flatten().tolist()
                ]
                table[b] = torch.tensor(free[:width], dtype=torch.int32)
        lengths.copy_(torch.tensor([len(each) for each in kept]))
        q, k, v = (torch.randn(3, 1, h, d, generator=generator) for h, d in ((HEADS[0], DIMS[0]), (HEADS[1], DIMS[0]), (HEADS[1], DIMS[1])))
        o = program(q, k, v)
        for b in range(3):
            kept[b].append((k[b], v[b]))
            keys, values = (torch.cat(x)[None] for x in zip(*kept[b], strict=True))
            assert torch.equal(o[b : b + 1], tw.decode(q[b : b + 1], keys, values))


def test_appending_under_autocast_and_export():
    q, k = randn(2, 1, 4, 8), randn(2, 1, 2, 8, seed=1)
    caches = [randn(2, 9, 2, 8, seed=seed) for seed in (2, 3)]
    words = {"k": k, "v": k, "cache_seqlens": torch.tensor([3, 5])}
    with torch.autocast("cpu", torch.bfloat16):
        o = tw.decode(q, *caches, **words)
    assert torch.equal(caches[0][0, 3], k[0, 0]) and torch.equal(caches[1][1, 5], k[1, 0])
    low = [x.bfloat16() for x in (q, *caches)]
    assert torch.equal(o, tw.decode(*low, cache_seqlens=words["cache_seqlens"] + 1))

    class Step(torch.nn.Module):
        def forward(self, q, k_cache, v_cache):
            return tw.decode(q, k_cache, v_cache, **words)

    one, two = ([x.clone() for x in caches] for _ in range(2))
    program = torch.export.export(Step(), (q, *caches)).module()
    assert torch.equal(program(q, *one), Step()(q, *two)) and all(map(torch.equal, one, two))


def test_out_is_written_and_returned():
    cache = Cache("plain")
    q = randn(5, 2, HEADS[0], DIMS[0])
    out = torch.full((5, 2, HEADS[0], DIMS[1]), math.nan)
    o, _ = tw.decode(q, cache.k, cache.v, out=out, return_lse=True, **cache.words)
    assert o is out and torch.equal(out, tw.decode(q, cache.k, cache.v, **cache.words))


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_calls_without_queries(backend):
    """Nothing to attend for, on every way of a call; new tokens are written all the same."""
    cache, eight = Cache("pages"), Cache("pages")
    q, k, v = randn(5, 0, HEADS[0], DIMS[0]), randn(5, 2, HEADS[1], DIMS[0]), randn(5, 2, HEADS[1], DIMS[1])
    for caches, new in (((cache.k, cache.v), (k, v)), ([x.to(torch.float8_e4m3fn) for x in (eight.k, eight.v)], None)):
        k, v = new or (x.to(torch.float8_e4m3fn) for x in (k, v))
        o, lse = tw.decode(q, *caches, k=k, v=v, return_lse=True, backend=backend, **cache.words)
        assert o.shape == (5, 0, HEADS[0], DIMS[1]) and lse.shape == (5, HEADS[0], 0)
        assert torch.equal(caches[0][cache.at(3, LENGTHS[3], LENGTHS[3] + 2)].float(), k[3].float())


@pytest.mark.parametrize("layout", ["plain", "pages"])
def test_it_compiles_whole_and_writes_only_the_caches(layout):
    torch._dynamo.reset()
    eager, compiled = Cache(layout, lengths=(9, 4, 20)), Cache(layout, lengths=(9, 4, 20))
    angles, traced = randn(64, 8), []
    q, k, v = randn(3, 2, HEADS[0], DIMS[0]), randn(3, 2, HEADS[1], DIMS[0], seed=1), randn(3, 2, HEADS[1], DIMS[1], seed=2)
    turn = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}

    def step(q, k_cache, v_cache, cache_seqlens, **words):
        return tw.decode(q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, **turn, **words, return_lse=True)

    def counting(graph, inputs):
        traced.append(1)
        return graph.forward

    run = torch.compile(step, fullgraph=True, backend=counting)
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    for times in (0, 1):
        words = dict(eager.words) | {"cache_seqlens": eager.words["cache_seqlens"] + 2 * times}
        expected = step(q, eager.k, eager.v, **words)
        for got in (run(q, compiled.k, compiled.v, **words), whole(q, compiled.k, compiled.v, **words)):
            assert all(map(torch.equal, got, expected))
        for a, b in ((eager.k, compiled.k), (eager.v, compiled.v)):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert len(traced) == 1


def test_it_compiles_whole_for_any_sizes():
    """Whose strides are then no numbers."""
    torch._dynamo.reset()

    def step(q, k_cache, v_cache, k, v, lengths, table, out):
        return tw.decode(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, page_table=table, out=out)

    run = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, new, pages, size in ((2, 1, 3, 8), (3, 2, 4, 8), (5, 3, 6, 4)):
        table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
        caches = randn(batch * pages, size, 2, 16), randn(batch * pages, size, 2, 16, seed=1)
        q, k, v = randn(batch, new, 4, 16), randn(batch, new, 2, 16, seed=2), randn(batch, new, 2, 16, seed=3)
        lengths = torch.arange(batch, dtype=torch.int32) + 4
        again = [x.clone() for x in caches]
        expected = step(q, *caches, k, v, lengths, table, torch.empty_like(q))
        assert torch.equal(run(q, *again, k, v, lengths, table, torch.empty_like(q)), expected) and all(map(torch.equal, again, caches))


def test_opcheck_of_packed_queries_and_trees():
    cache = Cache("pages", lengths=(9, 4))
    fields = dict.fromkeys(decode_operator.Operands._fields) | decode_operator.Operands._field_defaults | cache.words
    fields |= {"q": randn(3, HEADS[0], DIMS[0]), "k_cache": cache.k.nan_to_num(), "v_cache": cache.v.nan_to_num()}
    fields |= {"cu_seqlens_q": torch.tensor([0, 1, 3]), "tree": torch.ones(1, 2, 2, dtype=torch.bool), "leftpad": torch.tensor([1, 0])}
    fields |= {"mask_tensors": [], "mask": "Causal()", "softcap": 0.0, "shared_prefix": 0, "interleaved": False, "check": False}
    torch.library.opcheck(decode_operator.operator, tuple(decode_operator.Operands(**fields)))


def test_nothing_is_read_on_the_host_of_a_gpu(monkeypatch):
    """Tensors of the meta device have no values: whoever reads one raises. The backend is handed what lies on the device."""
    calls = []

    class Recorder:
        def decode(self, call):
            if call.q.numel() == 0:  # as Hopper's
                return None
            calls.append(call)
            return decode_operator._empty(call.q, call.v_cache)

    monkeypatch.setattr(decode_operator, "choose", lambda problem, name, decodes: Recorder())
    monkeypatch.setattr("tilewise.rotary.check_tensor", lambda *_: None)  # which refuses the device
    with torch.device("meta"):
        q, tables = torch.empty(7, 4, 16), {name: torch.empty(64, 8) for name in ("rotary_cos", "rotary_sin")}
        k_cache, v_cache, k = torch.empty(12, PAGE, 2, 16), torch.empty(12, PAGE, 2, 8), torch.empty(7, 2, 16)
        index = {name: torch.empty(shape, dtype=torch.int64) for name, shape in {"cache_seqlens": 3, "page_table": (3, 4)}.items()}
        bounds = torch.empty(4, dtype=torch.int32)
        given = dict.fromkeys(decode_operator.Operands._fields) | decode_operator.Operands._field_defaults | index | tables
        given |= {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "cu_seqlens_q": bounds,
            "mask_tensors": [],
            "mask": "Causal()",
            "softcap": 0.0,
        }
        given |= {"shared_prefix": 99, "interleaved": False, "check": False, "leftpad": torch.empty(3, dtype=torch.int64)}
        for rows in (q, q[:0]):
            decode_operator._compute(decode_operator.Operands(**given | {"q": rows}))
        new = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": k[..., :8], "cu_seqlens": bounds, "interleaved": True, "check": False}
        operands = dict.fromkeys(append_operator.Operands._fields) | append_operator.Operands._field_defaults | new | index | tables
        for share in ({}, {"cp_rank": 1, "cp_world": 2, "cp_interleave": 4}):
            append_operator._append(append_operator.Operands(**operands | share))
    (call,) = calls
    assert call.q.is_meta and call.max_seqlen_q == 7 and call.shared_prefix == 4 * PAGE
    assert call.seqlens.dtype == call.page_table.dtype == call.leftpad.dtype == torch.int64 and call.cu_seqlens_q.dtype == torch.int32
    narrow = call.in_int32()
    assert {x.dtype for x in (narrow.seqlens, narrow.page_table, narrow.cu_seqlens_q, narrow.leftpad)} == {torch.int32}
    assert narrow.in_int32() is narrow


def test_lengths_that_append_tells_are_not_computed_again(monkeypatch):
    """A backend's kernel writes them beside the tokens; else they are added up."""
    append, decode, seen = append_operator.run, decode_operator.run, []

    def spy(given):
        seen.append(given.cache_seqlens)
        return decode(given)

    monkeypatch.setattr(decode_operator, "run", spy)
    q, new = randn(2, 3, HEADS[0], DIMS[0]), (randn(2, 3, HEADS[1], dim) for dim in DIMS)
    k, v = new
    results, ends = [], torch.tensor((11, 7), dtype=torch.int32)
    for told in (None, ends):
        monkeypatch.setattr(append_operator, "run", lambda given, told=told: (append(given), told)[1])
        cache = Cache("plain", lengths=(8, 4))
        results.append(tw.decode(q, cache.k, cache.v, k=k, v=v, **cache.words))
    assert seen[1] is ends and torch.equal(seen[0], ends) and torch.equal(*results)


@pytest.mark.parametrize("layout", ["plain", "pages"])
def test_unchecked_tokens_without_a_place_are_not_written(layout, monkeypatch):
    """What a GPU does, whose values nobody reads: by the same operations here."""
    monkeypatch.setattr(cache_values, "wanted", lambda device, check: False)
    cache = Cache(layout, lengths=(20, 3, 8), spare=1)
    capacity = cache.words["page_table"].shape[1] * PAGE if layout == "pages" else cache.capacity
    if layout == "pages":
        cache.words["page_table"][1] = torch.tensor([-7, 999, 2**31 - 1])
    k, v = randn(3, 4, HEADS[1], DIMS[0]), randn(3, 4, HEADS[1], DIMS[1], seed=1)
    before = cache.k.clone(), cache.v.clone()
    lengths = torch.tensor([capacity - 1, 3, -3])
    tw.append(cache.k, cache.v, k, v, **(cache.words | {"cache_seqlens": lengths}))
    expected = [((0, capacity - 1), 0, 0), ((2, 0), 2, 3)]
    expected += [((1, 3 + i), 1, i) for i in range(4)] if layout == "plain" else []
    for (b, position), owner, i in expected:
        slot = cache.at(b, position, position + 1)
        for x, old, new in zip((cache.k, cache.v), before, (k, v), strict=True):
            assert torch.equal(x[slot][0], new[owner, i])
            x[slot] = old[slot] = 0.0
    for x, old in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(x.nan_to_num(7.0), old.nan_to_num(7.0))
    tw.append(cache.k, cache.v, k, v, **(cache.words | {"cache_seqlens": torch.tensor([999, -50, 10**6])}))
    for x, old in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(x.nan_to_num(7.0), old.nan_to_num(7.0))


def test_whose_values_are_checked(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    assert cache_values.wanted(cpu, False) and cache_values.wanted(cuda, True) and not cache_values.wanted(cuda, False)
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TILEWISE_CHECK", value)
        assert cache_values.wanted(cuda, False) is wanted


Q, K, V = torch.zeros(2, 1, 4, 8), torch.zeros(2, 7, 2, 8), torch.zeros(2, 7, 2, 6)
NEW_K, NEW_V, TABLE = K[:, :2].clone(), V[:, :2].clone(), torch.tensor([[0], [1]])
CU, BOTH = torch.tensor([0, 1, 2]), torch.zeros(2, 7, 2, 12)
TURN = {"rotary_cos": torch.zeros(4, 2), "rotary_sin": torch.zeros(4, 2)}
WRONG = [
    ({"k": NEW_K}, "v is missing: k and v are appended together, or neither"),
    ({"k": NEW_K, "v": NEW_V}, "cache_seqlens must be given with k: it says where the new keys go"),
    (
        {"k": NEW_K, "v": NEW_V, "cache_seqlens": 6},
        r"cache_seqlens\[0\] is 8 with the new tokens, but the cache holds between 0 and 7 tokens",
    ),
    ({"k": NEW_K, "v": NEW_V, "cache_seqlens": -1}, r"cache_seqlens\[0\] is -1; a length must not be negative"),
    ({"cache_seqlens": torch.tensor([3, -2])}, r"cache_seqlens\[1\] is -2; a length must not be negative"),
    (
        {"k_cache": K[:1].expand_as(K), "k": NEW_K, "v": NEW_V, "cache_seqlens": 1},
        r"k_cache has strides \(0, 16, 8, 1\) .* would overwrite each other; pass k_cache.contiguous\(\), or .* cache_batch_idx",
    ),
    (
        {"v_cache": V[:1].as_strided(V.shape, (42, 6, 6, 1)), "k": NEW_K, "v": NEW_V, "cache_seqlens": 1},
        r"v_cache has strides \(42, 6, 6, 1\) .* would overwrite each other",
    ),
    (
        {"k": NEW_K, "v": NEW_V, "cache_seqlens": CU[:2], "cache_batch_idx": CU[:2] * 0, "check": True},
        "new tokens of sequences 0 and 1 go to the same place, 1 of page or entry 0",
    ),
    (
        {"k": NEW_K, "v": NEW_V, "cache_seqlens": 6, "page_table": torch.tensor([[1, 0], [0, 0]]), "check": True},
        "new tokens of sequences 0 and 1 go to the same place, 0 of page or entry 0",
    ),
    ({"k": NEW_K.double(), "v": NEW_V, "cache_seqlens": 3}, "k is torch.float64, but k_cache is torch.float32"),
    ({"k": NEW_K[:1], "v": NEW_V[:1], "cache_seqlens": torch.tensor([1, 2])}, "k_cache has batch 2, but k has batch 1"),
    ({"k": NEW_K, "v": NEW_V[:, :1], "cache_seqlens": 1}, "v has new 1, but k has new 2"),
    ({"k": NEW_K[..., :4], "v": NEW_V, "cache_seqlens": 1}, "k has head_dim 4, but k_cache has head_dim 8"),
    (
        {"k": NEW_K, "v": NEW_V, "cache_seqlens": 6, "page_table": TABLE},
        r"is 8 with .* between 0 and 7 .*page_table has 1 pages of 7 tokens a sequence",
    ),
    (
        {"k": NEW_K, "v": NEW_V, "cache_seqlens": 3, "page_table": TABLE + 1},
        r"page_table\[1\] names pages \[2\], but k_cache has pages 0\.\.1",
    ),
    (
        {"q": Q[:, 0], "cu_seqlens_q": torch.tensor([0, 2, 1])},
        r"cu_seqlens_q must start at 0, not decrease and end at most at the 2 tokens",
    ),
    ({"q": Q[:, 0], "cu_seqlens_q": torch.tensor([0, 1, 3])}, r"at the 2 tokens that are given, got \[0, 1, 3\]"),
    ({"q": Q[:, 0], "cu_seqlens_q": torch.tensor([1, 1, 2])}, "cu_seqlens_q must start at 0"),
    ({"q": Q[:, 0], "cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens_q must have batch \+ 1 entries"),
    ({"cu_seqlens_q": CU}, r"q must have 3 dimensions \(total_q, heads_q, head_dim\), got 4"),
    ({"q": Q[:, 0], "cu_seqlens_q": CU, "mask": tw.Dense(torch.ones(2, 7, dtype=torch.bool))}, "mask has 2 queries, but with cu_seqlens_q"),
    ({"q": Q[:, 0], "cu_seqlens_q": CU, "alibi_slopes": torch.ones(3, 4)}, "alibi_slopes has batch 3, but cu_seqlens_q has batch 2"),
    ({"cache_batch_idx": torch.tensor([0, 2])}, r"cache_batch_idx must be between 0 and 1, got \[0, 2\]"),
    ({"cache_batch_idx": torch.tensor([0])}, "cache_batch_idx has batch 1, but q has batch 2"),
    (
        {"cache_batch_idx": CU[:2], "page_table": TABLE},
        r"cache_batch_idx and page_table exclude each other; .*page_table\[cache_batch_idx\]",
    ),
    ({"leftpad": torch.tensor([0, 5]), "cache_seqlens": 4}, r"leftpad \[0, 5\] is beyond the lengths of the sequences, \[4, 4\]"),
    ({"leftpad": torch.tensor([0, -1])}, r"leftpad must not be negative, got \[0, -1\]"),
    ({"leftpad": torch.tensor([0.0, 1.0])}, "leftpad must be int32 or int64, got float32"),
    ({"tree": torch.ones(1, 2, 3, dtype=torch.bool)}, "tree has tokens that see 2, but its last dimension has"),
    ({"tree": torch.ones(3, 2, 2, dtype=torch.bool)}, "tree has batch 3, but q has batch 2; it needs as many, or 1"),
    ({"tree": torch.ones(1, 2, 2)}, "tree must be bool, got float32"),
    ({"shared_prefix": -1}, "shared_prefix must be an integer of at least 0, got -1"),
    ({"shared_prefix": True}, "shared_prefix must be an integer of at least 0, got True"),
    ({"split": 0}, "split must be an integer of at least 1 or None, got 0"),
    ({"rotary_cos": TURN["rotary_cos"]}, "rotary_cos and rotary_sin must both be given, or neither"),
    (TURN, "cos and sin have 4 positions, but x reaches position 6; make longer tables"),
    ({"rotary_cos": torch.zeros(9, 5), "rotary_sin": torch.zeros(9, 5)}, "rotary_cos has rotary_dim / 2 = 5, but head_dim is 8"),
    ({"out": torch.zeros(2, 1, 4, 8)}, r"out must be \(2, 1, 4, 6\) torch.float32 on cpu, .* got \(2, 1, 4, 8\)"),
    ({"out": torch.zeros(2, 1, 4, 6).double()}, r"out must be \(2, 1, 4, 6\) torch.float32 .* got \(2, 1, 4, 6\) torch.float64"),
    ({"out": torch.zeros(1, 1, 4, 6).expand(2, -1, -1, -1)}, "out has strides .* no two numbers may share memory"),
    ({"out": V.flatten(0, 2)[:8].view(2, 1, 4, 6)}, "out shares memory with v_cache"),
    ({"k": K[:, 3:5], "v": NEW_V, "cache_seqlens": 1}, "k shares memory with k_cache, which is written while it is read; pass a tensor"),
    ({"k": NEW_K, "v": V[:, 3:5], "cache_seqlens": 1}, "v shares memory with v_cache, which is written while it is read; pass a tensor"),
    (
        {"k_cache": BOTH[..., :8], "v_cache": BOTH[..., 6:], "k": NEW_K, "v": NEW_V, "cache_seqlens": 1},
        "v_cache shares memory with k_cache, which is written, too; pass a tensor of its own",
    ),
    (
        {"v_cache": K[..., :6], "k": NEW_K, "v": NEW_V + 1, "cache_seqlens": 1},
        r"v must be k\[..., :6\], for v_cache is these columns of k_cache; pass caches that are apart",
    ),
    ({"cache_seqlens": 1 << 40}, "cache_seqlens is 1099511627776, which is more than any cache holds; it must fit in 32 bits"),
    ({"k": NEW_K, "v": NEW_V, "cache_seqlens": -(1 << 31)}, "cache_seqlens is -2147483648, which is more than any cache holds"),
    ({"k_cache": K[:1], "v_cache": V[:1]}, "k_cache has batch 1, but q has batch 2; they must be equal, or cache_batch_idx or page_table"),
    ({"q": Q[:, 0], "cu_seqlens_q": CU, "page_table": TABLE[:1]}, "page_table has batch 1, but cu_seqlens_q has batch 2"),
    (
        {"q": Q[:, 0], "cu_seqlens_q": CU, "k": NEW_K[0], "v": NEW_V[0], "cache_seqlens": torch.tensor([1])},
        "cache_seqlens has batch 1, but cu_seqlens_q has batch 2",
    ),
    (
        {"q": Q[:, 0], "cu_seqlens_q": CU, "k": NEW_K[0, :1], "v": NEW_V[0, :1], "cache_seqlens": 1},
        "k has total_q 1, but q has total_q 2; they must be equal",
    ),
    (
        {"q": Q[:, 0], "cu_seqlens_q": CU + 1, "k": NEW_K[0], "v": NEW_V[0], "cache_seqlens": 1},
        r"cu_seqlens \(decode's cu_seqlens_q\) must start at 0",
    ),
    ({"rotary_cos": TURN["rotary_cos"], "rotary_sin": torch.ones(4, 2, requires_grad=True)}, "rotary_sin requires grad, but decode is for"),
    ({"mask": {(0, 1): tw.Causal()}}, "PerHead: the head ranges cover 1 heads, the call has heads 4; they must agree"),
    ({"check": 1}, "check must be True or False, got int 1"),
    ({"interleaved": None}, "interleaved must be True or False, got NoneType"),
    (
        {"k": NEW_K.clone().requires_grad_(), "v": NEW_V, "cache_seqlens": 1},
        "k requires grad, but append is for inference and has no gradient",
    ),
]


@pytest.mark.parametrize("changes, words", WRONG, ids=lambda x: "+".join(x) if isinstance(x, dict) else None)
def test_refusals(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        tw.decode(**({"q": Q, "k_cache": K, "v_cache": V} | changes))
    assert isinstance(caught.value, ShapeError) or "must be" in str(caught.value) or "requires grad" in str(caught.value)
    assert K.count_nonzero() == 0 and V.count_nonzero() == 0


@pytest.mark.parametrize("causal", [True, False])
def test_masks_that_differ_by_sequence(causal):
    """Which the call has other words for. Nothing is appended before they are refused."""
    cache = Cache("plain", lengths=(3, 5))
    q, (k, v) = randn(2, 1, HEADS[0], DIMS[0]), (randn(2, 1, HEADS[1], dim) for dim in DIMS)
    with pytest.raises(
        tw.UnsupportedError, match=r"mask differs by sequence, Padding\(\[3,5\],None\), .* cache_seqlens= says how many keys"
    ):
        tw.decode(q, cache.k, cache.v, k=k, v=v, mask=tw.Padding([3, 5]), causal=causal, **cache.words)
    assert all(x[b, int(n)].isnan().all() for x in (cache.k, cache.v) for b, n in enumerate(cache.words["cache_seqlens"]))


def test_two_tokens_in_one_place_are_the_callers_business_unless_checked():
    """As flash_attn has it: one of them is there afterwards."""
    k_cache, v_cache, both = torch.zeros(3, 7, 2, 8), torch.zeros(3, 7, 2, 6), torch.tensor([1, 1])
    words = {"cache_seqlens": 3, "cache_batch_idx": both}
    tw.append(k_cache, v_cache, NEW_K + torch.tensor([1.0, 2.0])[:, None, None, None], NEW_V, **words)
    assert k_cache[1, 3, 0, 0] in (1.0, 2.0)
    with pytest.raises(ShapeError, match="sequences 0 and 1 go to the same place, 3 of page or entry 1"):
        tw.append(k_cache, v_cache, NEW_K, NEW_V, check=True, **words)
    tw.append(k_cache, v_cache, NEW_K, NEW_V, check=True, **(words | {"cache_seqlens": torch.tensor([3, 5])}))


def test_masks_of_the_only_head():
    q, k = randn(2, 3, 1, 8), randn(2, 9, 1, 8, seed=1)
    expected = tw.decode(q, k, k, mask=tw.SlidingWindow(3, 0))
    for causal in (False, True):
        torch.testing.assert_close(tw.decode(q, k, k, mask={(0, 1): tw.SlidingWindow(3, 0)}, causal=causal), expected)


@pytest.mark.parametrize("split, prefix", [(None, 5), (64, 0)])
def test_pieces_of_a_fixed_size_hang_on_no_prefix(split, prefix, monkeypatch):
    """Whether a backend reads one once hangs on how many sequences there are, and bits would, too."""
    calls = []
    monkeypatch.setattr(
        type(decode_operator.choose(Call(q=Q, k=K, v=V, mask=tw.Causal(), scale=1.0).problem)), "decode", lambda _, x: calls.append(x)
    )
    tw.decode(Q, K, V, split=split, shared_prefix=5)
    assert calls[0].shared_prefix == prefix


def test_pieces_longer_than_any_cache():
    expected = tw.decode(Q, K, V)
    assert torch.equal(tw.decode(Q, K, V, split=1 << 70, shared_prefix=1 << 70), expected)


def test_append_alone_says_which_position_is_wrong():
    with pytest.raises(ShapeError, match=r"rotary_first must not be negative, got \[0, -1\]"):
        tw.append(K, V, NEW_K, NEW_V, cache_seqlens=0, rotary_first=torch.tensor([0, -1]), **TURN)


def test_append_alone_wants_to_know_where():
    with pytest.raises(ShapeError, match="cache_seqlens must be an integer tensor"):
        tw.append(K, V, NEW_K, NEW_V, cache_seqlens=None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"leftpad": torch.tensor([0, 4])}, r"leftpad \[0, 4\] is beyond the lengths"),
        ({"backend": "hopper"}, "backend 'hopper' cannot run this problem"),
        ({"mask": tw.Dense(torch.ones(3, 2 * PAGE, dtype=torch.bool))}, "mask has seqlen_q 3, but q has 1"),
        ({"mask": tw.PerHead({(0, 9): tw.Causal()})}, "the mask is made for heads 9|the head ranges cover 9 heads"),
        ({"page_table": torch.tensor([[99, 1], [2, 3]])}, r"page_table\[0\] names pages \[99, 1\]"),
        (
            {"k_cache": torch.zeros(4, PAGE, HEADS[1], 2 * DIMS[0])[..., ::2]},
            "k_cache has strides .* with a page table its last dimension must",
        ),
    ],
    ids=["padding", "a backend", "a dense mask", "heads of a mask", "a page that is there already", "rows of pages"],
)
def test_what_is_refused_leaves_the_caches_as_they_were(changes, sentence):
    caches = {"k_cache": torch.zeros(4, PAGE, HEADS[1], DIMS[0]), "v_cache": torch.zeros(4, PAGE, HEADS[1], DIMS[1])}
    words = {"page_table": torch.tensor([[0, 1], [2, 3]]), "cache_seqlens": torch.tensor([PAGE + 1, 2])} | caches | changes
    q, k, v = randn(2, 1, HEADS[0], DIMS[0]), randn(2, 1, HEADS[1], DIMS[0]), randn(2, 1, HEADS[1], DIMS[1])
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        tw.decode(q, k=k, v=v, **words)
    assert not words["k_cache"].any() and not words["v_cache"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", ["NHD", "HND", "one tensor"])
def test_appending_to_slots(order, index, dtype):
    """As servers say where tokens go; those with a negative slot go nowhere."""
    pages, page, heads, dims = 6, 5, 3, (8, 4)
    if order == "one tensor":  # keys and values side by side, heads before places
        pool = torch.full((pages, heads, page, sum(dims)), torch.nan, dtype=torch.float32).to(dtype)
        k_cache, v_cache = pool.transpose(1, 2).split(dims, dim=-1)
    else:
        shape = (pages, page, heads) if order == "NHD" else (pages, heads, page)
        k_cache, v_cache = (torch.full((*shape, dim), torch.nan, dtype=torch.float32).to(dtype) for dim in dims)
        if order == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    slots = torch.tensor([7, -1, 29, 0, -1, 12, -7], dtype=index)
    k, v = (torch.randn(7, heads, dim, dtype=torch.float32).to(dtype) for dim in dims)
    expected = [x.float().clone() for x in (k_cache, v_cache)]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for cache, new in zip(expected, (k, v), strict=True):
                cache[slot // page, slot % page] = new[token].float()
    tw.append(k_cache, v_cache, k, v, slots=slots)
    for cache, want in zip((k_cache, v_cache), expected, strict=True):
        torch.testing.assert_close(cache.float(), want, atol=0, rtol=0, equal_nan=True)
    nothing = k_cache.float().clone()
    tw.append(k_cache, v_cache, k, v, slots=torch.full((7,), -1, dtype=index))
    tw.append(k_cache, v_cache, k[:0], v[:0], slots=slots[:0])
    torch.testing.assert_close(k_cache.float(), nothing, atol=0, rtol=0, equal_nan=True)


def test_slots_compiled_and_checked():
    k_cache, v_cache = torch.zeros(2, 4, 5, 2, 8)
    k, v = torch.randn(2, 3, 2, 8)
    slots = torch.tensor([3, -1, 11])
    compiled = torch.compile(lambda *x: tw.append(*x[:4], slots=x[4]), fullgraph=True, backend="aot_eager")
    compiled(k_cache, v_cache, k, v, slots)
    assert torch.equal(k_cache[0, 3], k[0]) and torch.equal(v_cache[2, 1], v[2]) and k_cache.count_nonzero() == 32
    tw.append(k_cache, v_cache, k, v, slots=slots, check=True)
    with pytest.raises(ShapeError, match="go to the same place, 3 of page or entry 0"):
        tw.append(k_cache, v_cache, k, v, slots=torch.tensor([3, 3, -1]), check=True)
    with pytest.raises(
        ShapeError, match=r"slots\[1\] is 20, but the caches have 4 pages of 5 tokens, slots 0..19; a token that goes nowhere"
    ):
        tw.append(k_cache, v_cache, k, v, slots=torch.tensor([3, 20, -1]))
    with pytest.raises(ShapeError, match="so cache_seqlens, page_table must not be given with it; rotate k before"):
        tw.append(k_cache, v_cache, k, v, slots=slots, cache_seqlens=3, page_table=slots[:, None])
    with pytest.raises(ShapeError, match="slots"):
        tw.append(k_cache, v_cache, k, v, slots=slots[:2])
    with pytest.raises(ShapeError, match="slots"):
        tw.append(k_cache, v_cache, k, v, slots=slots.float())
    with pytest.raises(ShapeError, match="k .*tokens"):
        tw.append(k_cache, v_cache, k[None], v[None], slots=slots)
