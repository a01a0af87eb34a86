"""The Triton backend: any GPU that Triton compiles for, from one source (kernels/)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends import Backend, BoundDecode
from tilewise.backends.tables import documents
from tilewise.backends.tables.window import window_of
from tilewise.backends.triton import targets
from tilewise.masks import Mask
from tilewise.problem import AppendCall, Call, DecodeCall, Gradients, Problem

__all__ = ["Triton"]

DTYPES = torch.float32, torch.bfloat16, torch.float16
MOST_DIM = 512
FP32_GRAD_BYTES = 144 << 10  # of the shared memory of NVIDIA's thread blocks, with a head_dim above MOST_DIM / 2


class Triton(Backend):
    """FlashAttention-2 for NVIDIA GPUs from Ampere on and AMD's, deterministic, without atomics."""

    name = "triton"
    eight_bits = True
    keeps_row_max = True

    @property
    def by_name(self) -> str:
        """The interpreter is for tests."""
        return "in Triton's interpreter it runs only when asked for by name" if targets.interpreted() else ""

    def reads(self, problem: Problem) -> bool:
        """Nothing is, where `why_not` is empty: documents are found from cu_seqlens on the GPU."""
        return bool(self.why_not(problem))

    def reads_decode(self, problem: Problem, mask: Mask, page_size: int | None, in_keys: bool) -> bool:
        """What `decode.why_not` refuses is cut by lengths on the host."""
        from tilewise.backends.triton.config import decodes

        return window_of(mask) is None or not decodes(problem.dtype, problem.head_dim, problem.head_dim_v)

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences that say why this backend cannot run the problem; empty when it can."""
        takes = "cpu" if targets.interpreted() else "cuda"
        if problem.device != takes:
            return [f"it computes on GPUs, the tensors are on {problem.device}"]
        refused = targets.why_not(problem.capability)
        reasons = [refused] if refused else []
        if problem.eight_bits and problem.precision is None:
            if (v := problem.v_dtype or problem.dtype) not in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
                reasons.append(f"beside q in {problem.dtype} it takes v in float8_e4m3fn, bf16 or fp16, not {v}")
        else:
            reasons += problem.mixed if problem.dtype in DTYPES else [f"it computes fp32, bf16 and fp16, not {problem.dtype}"]
        wide, fp32_grad = max(problem.head_dim, problem.head_dim_v), problem.grad and problem.dtype == torch.float32
        if wide > MOST_DIM:
            reasons.append(f"it takes head_dim and head_dim_v up to {MOST_DIM}, not {problem.head_dim} and {problem.head_dim_v}")
        elif wide > MOST_DIM // 2 and fp32_grad and targets.shared_bytes(problem.capability) < FP32_GRAD_BYTES:
            reasons.append(f"its fp32 gradients of a head_dim above {MOST_DIM // 2} need {FP32_GRAD_BYTES >> 10} KiB of shared memory")
        return reasons

    def missing(self, problem: Problem) -> str:
        """What keeps an NVIDIA GPU from Ampere on that is here, or an AMD one, from running the problem: no Triton, or one that cannot be trusted."""
        refused = targets.why_not(problem.capability)
        old = not torch.version.hip and problem.capability is not None and problem.capability < (8, 0)
        return refused if problem.device == "cuda" and not old and self.why_not(problem) == [refused] else ""

    def describe(self) -> str:
        """Triton's version, for `explain` and `doctor`."""
        if not targets.installed():
            return ""
        import triton

        return f"Triton {triton.__version__}"

    def details(self, call: Call) -> list[str]:
        """The configurations of its kernels, for `explain`."""
        arch, passes = targets.of_device(call.q.device).arch, ["forward", *(("dkdv", "dq") if call.grad else ())]
        found = [(name, _config(call, name)) for name in passes]
        return [f"{name}: tiles of {c.tile_m} x {c.tile_n}, {c.warps} warps, {c.stages} stages, for {arch}" for name, c in found]

    def why_not_decode(self, problem: Problem) -> list[str]:
        """As `why_not`; decode has some larger head dims."""
        from tilewise.backends.triton.config import decodes

        larger = decodes(problem.dtype, problem.head_dim, problem.head_dim_v)
        return self.why_not(replace(problem, head_dim=1, head_dim_v=1) if larger else problem)

    def bind_decode(self, call: DecodeCall) -> BoundDecode | None:
        """What computes calls like this one, by split-KV."""
        from tilewise.backends.triton import prefix

        return prefix.bind(call)

    def merge(self, outputs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """O and LSE from fp32 parts of any number of keys, in one launch."""
        device = outputs.device
        if outputs.dtype != torch.float32 or dtype not in DTYPES or outputs.shape[-1] > MOST_DIM:
            return None
        if device.type != ("cpu" if targets.interpreted() else "cuda"):
            return None
        if targets.why_not(torch.cuda.get_device_capability(device) if outputs.is_cuda else None):
            return None
        from tilewise.backends.triton import launch, merging

        o = torch.empty(outputs.shape[1:], dtype=dtype, device=device)
        lse = torch.empty(lses.transpose(-1, -2).shape[1:], dtype=torch.float32, device=device)
        if lse.numel():
            with launch.on(device):
                merging.merge(outputs.flatten(1, -2), lses.flatten(1), o, lse)
        return o, lse

    def bind_append(self, call: AppendCall) -> Callable[[tuple, Tensor | None], Tensor | None] | None:
        """What writes calls like this one."""
        from tilewise.backends.triton import append

        return append.bind(call)

    def tile(self, call: Call) -> tuple[int, int]:
        """(tile_m, tile_n) of the forward pass."""
        found = _config(call, "forward")
        return found.tile_m, found.tile_n

    def bind(self, call: Call):
        """`forward` and `backward` for more calls that differ in nothing but what tensors hold."""
        from tilewise.backends.triton import helpers
        from tilewise.backends.triton.bound import Bound

        documents.check(call.mask, call.seqlen_q, call.seqlen_k)
        call = _in_rows(call)
        return Bound(call, begin=lambda bound: helpers.begin_call(bound, call))

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32."""
        call = _in_rows(call)
        return self.bind(call).results(call)

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Gradients given the forward's outputs and the gradients that reach them; the bias's only where `bias_grad` asks for it."""
        call = _in_rows(call)
        wanted = bias_grad and call.bias is not None
        return Gradients(*self.bind(call).backward(call.q, call.k, call.v, o, lse.contiguous(), d_o, d_lse, call.extras, wanted))


def _config(call: Call, purpose: str):
    from tilewise.backends.triton.bound import kind_of
    from tilewise.backends.triton.config import config_of_call, weight_of

    return config_of_call(targets.of_device(call.q.device), purpose, call, weight_of(call), kind_of(call.mask))


def _in_rows(call: Call) -> Call:
    """The call with copies of the tensors that lack contiguous rows."""
    scattered = {name: x.contiguous() for name in ("q", "k", "v") if (x := getattr(call, name)).stride(-1) != 1}
    return replace(call, **scattered) if scattered else call
