"""The oracle against scalar Python, its backward against autograd and finite differences, and its treatment of what is hidden."""

import math
from dataclasses import replace

import pytest
import torch

from tilewise.backends import philox
from tilewise.backends.reference import Reference, delta, differentiate, eager, linearise
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.problem import Gradients
from tilewise.testing import conformance
from tilewise.testing.cases import EMPTY, FEATURES, QUICK, Case, make, masks, upstream

SMALL = Case(batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_k=2, head_dim=3, head_dim_v=2, dtype="fp64")
EVERYTHING = FEATURES[-2]


def scalar_attention(call):
    """The contract, a number at a time."""
    o, lse = torch.zeros(call.batch, call.seqlen_q, call.heads_q, call.head_dim_v), torch.zeros(call.batch, call.heads_q, call.seqlen_q)
    shown = call.mask.dense(call.seqlen_q, call.seqlen_k).expand(call.batch, call.heads_q, -1, -1)
    kept = torch.ones_like(shown)
    if call.dropout is not None:
        kept = philox.keep(call.dropout, range(call.batch), range(call.heads_q), 0, call.seqlen_q, 0, call.seqlen_k, call.heads_q)
    o, lse = o.double(), lse.double()
    for b in range(call.batch):
        for h in range(call.heads_q):
            head = h // call.group
            for i in range(call.seqlen_q):
                terms = {}
                for j in range(call.seqlen_k):
                    if not shown[b, h, i, j]:
                        continue
                    s = call.scale * sum(float(x) * float(y) for x, y in zip(call.q[b, i, h], call.k[b, j, head], strict=True))
                    if call.softcap:
                        s = call.softcap * math.tanh(s / call.softcap)
                    if call.bias is not None:
                        at = [index if size > 1 else 0 for index, size in zip((b, h, i), call.bias.shape, strict=False)]
                        s += float(call.bias[(*at, j)])
                    if call.alibi_slopes is not None:
                        slope = call.alibi_slopes[b if len(call.alibi_slopes) > 1 else 0, h]
                        shift = call.seqlen_k - call.seqlen_q if call.diagonal is None else int(call.diagonal[i])
                        s -= float(slope) * abs(i + shift - j)
                    terms[j] = math.exp(s)
                total = sum(terms.values()) + (math.exp(float(call.sink[h])) if call.sink is not None else 0.0)
                lse[b, h, i] = math.log(total) if total else -math.inf
                for j, term in terms.items():
                    weight = term / total if total else 0.0
                    weight *= float(kept[b, h, i, j]) * (philox.keep_scale(call.dropout.p) if call.dropout else 1.0)
                    o[b, i, h] += weight * call.v[b, j, head].double()
    return o, lse


