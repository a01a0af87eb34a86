from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.backends.reference import Reference, eager
from tilewise.backends.tiled import Tiled
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.testing import tolerance
from tilewise.testing.cases import FEATURES, Case, make, upstream
from tilewise.testing.conformance import run_case
from tilewise.testing.mutants import Mutant
from tilewise.testing.tolerance import Yardstick, check, check_gradients, check_lse, check_outputs, expected, hold, ulp

SHAPE = (4, 32, 16)
REF = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NAIVE = REF + 1e-3 * NOISE


@pytest.mark.parametrize("value", [1.0, 1.5, 0.7, 3e5, 1e-3, 0.0])
def test_ulp(value):
    got = [float(ulp(torch.tensor(value), dtype)) for dtype in (torch.float64, torch.float32)]
    tiny = max(value, np.finfo(np.float32).tiny)
    assert got == [np.spacing(np.float64(max(value, np.finfo(np.float64).tiny))), np.spacing(np.float32(tiny))]


def test_ulp_of_half_precision():
    assert float(ulp(torch.tensor(1.0), torch.bfloat16)) == 2.0**-7 and float(ulp(torch.tensor(-5.0), torch.float16)) == 2.0**-8
    assert float(ulp(torch.tensor(1e-7), torch.float16)) == 2.0**-24  # subnormal numbers are equally spaced


def test_as_wrong_as_naive_passes_and_three_times_fails():
    assert 0.4 < check("o", NAIVE, REF, NAIVE) < 0.6
    assert check("o", REF, REF, NAIVE) == 0.0
    check("o", REF - 1.9e-3 * NOISE, REF, NAIVE)
    with pytest.raises(AssertionError, match=r"o\[\d+, \d+, \d+\]: error .* > .*, is .*, expected .*\(\d+ of 2048 beyond"):
        check("o", REF - 3e-3 * NOISE, REF, NAIVE)


def test_two_ulps_are_free():
    ref, eps = torch.ones(SHAPE, dtype=torch.float64), torch.finfo(torch.float32).eps
    assert check("o", (ref + 2.0 * eps).float(), ref, ref) == 1.0
    with pytest.raises(AssertionError, match="error"):
        check("o", (ref + 3.0 * eps).float(), ref, ref)


def test_a_maximum_of_too_few_keys_fails():
    """One that stopped moving before the last tile, that counts the sink, or that lost a NaN; rounded once more it passes."""
    case = Case(seqlen_q=60, seqlen_k=90, head_dim=16, mask=Causal(), sink=True)
    call = replace(make(case), row_max=True)
    row_max = Reference().forward(call)[2]
    assert tolerance.check_row_max(call, row_max * (1 + 1e-7)) > 0.0
    stale = Reference().forward(replace(call, k=call.k[:, :64], v=call.v[:, :64], mask=Causal("top_left")))[2]
    for wrong in (stale, torch.maximum(row_max, call.sink[:, None] + 3.0), row_max * (1 + 1e-5), row_max[..., :-1]):
        with pytest.raises(AssertionError, match="row_max"):
            tolerance.check_row_max(call, wrong)
    call.k[0, 70, 0, 3] = torch.nan
    assert Reference().forward(call)[2].isnan().any()
    with pytest.raises(AssertionError, match="expected nan"):
        tolerance.check_row_max(call, row_max)


def test_what_a_flushed_probability_multiplies_counts():
    """A weight of 1e-39 is taken for 0 by kernels; beside q of 64 times the usual size that is 64 times as much, and no more."""
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=16)
    call = make(case)
    d_o, _ = upstream(case)
    usual, larger = expected(call, d_o), expected(replace(call, q=call.q * 640.0), d_o)
    assert {usual.o.unusual, usual.q.unusual, usual.k.unusual, usual.v.unusual} == {1.0}
    assert (
        larger.k.unusual == pytest.approx(float(call.q.abs().max()) * 640 / tolerance.USUAL) and larger.q.unusual == larger.o.unusual == 1.0
    )
    assert tolerance.floor(torch.float32, 64.0) < 65 * tolerance.floor(torch.float32)


def test_the_failure_names_the_worst_number():
    got = REF.clone()
    got[2, 3, 5] += 0.1
    with pytest.raises(AssertionError, match=r"^dq\[2, 3, 5\]: error 0\.1 > 0\.00\d+, is .* \(1 of 2048 beyond their allowance\)$"):
        check("dq", got, REF, NAIVE)


def test_a_bad_row_of_small_numbers_cannot_hide():
    """Rows of 1e-3: an error of all of their value is far below the largest error of the rows beside them."""
    scale = torch.ones(4, 32, 1, dtype=torch.float64)
    scale[:, 7] = 1e-3
    ref, naive = REF * scale, NAIVE * scale
    got = naive.clone()
    got[1, 7] = 0.9 * ref[1, 7]
    assert (got - ref).abs().max() < 2 * (naive - ref).abs().max()
    with pytest.raises(AssertionError, match=r"o\[1, 7\]: rms of a row, error .* \(1 of 128 beyond"):
        check("o", got, ref, naive)


