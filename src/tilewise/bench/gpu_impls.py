"""Contenders that are kernels of Hopper GPUs: the ladder's rungs, and FlashAttention-3 as vLLM builds it."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tilewise.bench.packed_impls import documents_of
from tilewise.bench.workloads import Workload
from tilewise.errors import UnsupportedError
from tilewise.ladder import RUNGS, VARIANTS, Rung
from tilewise.masks import Causal, Full, SlidingWindow


@dataclass(frozen=True)
class OnLadder:
    """A rung of the ladder, or a variant of one, under its plain name. What a rung in 8 bits multiplies is there before it is timed."""

    rung: Rung
    heads_first: bool = True

    @property
    def name(self) -> str:
        return self.rung.name

    @property
    def in_eight_bits(self) -> bool:
        return self.rung.in_eight_bits

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        other = workload.mask not in (Full(), Causal()) or workload.seqlen_q != workload.seqlen_k
        wrong = ["the ladder takes full and causal masks of equal lengths only"] * other + self.rung.why_not(workload.problem(device))
        return wrong + (["the ladder has the usual scale only"] if workload.scale is not None else [])

    def prepare(self, workload: Workload, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        causal, kept = workload.mask == Causal(), []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # views, as heads come first in memory
            if self.in_eight_bits and not (kept and all(x is y for x, y in zip((q, k, v), kept[0], strict=True))):
                kept[:] = (q, k, v), self.rung.operands(*heads, workload.softmax_scale)
            o = self.rung(*heads, causal=causal, operands=kept[1] if kept else None)
            return o.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)

        return attend


LIBRARY = "TILEWISE_FA3_LIBRARY"


@dataclass(frozen=True)
class PackedFlashAttention3:
    """FlashAttention-3's forward from the library that vLLM ships, for machines without Dao-AILab's own package.

    The environment variable TILEWISE_FA3_LIBRARY names the file, `_vllm_fa3_C.abi3.so` of vLLM's wheel. It takes packed sequences only.
    """

    name: str = "fa3:vllm"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append(f"{self.name} runs on CUDA devices only")
        if not Path(os.environ.get(LIBRARY) or "/nowhere/at/all").is_file():
            reasons.append(f"the environment variable {LIBRARY} does not name the library of vLLM's wheel, _vllm_fa3_C.abi3.so")
        if workload.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"{self.name} takes fp16 and bf16 only")
        if workload.grad:
            reasons.append(f"{self.name} has no backward")
        if _window(workload) is None and documents_of(workload) is None:
            reasons.append("only full, causal and window masks and packed documents can be expressed in its arguments")
        return reasons + workload.lacking("scale", "softcap", "sink")

    def prepare(self, workload: Workload, device: torch.device) -> Callable[..., Tensor]:
        load_library(os.environ[LIBRARY])
        return packed(torch.ops._vllm_fa3_C.fwd.default, workload, device)


@cache
def load_library(path: str) -> None:
    torch.ops.load_library(path)


SINK = "s_aux"  # of vLLM's operator, in the inputs' dtype


def packed(operator, workload: Workload, device: torch.device) -> Callable[..., Tensor]:
    """`operator`, a forward on packed sequences with FlashAttention-3's names of arguments, as a contender on batches."""

    if documents := documents_of(workload):
        *starts, is_causal = documents
        left = right = -1
    else:
        starts = [range(0, (workload.batch + 1) * seqlen, seqlen) for seqlen in (workload.seqlen_q, workload.seqlen_k)]
        is_causal, left, right = _window(workload)
    longest = [max(end - start for start, end in itertools.pairwise(each)) for each in starts]
    cu_seqlens = [torch.tensor(list(each), dtype=torch.int32, device=device) for each in starts]
    fixed = {
        "cu_seqlens_q": cu_seqlens[0],
        "cu_seqlens_k": cu_seqlens[1],
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "softmax_scale": workload.softmax_scale,
        "is_causal": is_causal,
        "window_size_left": left,
        "window_size_right": right,
        "attention_chunk": 0,
        "softcap": workload.softcap,
        "is_rotary_interleaved": True,
        "num_splits": 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    names = [each.name for each in operator._schema.arguments]
    if workload.sink and SINK not in names:
        raise UnsupportedError(f"this build of FlashAttention-3 has no sink: its operator takes no {SINK}")
    arguments = [_argument(each, fixed) for each in operator._schema.arguments]

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **descales: Tensor) -> Tensor:
        tokens, given = (x.flatten(0, 1) for x in (q, k, v)), list(arguments)
        for name, x in descales.items() if sink is None else (*descales.items(), (SINK, sink)):
            given[names.index(name)] = x
        return operator(*tokens, *given[3:])[0].unflatten(0, (workload.batch, workload.seqlen_q))

    return attend


def _argument(argument, fixed: dict[str, object]) -> object:
    """What to pass for one argument of a schema: versions differ in which they have."""
    if argument.name in fixed:
        return fixed[argument.name]
    if argument.has_default_value():
        return argument.default_value
    if argument.name in ("q", "k", "v") or str(argument.type).startswith("Optional"):
        return None
    raise UnsupportedError(f"this build of FlashAttention-3 wants {argument.name} ({argument.type}), which is not known here")


def _window(workload: Workload) -> tuple[bool, int, int] | None:
    """(causal, left, right), -1 for a side without an end."""
    mask = workload.mask
    if mask in (Full(), Causal()):
        return mask == Causal(), -1, -1
    if isinstance(mask, SlidingWindow) and mask.align == "bottom_right" and mask.offset == 0:
        left, right = (-1 if side is None else side for side in (mask.left, mask.right))
        return right == 0, left, right
    return None


def gpu_impls() -> list[OnLadder | PackedFlashAttention3]:
    return [*(OnLadder(rung) for rung in (*RUNGS.values(), *VARIANTS.values())), PackedFlashAttention3()]
