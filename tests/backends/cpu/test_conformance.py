"""The kernel through the gate: every case at the one tolerance, in poisoned memory, for every instruction set of this processor."""

import pytest
import torch
from sampled import some

from tilewise.backends.cpu import Cpu, abi
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import Call
from tilewise.testing.cases import FULL, QUICK, Case
from tilewise.testing.conformance import CLOSED_FORMS, run_case, run_hidden, run_overflown, run_spoiled

RUNS = (run_case, run_hidden, run_spoiled)


def _backend(isa: str) -> Cpu:
    from tilewise.backends.cpu.native import library

    if isa != "auto" and isa not in library().isas:
        pytest.skip(f"this processor has no {isa}")
    return Cpu(isa)


def _gate(isa: str, runs, cases) -> None:
    backend, ran = _backend(isa), 0
    for case in cases:
        for run in runs:
            try:
                run(backend, case)
                ran += 1
            except UnsupportedError as reason:
                assert "fp64" in case.id, reason
            except AssertionError as failure:
                raise AssertionError(f"{case.id} ({run.__name__}): {failure}") from failure
    assert ran


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_quick(run):
    _gate("auto", (run,), some(QUICK, 0.5, run.__name__))


@pytest.mark.parametrize("isa", abi.ISAS[1:])
def test_quick_by_instruction_set(isa):
    for run, share in ((run_case, 0.2), (run_hidden, 0.1)):
        _gate(isa, (run,), some(QUICK, share, f"{isa} {run.__name__}"))


@pytest.mark.parametrize("isa", abi.ISAS[1:])
def test_infinities_of_both_signs(isa):
    sizes = dict(seqlen_q=150, seqlen_k=150, head_dim=64)
    masks = Full(), Causal(), SlidingWindow(90, 3)
    _gate(isa, (run_overflown,), [Case(mask=mask, dtype=dtype, **sizes) for mask in masks for dtype in ("fp32", "bf16", "fp16")])


@pytest.mark.parametrize("form", CLOSED_FORMS)
@pytest.mark.parametrize("isa", abi.ISAS[1:])
def test_closed_forms(isa, form):
    CLOSED_FORMS[form](_backend(isa))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("isa", abi.ISAS[1:])
def test_rows_that_see_one_key_give_q_and_k_nothing(isa, dtype):
    """dP and rowsum(dO O) are then the same products, and cancel to the last bit."""
    backend = _backend(isa)
    for seqlen_k, mask, head_dim in ((1, Full(), 33), (130, SlidingWindow(0, 0), 64), (130, SlidingWindow(0, 0), 200)):
        shapes = (2, 130, 4, head_dim), (2, seqlen_k, 2, head_dim), (2, seqlen_k, 2, head_dim), (2, 130, 4, head_dim)
        q, k, v, d_o = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n, shape in enumerate(shapes))
        call = Call(q=q, k=k, v=v, mask=mask, scale=head_dim**-0.5, grad=True)
        grads = backend.backward(call, *backend.forward(call), d_o, None)
        assert not grads.q.any() and not grads.k.any() and grads.v.any(), (mask, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("isa", abi.ISAS[1:])
def test_full(isa):
    _gate(isa, RUNS, FULL)
