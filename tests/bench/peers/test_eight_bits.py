"""Contenders in 8 bits: what they are given, that they quantise once, the limit that they are held to, and why they cannot."""

from dataclasses import dataclass, replace

import pytest
import torch

from tilewise.backends.eight_bits import RECIPES
from tilewise.bench import Timing, find, run, workloads_from
from tilewise.bench.peers.contender import quantised_ahead
from tilewise.bench.peers.cudnn import CudnnInEightBits
from tilewise.bench.peers.flash_attention import LIBRARY, VllmFlashAttention3, packed
from tilewise.bench.peers.tilewise import E4M3, Tilewise, TilewiseE4M3
from tilewise.bench.sets import Workload
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, SlidingWindow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Workload(name="small", batch=2, seqlen_q=40, heads_q=4, heads_k=2, head_dim=16, mask=Causal(), dtype=torch.bfloat16)
ONCE = Timing(budget_s=0.0)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("name", ["tilewise:e4m3", *(f"tilewise:{precision}" for precision in RECIPES)])
def test_ours_are_checked_by_their_error_and_timed(name):
    for workload in (SMALL, replace(SMALL, softcap=2.0), replace(SMALL, dtype=torch.float16, rms=True)):
        (row,) = run([workload], find(name), memory=False, timing=ONCE)
        assert row.passed and row.median_s > 0 and row.error > 0
    assert 1e-3 < row.rms_error["o"] < 0.1


@dataclass(frozen=True)
class Wrong:
    """Twice the output, or NaN in one place."""

    nan: bool
    name: str = "wrong"
    in_eight_bits = True

    def why_not(self, workload, device):
        return []

    def prepare(self, workload, device):
        attend = Tilewise(precision="int8").prepare(workload, device)

        def call(q, k, v):
            o = attend(q, k, v).clone()
            if self.nan:
                o[-1, 0, -1, 0] = torch.nan
                return o
            return 2 * o

        return call


@pytest.mark.parametrize("nan", [False, True])
def test_what_is_wrong_does_not_pass(nan):
    (row,) = run([SMALL], [Wrong(nan)], memory=False, timing=ONCE)
    assert row.passed is False and row.median_s is None and "missed the tolerance: o" in row.reason


def test_given_tensors_are_quantised_once_and_again_for_others():
    seen = []
    attend = quantised_ahead(lambda x: seen.append(x) or x.q)
    q, k, v, _ = SMALL.inputs(0)
    attend(q, k, v), attend(q, k, v)
    assert seen[0] is seen[1] and seen[0].q.dtype == seen[0].v.dtype == E4M3
    assert [tuple(x.shape) for x in seen[0].scales] == [(2, 4), (2, 2), (2, 2)]
    attend(q.clone(), k, v)
    assert seen[2] is not seen[0] and torch.equal(seen[2].q.float(), seen[0].q.float())


def test_sets():
    cells = workloads_from({"set": "fp8", "dtype": "bf16"})
    assert len(cells) == 18 and all(cell.rms and cell.seqlen_q in (2048, 8192, 16384) for cell in cells)
    assert {cell.head_dim for cell in cells} == {64, 128, 256}
    assert all(cell.seqlen_q <= 512 for cell in workloads_from({"set": "fp8-small", "dtype": "bf16"}))


def test_why_not(monkeypatch, tmp_path):
    monkeypatch.delenv(LIBRARY, raising=False)
    training = replace(SMALL, direction="fwd+bwd")
    for impl in (TilewiseE4M3(), Tilewise(precision="fp8"), CudnnInEightBits()):
        assert "8 bits are for the forward pass" in impl.why_not(training, CPU)
        assert "8 bits stand beside fp16 and bf16" in impl.why_not(replace(SMALL, dtype=torch.float32), CPU)
    assert any("cudnn is not installed" in why for why in CudnnInEightBits().why_not(SMALL, CUDA))
    assert any("full and causal" in why for why in CudnnInEightBits().why_not(replace(SMALL, mask=SlidingWindow(3, 0)), CUDA))
    assert "it has no bias" in Tilewise(precision="fp8").why_not(replace(SMALL, bias="hqk"), CPU)
    assert any(LIBRARY in why for why in VllmFlashAttention3("fa3:fp8", in_eight_bits=True).why_not(SMALL, CUDA))


def test_the_emulation_is_no_contender_on_a_gpu(monkeypatch):
    from tilewise.backends.tiled import Tiled
    from tilewise.runtime import dispatch

    monkeypatch.setattr(dispatch, "choose", lambda problem: Tiled())
    assert Tilewise(precision="fp8").why_not(SMALL, CUDA) == ["there is no kernel for that, and the emulation is no contender"]
    assert Tilewise(precision="fp8").why_not(SMALL, CPU) == []

    def refuse(problem):
        raise UnsupportedError("nobody")

    monkeypatch.setattr(dispatch, "choose", refuse)
    assert TilewiseE4M3().why_not(SMALL, CUDA) == ["nobody"]


def test_a_packed_operator_gets_descales_by_name():
    library = torch.library.Library("tilewise_test_descales", "FRAGMENT")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, bool is_causal, Tensor? q_descale, Tensor? k_descale) -> Tensor[]"
    )
    found = []

    def forward(q, k, v, cu_seqlens_q, is_causal, q_descale, k_descale):
        found.append((q_descale, k_descale))
        return [q]

    library.impl("fwd", forward, "CompositeExplicitAutograd")
    attend = packed(torch.ops.tilewise_test_descales.fwd.default, SMALL, CPU)
    q, k, v, _ = SMALL.inputs(0)
    one, two = torch.ones(2, 2), torch.full((2, 2), 2.0)
    assert torch.equal(attend(q, k, v, k_descale=two, q_descale=one), q)
    attend(q, k, v)
    assert torch.equal(found[0][0], one) and torch.equal(found[0][1], two) and found[1] == (None, None)
