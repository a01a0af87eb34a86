"""dK and dV before they are rounded, for those who add others to them: fp32 numbers that round to what is given without."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends.cpu import Cpu, native
from tilewise.backends.tiled import Tiled
from tilewise.masks import Causal, Documents, SlidingWindow
from tilewise.problem import Call

SHAPES = [  # batch, seqlen_q, seqlen_k, heads, head_dim, head_dim_v, mask
    (2, 130, 300, (4, 2), 64, 64, Causal()),
    (1, 5, 700, (4, 1), 40, 24, SlidingWindow(100, 0)),  # few queries have a way of their own
    (1, 200, 200, (2, 2), 72, 40, Documents([0, 90, 200])),
    (1, 3, 64, (2, 2), 64, 64, SlidingWindow(2, 0)),  # most keys nobody sees
]


def backends():
    yield pytest.param(Tiled(), id="tiled")
    if native.problem() is None:
        for isa in native.library().isas:
            yield pytest.param(Cpu(isa), id=f"cpu {isa}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", list(backends()))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_round_to_what_is_given_without(shape, backend, dtype):
    batch, seqlen_q, seqlen_k, (heads_q, heads_k), dim, dim_v, mask = shape
    draw = torch.Generator().manual_seed(seqlen_q)

    def normal(*sizes):
        return torch.randn(sizes, generator=draw, dtype=torch.float32).to(dtype)

    q, k, v = normal(batch, seqlen_q, heads_q, dim), normal(batch, seqlen_k, heads_k, dim), normal(batch, seqlen_k, heads_k, dim_v)
    call = Call(q=q, k=k, v=v, mask=mask, scale=dim**-0.5, grad=True)
    if backend.why_not(call.problem):
        pytest.skip(backend.why_not(call.problem)[0])
    o, lse, *_ = backend.forward(call)
    d_o = normal(*o.shape)
    plain, wide = (backend.backward(each, o, lse, d_o, None) for each in (call, replace(call, wide_keys=True)))
    assert torch.equal(plain.q, wide.q)
    for narrow, found in ((plain.k, wide.k), (plain.v, wide.v)):
        assert found.dtype == torch.float32 and torch.equal(found.to(dtype), narrow)
        assert dtype == torch.float32 or not torch.equal(found, narrow.float())  # they were not rounded before
