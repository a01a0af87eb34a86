"""FlashAttention as a contender: what its functions are called with, by stand-ins that compute what the arguments say."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from tilewise.bench import ladder_sweep
from tilewise.bench.gate import verify
from tilewise.bench.peers import FlashAttention, Naive
from tilewise.bench.peers.flash_attention import LIBRARY, VllmFlashAttention3, _window, packed
from tilewise.bench.sets import Workload
from tilewise.masks import Causal, Dense, Documents, Full, SlidingWindow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Workload(name="small", batch=2, seqlen_q=40, heads_q=4, head_dim=16)


def test_flash_attention_is_called_with_its_own_arguments(monkeypatch):
    asked = []

    def flash_attn_func(q, k, v, **options):
        asked.append(options)
        return Naive().prepare(replace(SMALL, mask=Causal() if options["causal"] else Full()), CPU)(q, k, v), "lse"

    monkeypatch.setitem(sys.modules, "pretend_flash", types.SimpleNamespace(flash_attn_func=flash_attn_func, __spec__=object()))
    fa = FlashAttention("fa9", "pretend_flash", -1)
    assert fa.why_not(replace(SMALL, dtype=torch.bfloat16), CPU) == ["fa9 runs on CUDA devices only"]
    assert verify(fa.prepare(replace(SMALL, mask=Causal()), CPU), replace(SMALL, mask=Causal()), 0, CPU) < 1e-5
    fa.prepare(replace(SMALL, mask=SlidingWindow(7, None)), CPU)(*SMALL.inputs(0)[:3])
    assert asked == [{"causal": True}, {"causal": False, "window_size": (7, -1)}]
    assert _window(replace(SMALL, mask=Dense(torch.ones(40, 40, dtype=torch.bool)))) is None
    assert _window(replace(SMALL, mask=SlidingWindow(7, 0, offset=-3))) is None


SCHEMA = (
    "(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int? max_seqlen_q, "
    "int? max_seqlen_k, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, int num_splits, bool? pack_gqa, int sm_margin{}) -> Tensor[]"
)


def operator(name, extra=""):
    library = torch.library.Library("tilewise_test", "FRAGMENT")
    library.define(name + SCHEMA.format(extra))

    def forward(q, k, v, k_new, out, cu_q, cu_k, most_q, most_k, scale, causal, left, right, softcap, rotary, splits, pack, margin, *more):
        assert k_new is None and out is None and pack is None and (softcap, splits, margin, more) == (0.0, 1, 0, (1,) * len(more))
        assert cu_q.dtype == cu_k.dtype == torch.int32 and (most_q, most_k, scale) == (40, 40, 0.25)
        mask = Documents(cu_q.tolist(), inner=Causal() if causal else Full())
        one = replace(SMALL, batch=1, seqlen_q=len(q), seqlen_k=len(k), mask=mask)
        return [Naive().prepare(one, CPU)(q[None], k[None], v[None])[0], q.new_empty(0)]

    library.impl(name, forward, "CompositeExplicitAutograd")
    return library, getattr(torch.ops.tilewise_test, name).default


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("extra", ["", ", int cp_world_size"], ids=["shorter", "longer"])
def test_packed_operators_get_their_arguments_by_name(mask, extra):
    _library, forward = operator(f"fwd{len(extra)}_{type(mask).__name__}", extra)
    workload = replace(SMALL, mask=mask)
    assert verify(packed(forward, workload, CPU), workload, 0, CPU) < 1e-5


def test_a_packed_operator_that_wants_more_than_is_known():
    _library, forward = operator("fwd_unknown", ", int phase_of_moon")
    with pytest.raises(NotImplementedError, match=r"wants phase_of_moon \(int\), which is not known here"):
        packed(forward, SMALL, CPU)


def test_why_vllms_cannot(monkeypatch, tmp_path):
    peer, cell = VllmFlashAttention3(), ladder_sweep()[0]
    monkeypatch.delenv(LIBRARY, raising=False)
    assert peer.why_not(cell, CUDA)[0].startswith("the environment variable TILEWISE_FA3_LIBRARY does not name the library")
    (tmp_path / "lib.so").touch()
    monkeypatch.setenv(LIBRARY, str(tmp_path / "lib.so"))
    assert peer.why_not(cell, CUDA) == []
    assert peer.why_not(replace(cell, direction="bwd"), CUDA) == ["fa3:vllm has no backward"]
