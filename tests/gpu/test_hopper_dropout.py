"""Dropout in the Hopper backend, on a GPU: the pairs that the oracle keeps, in both passes, with every head_dim, mask and change of scores."""

import pytest
import torch
from hopper_problems import (
    LENGTHS,
    LENGTHS_OF_TABLES,
    NEEDS_HOPPER,
    ONE_BAND,
    beyond_one_band,
    drawing,
    held,
    packs,
    random_shape,
    same_bits,
)
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.backends import philox
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import plan
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.problem import Call, Dropout, Gradients
from tilewise.testing import conformance, tolerance
from tilewise.testing.cases import Case, make

pytestmark = NEEDS_HOPPER

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40), (8, 8), (104, 104))
PROBABILITIES = (0.1, 0.5, 0.999)
EVERYTHING = {"softcap": 3.0, "bias": "hq", "alibi": "bh", "diagonal": True, "sink": True, "wide": True, "lse_grad": True}
CHANGES = (
    {"softcap": 2.0},
    {"bias": "bhq"},
    {"bias": "q", "bias_hides": True},
    {"alibi": "h"},
    {"sink": True, "lse_grad": True},
    EVERYTHING,
)
MASKS = (Full(), Causal(), SlidingWindow(50, 20), Documents((0, 70, 70, 200, 290), inner=Causal()))


@pytest.mark.parametrize("mask", ONE_BAND, ids=repr)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_cases(dims, mask):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0], "head_dim_v": dims[1]}
        heads = ((4, 2), (3, 3), (8, 1))[turn % 3]
        given = {"dtype": ("bf16", "fp16")[turn % 2], "dropout": PROBABILITIES[turn % 3], "lse_grad": turn % 2 == 0}
        run = conformance.run_case if turn % 3 == 2 else conformance.run_hidden
        held(Case(batch=2, heads_q=heads[0], heads_k=heads[1], mask=mask, **sizes, **given), seed=turn, run=run)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_masks_beyond_one_band(dims):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS_OF_TABLES):
        for mask in beyond_one_band(seqlen_q, seqlen_k):
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0]}
            held(Case(batch=2, heads_q=4, heads_k=2, mask=mask, dtype="bf16", dropout=PROBABILITIES[turn % 3], **sizes), seed=turn)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_documents(dims):
    for turn, (cu_q, cu_k, seqlen_q, seqlen_k) in enumerate(packs()):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dims[0], "head_dim_v": dims[1]}
        mask = Documents(cu_q, cu_k, inner=(Causal(), Full(), SlidingWindow(30, 0))[turn % 3])
        held(Case(batch=1, heads_q=4, heads_k=2, mask=mask, dtype="bf16", dropout=0.3, **sizes), seed=turn)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(map(str, change)))
def test_changes_of_scores(change, mask):
    for turn, dims in enumerate(((64, 64), (128, 128), (96, 96), (256, 256))):
        sizes = {"seqlen_q": 290, "seqlen_k": 290, "head_dim": dims[0], "head_dim_v": dims[1], "dtype": ("bf16", "fp16")[turn % 2]}
        held(Case(batch=2, heads_q=6, heads_k=2, mask=mask, dropout=(0.2, 0.9)[turn % 2], **sizes, **change), seed=turn)


@pytest.mark.parametrize("seqlen_q", [1, 64, 300, 1500])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_few_keys(dims, seqlen_q):
    """Of one block, whose dQ is written by who computes it."""
    for turn, mask in enumerate((Full(), Causal("top_left"), SlidingWindow(50, 20), Documents((0, seqlen_q // 3, seqlen_q), (0, 30, 77)))):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": 77, "head_dim": dims[0], "head_dim_v": dims[1]}
        held(Case(batch=2, heads_q=4, heads_k=2, mask=mask, dtype=("bf16", "fp16")[turn % 2], dropout=0.3, **sizes), seed=turn)


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(50, 20), Documents((0, 100, 300), inner=Causal())], ids=repr)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_nan_and_infinities(dims, mask):
    """A pair that is dropped is visible still: 0 times NaN is NaN."""
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=dims[0], mask=mask, dtype="bf16", dropout=0.3)
    for run in (conformance.run_spoiled, conformance.run_scattered, conformance.run_overflown):
        held(case, run=run)


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed):
    draw = drawing(seed)
    for _ in range(12):
        case = Case(
            **random_shape(draw),
            head_dim=8 * draw(1, 17),
            mask=(Full(), Causal(), SlidingWindow(draw(0, 200), draw(0, 200)))[draw(0, 3)],
            dtype=("bf16", "fp16")[draw(0, 2)],
            dropout=(0.01, 0.3, 0.7, 0.99)[draw(0, 4)],
            sink=bool(draw(0, 2)),
            lse_grad=bool(draw(0, 2)),
        )
        held(case, seed=draw(0, 1 << 20))


