"""Gradients through softcap, biases, ALiBi and the sink in the Hopper backend, on a GPU; with those of the biases."""

import itertools

import pytest
import torch
from hopper_problems import NEEDS_HOPPER, beyond_one_band, drawing, held, held_each_way, random_shape, same_bits

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward.bias import call as bias_gradient
from tilewise.backends.hopper.backward.config import TILES
from tilewise.masks import Causal, Documents, Full, PerHead, PrefixLM, SlidingWindow
from tilewise.testing import conformance
from tilewise.testing.cases import FEATURES, FILLS, Case, make, random_mask, upstream

pytestmark = NEEDS_HOPPER

EVERYTHING = {"softcap": 3.0, "bias": "hq", "alibi": "bh", "diagonal": True, "sink": True, "wide": True, "lse_grad": True}
CHANGES = (
    *FEATURES,
    *FILLS,
    EVERYTHING,
    {"softcap": 50.0, "scale": -0.3},
    {"softcap": 1e6},
    {"softcap": 2.0, "bias": "h"},
    {"bias": "bhq", "scale": 0.0},
)
CHANGES = [change for change in CHANGES if change.keys() & {"softcap", "bias", "alibi"}]
MASKS = (Full(), Causal(), SlidingWindow(50, 20))
LENGTHS = ((1, 1), (129, 65), (130, 257), (300, 700), (1, 300), (300, 1), (40, 400))


def _in_turns(*axes, per=1):
    """All combinations; of those that differ in the last axis alone, `per` in turns, and the others marked slow."""
    *first, last = axes
    found = []
    for turn, ahead in enumerate(itertools.product(*first)):
        for place, value in enumerate(last):
            taken = (place - turn) % (len(last) // per) == 0
            names = "-".join(_name(x) for x in (*ahead, value))
            found.append(pytest.param(*ahead, value, id=names, marks=() if taken else pytest.mark.slow))
    return found


def _name(x):
    text = "-".join(map(str, x.items())) if isinstance(x, dict) else repr(x)
    return text.translate(str.maketrans("", "", "'() "))


@pytest.mark.parametrize(("change", "mask"), _in_turns(CHANGES, MASKS))
def test_cases(change, mask):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        if change.get("bias_fill") and seqlen_k < 200:
            continue  # a filled row has to see keys that are not
        case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=128, mask=mask, dtype="bf16", **change)
        held(case, seed=turn, run=conformance.run_case if turn % 3 == 2 else conformance.run_hidden)


@pytest.mark.parametrize(
    ("dims", "change", "mask"), _in_turns(TILES, [{"softcap": 2.0}, {"bias": "hq"}, {"alibi": "h"}, EVERYTHING], MASKS)
)
def test_head_dims(dims, change, mask):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0], "head_dim_v": dims[1]}
        held(Case(heads_q=6, heads_k=2, mask=mask, dtype="fp16", **sizes, **change), seed=turn)


MORE_MASKS = {
    "documents": Documents((0, 70, 70, 200, 290), inner=Causal()),
    "prefix": PrefixLM(100),
    "windows": Documents((0, 1, 150, 290), (0, 90, 90, 280), inner=SlidingWindow(40, 0)),
    "heads": PerHead({(0, 1): Causal(), (1, 6): SlidingWindow(90, 2)}),
    "one": Documents((0, 290)),
    "pairs": random_mask(290, 290, batch=2, heads=6),
}


@pytest.mark.parametrize(
    ("dims", "change", "mask"),
    _in_turns([(64, 64), (128, 128), (256, 256)], [{"softcap": 2.0}, {"bias": "hq"}, {"bias": "b"}, EVERYTHING], MORE_MASKS, per=2),
)
def test_masks_beyond_one_band(dims, change, mask):
    lengths = {"seqlen_q": 290, "seqlen_k": 280 if mask == "windows" else 290}
    case = Case(batch=2, heads_q=6, heads_k=2, head_dim=dims[0], mask=MORE_MASKS[mask], dtype="bf16", **lengths, **change)
    held(case)
    held(case, seed=1, run=conformance.run_case)


FEW_KEYS = ((64, 64), (300, 77), (700, 128), (200, 3))
SOME_CHANGES = (
    {"softcap": 2.0},
    {"bias": "hq", "bias_hides": True},
    {"alibi": "h"},
    {"bias": "bhq", "alibi": "h", "diagonal": True},
    EVERYTHING,
)


