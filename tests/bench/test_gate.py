"""RMS errors against fp64: right for all masks and heads, and where results are not finite."""

import math
from dataclasses import replace

import pytest
import torch

from tilewise.bench import gate
from tilewise.bench.gate import Exact
from tilewise.bench.peers import Naive, Tilewise
from tilewise.bench.sets import Workload, padded
from tilewise.masks import Causal, Full, SlidingWindow

CPU = torch.device("cpu")
SMALL = Workload(name="small", batch=2, seqlen_q=70, heads_q=4, heads_k=2, head_dim=16, direction="bwd", dtype=torch.bfloat16)


def whole(workload):
    """O and the gradients in fp64, from the naive formula."""
    q, k, v, d_o = (x.detach().double() for x in workload.inputs(5))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = Naive().prepare(replace(workload, dtype=torch.float64), CPU)(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, d_o)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(9, 0), padded(70)], ids=str)
@pytest.mark.parametrize("piece", [1 << 22, 2 * 70 * 32], ids=["at once", "in pieces"])
def test_the_reference_is_that_of_the_whole(mask, piece, monkeypatch):
    monkeypatch.setattr(gate, "PIECE", piece)
    workload = replace(SMALL, mask=mask)
    results = Exact(workload, 5, CPU).results
    for name, want in zip(("o", "dq", "dk", "dv"), whole(workload), strict=True):
        want = want[1:, :, 2:] if name in ("o", "dq") else want[1:, :, 1:]
        torch.testing.assert_close(results[name][0], want, rtol=1e-9, atol=1e-12)
        assert results[name][1] == pytest.approx(want.square().mean().sqrt().item())


def test_an_error_is_relative_and_of_every_output():
    right = Naive().prepare(SMALL, CPU)
    exact = Exact(SMALL, 5, CPU)
    usual = exact.errors(right)
    assert usual.places and set(usual.rms) == {"o", "dq", "dk", "dv"} and all(1e-4 < x < 2e-2 for x in usual.rms.values())
    off = exact.errors(lambda q, k, v: right(q, k, v) * 1.5).rms
    assert all(error == pytest.approx(0.5, abs=0.02) for error in off.values())
    assert set(Exact(replace(SMALL, direction="fwd"), 5, CPU).errors(right).rms) == {"o"}


def test_what_cancels_is_relative_to_its_terms():
    """A softmax that is all or nothing has no gradient, and an error of rounding is small all the same."""
    exact = Exact(replace(SMALL, data="largest scores", mask=Causal()), 5, CPU)
    errors = exact.errors(Tilewise().prepare(exact.workload, CPU))
    assert errors.places and all(math.isfinite(x) and x < 0.1 for x in errors.rms.values())


@pytest.mark.parametrize("data", ["nan in v", "inf in last keys", "overflown"])
@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(9, 0)], ids=str)
def test_errors_beside_nan(data, mask):
    workload = replace(SMALL, mask=mask, data=data, dtype=torch.float16)
    found = Exact(workload, 5, CPU).errors(Tilewise("tiled").prepare(workload, CPU))
    assert found.places and all(x < 2e-2 for x in found.rms.values())


def test_stray_nan_is_seen():
    workload = replace(SMALL, mask=padded(70), data="hidden nan")
    leaks = Exact(workload, 5, CPU).errors(Naive().prepare(workload, CPU))
    assert not leaks.places and leaks.rms == {}
    assert Exact(workload, 5, CPU).errors(Tilewise("tiled").prepare(workload, CPU)).places
