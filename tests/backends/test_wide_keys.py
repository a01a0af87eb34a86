"""dK and dV before they are rounded, for those who add others to them: fp32 elements that round to what is given without."""

from dataclasses import replace

import pytest
import torch
import wide_keys

from tilewise import distributed
from tilewise.backends.cpu import Cpu, native
from tilewise.backends.tiled import Tiled
from tilewise.distributed import bound
from tilewise.masks import Causal, Documents, SlidingWindow
from tilewise.runtime import operator
from tilewise.testing.cases import Case, make

CASES = [
    Case(batch=2, seqlen_q=130, seqlen_k=300, mask=Causal()),
    Case(
        batch=1, seqlen_q=5, seqlen_k=700, heads_k=1, head_dim=40, head_dim_v=24, mask=SlidingWindow(100, 0)
    ),  # few queries have a way of their own
    Case(batch=1, seqlen_q=200, seqlen_k=200, heads_q=2, head_dim=72, head_dim_v=40, mask=Documents([0, 90, 200])),
    Case(batch=1, seqlen_q=3, seqlen_k=64, heads_q=2, mask=SlidingWindow(2, 0)),  # most keys nobody sees
]


def backends():
    yield pytest.param(Tiled(), id="tiled")
    if native.problem() is None:
        for isa in native.library().isas:
            yield pytest.param(Cpu(isa), id=f"cpu {isa}")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("backend", list(backends()))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_they_round_to_what_is_given_without(case, backend, dtype):
    case = replace(case, dtype=dtype)
    if reasons := backend.why_not(make(case, grad=True).problem):
        pytest.skip(reasons[0])
    wide_keys.held(backend, case)


def test_both_passes_of_a_rank_say_so(monkeypatch):
    """The forward pass too, during which a backend may compile the gradients' kernels."""
    told = []

    class Telling(Tiled):
        def forward(self, call):
            told.append(call.wide_keys)
            return super().forward(call)

        def backward(self, call, *given, **named):
            told.append(call.wide_keys)
            return super().backward(call, *given, **named)

    for module in (operator, bound):
        monkeypatch.setattr(module, "choose", lambda *_: Telling())
    call = make(replace(CASES[2], head_dim_v=None), grad=True)
    plan = distributed.plan(Causal(), call.seqlen_q, (0, 1), heads=(call.heads_q, call.heads_k), head_dim=call.head_dim)
    q, k, v = (x.requires_grad_() for x in (call.q, call.k, call.v))
    o = distributed.attention(q, k, v, plan)
    assert o.requires_grad
    found = torch.autograd.grad(o.sum(), (q, k, v))
    assert told == [True, True] and all(x.dtype == call.q.dtype for x in found)
