"""Gradients of packed documents in the Hopper backend, on a GPU: lengths of every sort, hidden NaN, repeated runs, CUDA graph capture."""

import pytest
import torch
from hopper_problems import INNER, NEEDS_HOPPER, cumulated, drawing, held, packs, same_bits

import tilewise as tw
from tilewise.backends.hopper.backward.config import TILES
from tilewise.masks import Causal, Documents, FirstKeys, Full, SlidingWindow
from tilewise.problem import Call
from tilewise.testing import conformance
from tilewise.testing.cases import Case

pytestmark = NEEDS_HOPPER


def _case(pack, inner, **fields):
    cu_q, cu_k, total_q, total_k = pack
    return Case(
        **{"batch": 1, "dtype": "bf16", "head_dim": 128} | fields,
        seqlen_q=total_q,
        seqlen_k=total_k,
        mask=Documents(cu_q, cu_k, inner=inner),
    )


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_packs(inner):
    for turn, pack in enumerate(packs()):
        fields = {"heads_q": 4, "heads_k": 2, "dtype": ("bf16", "fp16")[turn % 2], "lse_grad": turn % 3 == 1}
        held(_case(pack, inner, **fields), seed=turn)
        held(_case(pack, inner, **fields), seed=turn, run=conformance.run_case)


@pytest.mark.parametrize("dims", [*TILES, (72, 40), (8, 8), (200, 136)], ids=str)
def test_head_dims_and_batches(dims):
    """Documents as a mask hold for every batch entry."""
    for turn, pack in enumerate(packs(1)):
        sizes = {"batch": 2, "heads_q": 6, "heads_k": (3, 6, 1)[turn % 3], "head_dim": dims[0], "head_dim_v": dims[1]}
        dtype = "fp16" if dims == (128, 128) and turn % 2 else "bf16"
        held(_case(pack, (Causal(), Full(), SlidingWindow(40, 0))[turn % 3], dtype=dtype, **sizes))


def test_a_sink():
    for inner in (Full(), Causal()):
        for turn, pack in enumerate(packs(2)):
            held(_case(pack, inner, head_dim=64, sink=True, lse_grad=turn % 2 == 1))


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_a_hidden_nan_reaches_nobody(dims):
    for inner in (Full(), Causal(), SlidingWindow(9, 9)):
        for pack in packs(3):
            held(_case(pack, inner, head_dim=dims[0], head_dim_v=dims[1]), run=conformance.run_spoiled)


@pytest.mark.parametrize("seed", range(4))
def test_random_packs(seed):
    draw = drawing(seed)
    for _ in range(12):
        count, largest = draw(1, 40), draw(1, 200)
        cu_q, cu_k = (cumulated([draw(0, largest) for _ in range(count)]) for _ in range(2))
        inner = (Full(), Causal(), SlidingWindow(draw(0, 100), draw(0, 100)))[draw(0, 3)]
        pack = cu_q, cu_k, max(1, cu_q[-1]), max(1, cu_k[-1])
        held(_case(pack, inner, head_dim=8 * draw(1, 17), heads_q=4, heads_k=(1, 2, 4)[draw(0, 3)]), seed=draw(0, 1 << 20))


def tensors(cu_q, cu_k, total_q, total_k, heads=(4, 2), dim=128):
    q = torch.randn(total_q, heads[0], dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(total_k, heads[1], dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    return q, k, v, *(torch.tensor(cu, device="cuda") for cu in (cu_q, cu_k))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": SlidingWindow(30, 0)}, {"mask": FirstKeys(3)}], ids=str)
def test_the_public_call_is_the_mask(options):
    inner = Causal() if options.get("causal") else options.get("mask")
    for cu_q, cu_k, total_q, total_k in packs(4):
        q, k, v, *cu = tensors(cu_q, cu_k, total_q, total_k)
        d_o = torch.randn_like(q)
        found = torch.autograd.grad(tw.attention_varlen(q, k, v, *cu, **options), (q, k, v), d_o)
        mask = Documents(cu_q, cu_k, inner=inner)
        o = tw.attention(q[None], k[None], v[None], mask=mask, backend="hopper")
        for got, want in zip(found, torch.autograd.grad(o, (q, k, v), d_o[None]), strict=True):
            assert torch.equal(got, want)


def _step(q, k, v, cu, d_o):
    return torch.autograd.grad(tw.attention_varlen(q, k, v, cu, cu, causal=True), (q, k, v), d_o)


def test_a_captured_graph_follows_its_cu_seqlens():
    q, k, v, cu, _ = tensors((0, 100, 300, 1000), (0, 100, 300, 1000), 1000, 1000)
    d_o = torch.randn_like(q)
    _step(q, k, v, cu, d_o)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _step(q, k, v, cu, d_o)
    for lengths in ((0, 1, 2, 3), (0, 1000, 1000, 1000), (0, 333, 334, 900)):
        cu.copy_(torch.tensor(lengths))
        with torch.no_grad():
            q.normal_()
        graph.replay()
        for got, want in zip(found, _step(q, k, v, cu, d_o), strict=True):
            assert torch.equal(got, want)
    wrong_ones = (5, 100, 50, 2000), (-9, -100, 1 << 30, -(1 << 30)), (0, 2000, 3000, 4000), (900, 500, 400, 0)
    for wrong in wrong_ones:  # nobody can say so, but nobody waits for ever either
        cu.copy_(torch.tensor(wrong))
        graph.replay()
    torch.cuda.synchronize()


def test_nothing_waits_for_the_device():
    q, k, v, cu, _ = tensors((0, 100, 300), (0, 100, 300), 300, 300)
    d_o = torch.randn_like(q)
    _step(q, k, v, cu, d_o)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(q, k, v, cu, d_o)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_many_runs_have_the_same_bits(dims):
    """Documents that begin within tiles, many blocks a head, and heads that share keys."""
    torch.manual_seed(0)
    lengths = [*range(1, 60), 1000, 3, 0, 700]
    seqlen = sum(lengths)
    q, k, v = (torch.randn(1, seqlen, heads, dim, device="cuda").bfloat16() for heads, dim in ((8, dims[0]), (4, dims[0]), (4, dims[1])))
    for inner in (Full(), Causal()):
        mask = Documents(cumulated(lengths), inner=inner)
        same_bits(Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True), runs=300 if dims == (128, 128) else 50)


def test_autograd_takes_it():
    q, k, v, *cu = tensors((0, 100, 300), (0, 100, 300), 300, 300)
    mask = Documents((0, 100, 300), inner=Causal())
    assert "hopper" in str(tw.explain(q[None], k[None], v[None], mask=mask)).splitlines()[0]
    d_o = torch.randn_like(q)
    found = torch.autograd.grad(tw.attention_varlen(q, k, v, *cu, causal=True), (q, k, v), d_o)
    for got, want in zip(
        found, torch.autograd.grad(tw.attention_varlen(q, k, v, *cu, causal=True, backend="tiled"), (q, k, v), d_o), strict=True
    ):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
