"""Gradients under masks beyond one band in the Hopper backend, on a GPU: visits with bands and bitmaps, masks that differ by head or batch."""

import pytest
import torch
from hopper_problems import LENGTHS_OF_TABLES, NEEDS_HOPPER, beyond_one_band, drawing, held, random_slices, same_bits

import tilewise as tw
from tilewise.backends.hopper.backward.config import TILES
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Dense, FirstKeys, Full, PerHead, PrefixLM, Slices, SlidingWindow
from tilewise.masks.mask import KEPT
from tilewise.problem import Call
from tilewise.runtime import call_cache
from tilewise.testing import conformance
from tilewise.testing.cases import QUICK, Case, masks

pytestmark = NEEDS_HOPPER


@pytest.mark.parametrize("lengths", LENGTHS_OF_TABLES, ids=str)
def test_every_mask(lengths):
    of_lengths = masks(*lengths) if min(lengths) >= 16 else []
    for turn, mask in enumerate(of_lengths + beyond_one_band(*lengths)):
        case = Case(
            seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=128, mask=mask, dtype=("bf16", "fp16")[turn % 2], lse_grad=turn % 3 == 1
        )
        held(case, seed=turn)
        held(case, seed=turn, run=conformance.run_case)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize("dims", [*TILES, (72, 40), (8, 8), (200, 136)], ids=str)
def test_head_dims_and_groups(dims, heads_k):
    """Heads of a group may have masks of their own, and some of them nothing to see."""
    other = PerHead({(0, 2): Dense(torch.zeros(1, 450, dtype=torch.bool)), (2, 3): Causal(), (3, 4): Slices([(0, 9)], [(130, 131)], [0])})
    for mask in [*beyond_one_band(300, 450), other]:
        sizes = {"heads_q": 4, "heads_k": heads_k, "head_dim": dims[0], "head_dim_v": dims[1]}
        held(Case(seqlen_q=300, seqlen_k=450, mask=mask, dtype="fp16" if dims == (64, 64) else "bf16", **sizes))


def test_a_sink():
    for turn, mask in enumerate(beyond_one_band(260, 390)):
        held(Case(seqlen_q=260, seqlen_k=390, head_dim=64, mask=mask, dtype="bf16", sink=True, lse_grad=turn % 2 == 1))


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_a_hidden_nan_reaches_nobody(dims):
    for mask in [*beyond_one_band(300, 300), Full() - Slices([(0, 300)], [(150, 151)], [0])]:
        case = Case(seqlen_q=300, seqlen_k=300, head_dim=dims[0], head_dim_v=dims[1], mask=mask, dtype="bf16")
        held(case, run=conformance.run_spoiled)
        held(case, run=conformance.run_overflown)


@pytest.mark.parametrize("seed", range(4))
def test_random_slices(seed):
    draw = drawing(seed)
    for _ in range(12):
        held(Case(**random_slices(draw), dtype="bf16", heads_q=4, heads_k=(1, 2, 4)[draw(0, 3)]), seed=draw(0, 1 << 20))


@pytest.mark.parametrize("part", range(4))
def test_quick_cases(part):
    """Those with such a mask that the backward pass takes."""
    ran = 0
    for case in QUICK[part::4]:
        if case.mask.kind in ("full", "band"):
            continue
        try:
            held(case)
            ran += 1
        except UnsupportedError:
            continue
    assert ran > 0


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_many_runs_have_the_same_bits(dims):
    """Many blocks a head, more of them than the machine runs at a time, heads that share keys, and tiles that only some blocks visit."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1500, heads, dim, device="cuda").bfloat16() for heads, dim in ((8, dims[0]), (4, dims[0]), (4, dims[1])))
    sparse = Dense(torch.rand(1500, 1500, generator=torch.Generator().manual_seed(3)) < 0.0001)
    for mask in (PrefixLM(300), sparse | SlidingWindow(100, 0), PerHead({(0, 5): Causal(), (5, 8): FirstKeys(700)})):
        same_bits(Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True), runs=200 if dims == (128, 128) else 50)


def after_other_masks() -> list[torch.Tensor]:
    """Nobody but a graph has the tables of a mask any more; what takes the place of those that nobody has."""
    call_cache.forget()
    for n in range(KEPT):
        PrefixLM(10_000 + n).planes(300, 300)
    return [torch.full((1 << size,), 1 << 30, dtype=torch.int32, device="cuda") for size in range(4, 20) for _ in range(8)]


def test_the_public_call_takes_them():
    q, k, v = (torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2))
    shown, d_o = torch.rand(300, 300, device="cuda") < 0.3, torch.randn(2, 300, 8, 128, device="cuda", dtype=torch.bfloat16)
    for mask in (PrefixLM(100), Dense(shown), {(0, 4): Causal(), (4, 8): FirstKeys(9)}):
        assert "hopper" in str(tw.explain(q, k, v, mask=mask)).splitlines()[0]

        def step(mask=mask, backend=None):
            return torch.autograd.grad(tw.attention(q, k, v, mask=mask, backend=backend), (q, k, v), d_o)

        for got, want in zip(step(), step(backend="tiled"), strict=True):
            torch.testing.assert_close(got, want, atol=5e-2, rtol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        with torch.no_grad():
            q.normal_()
        held_elsewhere = after_other_masks()
        graph.replay()
        del held_elsewhere
        assert all(torch.equal(got, want) for got, want in zip(found, step(), strict=True))
