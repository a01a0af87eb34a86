"""Peers that were added for trees and for biases, whose packages are not here: what they are called with, by stand-ins that compute what it says."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tilewise.bench.gate import Gate, verify
from tilewise.bench.peers import contender, cudnn_flex, cuequivariance, known
from tilewise.bench.peers.cudnn_flex import intervals
from tilewise.bench.sets import Workload
from tilewise.compat.cuequivariance import triangle_attention
from tilewise.masks import Causal, Documents, Full, PrefixLM, PrefixTree, SlidingWindow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Workload(name="small", batch=2, seqlen_q=33, heads_q=4, heads_k=2, head_dim=16)
TREES = [
    PrefixTree([-1, 0, 1, 1, 0, -1], [5, 7, 6, 0, 9, 6]),
    PrefixTree([-1, 0, 0, 1, 2, 1], [5, 7, 6, 4, 5, 6]),
    PrefixTree.group(10, [8, 7, 8]),
]
DOCUMENTS = [Documents([0, 4, 4, 33]), Documents([0, 10, 33], inner=Causal()), Documents([0, 4, 12], inner=Causal()), Documents([0, 4, 12])]
WINDOWS = [SlidingWindow(5, 2), SlidingWindow(None, 0), SlidingWindow(3, None)]


def dense(ends, keys):
    at = torch.arange(keys)
    seen = at < ends[0, :, None]
    for first, last in zip(ends[1::2], ends[2::2], strict=True):
        assert (first <= last).all()
        seen = seen | ((at >= first[:, None]) & (at < last[:, None]))
    return seen


@pytest.mark.parametrize("mask", [Full(), Causal(), *WINDOWS, *DOCUMENTS, *TREES], ids=str)
def test_intervals_say_what_the_masks_say(mask):
    for lengths in [(33, 33)] if isinstance(mask, Documents | PrefixTree) else [(33, 33), (20, 33), (33, 20)]:
        ends = intervals(replace(SMALL, seqlen_q=lengths[0], seqlen_k=lengths[1], mask=mask))
        assert ends.dtype == torch.int32 and len(ends) % 2 == 1 and ends.is_contiguous()
        assert torch.equal(dense(ends, lengths[1]), mask.dense(*lengths))


def test_masks_that_are_no_such_intervals():
    assert intervals(replace(SMALL, mask=PrefixLM(3))) is None
    assert "written as intervals" in known()["cudnn:flex"].why_not(replace(SMALL, mask=PrefixLM(3)), CUDA)[-1]


@pytest.mark.parametrize("mask", [Causal(), DOCUMENTS[1], TREES[0]], ids=str)
@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_cudnn_is_called_with_a_plan_that_is_made_once(mask, direction, monkeypatch):
    plans, stand_in = [], ModuleType("cudnn.flex_attention")

    def create_mask_plan(ends, q, k, v, *, build_backward):
        assert ends.shape[0] == 1 and ends.shape[2] == q.shape[0] * q.shape[1] and build_backward == (direction != "fwd")
        plans.append(dense(ends[0], k.shape[1]).view(q.shape[0], 1, q.shape[1], -1))
        return plans[-1]

    def flex_attn_func(q, k, v, *, mask_plan, softmax_scale):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask_plan, enable_gqa=True, scale=softmax_scale)
        return o.transpose(1, 2)

    vars(stand_in).update(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", stand_in)
    workload = replace(SMALL, mask=mask, direction=direction)
    attend = known()["cudnn:flex"].prepare(workload, CPU)
    assert verify(attend, workload, 0, CPU) < 1e-5 and verify(attend, workload, 1, CPU) < 1e-5 and len(plans) == 1


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_cuequivariance_is_called_with_rows(direction, monkeypatch):
    stand_in = ModuleType(cuequivariance.MODULE)
    stand_in.triangle_attention = triangle_attention  # ours, which has the signature
    monkeypatch.setitem(sys.modules, cuequivariance.MODULE, stand_in)
    workload = replace(SMALL, heads_k=4, bias="hqk", bias_grad=True, direction=direction)
    assert Gate(workload, 0, CPU).verify(known()["cueq"].prepare(workload, CPU), heads_first=True) < 1e-5


def test_why_not(monkeypatch):
    monkeypatch.setattr(contender, "installed", lambda module: True)
    half = replace(SMALL, dtype=torch.bfloat16, mask=TREES[0])
    assert known()["cudnn:flex"].why_not(half, CUDA) == []
    assert known()["cudnn:flex"].why_not(replace(half, softcap=5.0), CUDA) and known()["cudnn:flex"].why_not(SMALL, CUDA) == [
        "cudnn:flex takes fp16 and bf16 only"
    ]
    pairs = replace(SMALL, heads_k=4, bias="hqk", bias_grad=True, direction="bwd", dtype=torch.bfloat16)
    assert known()["cueq"].why_not(pairs, CUDA) == []
    assert "that all batch entries share" in known()["cueq"].why_not(replace(pairs, bias="bhqk"), CUDA)[0]
    monkeypatch.setattr(contender, "installed", lambda module: False)
    assert known()["cueq"].why_not(pairs, CUDA) == ["cuequivariance_ops_torch is not installed"]
    assert known()["cudnn:flex"].why_not(half, CUDA) == ["cudnn.flex_attention is not installed"]


def test_the_trees_of_the_set_have_few_intervals():
    from tilewise.bench.sets.trees import trees

    for workload in trees():
        if isinstance(workload.mask, PrefixTree):
            assert len(cudnn_flex.intervals(workload)) < 40
