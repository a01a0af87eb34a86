"""The Triton backend in Triton's interpreter: every case of the quick conformance suite, and NaN in all that is hidden."""

import warnings

import pytest

from tests.shared.interpreted import interpreted
from tilewise.testing import cases, conformance

pytest.importorskip("triton")

LONGEST = 150  # tokens that the interpreter takes in a few seconds
QUICK = [case for case in cases.QUICK if case.dtype != "fp64"]
SHORT = [case for case in QUICK if max(case.seqlen_q, case.seqlen_k) <= LONGEST]


def held(name: str, case: cases.Case) -> float:
    """The case through one of conformance's functions, in the process of the interpreter."""
    from tilewise.backends.triton import Triton

    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of overflows that are meant
    return getattr(conformance, name)(Triton(), case)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_cases(case):
    interpreted(held, "run_case", case)


@pytest.mark.sampled(0.05)
@pytest.mark.parametrize("name", ["run_hidden", "run_spoiled", "run_scattered", "run_row_max"])
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.id)
def test_nothing_hidden_is_read(case, name):
    if name == "run_scattered" and case.bias_hides:
        pytest.skip("the contract does not say what a bias of -inf hides of a NaN")
    interpreted(held, name, case)