def test_a_row_where_naive_is_exact_is_not_held_to_that():
    naive = NAIVE.clone()
    naive[0, 0] = REF[0, 0]
    check("o", REF + 1e-3 * NOISE.flip(0), REF, naive)


def test_outputs_that_were_subnormal_may_leave_their_error_to_a_gradient():
    """O near 1e-8 is rounded to steps of 6e-8 in fp16; the sink's gradient, of its sum with dO, is as far off by any kernel and by naive."""
    case = Case(
        batch=2, seqlen_q=99, seqlen_k=279, heads_q=4, heads_k=2, head_dim=32, mask=Documents([0, 1]), dtype="fp16", alibi="h", sink=True
    )
    call, (d_o, d_lse) = make(case, 1), upstream(case, 1)
    o, lse = Tiled().forward(call)
    assert o[:, 0, 0].abs().max() < 1e-6
    check_gradients(call, Tiled().backward(call, o, lse, d_o, d_lse), d_o, d_lse)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_special_values_must_match(bad):
    got, ref = NAIVE.clone(), REF.clone()
    got[1, 2, 3] = bad
    with pytest.raises(AssertionError, match=r"o\[1, 2, 3\]: -?(nan|inf), expected .*\(1 such\)"):
        check("o", got, ref, NAIVE)
    with pytest.raises(AssertionError, match=r"o\[1, 2, 3\]: .*, expected -?(nan|inf)"):
        check("o", NAIVE, got, NAIVE)
    ref[1, 2, 3] = bad
    check("o", got, ref, got)


def test_nan_never_passes():
    with pytest.raises(AssertionError):
        check("o", torch.full(SHAPE, torch.nan), REF, NAIVE)
    naive = torch.full(SHAPE, torch.nan, dtype=torch.float64)  # no yardstick at all leaves two ulps
    with pytest.raises(AssertionError):
        check("o", NAIVE, REF, naive)
    check("o", REF, REF, naive)


def test_shapes_and_dtypes():
    with pytest.raises(AssertionError, match=r"o: is \(4, 32, 15\) torch.float64, expected \(4, 32, 16\) torch.float64"):
        check("o", NAIVE[..., 1:], REF, REF)
    with pytest.raises(AssertionError, match=r"o: is \(4, 32, 16\) torch.float64, expected \(4, 32, 16\) torch.float32"):
        hold("o", NAIVE, Yardstick(REF, NOISE.abs(), REF.abs(), torch.float32))
    assert check("o", REF[:0], REF[:0], REF[:0]) == 0.0


def test_each_number_of_a_vector_is_a_row():
    ref = torch.tensor([1.0, 1e-6], dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"dsink\[1\]: rms of a row"):
        check("dsink", torch.tensor([1.0, 1.1e-6], dtype=torch.float64), ref, ref * (1 + 1e-5))


def test_lse_in_ulps():
    ref = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64)
    want = Yardstick(ref, torch.zeros(3, dtype=torch.float64), ref.clamp(min=1.0), torch.float32)
    eps = torch.finfo(torch.float32).eps
    check_lse("lse", (ref + eps * torch.tensor([1.0, 1.0, 16.0])).float(), want)
    with pytest.raises(AssertionError, match=r"lse\[2\]: in ulps, error 3"):
        check_lse("lse", (ref + eps * torch.tensor([1.0, 1.0, 48.0])).float(), want)
    with pytest.raises(AssertionError, match=r"lse\[0\]: in ulps, error 4"):
        check_lse("lse", (ref + eps * torch.tensor([4.0, 1.0, 1.0])).float(), want)


def test_lse_of_empty_rows():
    case = Case(seqlen_q=9, seqlen_k=5, mask=Causal())
    call = make(case)
    o, lse = Reference().forward(call)
    check_outputs(call, o, lse)
    for wrong in (0.0, -1e30, torch.nan):
        with pytest.raises(AssertionError, match="expected -inf"):
            check_outputs(call, o, lse.masked_fill(lse == -torch.inf, wrong))


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_the_naive_formula_passes_its_own_gate(dtype):
    case = Case(dtype=dtype, mask=Causal(), lse_grad=True, **{k: v for k, v in FEATURES[-2].items() if k != "lse_grad"})
    call, (d_o, d_lse) = make(case), upstream(case)
    expect = expected(call, d_o, d_lse)
    o, lse = eager(call, call.q.dtype)
    assert hold("o", o, expect.o) <= 0.5 + (dtype == "fp64")
    if dtype in ("fp32", "fp64"):
        check_lse("lse", lse, expect.lse)
    else:
        with pytest.raises(AssertionError, match=r"lse: is .*torch\.float32"):
            check_lse("lse", lse, expect.lse)  # half precision statistics are not good enough
        with pytest.raises(AssertionError, match="in ulps"):
            check_lse("lse", lse.float(), expect.lse)


