"""A dtype for each operand and the output, where a backend is asked for it: the oracle has it, the others say that they have not."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends.reference import Reference
from tilewise.masks import Causal
from tilewise.problem import Call
from tilewise.runtime.dispatch import backends


def call(**fields) -> Call:
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    return replace(Call(q=q, k=k, v=v, mask=Causal(), scale=0.3), **fields)


@pytest.mark.parametrize("name", [backend.name for backend in backends() if backend.name != "reference"])
@pytest.mark.parametrize(
    "fields", [{"out_dtype": torch.float32}, {"k": torch.randn(1, 5, 2, 8)}, {"v": torch.randn(1, 5, 2, 8)}], ids=["o", "k", "v"]
)
def test_others_refuse_what_is_mixed(name, fields):
    problem = replace(call(**fields).problem, device="cuda" if name in ("hopper", "triton") else "cpu")
    (backend,) = (each for each in backends() if each.name == name)
    assert any("one dtype" in why and "float32" in why for why in backend.why_not(problem))
    assert not any("one dtype" in why for why in backend.why_not(replace(call().problem, device=problem.device)))


def test_the_oracle_rounds_to_the_dtype_that_is_asked_for():
    given = call()
    exact, _ = Reference().forward(replace(given, q=given.q.double(), k=given.k.double(), v=given.v.double()))
    wide, _ = Reference().forward(replace(given, out_dtype=torch.float32))
    assert wide.dtype == torch.float32 and torch.equal(wide, exact.float())
    assert Reference().forward(given)[0].dtype == torch.bfloat16


def test_one_dtype_is_one_problem():
    assert call().problem is call(out_dtype=torch.bfloat16).problem and call().problem != call(out_dtype=torch.float32).problem