@pytest.mark.parametrize("feature", [{}, *FEATURES, *EMPTY], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(1, 0, align="top_left")], ids=str)
def test_against_scalar_python(feature, mask):
    call = make(replace(SMALL, mask=mask, **feature), seed=4)
    for got, expected in zip(eager(call), scalar_attention(call), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("mask", masks(17, 21) + masks(21, 17), ids=str)
def test_against_scalar_python_for_every_mask(mask):
    lengths = (17, 21) if mask in masks(17, 21) else (21, 17)
    call = make(replace(SMALL, seqlen_q=lengths[0], seqlen_k=lengths[1], mask=mask, head_dim=2))
    for got, expected in zip(eager(call), scalar_attention(call), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def by_hand(call, d_o, d_lse):
    o, lse = eager(call)
    return differentiate(call, linearise(call, lse), delta(call, o, lse, d_o, d_lse), d_o)


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("case", [c for c in QUICK if c.seqlen_q < 200], ids=lambda case: case.id)
def test_backward_by_hand_agrees_with_autograd(case):
    call, (d_o, d_lse) = make(case), upstream(case)
    for name, hand, auto in zip(Gradients._fields, by_hand(call, d_o, d_lse), Reference().backward_autograd(call, d_o, d_lse), strict=True):
        assert (hand is None) == (auto is None) == (getattr(call, name) is None)
        if hand is not None:
            assert hand.dtype == auto.dtype == torch.float64
            torch.testing.assert_close(hand, auto, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("mask", [Causal(), Documents([0, 2, 2, 5], [0, 3, 4, 6], inner=SlidingWindow(1, 0))], ids=str)
@pytest.mark.parametrize("feature", [{}, *FEATURES], ids=str)
def test_gradcheck(feature, mask):
    call = make(replace(SMALL, batch=1, heads_q=2, heads_k=1, mask=mask, **{**feature, "bias_hides": False}), seed=1)
    names = [name for name in Gradients._fields if getattr(call, name) is not None]
    inputs = [getattr(call, name).double().requires_grad_() for name in names]

    def outputs(*tensors):
        o, lse = eager(replace(call, **dict(zip(names, tensors, strict=True))))
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(outputs, inputs)


def test_rows_that_see_nothing():
    case = replace(SMALL, seqlen_q=7, seqlen_k=5, mask=Causal(), lse_grad=True)  # queries 0 and 1 come before the first key
    call, (d_o, d_lse) = make(case), upstream(case)
    o, lse = Reference().forward(call)
    assert (o[:, :2] == 0).all() and (lse[..., :2] == -torch.inf).all() and lse[..., 2:].isfinite().all()
    grads = Reference().backward(call, o, lse, d_o, d_lse)
    assert (grads.q[:, :2] == 0).all() and all(g.isfinite().all() for g in grads[:3])


def test_the_largest_scores_of_rows():
    """Keys that are one-hot choose a number of q as the score; rows that see nothing have -inf, and so have those of -inf."""
    case = replace(SMALL, seqlen_q=7, seqlen_k=5, mask=Causal(), scale=2.0, sink=True)
    call = replace(make(case), row_max=True)
    call.k[:] = 0.0
    for key in range(2):
        call.k[:, key, :, key] = 1.0
    seen = 2.0 * call.q[..., :2].transpose(1, 2)
    seen[:, :, :2], seen[:, :, 2, 1] = -torch.inf, -torch.inf  # queries 0 and 1 come before the first key, query 2 before the second
    want = seen.amax(-1)
    want[:, :, 4:] = want[:, :, 4:].clamp(min=0.0)  # the other keys
    torch.testing.assert_close(Reference().forward(call)[2], want, rtol=0, atol=0)
    call.k[:, 2, :, 2] = torch.inf
    _, _, row_max = Reference().forward(replace(call, q=call.q.abs()))
    assert row_max[:, :, 4:].isnan().all() and not row_max[:, :, :4].isnan().any()


def test_rows_that_see_only_the_sink():
    case = replace(SMALL, seqlen_q=7, seqlen_k=5, mask=Causal(), sink=True, lse_grad=True)
    call, (d_o, d_lse) = make(case), upstream(case)
    o, lse = Reference().forward(call)
    assert (o[:, :2] == 0).all()
    torch.testing.assert_close(lse[..., :2], call.sink[:, None].expand(2, 4, 2))
    with_nan, poisoned = d_o.clone(), d_lse.clone()
    with_nan[:, :2] = torch.nan
    grads = Reference().backward(call, o, lse, with_nan, d_lse)
    assert all(g.isfinite().all() for g in (*grads[:3], grads.sink))
    poisoned[..., :2] += 1.0
    more = Reference().backward(call, o, lse, with_nan, poisoned)
    torch.testing.assert_close(more.sink - grads.sink, torch.full((4,), 4.0, dtype=torch.float64))  # dsink takes dlse of 2 rows x 2 entries


def test_a_bias_of_minus_infinity_hides_like_the_mask():
    case = replace(SMALL, bias="bhq", lse_grad=True)
    call, (d_o, d_lse) = make(case), upstream(case)
    call.bias[:, :, 0], call.bias[..., 3] = -torch.inf, -torch.inf
    o, lse = Reference().forward(call)
    assert (o[:, 0] == 0).all() and (lse[..., 0] == -torch.inf).all()
    grads = Reference().backward(call, o, lse, d_o, d_lse, bias_grad=True)
    assert (grads.k[:, 3] == 0).all() and (grads.v[:, 3] == 0).all() and (grads.bias[..., 3] == 0).all() and (grads.q[:, 0] == 0).all()


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_dtypes_of_the_results(dtype):
    case = replace(SMALL, dtype=dtype, sink=True, bias="h", wide=True)
    call, (d_o, d_lse) = make(case), upstream(case)
    o, lse = Reference().forward(call)
    assert o.dtype == call.q.dtype and lse.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    grads = Reference().backward(call, o, lse, d_o, d_lse, bias_grad=True)
    assert [g.dtype for g in grads] == [call.q.dtype] * 3 + [torch.float32] * 2
    assert Reference().backward(call, o, lse, d_o, d_lse).bias is None


def test_backward_honours_the_lse_it_is_given():
    """Half of the keys with the LSE and O of all of them: what context parallelism sums up."""
    case = replace(SMALL, seqlen_k=8)
    call, (d_o, _) = make(case), upstream(case)
    o, lse = Reference().forward(call)
    whole = Reference().backward(call, o, lse, d_o, None)
    halves = [
        Reference().backward(replace(call, k=call.k[:, part], v=call.v[:, part]), o, lse, d_o, None) for part in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(halves[0].q + halves[1].q, whole.q)
    torch.testing.assert_close(torch.cat([half.k for half in halves], dim=1), whole.k)
    torch.testing.assert_close(torch.cat([half.v for half in halves], dim=1), whole.v)


def test_a_rounded_lse_cannot_push_probabilities_above_one():
    call = make(replace(SMALL, dtype="fp32", bias="q"))
    call.bias[:] = -1e10  # LSE is rounded to a multiple of 1024
    _, lse = Reference().forward(call)
    p = linearise(call, lse).p
    assert (p <= 1.0).all() and p.isfinite().all()
    assert (linearise(call, lse - 1024.0).p == 1.0).all()


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("case", QUICK[::3], ids=lambda case: case.id)
def test_hidden_nan_stays_hidden(case):
    conformance.run_hidden(Reference(), case)


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("case", QUICK[1::3], ids=lambda case: case.id)
def test_visible_nan_reaches_those_who_see_it(case):
    conformance.run_spoiled(Reference(), case)


@pytest.mark.parametrize("form", conformance.CLOSED_FORMS)
def test_closed_forms(form):
    conformance.CLOSED_FORMS[form](Reference())
