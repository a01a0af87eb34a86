"""Masks beyond one band in the Hopper backend, on a GPU: runs of tiles with bands and bitmaps, masks that differ by head or batch."""

import pytest
import torch
from hopper_problems import LENGTHS_OF_TABLES, NEEDS_HOPPER, beyond_one_band, drawing, held_forward, random_slices

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Dense, FirstKeys, Full, PrefixLM, Slices
from tilewise.testing import conformance
from tilewise.testing.cases import QUICK, Case, masks

pytestmark = NEEDS_HOPPER

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
CHANGES = (
    {"softcap": 2.0},
    {"bias": "hq"},
    {"alibi": "h"},
    {"sink": True},
    {"softcap": 3.0, "bias": "bhq", "alibi": "bh", "diagonal": True, "sink": True},
)


@pytest.mark.parametrize("lengths", LENGTHS_OF_TABLES, ids=str)
def test_every_mask(lengths):
    of_lengths = masks(*lengths) if min(lengths) >= 16 else []
    for turn, mask in enumerate(of_lengths + beyond_one_band(*lengths)):
        held_forward(Case(seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=128, mask=mask, dtype="bf16"), seed=turn)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims):
    for mask in beyond_one_band(300, 450):
        held_forward(Case(seqlen_q=300, seqlen_k=450, head_dim=dims[0], head_dim_v=dims[1], mask=mask, dtype="fp16"))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(map(str, change)))
def test_with_changed_scores(change):
    for mask in beyond_one_band(260, 390):
        held_forward(Case(seqlen_q=260, seqlen_k=390, head_dim=128, mask=mask, dtype="bf16", **change))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_hidden_nan_reaches_nobody(dims):
    for mask in [*beyond_one_band(300, 300), Full() - Slices([(0, 300)], [(150, 151)], [0])]:
        case = Case(seqlen_q=300, seqlen_k=300, head_dim=dims[0], head_dim_v=dims[1], mask=mask, dtype="bf16")
        try:
            conformance.run_spoiled(Hopper(), case, device="cuda", backward=False)
        except AssertionError as failure:
            raise AssertionError(f"{case.id}: {failure}") from None


@pytest.mark.parametrize("seed", range(4))
def test_random_slices(seed):
    draw = drawing(seed)
    for _ in range(15):
        held_forward(Case(**random_slices(draw), dtype="bf16"), seed=draw(0, 1 << 20))


def covered(part):
    return [case for case in QUICK if case.dtype in ("bf16", "fp16")][part::8]


@pytest.mark.parametrize("part", range(8))
def test_quick_cases(part):
    """All of them but fp32 and fp64."""
    for case in covered(part):
        try:
            held_forward(case)
        except UnsupportedError as refused:
            raise AssertionError(f"{case.id}: {refused}") from None


@pytest.mark.parametrize("name", conformance.CLOSED_FORMS)
def test_closed_form(name):
    if name != "one_key_is_copied":  # it needs gradients
        conformance.CLOSED_FORMS[name](Hopper(), device="cuda")


def test_the_public_call_takes_them():
    q, k, v = (torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    shown = torch.rand(300, 300, device="cuda") < 0.3
    for mask in (PrefixLM(100), Dense(shown), {(0, 4): Causal(), (4, 8): FirstKeys(9)}):
        assert "hopper" in str(tw.explain(q, k, v, mask=mask)).splitlines()[0]
        o = tw.attention(q, k, v, mask=mask)
        torch.testing.assert_close(o, tw.attention(q, k, v, mask=mask, backend="tiled"), atol=1e-2, rtol=2e-2)
        graph, static = torch.cuda.CUDAGraph(), torch.empty_like(o)
        with torch.cuda.graph(graph):
            static.copy_(tw.attention(q, k, v, mask=mask))
        q.normal_()
        graph.replay()
        torch.testing.assert_close(static, tw.attention(q, k, v, mask=mask), atol=0, rtol=0)