@pytest.mark.parametrize("change", SOME_CHANGES, ids=_name)
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_keys_of_one_block_under_masks_beyond_one_band(dims, change):
    """dQ is written by who computes it: the consumers, or a kernel of its own; with tiles that see nothing, and hidden NaN."""
    first = SOME_CHANGES.index(change) % 2
    for turn, (seqlen_q, seqlen_k) in enumerate(FEW_KEYS[first::2]):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 4, "heads_k": (2, 1)[turn]}
        sizes |= {"head_dim": dims[0], "head_dim_v": dims[1], "dtype": ("bf16", "fp16")[first]}
        windows = Documents((0, seqlen_q // 3, seqlen_q), (0, seqlen_k // 2, seqlen_k), inner=SlidingWindow(40, 9))
        apart = Documents((0, seqlen_q // 4, seqlen_q // 4 + 9), (0, 0, seqlen_k), inner=Causal())
        for mask in (windows, apart, *beyond_one_band(seqlen_q, seqlen_k)):
            held_each_way(Case(batch=2, mask=mask, **sizes, **change), seed=turn)


@pytest.mark.parametrize(
    ("change", "mask"), _in_turns([{"softcap": 2.0}, {"bias": "bhq"}, {"alibi": "h"}, EVERYTHING], [Causal(), SlidingWindow(50, 20)])
)
def test_a_hidden_nan_reaches_nobody(change, mask):
    held(Case(seqlen_q=300, seqlen_k=300, head_dim=128, mask=mask, dtype="bf16", **change), run=conformance.run_spoiled)


@pytest.mark.parametrize("mask", [*MASKS, None], ids=repr)
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_rows_that_only_a_bias_hides(dims, mask):
    """NaN in their dO reaches nobody, also where thread blocks share the walk of few keys; a bias of +inf does. None: a mask of any pairs."""
    for turn, (seqlen_q, seqlen_k) in enumerate(((300, 700), (1000, 77), (129, 128), (70, 300))):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 4, "heads_k": 2, "head_dim": dims[0], "head_dim_v": dims[1]}
        case = Case(
            batch=2, mask=mask or random_mask(seqlen_q, seqlen_k), dtype="bf16", bias=("hq", "bq")[turn % 2], bias_hides=True, **sizes
        )
        held_each_way(case, seed=turn)


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed):
    """Two configurations, so that there is time for many problems."""
    draw = drawing(seed)
    for _ in range(10):
        case = Case(
            **random_shape(draw),
            head_dim=8 * draw(9, 13),
            mask=Causal() if seed % 2 else SlidingWindow(draw(0, 200), draw(0, 200)),
            dtype="bf16",
            bias=("", "h", "q", "bhq", "b", "bq", "hq", "bh")[draw(0, 8)],
            bias_hides=bool(draw(0, 2)),
            sink=bool(draw(0, 2)),
            wide=True,
            lse_grad=bool(draw(0, 2)),
        )
        held(case, seed=draw(0, 1 << 20))


@pytest.mark.parametrize("bias", ["", "b", "h", "q", "bh", "bq", "hq", "bhq"])
def test_every_shape_of_a_bias_and_however_its_sums_are_cut(bias, monkeypatch):
    """The choice of parts is for speed; with each the gradient is right, and the same from run to run."""
    for turn, parts in enumerate((1, 2, 3, 100)):
        monkeypatch.setattr(bias_gradient, "parts_of", lambda call, _, parts=parts: parts)
        mask = (*MASKS, PrefixLM(50))[turn]
        held(Case(batch=3, seqlen_q=200, seqlen_k=301, heads_q=4, heads_k=2, head_dim=64, mask=mask, dtype="bf16", bias=bias))


def test_huge_biases():
    conformance.huge_biases_keep_what_rounding_keeps(Hopper(), device="cuda")


@pytest.mark.parametrize(
    ("change", "dims"), _in_turns([{"softcap": 5.0}, {"bias": "hq"}, {"bias": "h"}, EVERYTHING], [(64, 64), (128, 128), (256, 256)])
)
def test_many_runs_have_the_same_bits(change, dims):
    sizes = {"seqlen_q": 1100, "seqlen_k": 1300, "heads_q": 8, "heads_k": 4}
    _same_bits(Case(head_dim=dims[0], mask=Causal(), dtype="bf16", **sizes, **change))


@pytest.mark.parametrize("mask", [Documents((0, 1000, 1100), (0, 70, 128)), random_mask(1100, 128)], ids=["documents", "pairs"])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_many_runs_of_keys_of_one_block_have_the_same_bits(dims, mask):
    sizes = {"seqlen_q": 1100, "seqlen_k": 128, "heads_q": 8, "heads_k": 4, "head_dim": dims[0], "head_dim_v": dims[1]}
    _same_bits(Case(mask=mask, dtype="bf16", **sizes, **EVERYTHING))


def _same_bits(case):
    same_bits(make(case, device="cuda", grad=True), 100, *upstream(case, device="cuda"))


def test_autograd_takes_them():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2))
    bias = torch.randn(1, 8, 300, 300, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sink = torch.randn(8, device="cuda", requires_grad=True)
    options = {"causal": True, "softcap": 10.0, "bias": bias, "sink": sink, "alibi_slopes": torch.rand(8, device="cuda")}
    assert "hopper" in str(tw.explain(q, k, v, **options)).splitlines()[0]
    d_o, inputs = torch.randn_like(q), (q, k, v, bias, sink)
    found = torch.autograd.grad(tw.attention(q, k, v, **options), inputs, d_o)
    expected = torch.autograd.grad(tw.attention(q, k, v, **options, backend="tiled"), inputs, d_o)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)
