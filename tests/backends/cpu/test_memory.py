"""Memory beyond the inputs: the results, and what grows with the length and not with its square; a paged cache is not copied."""

import pytest
import torch

import tilewise as tw
from tilewise.backends.cpu import Cpu
from tilewise.bench.memory import peak_extra_bytes
from tilewise.masks import Causal
from tilewise.problem import Call

MB = 1 << 20


def _peak(function) -> int:
    """The least of three: the figure is the whole process's, and what else happens in it can only add."""
    function()
    peaks = [peak_extra_bytes(function)[1] for _ in range(3)]
    return pytest.skip("no peak of memory is to be had here") if None in peaks else min(peaks)


def _calls(seqlen: int, dtype: torch.dtype):
    q, k, v, d_o = (torch.randn(1, seqlen, 2, 64).to(dtype) for _ in range(4))
    call = Call(q=q, k=k, v=v, mask=Causal(), scale=0.125)
    o, lse = Cpu().forward(call)
    return (lambda: Cpu().forward(call)), (lambda: Cpu().backward(call, o, lse, d_o, None))


@pytest.mark.parametrize("dtype", (torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)), ids=str)
def test_it_grows_with_the_length(dtype, threads):
    """Twice the tokens take twice the memory; the score matrix of 4,096 tokens alone would be 67 MB a head."""
    threads(2)
    for short, long in zip(_calls(2048, dtype), _calls(4096, dtype), strict=True):
        peak = _peak(long)
        assert peak <= 2.5 * _peak(short) + 2 * MB and peak < 20 * MB


def test_a_paged_cache_is_read_in_place():
    pages, page = 1024, 16
    cache = torch.randn(pages, page, 4, 64)
    table = torch.randperm(pages).view(1, pages)
    q = torch.randn(1, 1, 4, 64)
    assert _peak(lambda: tw.decode(q, cache, cache, page_table=table)) < 2 * MB < cache.numel() * 4
