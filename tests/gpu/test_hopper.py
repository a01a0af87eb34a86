"""The Hopper backend's forward pass on a GPU: the cases that it covers, random problems, hidden NaN, closed forms, repeated runs."""

import pytest
import torch
from hopper_problems import LENGTHS, NEEDS_HOPPER, ONE_BAND, Fixed, drawing, held_forward

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.forward.call import _PARTIALS
from tilewise.backends.hopper.forward.config import shipped
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.testing import conformance
from tilewise.testing.cases import QUICK, Case

pytestmark = NEEDS_HOPPER

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40), (8, 8), (104, 104), (160, 160))


@pytest.mark.parametrize("mask", ONE_BAND, ids=repr)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_cases(mask, dims):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0], "head_dim_v": dims[1]}
        heads = ((4, 2), (3, 3), (8, 1))[turn % 3]
        held_forward(Case(batch=2, heads_q=heads[0], heads_k=heads[1], mask=mask, dtype=("bf16", "fp16")[turn % 2], **sizes))


@pytest.mark.parametrize("chosen", [each for each in shipped(torch.bfloat16) if each.mask_kind in ("full", "causal", "band")], ids=str)
def test_every_configuration_on_short_sequences(chosen):
    """Also those that calls of such lengths would not get."""
    mask = {"full": Full(), "causal": Causal(), "band": SlidingWindow(50, 3)}[chosen.mask_kind]
    for heads, (seqlen_q, seqlen_k) in zip((1, 2, 3) * 3, (*LENGTHS, (900, 1100)), strict=False):
        dims = {"head_dim": chosen.head_dim, "head_dim_v": chosen.head_dim_v}
        case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=2 * heads, heads_k=heads, mask=mask, dtype="bf16", **dims)
        held_forward(case, backend=Fixed(chosen))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_units_that_are_shared(dims):
    """Full masks whose tiles of queries do not fill a last round, or not even one: by sixteen blocks each, by two, cut in the middle."""
    for seqlen_q, seqlen_k, heads in ((1, 9000, 2), (64, 5000, 4), (129, 3000, 2), (2100, 2100, 6), (4096, 1000, 5)):
        sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads, "heads_k": 1}
        held_forward(Case(**sizes, head_dim=dims[0], head_dim_v=dims[1], dtype="bf16"), seed=seqlen_q)
    assert not any(arrivals.any() for _, arrivals in _PARTIALS.values())


def test_quick_cases_that_it_covers():
    ran = 0
    for case in QUICK:
        try:
            held_forward(case)
            ran += 1
        except UnsupportedError:
            continue
    assert ran > 20


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed):
    draw = drawing(seed)
    for _ in range(15):
        group, heads_k = draw(1, 5), draw(1, 4)
        window = SlidingWindow(draw(0, 200), draw(0, 200))
        case = Case(
            batch=draw(1, 4),
            seqlen_q=draw(1, 800),
            seqlen_k=draw(1, 800),
            heads_q=group * heads_k,
            heads_k=heads_k,
            head_dim=8 * draw(1, 17),
            mask=(Full(), Causal(), window)[draw(0, 3)],
            dtype=("bf16", "fp16")[draw(0, 2)],
            scale=(None, 0.5, -0.3)[draw(0, 3)],
        )
        held_forward(case, seed=draw(0, 1 << 20))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(50, 0)], ids=repr)
def test_a_hidden_nan_reaches_nobody(mask, dims):
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=dims[0], head_dim_v=dims[1], mask=mask, dtype="bf16")
    conformance.run_spoiled(Hopper(), case, device="cuda", backward=False)


@pytest.mark.parametrize("name", ["ones_give_ones", "zero_queries_give_the_mean", "one_hot_values_give_probabilities", "key_order_is_irrelevant",
                                  "halves_merge_to_the_whole", "doubled_values_double_the_output", "scale_moves_into_queries"])  # fmt: skip
def test_closed_form(name):
    getattr(conformance, name)(Hopper(), device="cuda")


def test_the_public_call_takes_it():
    q, k, v = (torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    assert "hopper" in str(tw.explain(q, k, v, causal=True)).splitlines()[0]
    o = tw.attention(q, k, v, causal=True)
    torch.testing.assert_close(o, tw.attention(q, k, v, causal=True, backend="tiled"), atol=1e-2, rtol=2e-2)
    graph, static = torch.cuda.CUDAGraph(), torch.empty_like(o)
    with torch.cuda.graph(graph):
        static.copy_(tw.attention(q, k, v, causal=True))
    q.normal_()
    graph.replay()
    torch.testing.assert_close(static, tw.attention(q, k, v, causal=True), atol=0, rtol=0)
    compiled = torch.compile(tw.attention, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, causal=True), static, atol=0, rtol=0)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(300, 0)], ids=repr)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_many_runs_have_the_same_bits(mask, dims):
    """A race would show as a result that moves."""
    q, k, v = (
        torch.randn(2, 900, heads, dim, device="cuda", dtype=torch.bfloat16) for heads, dim in ((8, dims[0]), (4, dims[0]), (4, dims[1]))
    )
    first = tw.attention(q, k, v, mask=mask, backend="hopper", return_lse=True)
    moved = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        for got, kept in zip(tw.attention(q, k, v, mask=mask, backend="hopper", return_lse=True), first, strict=True):
            moved |= (got != kept).any()
    assert not moved
