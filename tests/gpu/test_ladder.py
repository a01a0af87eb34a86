"""Every rung on a Hopper GPU: the cases, random problems, closed forms, poison, and two runs with the same bits."""

import pytest
import torch
from hopper_problems import of_the_ladder

from tilewise.errors import ShapeError, UnsupportedError
from tilewise.ladder import RUNGS, VARIANTS
from tilewise.masks import Causal, Full
from tilewise.sm90.jit import why_not_here
from tilewise.testing import conformance
from tilewise.testing.cases import QUICK, Case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

EVERY = {**RUNGS, **VARIANTS}
SEQLENS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 300, 577, 1000)
CASES = of_the_ladder(SEQLENS)


def rungs(test):
    return pytest.mark.parametrize("rung", EVERY.values(), ids=EVERY)(test)


@rungs
def test_cases(rung):
    for case in CASES:
        try:
            conformance.run_forward(rung, case, device="cuda")
        except AssertionError as failure:
            raise AssertionError(f"{case.id}: {failure}") from None


@rungs
def test_quick_cases_that_it_covers(rung):
    ran = 0
    for case in QUICK:
        try:
            conformance.run_forward(rung, case, device="cuda")
            ran += 1
        except UnsupportedError:
            continue
    assert ran == sum(_covered(case) for case in QUICK)


def _covered(case):
    sizes = {name: getattr(case, name) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "layout")}
    square = case.seqlen_q == case.seqlen_k and case.heads_q == case.heads_k and case.head_dim in (64, 128)
    return square and case.mask in (Full(), Causal()) and case == Case(**sizes, mask=case.mask, dtype="bf16")


@rungs
@pytest.mark.parametrize("seed", range(4))
def test_random_problems(rung, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    for _ in range(12):
        seqlen, heads, scale = draw(1, 900), draw(1, 5), (None, 0.5, 2.0)[draw(0, 3)]
        mask, head_dim = (Full(), Causal())[draw(0, 2)], (64, 128)[draw(0, 2)]
        sizes = {"batch": draw(1, 3), "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": heads, "heads_k": heads, "head_dim": head_dim}
        case = Case(**sizes, mask=mask, scale=scale, dtype="bf16")
        try:
            conformance.run_forward(rung, case, seed=draw(0, 1 << 20), device="cuda")
        except AssertionError as failure:
            raise AssertionError(f"{case.id}: {failure}") from None


def _random(*shape, generator=None):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@rungs
@pytest.mark.parametrize("causal", [False, True])
def test_ones_give_ones(rung, causal):
    q, k = _random(2, 333, 128), _random(2, 333, 128)
    o = rung(q, k, torch.ones_like(q), causal=causal)
    torch.testing.assert_close(
        o, torch.ones_like(o), atol=2**-4 if rung.in_eight_bits else 2**-8, rtol=0
    )  # as P is rounded, and its sum is not


@rungs
def test_many_runs_have_the_same_bits(rung):
    q, k, v = (_random(4, 700, 128) for _ in range(3))
    first = rung(q, k, v, causal=True)
    assert all(torch.equal(first, rung(q, k, v, causal=True)) for _ in range(50))


@rungs
def test_bad_input(rung):
    q = _random(2, 64, 64)
    for wrong, error in (
        ((q[0], q[0], q[0]), ShapeError),
        ((q, q[:, :32], q), ShapeError),
        ((q, q, q.float()), ShapeError),
        ((q.float(),) * 3, UnsupportedError),
        ((q[..., :32],) * 3, UnsupportedError),
        ((q.cpu(),) * 3, UnsupportedError),
        ((q.new_empty(70000, 1, 64),) * 3, UnsupportedError),
    ):
        with pytest.raises(error):
            rung(*wrong)
    empty = q.new_empty(0, 64, 64)
    assert rung(empty, empty, empty).shape == empty.shape and rung(q[:, :0], q[:, :0], q[:, :0]).shape == (2, 0, 64)


def test_a_score_matrix_that_does_not_fit_is_said_so():
    q = torch.empty(64, 100_000, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"2560\.0 GB, and .* are free"):
        RUNGS["k1"](q, q, q)


def test_large_tensors_are_addressed_in_64_bits():
    q, k, v = (_random(5, 21_000, 64) for _ in range(3))  # S has 2.2e9 numbers
    torch.testing.assert_close(RUNGS["k1"](q, k, v)[4:], RUNGS["k6"](q[4:], k[4:], v[4:]), atol=2e-3, rtol=2e-2)
