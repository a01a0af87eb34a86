"""The Triton backend in Triton's interpreter: every case of the quick conformance suite, and NaN in all that is hidden."""

import warnings
from dataclasses import replace

import pytest
import torch
import triton_problems as problems

from tests.shared.interpreted import interpreted
from tilewise.masks import Causal, Documents, PerHead, PrefixLM, SlidingWindow
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


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_cases(case):
    interpreted(held, "run_case", case)


@pytest.mark.sampled(0.05, of="name,mask,dtype")
@pytest.mark.parametrize("name", ["run_hidden", "run_spoiled", "run_scattered", "run_row_max"])
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.id)
def test_nothing_hidden_is_read(case, name):
    if name == "run_scattered" and case.bias_hides:
        pytest.skip("the contract does not say what a bias of -inf hides of a NaN")
    interpreted(held, name, replace(case, heads_q=2, heads_k=1) if fewer_heads(case) else case)


def fewer_heads(case: cases.Case) -> bool:
    """Whether the case is none of as many heads as it has: sums again, pair by pair, take ten times as long as the rest."""
    return (case.heads_q, case.heads_k) == (4, 2) and not isinstance(case.mask, PerHead) and "x4x" not in repr(case.mask)


def test_no_queries_have_no_gradient_of_a_bias():
    interpreted(problems.no_queries_have_no_gradient_of_a_bias)


@pytest.mark.parametrize("mask", [Documents((0, 90)), Documents((0, 20, 90), inner=Causal())], ids=str)
def test_what_lies_beyond_all_rows_is_not_read(mask):
    interpreted(problems.what_lies_beyond_all_rows_is_not_read, mask, 90)


@pytest.mark.parametrize(
    ("processors", "batch", "spoiled"),
    [
        (8, 40, [3, 16, 18, 33, 39]),  # of 15 programs one has three of these
        (1, 140, [5, 139]),  # more than one load of flags finds
    ],
)
def test_few_programs_mend_many_tiles(processors, batch, spoiled):
    interpreted(problems.few_programs_mend_many_tiles, processors, batch, spoiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(30, 5), Documents((0, 20, 45, 70), inner=Causal()), PrefixLM(13)], ids=str)
def test_what_is_not_finite_stays_the_formulas(mask, dtype):
    interpreted(problems.what_is_not_finite_stays_the_formulas, mask, dtype)


def test_a_row_as_low_as_its_dtype_goes_hides_nothing_more():
    interpreted(problems.a_row_as_low_as_its_dtype_goes_hides_nothing_more)


def bounded() -> None:
    from tilewise.backends.triton import Triton

    problems.a_large_lse_bounds_its_gradients(Triton())


@pytest.mark.parametrize("softcap, scale", [(1e-30, 1e10), (1.0, 1e35), (3e38, 8.0)])
def test_a_scale_that_overflows_beside_its_softcap(softcap, scale):
    interpreted(problems.a_scale_overflows_beside_its_softcap, softcap, scale)


@pytest.mark.parametrize("loud", [slice(0), slice(0, 150, 7), slice(140, 150), slice(150)], ids=str)
def test_a_softcap_bends(loud):
    interpreted(problems.a_softcap_bends, loud)


def test_gradients_at_the_cap():
    interpreted(problems.gradients_at_the_cap)


def test_a_large_lse_bounds_its_gradients():
    interpreted(bounded)
