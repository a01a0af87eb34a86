"""Decode of a latent cache on a GPU: lengths, pages, heads, masks, poisoned caches, CUDA graphs, and the public call."""

from dataclasses import replace

import pytest
import torch
from decode_problems import DecodeCase, held, made
from hopper_problems import NEEDS_HOPPER

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import prefix, workspace
from tilewise.masks import Causal, Full, SlidingWindow

pytestmark = NEEDS_HOPPER

RAGGED = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4097)
LATENT = {"dims": (576, 512), "latent": True}


def run(call):
    found = Hopper().decode(call)
    assert found is not None, decoding.why_not(call)
    return found


def checked(case: DecodeCase, seed: int = 0):
    call = made(case, seed, "cuda")
    found = run(call)
    held(call, *found)
    assert all(map(torch.equal, found, run(call)))
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return call, found


@pytest.mark.parametrize("heads", [16, 32, 64, 128, 5], ids=str)
@pytest.mark.parametrize("queries", [1, 2, 3, 4], ids=str)
def test_heads(heads, queries):
    for page in (0, 64):
        checked(DecodeCase(lengths=RAGGED, heads=(heads, 1), queries=queries, page=page, **LATENT))


@pytest.mark.parametrize("page", [8, 16, 24, 32, 64, 128, 256, 1024])
def test_pages(page):
    for dtype in (torch.bfloat16, torch.float16):
        checked(DecodeCase(lengths=RAGGED, heads=(16, 1), page=page, dtype=dtype, **LATENT))


@pytest.mark.parametrize("dims", [(320, 256), (288, 256), (448, 384), (264, 8), (576, 512)], ids=str)
def test_dims(dims):
    for heads in ((40, 1), (128, 1), (8, 2)):
        checked(DecodeCase(lengths=RAGGED, heads=heads, dims=dims, latent=True, page=16))


