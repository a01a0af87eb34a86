"""Random problems through the public call and autograd, held to the tolerance: shapes, lengths, head dimensions, groups, strides, masks, dtypes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.problem import Gradients
from tilewise.testing import poison, tolerance
from tilewise.testing.cases import DTYPES, LAYOUTS, Case, make, random_mask, upstream

LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65]), st.integers(0, 150))
HEAD_DIMS = st.one_of(st.sampled_from([1, 8, 64, 72, 128, 256]), st.integers(1, 256))


def cumulative(draw, total: int, documents: int) -> list[int]:
    return [0, *sorted(draw(st.lists(st.integers(0, total), min_size=documents, max_size=documents)))]


@st.composite
def band_masks(draw, seqlen_q: int, seqlen_k: int, depth: int = 2):
    """A random expression: constructors joined by & | - ~."""
    if depth and draw(st.integers(0, 2)) == 0:
        a, b = (draw(band_masks(seqlen_q, seqlen_k, depth - 1)) for _ in range(2))
        return draw(st.sampled_from([a & b, a | b, a - b, ~a]))
    n, side = draw(st.integers(1, 40)), st.one_of(st.none(), st.integers(0, 80))
    documents = draw(st.integers(1, 4))
    cu_q, cu_k = cumulative(draw, seqlen_q, documents), cumulative(draw, seqlen_k, documents)
    simple = [
        tw.Full(),
        tw.Causal(align=draw(st.sampled_from(["bottom_right", "top_left"]))),
        tw.SlidingWindow(draw(side), draw(side)),
        tw.PrefixLM(n),
        tw.FirstKeys(n),
        tw.ChunkedCausal(n),
    ]
    return draw(st.sampled_from([*simple, tw.Documents(cu_q, cu_k, inner=draw(st.sampled_from(simple)))]))


@st.composite
def cases(draw):
    group, heads_k = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.integers(1, 3))
    seqlen_q, seqlen_k, batch = draw(LENGTHS), draw(LENGTHS), draw(st.integers(0, 2))
    heads = group * heads_k
    mask = draw(band_masks(seqlen_q, seqlen_k))
    if draw(st.integers(0, 4)) == 0:
        mask = draw(st.sampled_from([random_mask(seqlen_q, seqlen_k), random_mask(seqlen_q, seqlen_k) & mask]))
    if heads > 1 and draw(st.integers(0, 4)) == 0:
        mask = tw.PerHead({(0, 1): mask, (1, heads): draw(band_masks(seqlen_q, seqlen_k, 0))})
    return Case(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads,
        heads_k=heads_k,
        head_dim=draw(HEAD_DIMS),
        head_dim_v=draw(st.one_of(st.none(), HEAD_DIMS)),
        mask=mask,
        dtype=draw(st.sampled_from(list(DTYPES))),
        layout=draw(st.sampled_from(LAYOUTS)),
        scale=draw(st.sampled_from([None, 0.3])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.5])),
        bias=draw(st.sampled_from([None, None, "", "q", "bhq"])),
        alibi=draw(st.sampled_from([None, None, "h", "bh"])),
        sink=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.25])),
        lse_grad=draw(st.booleans()),
    )


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
