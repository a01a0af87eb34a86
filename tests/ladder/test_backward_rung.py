"""A rung for gradients without a GPU: what it says to tensors that it cannot serve, and how the bench asks it."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench import Timing, find, run
from tilewise.bench.peers.ladder import BackwardOnLadder
from tilewise.bench.peers.naive import Naive
from tilewise.bench.sets import Workload
from tilewise.cli import grammar
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.ladder import BACKWARD_RUNGS, DECODE_RUNGS, RUNGS, VARIANTS
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.testing import conformance
from tilewise.testing.cases import Case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Workload(name="small", batch=2, seqlen_q=40, heads_q=4, head_dim=16, direction="bwd")


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


X, LSE = bf16(2, 64, 64), torch.zeros(2, 64)


def test_names():
    assert not BACKWARD_RUNGS.keys() & (RUNGS | VARIANTS | DECODE_RUNGS).keys()
    assert all(name == rung.name and rung.title for name, rung in BACKWARD_RUNGS.items())
    assert [each.name for each in find(f"b1..{list(BACKWARD_RUNGS)[-1]}")] == list(BACKWARD_RUNGS)
    for wrong in ("b1..k6", "k1..b1", "b2..b0"):
        with pytest.raises(ValueError, match="a range goes up the ladder"):
            find(wrong)


@pytest.mark.parametrize(
    "changed, error, message",
    [
        ({"q": X[0]}, ShapeError, "q must have 3 dimensions (batch * heads, seqlen, head_dim), got 2 with shape (64, 64)"),
        ({"o": X[:, :5]}, ShapeError, "o has shape (2, 5, 64), but q has shape (2, 64, 64)"),
        ({"d_o": X.float()}, ShapeError, "d_o is torch.float32, but q is torch.bfloat16"),
        ({"lse": LSE[:1]}, ShapeError, "lse has shape (1, 64), but q has shape (2, 64)"),
        ({"lse": LSE.double()}, ShapeError, "lse must be float32, got float64; convert it with lse.to(...)"),
        (dict.fromkeys(("q", "k", "v", "o", "d_o"), X.float()), UnsupportedError, "it takes bfloat16 only, and the tensors are torch.float32"),
        (dict.fromkeys(("q", "k", "v", "o", "d_o"), X[..., :32]), UnsupportedError, "it takes head_dim 64 and 128, and this is 32"),
        ({}, UnsupportedError, "it runs on a Hopper GPU, and the tensors are on cpu: move them to 'cuda'"),
    ],
)  # fmt: skip
def test_bad_tensors(changed, error, message):
    for rung in BACKWARD_RUNGS.values():
        with pytest.raises(error) as raised:
            rung(**{"q": X, "k": X, "v": X, "o": X, "lse": LSE, "d_o": X} | changed)
        assert message in str(raised.value)


@pytest.mark.parametrize("rung", BACKWARD_RUNGS.values(), ids=BACKWARD_RUNGS)
def test_what_it_cannot_do_is_said(rung):
    case = Case(batch=1, seqlen_q=40, seqlen_k=40, heads_q=1, heads_k=1, head_dim=64, mask=Full(), dtype="bf16")
    with pytest.raises(UnsupportedError, match="it runs on a Hopper GPU"):
        conformance.run_case(rung, case)
    with pytest.raises(UnsupportedError, match="it takes as many key heads as query heads"):
        conformance.run_case(rung, replace(case, heads_q=2))
    with pytest.raises(UnsupportedError, match="no gradient that reaches the log-sum-exp"):
        rung.backward(None, X, LSE, X, LSE)
    many = bf16(70000, 1, 64)
    with pytest.raises(UnsupportedError, match=r"at most 65535 heads in all .* and this is 70000; cut the batch"):
        rung.run(*[many] * 4, torch.zeros(70000, 1), many, causal=False, scale=1.0)
    assert all(x.shape == (2, 0, 64) for x in rung.run(*[X[:, :0]] * 4, LSE[:, :0], X[:, :0], causal=False, scale=1.0))


class Formula:
    """Stands for a rung: torch's gradients of the formula, on (heads, seqlen, head_dim)."""

    name = "b0"

    def why_not(self, problem):
        return []

    def attend(self, q, k, v, causal, scale):
        assert all(x.is_contiguous() for x in (q, k, v)), "a copy would be timed"
        one = replace(SMALL, batch=1, heads_q=q.shape[0], heads_k=0, mask=Causal() if causal else Full())
        o = Naive().prepare(one, CPU)(*(x[None].transpose(1, 2) for x in (q, k, v)))[0].transpose(0, 1).contiguous()
        return o, torch.zeros(o.shape[:2])

    def __call__(self, q, k, v, o, lse, d_o, causal, scale):
        assert d_o.is_contiguous() and o.shape == d_o.shape and lse.shape == q.shape[:2]
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            return torch.autograd.grad(self.attend(*inputs, causal, scale)[0], inputs, d_o)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_the_bench_checks_and_times_its_gradients(mask):
    (row,) = run([replace(SMALL, mask=mask)], [BackwardOnLadder(Formula())], memory=False, timing=Timing(budget_s=0.0))
    assert row.impl == "b0" and row.passed and row.median_s > 0, row.reason


def test_why_the_bench_does_not_ask_it():
    rung = BackwardOnLadder(BACKWARD_RUNGS["b1"])
    sizes = {"batch": 2, "seqlen_q": 40, "heads_q": 4, "head_dim": 64}
    workload = Workload(name="small", dtype=torch.bfloat16, direction="bwd", **sizes)
    assert rung.why_not(workload, CPU) == ["it runs on a Hopper GPU, and the tensors are on cpu: move them to 'cuda'"]
    wrong = rung.why_not(replace(workload, direction="fwd", mask=SlidingWindow(9, 0), scale=1.0), CUDA)
    masks = "the ladder takes full and causal masks of equal lengths only"
    assert wrong[:2] == ["it is a backward pass: give direction bwd", masks] and wrong[-1] == "the ladder has the usual scale only"


def test_the_command_line_times_gradients_where_such_a_rung_is_named(monkeypatch):
    asked = []
    monkeypatch.setattr("tilewise.bench.run", lambda workloads, impls, **_: asked.extend(workloads) or [])
    command = ["bench", "b1,naive", "--device", "cpu", "--seqlen", "512", "--head-dim", "64"]
    grammar.main(command)
    assert {(each.name, each.direction) for each in asked} == {("ladder", "bwd")}
    asked.clear()
    grammar.main([*command, "--direction", "fwd+bwd", "--batch", "1"])
    assert {(each.name, each.direction) for each in asked} == {("custom", "fwd+bwd")}
