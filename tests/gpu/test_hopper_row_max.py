"""Each row's largest score on a GPU: every way to see and to change scores, units that several thread blocks share, and maxima that always move."""

import math
from dataclasses import replace

import pytest
import torch
from hopper_problems import INNER, LENGTHS, NEEDS_HOPPER, ONE_BAND, beyond_one_band, cumulated, held

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.testing import conformance, tolerance
from tilewise.testing.cases import FEATURES, Case, make

pytestmark = NEEDS_HOPPER

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72)]


def cases(**fields):
    return [Case(**{"batch": 2, "heads_q": 4, "heads_k": 2, "dtype": ("bf16", "fp16")[i % 2]} | fields, **dims) for i, dims in enumerate(
        {"head_dim": d, "head_dim_v": v} for d, v in DIMS)]  # fmt: skip


@pytest.mark.parametrize("mask", ONE_BAND, ids=repr)
def test_masks_of_one_band(mask):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        for case in cases(seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask)[turn % 2 :: 2]:
            held(case, turn, conformance.run_row_max)


@pytest.mark.parametrize("seqlens", [(130, 257), (400, 385)], ids=str)
def test_masks_that_need_tables(seqlens):
    masks = [*beyond_one_band(*seqlens), *(Documents(cumulated((40, 1, 0, 80)), inner=inner) for inner in INNER)]
    for turn, mask in enumerate(masks):
        for case in cases(seqlen_q=seqlens[0], seqlen_k=seqlens[1], mask=mask)[turn % 3 :: 3]:
            held(case, turn, conformance.run_row_max)


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_changes_of_scores(feature):
    for mask in (Full(), Causal(), SlidingWindow(50, 9)):
        for case in cases(seqlen_q=200, seqlen_k=333, mask=mask, **feature):
            held(case, 1, conformance.run_row_max)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(900, 0)], ids=repr)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_maxima_that_always_move(dims, mask):
    """Ascending and descending over the keys, above 0 and below, in many units and in few that are shared; beside NaN and an infinity."""
    for seqlen_q, seqlen_k in ((200, 8100), (2300, 2300)):
        call = make(Case(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=2, heads_k=1, head_dim=dims[0], head_dim_v=dims[1], dtype="bf16",
                         mask=mask), 0, "cuda")  # fmt: skip
        slope = torch.linspace(0.1, 2.0, seqlen_k, device="cuda")[None, :, None, None]
        for turn, k in enumerate((call.k.abs() * slope, call.k.abs() * slope.flip(1), -call.k.abs() * slope, call.k)):
            moving = replace(call, q=call.q.abs(), k=k.to(call.k.dtype).clone(), row_max=True)
            if turn == 3:
                moving.k[0, seqlen_k // 3, 0, 2], moving.k[0, seqlen_k * 7 // 8, 0, 3] = math.inf, math.nan
            o, lse, row_max = Hopper().forward(moving)
            tolerance.check_row_max(moving, row_max)
            same = Hopper().forward(moving)
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip((o, lse, row_max), same, strict=True))


def test_beside_the_short_way_and_with_gradients():
    call = make(Case(batch=2, seqlen_q=300, seqlen_k=300, heads_q=4, heads_k=2, head_dim=128, dtype="bf16", mask=Causal()), 0, "cuda")
    q, k, v = (x.requires_grad_() for x in (call.q, call.k, call.v))
    found = []
    for _ in range(3):
        o = tw.attention(q, k, v, causal=True, backend="hopper")
        with_largest, largest = tw.attention(q, k, v, causal=True, backend="hopper", return_max_logits=True)
        tolerance.check_row_max(replace(call, row_max=True), Hopper().forward(replace(call, row_max=True))[2])
        assert largest.shape == (2, 4) and not largest.requires_grad
        found.append(largest)
        grads = [torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (o, with_largest)]
        for got, want in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(got, want)
    assert torch.equal(found[0], found[2])


def test_packed_documents():
    q, k, v = (torch.randn(700, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2))
    cu = torch.tensor([0, 300, 300, 650], dtype=torch.int32, device="cuda")
    _, largest = tw.attention_varlen(q, k, v, cu, cu, causal=True, backend="hopper", return_max_logits=True)
    assert largest.shape == (3, 4) and (largest[1] == -math.inf).all()
    for n in (0, 2):
        part = slice(int(cu[n]), int(cu[n + 1]))
        _, alone = tw.attention(*(x[None, part] for x in (q, k, v)), causal=True, backend="hopper", return_max_logits=True)
        torch.testing.assert_close(largest[n], alone[0])
