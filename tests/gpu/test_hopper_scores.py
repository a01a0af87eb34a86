"""Softcap, biases, ALiBi and the sink in the Hopper backend, on a GPU: every one with every kind of mask, alone and together."""

import pytest
import torch
from hopper_problems import NEEDS_HOPPER, drawing, held_forward, random_shape

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.testing import conformance
from tilewise.testing.cases import FEATURES, FILLS, Case

pytestmark = NEEDS_HOPPER

EVERYTHING = {"softcap": 3.0, "bias": "hq", "alibi": "bh", "diagonal": True, "sink": True, "wide": True}
CHANGES = (
    *({name: value for name, value in feature.items() if name != "lse_grad"} for feature in FEATURES + FILLS),
    EVERYTHING,
    {"softcap": 50.0, "scale": -0.3},
    {"softcap": 1e6},
    {"sink": True, "scale": -0.3},
    {"bias": "bhq", "scale": 0.0},
)
CHANGES = [change for change in CHANGES if change.keys() - {"scale"}]
MASKS = (Full(), Causal(), SlidingWindow(50, 20))
LENGTHS = ((1, 1), (129, 65), (130, 257), (300, 700), (1, 300), (40, 400))
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(map(str, change)))
def test_cases(change, mask):
    for seqlen_q, seqlen_k in LENGTHS:
        if change.get("bias_fill") and seqlen_k < 200:
            continue  # a filled row has to see keys that are not
        held_forward(Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=128, mask=mask, dtype="bf16", **change))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("change", [{"softcap": 2.0}, {"bias": "hq"}, EVERYTHING], ids=lambda change: "-".join(map(str, change)))
def test_head_dims(change, dims):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0], "head_dim_v": dims[1]}
        held_forward(Case(heads_q=6, heads_k=2, mask=Causal(), dtype="fp16", **sizes, **change), seed=turn)


@pytest.mark.parametrize("change", [{"softcap": 2.0}, {"bias": "bhq"}, {"alibi": "h"}, {"sink": True}, EVERYTHING],
                         ids=lambda change: "-".join(map(str, change)))  # fmt: skip
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(50, 20)], ids=repr)
def test_a_hidden_nan_reaches_nobody(mask, change):
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=128, mask=mask, dtype="bf16", **change)
    conformance.run_spoiled(Hopper(), case, device="cuda", backward=False)


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed):
    """Two configurations, so that there is time for many problems."""
    draw = drawing(seed)
    for _ in range(25):
        case = Case(
            **random_shape(draw),
            head_dim=8 * draw(9, 17),
            mask=Causal() if seed % 2 else SlidingWindow(draw(0, 200), draw(0, 200)),
            dtype="bf16",
            softcap=(3.0, 20.0)[draw(0, 2)],
            bias=("", "h", "q", "bhq")[draw(0, 4)],
            bias_hides=bool(draw(0, 2)),
            alibi=("h", "bh")[draw(0, 2)],
            sink=True,
            wide=True,
        )
        held_forward(case, seed=draw(0, 1 << 20))


def test_huge_biases():
    conformance.huge_biases_keep_what_rounding_keeps(Hopper(), device="cuda")


def test_without_keys_the_sink_is_all_there_is():
    held_forward(Case(seqlen_k=0, sink=True, dtype="bf16"))


def test_the_public_call_takes_them():
    q, k, v = (torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    bias = torch.randn(1, 8, 300, 300, device="cuda", dtype=torch.bfloat16)
    options = {
        "causal": True,
        "softcap": 10.0,
        "bias": bias,
        "sink": torch.randn(8, device="cuda"),
        "alibi_slopes": torch.rand(8, device="cuda"),
    }
    assert "hopper" in str(tw.explain(q, k, v, **options)).splitlines()[0]
    o = tw.attention(q, k, v, **options)
    torch.testing.assert_close(o, tw.attention(q, k, v, **options, backend="tiled"), atol=1e-2, rtol=2e-2)
    graph, static = torch.cuda.CUDAGraph(), torch.empty_like(o)
    with torch.cuda.graph(graph):
        static.copy_(tw.attention(q, k, v, **options))
    bias.normal_()
    graph.replay()
    torch.testing.assert_close(static, tw.attention(q, k, v, **options), atol=0, rtol=0)