def test_gradients_must_be_there():
    case = Case(seqlen_q=9, seqlen_k=5, sink=True, bias="h")
    call, (d_o, _) = make(case), upstream(case)
    o, lse = Reference().forward(call)
    grads = Reference().backward(call, o, lse, d_o, None, bias_grad=True)
    check_gradients(call, grads, d_o)
    check_gradients(call, grads._replace(bias=None), d_o)
    with pytest.raises(AssertionError, match=r"dsink: missing, expected \(4,\) torch.float32"):
        check_gradients(call, grads._replace(sink=None), d_o)
    with pytest.raises(AssertionError, match="dk"):
        check_gradients(call, grads._replace(k=1.01 * grads.k), d_o)


def test_without_gradients_there_are_no_yardsticks_for_them():
    expect = expected(make(Case()))
    assert expect.q is expect.k is expect.v is expect.bias is expect.sink is None


def test_the_magnitude_is_that_of_the_result_unless_it_cancels():
    """One visible key: dQ and dK are exactly zero, and still an ulp of the terms that cancel is allowed. Elsewhere the two are alike."""
    case = Case(seqlen_q=64, seqlen_k=1, mask=Full())
    call, (d_o, _) = make(case), upstream(case)
    expect = expected(call, d_o)
    assert expect.q.ref.abs().max() < 1e-14 and 0.1 < expect.q.magnitude.max() < 10.0
    call, (d_o, _) = make(Case()), upstream(Case())
    expect = expected(call, d_o)
    for want in (expect.o, expect.q, expect.k, expect.v):
        assert (want.magnitude >= want.ref.abs()).all() and want.magnitude.max() < 3.0 * want.ref.abs().max()


def test_few_rows_get_the_expected_rounding_error():
    assert expected(make(Case(seqlen_q=1))).o.roundoff > 0.0
    assert expected(make(Case(seqlen_q=65))).o.roundoff == 0.0
    half = expected(make(Case(seqlen_q=1, dtype="bf16")))
    assert 2.0**-8 < half.o.roundoff < 1.01 * 2.0**-8 and half.lse.roundoff < 1e-5  # statistics are fp32 whatever the inputs are


def test_a_visible_nan_is_expected_where_it_is_seen():
    call = make(Case(seqlen_q=40, seqlen_k=40, mask=SlidingWindow(3, 0)))
    v = call.v.clone()
    v[:, 20] = torch.nan
    call = replace(call, v=v)
    o, lse = Reference().forward(call)
    assert o.isnan().any(-1).any(-1)[0].nonzero().flatten().tolist() == [20, 21, 22, 23]
    check_outputs(call, o, lse)
    with pytest.raises(AssertionError, match="expected nan"):
        check_outputs(call, o.nan_to_num(nan=0.0), lse)


@settings(max_examples=150)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 60)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dims=st.tuples(st.sampled_from([1, 2, 5, 33, 64]), st.sampled_from([1, 3, 16, 64])),
    dtype=st.sampled_from(["fp32", "bf16", "fp16", "fp64"]),
    mask=st.sampled_from([Full(), Causal(), Causal(align="top_left"), SlidingWindow(3, 2)]),
    feature=st.sampled_from([{}, *FEATURES]),
    seed=st.integers(0, 1 << 20),
)
def test_a_healthy_kernel_passes_whatever_the_problem(lengths, heads, dims, dtype, mask, feature, seed):
    """The tolerance is tight, so it must be shown that rounding errors alone do not fail it."""
    if lengths[0] == 0:
        feature = {**feature, "bias_hides": False}
    case = Case(
        batch=1,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        heads_q=heads[0],
        heads_k=heads[1],
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
        mask=mask,
        **feature,
    )
    assert run_case(Mutant(), case, seed) <= 1.0


def test_nothing_here_depends_on_assert_statements():
    """python -O drops assert statements, and with them a gate that is made of them."""
    assert "    assert " not in Path(tolerance.__file__).read_text()


def test_masked_scores_do_not_loosen_the_tolerance():
    """A bias of -1e30 beside ordinary scores; in so few rows the allowance grows with the largest score."""
    call = make(Case(batch=1, seqlen_q=5, seqlen_k=40, heads_q=1, heads_k=1, bias="q"))
    low = replace(call, bias=call.bias.clone())
    low.bias[..., :20] = -1e30
    assert expected(low).o.roundoff < 2.0 * expected(call).o.roundoff < 1e-5