@pytest.mark.parametrize("change", [{}, {"bias": "hq", "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_the_same_bits_at_every_run(dims, change):
    case = Case(
        batch=2, seqlen_q=900, seqlen_k=1100, heads_q=8, heads_k=2, head_dim=dims[0], mask=Causal(), dtype="bf16", dropout=0.3, **change
    )
    same_bits(make(case, 0, "cuda", grad=True), runs=20)


# The pairs themselves, bit for bit: all scores are 0, so all weights are alike, and a one in V, or in dO, shows each


def _zeros(*shape):
    return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16)


def _call(batch, seqlen_q, seqlen_k, heads, dim, dropout, mask=None):
    q, k = _zeros(batch, seqlen_q, heads, dim), _zeros(batch, seqlen_k, heads, dim)
    return Call(q=q, k=k, v=torch.zeros_like(k), mask=mask or Full(), scale=1.0, grad=True, dropout=dropout)


def _ones(x, first):
    """x[:, first + i, :, i] = 1."""
    n = min(x.shape[1] - first, x.shape[-1])
    for i in range(n):
        x[:, first + i, :, i] = 1.0
    return n


def _kept_by_forward(call, first):
    """(batch, heads, seqlen_q, n): of the keys from `first` on."""
    call.v.zero_()
    n = _ones(call.v, first)
    o, _ = Hopper().forward(call)
    return (o != 0).transpose(1, 2)[..., :n]


def _kept_by_backward(call, first):
    """(batch, heads, n, seqlen_k): of the queries from `first` on."""
    o, lse = Hopper().forward(call)
    d_o = torch.zeros_like(o)
    n = _ones(d_o, first)
    d_v = Hopper().backward(call, o, lse, d_o, None).v
    return (d_v != 0).permute(0, 2, 3, 1)[:, :, :n]


def _wanted(call, i0, i1, j0, j1, batch=None):
    return philox.keep(call.dropout, batch or range(call.batch), range(call.heads_q), i0, i1, j0, j1, call.heads_q, "cuda")


DRAWS = (Dropout(0.5, 0, 0), Dropout(0.1, (1 << 63) - 5, (1 << 32) - 1), Dropout(0.9, 3 << 31, 1 << 31), Dropout(1e-9, 1, 2))


@pytest.mark.parametrize("dropout", DRAWS, ids=lambda each: f"{each.p:g}")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_the_pairs_of_philox(dim, dropout):
    call = _call(2, 333, 410, 3, dim, dropout)
    for first in (0, 100, 410 - dim):
        kept = _kept_by_forward(call, first)
        assert torch.equal(kept, _wanted(call, 0, 333, first, first + kept.shape[-1]))
    for first in (0, 70, 333 - dim):
        kept = _kept_by_backward(call, first)
        assert torch.equal(kept, _wanted(call, first, first + kept.shape[2], 0, 410))


def test_more_than_2_to_the_32_pairs():
    """Of a head, and of all."""
    for batch, heads, seqlen in ((1, 1, 70001), (3, 20, 9001)):
        call = _call(batch, seqlen, seqlen, heads, 64, DRAWS[1])
        assert batch * heads * seqlen**2 > 1 << 32
        kept = _kept_by_forward(call, seqlen - 64)[:, :, -300:]
        assert torch.equal(kept, _wanted(call, seqlen - 300, seqlen, seqlen - 64, seqlen))
        kept = _kept_by_backward(call, seqlen - 64)[..., -300:]
        assert torch.equal(kept, _wanted(call, seqlen - 64, seqlen, seqlen - 300, seqlen))


def test_a_batch_beyond_what_a_grid_holds():
    call = _call(plan.MOST + 21, 70, 70, 1, 64, DRAWS[0])
    for part in (range(9), range(plan.MOST - 9, plan.MOST + 21)):
        where = slice(part.start, part.stop)
        assert torch.equal(_kept_by_forward(call, 0)[where], _wanted(call, 0, 70, 0, 64, part))
        assert torch.equal(_kept_by_backward(call, 0)[where], _wanted(call, 0, 64, 0, 70, part))


# As it is called


def _inputs(seqlen=300, grad=True):
    torch.manual_seed(0)
    shapes = (2, seqlen, 8, 128), (2, seqlen, 2, 128), (2, seqlen, 2, 128)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for shape in shapes]


def _results(function, inputs):
    o = function(*inputs)
    return (o, *torch.autograd.grad(o.float().square().sum(), inputs))


def _attend(*inputs, **options):
    return tw.attention(*inputs, causal=True, **options)


def test_the_public_call_takes_it():
    options = {"dropout_p": 0.3, "dropout_seed": 11, "dropout_offset": 4}
    inputs = _inputs()
    assert "hopper" in str(tw.explain(*inputs, causal=True, **options)).splitlines()[0]
    o, lse = _attend(*inputs, backend="hopper", return_lse=True, **options)
    d_o = torch.randn_like(o)
    grads = torch.autograd.grad(o, inputs, d_o)
    call = Call(**dict(zip("qkv", (x.detach() for x in inputs), strict=True)), mask=Causal(), scale=128**-0.5, dropout=Dropout(0.3, 11, 4))
    tolerance.check_outputs(call, o.detach(), lse.detach())
    tolerance.check_gradients(call, Gradients(*grads, None, None), d_o)
    other = _attend(*inputs, dropout_p=0.3, dropout_seed=12)
    assert not torch.equal(other, o) and torch.equal(_attend(*inputs, **options), o)


def test_packed_sequences_draw_by_packed_positions():
    q, k, v = (x[0].detach() for x in _inputs())
    cu = torch.tensor([0, 90, 300], device="cuda")
    options = {"causal": True, "dropout_p": 0.3, "dropout_seed": 11}
    got, want = (tw.attention_varlen(q, k, v, cu, cu, backend=backend, **options) for backend in ("hopper", "tiled"))
    torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_it(reentrant):
    inputs, found = _inputs(), []
    for wrap in (
        lambda *x: _attend(*x, dropout_p=0.4),
        lambda *x: checkpoint(lambda *y: _attend(*y, dropout_p=0.4), *x, use_reentrant=reentrant),
    ):
        torch.manual_seed(3)
        wrap(*inputs).float().square().sum().backward()
        found.append([x.grad.clone() for x in inputs])
        for x in inputs:
            x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_programs_have_it():
    def attend(*x):
        return _attend(*x, dropout_p=0.3, dropout_seed=11) * 2.0

    inputs = _inputs()
    plain, compiled = _results(attend, inputs), _results(torch.compile(attend, fullgraph=True), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))
