"""Packed documents in the Hopper backend, on a GPU: lengths of every sort, without waiting for the device, and under CUDA graph capture."""

from dataclasses import replace

import pytest
import torch
from hopper_problems import INNER, NEEDS_HOPPER, cumulated, drawing, held_forward, packs

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.forward import call as forward
from tilewise.backends.hopper.forward import plan
from tilewise.errors import ShapeError
from tilewise.masks import Causal, Documents, FirstKeys, Full, PrefixLM, SlidingWindow
from tilewise.problem import Call
from tilewise.testing import conformance
from tilewise.testing.cases import Case

pytestmark = NEEDS_HOPPER

NOT_ONE_BAND = PrefixLM(7), FirstKeys(3)


@pytest.mark.parametrize("inner", [*INNER, *NOT_ONE_BAND], ids=repr)
def test_packs(inner):
    for turn, (cu_q, cu_k, total_q, total_k) in enumerate(packs()):
        mask = Documents(cu_q, cu_k, inner=inner)
        case = Case(batch=1, seqlen_q=total_q, seqlen_k=total_k, heads_q=4, heads_k=2, head_dim=128, mask=mask, dtype="bf16")
        held_forward(case, seed=turn)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
def test_head_dims_and_batches(dims):
    """Documents as a mask hold for every batch entry."""
    for cu_q, cu_k, total_q, total_k in packs(1):
        mask = Documents(cu_q, cu_k, inner=Causal())
        sizes = {"seqlen_q": total_q, "seqlen_k": total_k, "head_dim": dims[0], "head_dim_v": dims[1]}
        held_forward(Case(batch=2, heads_q=3, heads_k=3, mask=mask, dtype="fp16", **sizes))


@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"sink": True}, {"softcap": 3.0, "bias": "h", "alibi": "h", "diagonal": True, "sink": True}],
                         ids=lambda change: "-".join(change))  # fmt: skip
def test_with_changed_scores(change):
    for cu_q, cu_k, total_q, total_k in packs(2):
        mask = Documents(cu_q, cu_k, inner=SlidingWindow(40, 0))
        held_forward(Case(batch=1, seqlen_q=total_q, seqlen_k=total_k, head_dim=128, mask=mask, dtype="bf16", **change))


def test_a_hidden_nan_reaches_nobody():
    for inner in (Full(), Causal(), SlidingWindow(9, 9)):
        for cu_q, cu_k, total_q, total_k in packs(3):
            mask = Documents(cu_q, cu_k, inner=inner)
            case = Case(batch=1, seqlen_q=total_q, seqlen_k=total_k, head_dim=128, mask=mask, dtype="bf16")
            conformance.run_spoiled(Hopper(), case, device="cuda", backward=False)


@pytest.mark.parametrize("seed", range(4))
def test_random_packs(seed):
    draw = drawing(seed)
    for _ in range(15):
        count, largest = draw(1, 40), draw(1, 200)
        cu_q, cu_k = (cumulated([draw(0, largest) for _ in range(count)]) for _ in range(2))
        inner = (Full(), Causal(), SlidingWindow(draw(0, 100), draw(0, 100)))[draw(0, 3)]
        sizes = {"seqlen_q": max(1, cu_q[-1]), "seqlen_k": max(1, cu_k[-1]), "head_dim": 128}
        mask = Documents(cu_q, cu_k, inner=inner)
        held_forward(Case(batch=1, mask=mask, dtype="bf16", **sizes), seed=draw(0, 1 << 20))


def tensors(cu_q, cu_k, total_q, total_k, heads=(4, 2), dim=128):
    q = torch.randn(total_q, heads[0], dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(total_k, heads[1], dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, *(torch.tensor(cu, device="cuda") for cu in (cu_q, cu_k))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": SlidingWindow(30, 0)}, {"mask": FirstKeys(3)}], ids=str)
def test_the_public_call_is_the_mask(options):
    inner = Causal() if options.get("causal") else options.get("mask")
    for cu_q, cu_k, total_q, total_k in packs(4):
        given = tensors(cu_q, cu_k, total_q, total_k)
        o, lse = tw.attention_varlen(*given, **options, return_lse=True)
        mask = Documents(cu_q, cu_k, inner=inner)
        want, want_lse = tw.attention(*(x[None] for x in given[:3]), mask=mask, return_lse=True, backend="hopper")
        assert torch.equal(o, want[0]) and torch.equal(lse, want_lse[0])


def test_a_captured_graph_follows_its_cu_seqlens():
    q, k, v, cu, _ = given = tensors((0, 100, 300, 1000), (0, 100, 300, 1000), 1000, 1000)
    slopes = torch.rand(4, device="cuda")
    options = {"causal": True, "alibi_slopes": slopes}
    tw.attention_varlen(q, k, v, cu, cu, **options)
    graph, static = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with torch.cuda.graph(graph):
        static.copy_(tw.attention_varlen(q, k, v, cu, cu, **options))
    for lengths in ((0, 1, 2, 3), (0, 1000, 1000, 1000), (0, 333, 334, 900)):
        cu.copy_(torch.tensor(lengths))
        q.normal_()
        graph.replay()
        assert torch.equal(static, tw.attention_varlen(q, k, v, cu, cu, **options))
    for wrong in (
        (5, 100, 50, 2000),
        (-9, -100, 1 << 30, -(1 << 30)),
        (0, 2000, 3000, 4000),
    ):  # nobody can say so, but nothing else is read or written
        cu.copy_(torch.tensor(wrong))
        graph.replay()
    torch.cuda.synchronize()
    assert len(given) == 5


def test_nothing_waits_for_the_device():
    given = tensors((0, 100, 300), (0, 100, 300), 300, 300)
    tw.attention_varlen(*given, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tw.attention_varlen(*given, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("wrong", [(1, 300), (0, 200, 100), (0, 301)])
def test_bad_cu_seqlens_are_named(wrong):
    q, k, v, _, _ = tensors((0, 300), (0, 300), 300, 300)
    cu = torch.tensor(wrong, device="cuda")
    for empty in (slice(None), slice(0)):
        with pytest.raises(ShapeError, match="cu_seqlens"):
            tw.attention_varlen(q, k[empty], v[empty], cu, cu)


def test_long_documents_have_the_same_bits_whoever_knows_their_lengths():
    """Thread blocks in pairs take them, where the host has the lengths, or has looked at them once; and single ones, where it has not."""
    ends = cumulated([4000, 30, 5, 3200])
    q, k, v, cu_q, cu_k = tensors(ends, ends, ends[-1], ends[-1])
    of_varlen = [tw.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True) for _ in range(3)]
    known = tw.attention(q[None], k[None], v[None], mask=Documents(ends, inner=Causal()), return_lse=True)
    call = Call(q=q[None], k=k[None], v=v[None], mask=Documents(ends, inner=Causal()), scale=128**-0.5)
    config = plan.config_of(call)
    assert config.cluster == 2
    single = forward.forward(call, replace(config, cluster=1))
    for found in (*of_varlen, [x[0] for x in single]):
        assert all(torch.equal(one, other[0]) for one, other in zip(found, known, strict=True))
