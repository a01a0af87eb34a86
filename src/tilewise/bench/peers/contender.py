"""What a contender is, of attention and of decoding, and what several have in common: their reasons, and tensors quantised ahead."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.bench.memory import available_bytes
from tilewise.bench.sets import Attend, Caches, Cell, Workload
from tilewise.machine.roofline import score_matrix_bytes


class Impl(Protocol):
    """One way to compute attention, as its users call it."""

    @property
    def name(self) -> str: ...

    # One that sets `heads_first = True` is given inputs stored as (batch, heads, seqlen, head_dim), so that it copies none. One that sets
    # `in_eight_bits = True` is held to the tolerance of testing/eight_bits.py in place of that for 16 bits and more.

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        """Sentences that say why `workload` cannot run there; empty when it is worth trying."""
        ...

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        """Everything that is done once, before the first call."""
        ...


class DecodeImpl(Protocol):
    """One way to decode. `prepare` returns attend(copy) -> O (batch, new, heads_q, head_dim) with one copy of the caches."""

    @property
    def name(self) -> str: ...

    def why_not(self, cell: Cell, device: torch.device) -> list[str]: ...

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]: ...


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing, or is no package
        return False


def not_here(name: str, module: str, device: torch.device) -> list[str]:
    """Why kernels of the package `module` cannot run: they need a CUDA device, and the package."""
    reasons = [] if device.type == "cuda" else [f"{name} runs on CUDA devices only"]
    return reasons + ([] if installed(module) else [f"{module} is not installed"])


def no_latent(cell: Cell) -> list[str]:
    """Why a peer, as it is called here, does not decode the cell."""
    return ["it is not called with latent caches here"] if cell.latent else []


def too_large(workload: Workload, device: torch.device, *, matrices: int, itemsize: int | None = None) -> list[str]:
    """A sentence when `matrices` score matrices would take more than half of the memory that is free."""
    need, free = matrices * score_matrix_bytes(workload.shape, itemsize), available_bytes(device)
    if free is None or need <= free / 2:
        return []
    return [f"it keeps {matrices} score matrices, {need / 1e9:.1f} GB here, and half of the free memory is {free / 2e9:.1f} GB"]


def not_in_eight_bits(workload: Workload) -> list[str]:
    """Why no contender in 8 bits takes it."""
    wrong = ["8 bits are for the forward pass"] if workload.grad else []
    if workload.dtype not in (torch.bfloat16, torch.float16):
        wrong.append("8 bits stand beside fp16 and bf16")
    return wrong


class Eight(NamedTuple):
    """q, k and v in e4m3, and their scales (batch, heads) fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: tuple[Tensor, Tensor, Tensor]


def quantised_ahead(attend: Callable[[Eight], Tensor], per: str = "head") -> Attend:
    """`attend` of e4m3 tensors as a contender on 16-bit ones, which it quantises when they are others than those of the last call."""
    seen: list[tuple[tuple, Eight]] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not seen or any(x is not y for x, y in zip(seen[0][0], (q, k, v), strict=True)):
            seen[:] = [((q, k, v), _quantised(q, k, v, per))]
        return attend(seen[0][1])

    return call


def _quantised(q: Tensor, k: Tensor, v: Tensor, per: str) -> Eight:
    from tilewise.quantising import quantise

    def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
        numbers, scale = quantise(x.detach(), "fp8", per=per)
        return numbers, scale.expand(x.shape[0], x.shape[2]).contiguous()

    (q, q_scale), (k, k_scale), (v, v_scale) = (quantised(x) for x in (q, k, v))
    return Eight(q, k, v, (q_scale, k_scale, v_scale))
