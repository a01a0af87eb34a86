"""The same call three times, on fresh memory: the bits of O, LSE and gradients are those of the first call, and within the tolerance.

The first call is bound, and the others are served by what it was bound to. Problems are random, by a seed of the day, which a failure shows; where
tests may be slow there are hundreds.
"""

import pytest
import three_calls
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from sampled import SEED

import tilewise as tw
from tilewise.compat import flash_attn, sdpa
from tilewise.masks import Documents
from tilewise.testing.cases import DTYPES, Case, make, masks
from tilewise.testing.strategies import band_masks, cases, cumulative

TODAY = int(SEED)
BACKENDS = {"reference": tuple(DTYPES), "tiled": tuple(DTYPES), "cpu": ("fp32", "bf16", "fp16")}
SHORT = st.one_of(st.sampled_from([0, 1, 2, 17, 64, 65]), st.integers(0, 100))
few = settings(max_examples=5)
many = settings(max_examples=150)


def random(*strategies, how):
    """A test of random problems, quickly and again with many."""

    def tests(test):
        quick, slow = (seed(TODAY)(how_many(given(*strategies)(test))) for how_many in how)
        return quick, pytest.mark.slow(slow)

    return tests


@pytest.fixture(autouse=True)
def poisoned():
    with three_calls.fresh_is_nan():
        yield


def hold_attention(case: Case, return_lse: bool) -> None:
    """On every backend that takes it."""
    expect = None
    for backend, dtypes in BACKENDS.items():
        if case.dtype in dtypes:
            expect = three_calls.hold_attention(case, return_lse, backend, expect=expect)


@random(cases(lengths=SHORT), st.booleans(), how=(few, many))
def attentions(case, return_lse):
    hold_attention(case, return_lse)


test_attention, test_attention_many_times = attentions


@st.composite
def documents(draw) -> Case:
    """Packed documents as a mask, alone in their batch or not."""
    total_q, total_k, number = draw(st.integers(1, 200)), draw(st.integers(1, 300)), draw(st.integers(1, 5))
    cu_q = cumulative(draw, total_q, number)
    cu_k = cumulative(draw, total_k, number) if draw(st.booleans()) else None
    inner = draw(band_masks(0, 0, 0).filter(lambda mask: not isinstance(mask, Documents)))
    length = max(total_q, total_k) if cu_k is None else total_k
    return Case(
        batch=draw(st.integers(1, 2)), seqlen_q=total_q, seqlen_k=length, mask=Documents(cu_q, cu_k, inner),
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        head_dim=draw(st.sampled_from([8, 32, 33])), alibi=draw(st.sampled_from([None, "h", "bh"])), sink=draw(st.booleans()),
        bias=draw(st.sampled_from([None, None, "hq"])), softcap=draw(st.sampled_from([0.0, 2.0])), dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        lse_grad=draw(st.booleans()),
    )  # fmt: skip


@random(documents(), st.booleans(), how=(few, many))
def documents_as_masks(case, return_lse):
    hold_attention(case, return_lse)


test_documents, test_documents_many_times = documents_as_masks


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(masks(45, 70))))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mask(number, dtype):
    hold_attention(Case(seqlen_q=45, seqlen_k=70, head_dim=24, mask=masks(45, 70)[number], dtype=dtype, alibi="h"), True)


@random(three_calls.packed(), st.booleans(), st.booleans(), how=(few, many))
def varlens(problem, grad, return_lse):
    expected = three_calls.varlen(problem, "reference", grad, return_lse, torch.float64)
    for backend, dtypes in BACKENDS.items():
        if problem["dtype"] in dtypes:
            three_calls.hold_varlen(problem, expected, backend, grad, return_lse)


test_varlen, test_varlen_many_times = varlens


@random(st.integers(0, 1 << 30), st.booleans(), how=(settings(max_examples=8), many))
def decodes(number, return_lse):
    three_calls.hold_decode(number, return_lse)


test_decode, test_decode_many_times = decodes


@random(cases(lengths=SHORT.filter(bool), dtypes=("fp32", "bf16", "fp16")), st.booleans(), how=(few, many))
def drop_ins(case, grad):
    """SDPA's and flash_attn's functions: the same bits again, and each other's and `attention`'s where these can be called so."""
    if case.batch == 0:
        return

    def inputs():
        call = make(case, seed=1)
        return [x.detach().requires_grad_(grad) for x in (call.q, call.k, call.v)]

    def results(o, x):
        gradients = torch.autograd.grad(o, x, torch.ones_like(o)) if grad else ()
        return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=False))

    def by_sdpa():
        x = inputs()
        o = sdpa.scaled_dot_product_attention(*(each.transpose(1, 2) for each in x), enable_gqa=True, scale=case.scale)
        return results(o.transpose(1, 2), x)

    def by_flash_attn():
        x = inputs()
        return results(flash_attn.flash_attn_func(*x, softmax_scale=case.scale), x)

    def directly():
        x = inputs()
        return results(tw.attention(*x, scale=case.scale), x)

    one, *others = (three_calls.thrice(run) for run in (directly, by_sdpa, by_flash_attn))
    assert all(torch.equal(other[name], one[name]) for other in others for name in one)


test_drop_ins, test_drop_ins_many_times = drop_ins
