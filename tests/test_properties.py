"""Random problems through the public call and autograd, held to the tolerance: shapes, lengths, head dimensions, groups, strides, masks, dtypes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.problem import Gradients
from tilewise.testing import poison, tolerance
from tilewise.testing.cases import Case, make, upstream
from tilewise.testing.strategies import band_masks, cases


def run(case: Case, backend: str | None) -> None:
    """tw.attention and its gradients on the case, in poisoned memory, against the tolerance."""
    call, (d_o, d_lse) = make(case, seed=1, grad=True), upstream(case, seed=1)
    names = ("q", "k", "v", "bias", "sink")
    leaves = {name: None if (x := getattr(call, name)) is None else x.detach().requires_grad_() for name in names}
    seeds = {} if call.dropout is None else {"dropout_seed": call.dropout.seed, "dropout_offset": call.dropout.offset}
    with poison.memory():
        o, lse = tw.attention(
            **leaves, mask=case.mask, scale=case.scale, softcap=case.softcap, alibi_slopes=call.alibi_slopes, dropout_p=case.dropout,
            backend=backend, return_lse=True, **seeds,
        )  # fmt: skip
        outputs, gradients = ((o, lse), (d_o, d_lse)) if case.lse_grad else ((o,), (d_o,))
        torch.autograd.backward(outputs, gradients)
    expect = tolerance.expected(call, d_o, d_lse)
    tolerance.check_outputs(call, o.detach(), lse.detach(), expect)
    grads = Gradients(*(None if x is None else x.grad for x in leaves.values()))
    tolerance.check_gradients(call, grads, d_o, d_lse, expect)


@settings(max_examples=150)
@given(cases())
def test_attention_is_within_the_tolerance(case):
    run(case, None)


@settings(max_examples=25)
@given(cases())
def test_the_oracle_is_within_its_own_tolerance(case):
    run(case, "reference")


@settings(max_examples=40)
@given(st.data())
def test_packed_documents_equal_the_loop(data):
    documents = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5))
    cu_q, cu_k = (torch.tensor([0, *(pair[side] for pair in documents)]).cumsum(0) for side in (0, 1))
    q, k, v = (torch.randn(n, h, 16, dtype=torch.float64) for n, h in ((int(cu_q[-1]), 4), (int(cu_k[-1]), 2), (int(cu_k[-1]), 2)))
    mask = data.draw(band_masks(0, 0, 1).filter(lambda mask: "Documents" not in mask.source))
    o, lse = tw.attention_varlen(q, k, v, cu_q, cu_k, mask=mask, return_lse=True)
    for (q0, q1), (k0, k1) in zip(*(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True) for cu in (cu_q, cu_k)), strict=True):
        alone = tw.attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], mask=mask, return_lse=True)
        torch.testing.assert_close(o[q0:q1], alone[0][0], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(lse[:, q0:q1], alone[1][0], atol=1e-12, rtol=1e-12)
