"""The gate passes the healthy kernel and fails every mutant, in single and in half precision."""

from dataclasses import replace

import pytest

from tilewise.masks import Causal, Documents, Full
from tilewise.testing.cases import FEATURES, QUICK, Case
from tilewise.testing.conformance import run_case, run_hidden, run_scattered, run_spoiled
from tilewise.testing.mutants import FAULTS, Mutant, first_failure

pytestmark = pytest.mark.usefixtures("expected_once")

BASE = Case(seqlen_q=45, seqlen_k=70, head_dim=32, head_dim_v=24)
GATE = (
    replace(BASE, mask=Causal(), **FEATURES[-2]),
    replace(BASE, mask=Causal(), alibi="h", diagonal=True, bias="h", sink=True, lse_grad=True),
    replace(BASE, mask=Documents([0, 10, 30, 40], [0, 0, 33, 60], inner=Causal())),
    replace(BASE, mask=Full(), dropout=0.3),
)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("case", [case for case in QUICK if case.seqlen_q < 500], ids=lambda case: case.id)
def test_the_healthy_kernel_passes(case):
    assert run_case(Mutant(), case) <= 1.0


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("case", QUICK[2::5], ids=lambda case: case.id)
def test_the_healthy_kernel_is_safe_from_poison(case):
    assert run_hidden(Mutant(), case) <= 1.0
    assert run_spoiled(Mutant(), case) <= 1.0
    if not case.bias_hides:
        assert run_scattered(Mutant(), case) <= 1.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_healthy_kernel_passes_the_gate(dtype):
    assert first_failure(Mutant(), [replace(case, dtype=dtype) for case in GATE]) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_mutant_is_caught(fault, dtype):
    failure = first_failure(Mutant(fault), [replace(case, dtype=dtype) for case in GATE])
    assert failure is not None, f"{fault} ({FAULTS[fault]}) passes the gate"


def test_unknown_faults():
    with pytest.raises(ValueError, match=r"fault must be one of skipped_rescale, .* or None, got 'none'"):
        Mutant("none")
