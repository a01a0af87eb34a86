from dataclasses import replace

import pytest
import torch

from tilewise.backends.reference import Reference
from tilewise.errors import UnsupportedError
from tilewise.masks import SlidingWindow
from tilewise.testing.cases import QUICK, Case
from tilewise.testing.conformance import CLOSED_FORMS, run_case, run_hidden, run_overflown, run_spoiled
from tilewise.testing.mutants import Mutant, first_failure

# A fault that each closed form finds without a reference.
FOUND_BY = {
    "ones_give_ones": "unmasked_tail",
    "zero_queries_give_the_mean": "dropped_last_tile",
    "one_hot_values_give_probabilities": "scale_twice",
    "key_order_is_irrelevant": "stale_stage",
    "halves_merge_to_the_whole": "lse_without_max",
    "one_key_is_copied": "ds_without_delta",
    "huge_biases_keep_what_rounding_keeps": "lse_without_max",
}


class OnlyHalfPrecision(Reference):
    name = "picky"

    def why_not(self, problem):
        return [] if problem.dtype == torch.bfloat16 and not problem.sink else ["it takes bf16 without a sink"]


class Rounding(Reference):
    """Keeps V and Q in absolute steps, so that results do not scale."""

    def forward(self, call):
        steps = [(x * 256).round() / 256 for x in (call.q, call.v)]
        return super().forward(replace(call, q=steps[0], v=steps[1]))


@pytest.mark.parametrize("form", CLOSED_FORMS)
def test_closed_forms_hold_for_the_healthy_kernel(form):
    CLOSED_FORMS[form](Mutant())


@pytest.mark.parametrize("form", CLOSED_FORMS)
def test_closed_forms_fail_for_a_wrong_one(form):
    wrong = Mutant(FOUND_BY[form]) if form in FOUND_BY else Rounding()
    with pytest.raises(AssertionError):
        CLOSED_FORMS[form](wrong)


def test_closed_forms_run_in_what_the_backend_takes():
    for form in CLOSED_FORMS.values():
        form(OnlyHalfPrecision())


@pytest.mark.parametrize("run", [run_case, run_hidden, run_overflown, run_spoiled])
def test_what_a_backend_cannot_do(run):
    with pytest.raises(UnsupportedError, match="picky cannot run this: it takes bf16 without a sink"):
        run(OnlyHalfPrecision(), Case(dtype="fp32"))
    assert 0.0 < run(OnlyHalfPrecision(), Case(dtype="bf16", seqlen_q=20, mask=SlidingWindow(50, 0))) <= 1.0
    assert first_failure(OnlyHalfPrecision(), QUICK[:3]) is None


def test_a_bias_gradient_is_required():
    class Forgetful(Reference):
        def backward(self, *args, **kwargs):
            return super().backward(*args, **kwargs)._replace(bias=None)

    with pytest.raises(AssertionError, match="dbias: missing"):
        run_case(Forgetful(), Case(bias="h", seqlen_q=20))


def test_a_nan_that_spreads_is_caught():
    class Spreading(Reference):
        def forward(self, call):
            o, lse = super().forward(call)
            return (torch.full_like(o, torch.nan) if o.isnan().any() else o), lse

    case = Case(mask=SlidingWindow(5, 0), seqlen_q=30, seqlen_k=30)
    run_case(Spreading(), case)
    with pytest.raises(AssertionError, match="nan"):
        run_spoiled(Spreading(), case)
    with pytest.raises(AssertionError, match="nan"):
        run_spoiled(Spreading(), case, backward=False)


def test_an_infinity_that_stays_where_another_makes_nan_is_caught():
    class Ending(Reference):
        def backward(self, *args, **kwargs):
            grads = super().backward(*args, **kwargs)
            return grads._replace(v=grads.v.nan_to_num(torch.inf, torch.inf, -torch.inf))

    with pytest.raises(AssertionError, match="expected nan"):
        run_overflown(Ending(), Case(seqlen_q=30))


def test_seeds_give_fresh_problems():
    assert run_case(Mutant(), QUICK[3], seed=1) != run_case(Mutant(), QUICK[3], seed=2)
