"""decode and append on a GPU: right for every layout, without waiting where the backend covers the call, in graphs that replay with other values."""

import math

import pytest
import torch

import tilewise as tw
from tilewise.problem import Call
from tilewise.runtime import decode_operator
from tilewise.runtime.dispatch import choose
from tilewise.testing import tolerance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

HEADS, DIM, PAGE, LENGTHS, QUERIES = (8, 2), 64, 16, (300, 0, 5, 1100, 33), (3, 1, 2, 17, 0)


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to("cuda", dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Pool:
    """Sequences of LENGTHS tokens in pages that are NaN elsewhere."""

    def __init__(self, dtype, spare=8):
        width = -(-(max(LENGTHS) + spare) // PAGE)
        pages = torch.randperm(len(LENGTHS) * width + 2, generator=torch.Generator().manual_seed(1))[: len(LENGTHS) * width].view(-1, width)
        self.k, self.v = (torch.full((pages.numel() + 2, PAGE, HEADS[1], DIM), math.nan, dtype=dtype, device="cuda") for _ in range(2))
        self.table = pages.to("cuda", torch.int32)
        for b, n in enumerate(LENGTHS):
            self.table[b, -(-(n + spare) // PAGE) :] = -1
            for seed, cache in enumerate((self.k, self.v)):
                cache[self.at(b, 0, n)] = randn(n, HEADS[1], DIM, seed=seed + 10 * b, dtype=dtype)

    def at(self, b, start, end):
        places = torch.arange(start, end, device="cuda")
        return self.table[b, places // PAGE].long(), places % PAGE

    def sequence(self, b, end):
        return tuple(cache[self.at(b, 0, end)][None] for cache in (self.k, self.v))


def hold(o, lse, q, k, v, mask):
    call = Call(q=q[None].cpu(), k=k.cpu(), v=v.cpu(), mask=mask, scale=q.shape[-1] ** -0.5)
    tolerance.check_outputs(call, o[None].cpu(), lse[None].cpu())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_packed_queries_padding_and_trees(dtype):
    pool, cu = Pool(dtype), ints(0, *QUERIES).cumsum(0, dtype=torch.int32)
    q, leftpad = randn(int(cu[-1]) + 2, HEADS[0], DIM, seed=5, dtype=dtype), ints(7, 0, 5, 1001, 2)
    tree = torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 0, 1]]], dtype=torch.bool, device="cuda")
    words = {"cu_seqlens_q": cu, "cache_seqlens": ints(*LENGTHS), "page_table": pool.table, "return_lse": True}
    for more in ({}, {"leftpad": leftpad, "tree": tree}):
        o, lse = tw.decode(q, pool.k, pool.v, **words, **more)
        for b, (n, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
            rows = slice(int(cu[b]), int(cu[b]) + count)
            position, key = torch.arange(n - count, n)[:, None], torch.arange(n)
            shown = key <= position
            if more:
                shown &= key >= int(leftpad[b])
                newest = (position >= n - 3) & (key >= n - 3)
                shown &= ~newest | tree[0].cpu()[(position - n).clamp(-3, -1), (key - n).clamp(-3, -1)]
            if count:
                hold(o[rows], lse[:, rows], q[rows], *pool.sequence(b, n), tw.Dense(shown))
        assert (o[-2:] == 0).all() and (lse[:, -2:] == -math.inf).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_appending_never_waits_and_replays_with_other_values(dtype):
    pool, angles = Pool(dtype), randn(1200, 8, dtype=torch.float32)
    k, v = (randn(len(LENGTHS), 4, HEADS[1], DIM, seed=seed, dtype=dtype) for seed in (5, 6))
    lengths, table = ints(*LENGTHS), pool.table.clone()
    words = {"cache_seqlens": lengths, "page_table": table, "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    tw.append(pool.k, pool.v, k, v, **words)  # the first call loads torch's kernels
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tw.append(pool.k, pool.v, k, v, **words)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tw.append(pool.k, pool.v, k, v, **words)
    other = Pool(dtype)
    pool.k.copy_(other.k)
    pool.v.copy_(other.v)
    v.mul_(2)
    capacity = table.shape[1] * PAGE
    lengths.copy_(ints(301, 0, -4, capacity - 2, 99999))
    graph.replay()
    for b, (n, first, count) in enumerate(((301, 0, 4), (0, 0, 4), (0, 0, 0), (capacity - 2, 0, 2), (0, 0, 0))):
        if count:
            assert torch.equal(pool.v[pool.at(b, n, n + count)], v[b, first : first + count])
            pool.v[pool.at(b, n, n + count)] = other.v[pool.at(b, n, n + count)]
    assert torch.equal(pool.v.nan_to_num(7.0), other.v.nan_to_num(7.0))


def test_a_check_says_what_is_wrong():
    pool = Pool(torch.bfloat16)
    q, words = randn(len(LENGTHS), 1, HEADS[0], DIM), {"page_table": pool.table}
    with pytest.raises(tw.ShapeError, match=r"cache_seqlens\[0\] is 99999, but the cache holds between 0 and"):
        tw.decode(q, pool.k, pool.v, cache_seqlens=99999, check=True, **words)
    o = tw.decode(q, pool.k.nan_to_num(), pool.v.nan_to_num(), cache_seqlens=99999, **words)
    assert o.isfinite().all()


def test_it_compiles_whole_and_equals_eager():
    torch._dynamo.reset()
    eager, compiled = Pool(torch.bfloat16), Pool(torch.bfloat16)
    q, k, v = (randn(len(LENGTHS), 2, h, DIM, seed=h) for h in (HEADS[0], HEADS[1], HEADS[1]))

    def step(pool):
        return tw.decode(q, pool.k, pool.v, k=k, v=v, cache_seqlens=ints(*LENGTHS), page_table=pool.table)

    expected = step(eager)
    assert torch.equal(torch.compile(lambda: step(compiled), fullgraph=True)(), expected)
    assert torch.equal(compiled.k.nan_to_num(7.0), eager.k.nan_to_num(7.0))


def test_what_the_backend_covers_never_waits():
    """Skipped until the backend of this device has a kernel for it."""
    pool = Pool(torch.bfloat16)
    q = randn(len(LENGTHS), 1, HEADS[0], DIM)
    words = {"cache_seqlens": ints(*LENGTHS), "page_table": pool.table, "return_lse": True}
    given = (
        dict.fromkeys(decode_operator.Operands._fields)
        | {"cp_rank": 0, "cp_world": 1, "cp_interleave": 1}
        | {
            "q": q,
            "k_cache": pool.k,
            "v_cache": pool.v,
            "mask_tensors": [],
            "mask": "Causal()",
        }
    )
    given |= {"softcap": 0.0, "shared_prefix": 0, "interleaved": False, "check": False} | {
        name: words[name] for name in ("cache_seqlens", "page_table")
    }
    call = decode_operator.call_of(decode_operator.Operands(**given), None)
    if choose(Call(q=q, k=pool.k, v=pool.v, mask=call.mask, scale=call.scale).problem).decode(call) is None:
        pytest.skip("the backend does not cover decode")
    expected = tw.decode(q, pool.k, pool.v, **words)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = tw.decode(q, pool.k, pool.v, **words)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(map(torch.equal, got, expected))
