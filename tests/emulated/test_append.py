"""Appending's kernel, carried out without a GPU: the bits that torch writes, where it writes them, and nowhere else."""

from dataclasses import replace

import pytest
import torch
from append_problems import CASES, AppendCase, by_torch, made, same
from emulator.backend import NEEDED, Emulated

from tilewise.backends.hopper.decode import append_call, bound

pytestmark = NEEDED

MORE = [
    AppendCase(lengths=tuple(i % 90 - 4 for i in range(70)), new=tuple(i % 4 for i in range(70)), heads=1, dims=(8, 8)),
    AppendCase(lengths=(5, 0, 79), new=4, rotary=64, interleaved=True, table=torch.float16, first=True),
    AppendCase(lengths=(2**40, -(2**40), 3, 2**31 + 3), new=2, index=torch.int64, page=16),
]


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(bound, "_KEPT", {})
    with Emulated().on_gpu():
        yield


def written(call):
    ends = Emulated().append(call)
    assert ends is not None, append_call.why_not(call)
    return ends


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_cases(case, on_gpu, monkeypatch):
    call = made(case)
    want = by_torch(call, monkeypatch)
    before = call.k_cache._version
    ends = written(call)
    assert same(call.k_cache, want[0]) and same(call.v_cache, want[1])
    assert call.k_cache._version > before  # autograd is told
    more = torch.tensor(case.new)
    assert ends.dtype == torch.int32 and torch.equal(ends.long(), (torch.tensor(case.lengths) + more).clamp(-(2**31) + 1, 2**31 - 1))


def test_wild_offsets_write_nothing_that_is_not_there(on_gpu):
    call = made(AppendCase(lengths=(5, 0, 75), new=(1, 2, 7)))
    for cu in ([0, 5, 2, 6], [-4, 100, 101, 102], [0, 2, 2**31 - 1, -5]):
        written(replace(call, cu_seqlens=torch.tensor(cu, dtype=torch.int32)))


def test_tensors_that_do_not_lie_as_the_kernel_wants_them(on_gpu, monkeypatch):
    """Copies are read in their place; caches that no copy can stand for are torch's."""
    call = made(AppendCase(lengths=(5, 0, 75), rotary=64, page=16))
    want = by_torch(call, monkeypatch)
    apart = torch.empty(call.k.numel() + 1, dtype=call.k.dtype)[1:].view(call.k.shape).copy_(call.k)
    strided = torch.empty(*call.v.shape, 2, dtype=call.v.dtype)[..., 0].copy_(call.v)
    wide = torch.empty(*call.page_table.shape, 2, dtype=torch.int32)[..., 0].copy_(call.page_table)
    written(replace(call, k=apart, v=strided, page_table=wide, rotary_cos=call.rotary_cos.mT.contiguous().mT))
    assert same(call.k_cache, want[0]) and same(call.v_cache, want[1])
    odd = torch.full((call.k_cache.numel() + 1,), 7.0, dtype=call.k.dtype)[1:].view(call.k_cache.shape)
    assert Emulated().append(replace(call, k_cache=odd)) is None and (odd == 7.0).all()