@pytest.mark.parametrize("queries", [(1, 0, 4, 2), (3, 1, 1, 0), (40, 1, 0, 7)], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_ragged_queries(queries, heads):
    for page in (0, 64):
        checked(DecodeCase(lengths=(70, 300, 4097, 40), heads=(heads, 1), queries=queries, page=page, **LATENT))


@pytest.mark.parametrize("mask", [Causal(), Full(), Causal(offset=-3), SlidingWindow(100, 0), SlidingWindow(70, 5)], ids=repr)
def test_masks(mask):
    for changes in ({}, {"softcap": 9.0, "alibi": True, "sink": True}):
        checked(DecodeCase(lengths=(1, 64, 200, 3000), heads=(16, 1), queries=3, mask=mask, page=16, **changes, **LATENT))


def test_padding_entries_and_trees():
    checked(DecodeCase(lengths=(70, 3, 500, 0), heads=(16, 1), queries=2, leftpad=(5, 3, 200, 0), entries=True, **LATENT))
    checked(DecodeCase(lengths=(70, 3, 0, 200, 5000), heads=(32, 1), queries=4, tree=7, page=16, **LATENT))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(("batch", "length"), [(1, 4096), (1, 131_072), (3, 20_000), (200, 130)], ids=str)
def test_units_in_many_blocks(batch, length, heads):
    checked(DecodeCase(lengths=(length,) * batch, heads=(heads, 1), **LATENT))


@pytest.mark.parametrize("split", [64, 300, 1024])
def test_pieces_of_a_fixed_size(split):
    call, (o, lse) = checked(DecodeCase(lengths=(3, 6000, 129, 4097), heads=(128, 1), page=64, split=split, **LATENT))
    for b in range(4):
        alone = run(replace(call, q=call.q[b : b + 1], seqlens=call.seqlens[b : b + 1], page_table=call.page_table[b : b + 1]))
        assert torch.equal(alone[0], o[b : b + 1]) and torch.equal(alone[1], lse[b : b + 1])


@pytest.mark.parametrize("queries", [1, (1, 0, 5, 2, 3)], ids=str)
def test_prefix_of_all(queries, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    for page in (0, 64):
        case = DecodeCase(lengths=(1500, 1024, 1030, 4000, 20), heads=(16, 1), queries=queries, prefix=1024, page=page, **LATENT)
        call, _ = checked(case)
        assert prefix.pays(call)


@pytest.mark.parametrize("wild", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_pages_that_do_not_exist(wild):
    call = made(DecodeCase(lengths=(300, 300), heads=(16, 1), page=64, **LATENT), device="cuda")
    o, lse = run(call)
    table = call.page_table.clone()
    table[0, 3] = wild
    spoiled, of_spoiled = run(replace(call, page_table=table))
    torch.cuda.synchronize()
    assert torch.equal(spoiled[1], o[1]) and torch.equal(of_spoiled[1], lse[1])
    assert spoiled.isfinite().all() and not torch.equal(spoiled[0], o[0])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [0, 64])
def test_graph_captured_at_short_lengths(page, heads):
    """And replayed at long ones: as a fresh call, bit for bit."""
    call = made(DecodeCase(lengths=(4000, 3000, 17, 2500), heads=(heads, 1), page=page, **LATENT), device="cuda")
    lengths, static = call.seqlens, replace(call, seqlens=torch.ones_like(call.seqlens), q=call.q.clone())
    run(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = run(static)
    draw = torch.Generator().manual_seed(0)
    for turn in range(30):
        now = lengths if turn == 0 else (lengths.cpu() * torch.rand(4, generator=draw)).int().cuda()
        static.seqlens.copy_(now)
        static.q.normal_()
        graph.replay()
        want = run(replace(static, seqlens=now))
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
    held(static, o, lse)


def test_many_launches_behind_each_other():
    """Shares, counters and registers of one launch do not meet those of the next."""
    call = made(DecodeCase(lengths=(5000, 30, 700), heads=(128, 1), page=64, **LATENT), device="cuda")
    want = run(call)
    found = [run(call) for _ in range(300)]
    assert all(torch.equal(o, want[0]) and torch.equal(lse, want[1]) for o, lse in found)


def test_the_public_call():
    """By the kernel where the values are a view, which is not waited for; else by what there is, or an error where the backend is named."""
    call = made(DecodeCase(lengths=(300, 17), heads=(16, 1), page=64, **LATENT), device="cuda")
    words = {"cache_seqlens": call.seqlens, "page_table": call.page_table, "scale": call.scale, "return_lse": True}
    expected = run(call)
    tw.decode(call.q, call.k_cache, call.v_cache, **words)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = tw.decode(call.q, call.k_cache, call.v_cache, **words)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, found, expected))
    held(call, *tw.decode(call.q, call.k_cache, call.v_cache.clone(), **words))
    with pytest.raises(tw.UnsupportedError, match=r"except to decode with v_cache = k_cache\[\.\.\., :512\]"):
        tw.decode(call.q, call.k_cache, call.v_cache.clone(), backend="hopper", **words)


@pytest.mark.parametrize("queries", [1, 3])
def test_appending(queries):
    call = made(DecodeCase(lengths=(300, 64, 17), heads=(16, 1), page=64, queries=queries, **LATENT), device="cuda")
    expected = run(call)
    new = torch.empty(3, queries, 1, 576, dtype=call.q.dtype, device="cuda")
    for b, n in enumerate(call.seqlens.tolist()):
        for i in range(queries):
            page, row = divmod(n - queries + i, 64)
            token = call.k_cache[call.page_table[b, page], row]
            new[b, i] = token
            token.fill_(torch.nan)
    words = {"cache_seqlens": call.seqlens - queries, "page_table": call.page_table, "scale": call.scale, "return_lse": True}
    found = tw.decode(call.q, call.k_cache, call.v_cache, k=new, v=new[..., :512], **words)
    assert all(map(torch.equal, found, expected))
