"""Decoding: the same as attention over each sequence's own keys, whatever the cache's layout, and nothing beyond them is read."""

import math

import pytest
import torch

from tilewise.backends.cpu import Cpu
from tilewise.masks import Causal, Dense, Full, PrefixLM, SlidingWindow
from tilewise.problem import Call, DecodeCall
from tilewise.testing import tolerance

MASKS = (None, Full(), SlidingWindow(70, 0), PrefixLM(3) & SlidingWindow(40, 0), Causal(align="top_left"))


def _inputs(dtype, lengths, seqlen_q=1, heads=(6, 2), dims=(40, 24), page=None):
    """q, caches whose unused slots are NaN, and the page table (None for a plain cache)."""
    torch.manual_seed(len(lengths) + seqlen_q)
    capacity = max(lengths) + 5
    q = torch.randn(len(lengths), seqlen_q, heads[0], dims[0]).to(dtype)
    if page is None:
        k, v = (torch.full((len(lengths), capacity, heads[1], dim), math.nan, dtype=dtype) for dim in dims)
        for b, n in enumerate(lengths):
            k[b, :n], v[b, :n] = (torch.randn(n, heads[1], dim).to(dtype) for dim in dims)
        return q, k, v, None
    width = -(-capacity // page)
    pages = torch.randperm(len(lengths) * width).view(len(lengths), width)
    k, v = (torch.full((pages.numel(), page, heads[1], dim), math.nan, dtype=dtype) for dim in dims)
    for b, n in enumerate(lengths):
        for j in range(n):
            where = pages[b, j // page], j % page
            k[where], v[where] = (torch.randn(heads[1], dim).to(dtype) for dim in dims)
        pages[b, -(-n // page) :] = 10**6  # never looked at
    return q, k, v, pages


def _sequence(cache, pages, b, n):
    rows = cache[b] if pages is None else cache[pages[b, : -(-n // cache.shape[1])]].flatten(0, 1)
    return rows[None, :n]


def _decode(q, k, v, lengths, pages=None, mask=None, **options):
    given = {"cu_seqlens_q": None, "cache_batch_idx": None, "leftpad": None, "tree": None, "shared_prefix": 0, "split": None} | options
    seqlens, table = torch.tensor(lengths, dtype=torch.int32), None if pages is None else pages.int()
    cache = {"q": q, "k_cache": k, "v_cache": v, "seqlens": seqlens, "page_table": table}
    call = DecodeCall(**cache, max_seqlen_q=q.shape[1], mask=mask or Causal(), scale=0.2, **given)
    return Cpu().decode(call)


def _check(q, k, v, lengths, pages, mask, **options):
    o, lse = _decode(q, k, v, lengths, pages, mask, **options)
    for b, n in enumerate(lengths):
        call = Call(q=q[b : b + 1], k=_sequence(k, pages, b, n), v=_sequence(v, pages, b, n), mask=mask or Causal(), scale=0.2, **options)
        tolerance.check_outputs(call, o[b : b + 1], lse[b : b + 1])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("page", (None, 16), ids=("plain", "paged"))
def test_equals_attention(dtype, mask, page):
    for seqlen_q, lengths in ((1, [300, 1, 129]), (3, [1200, 3])):
        q, k, v, pages = _inputs(dtype, lengths, seqlen_q, page=page)
        _check(q, k, v, lengths, pages, mask)


def test_features():
    lengths = [200, 77]
    q, k, v, pages = _inputs(torch.float32, lengths, 2, page=16)
    _check(q, k, v, lengths, pages, None, softcap=2.0, sink=torch.randn(6), alibi_slopes=torch.rand(1, 6) / 4)


def test_empty_sequences_and_batches():
    q, k, v, _ = _inputs(torch.float32, [0, 4])
    o, lse = _decode(q, k, v, [0, 4])
    assert torch.equal(o[0], torch.zeros_like(o[0])) and (lse[0] == -math.inf).all()
    assert lse[1].isfinite().all()
    o, lse = _decode(q[:0], k[:0], v[:0], [])
    assert o.shape == (0, 1, 6, 24) and lse.shape == (0, 6, 1)


def test_many_heads_side_by_side():
    lengths = [2500]
    q, k, v, _ = _inputs(torch.bfloat16, lengths, 1, heads=(16, 8), dims=(64, 64))
    _check(q, k, v, lengths, None, None)
    _check(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, lengths, None, None)


def test_dense_masks_are_left_to_the_general_path():
    q, k, v, _ = _inputs(torch.float32, [4])
    assert _decode(q, k, v, [4], mask=Dense(torch.ones(1, 4, dtype=torch.bool))) is None
