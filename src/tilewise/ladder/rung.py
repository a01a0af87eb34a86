"""A rung of the ladder, as the rest of the project sees it: a forward pass of attention that says what it cannot do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from tilewise.errors import ShapeError, UnsupportedError
from tilewise.ladder import stamps
from tilewise.ladder.operands import RECIPES, Operands
from tilewise.masks import Causal, Full
from tilewise.problem import Call, Problem
from tilewise.sm90 import jit

HEAD_DIMS = (64, 128)
MOST_HEADS = 65535  # the second dimension of a grid


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder: `rung(q, k, v, causal=False)`, or a backend of forward passes for the checks.

    `module` is the file under tilewise.ladder; `choice` what this rung fixes of its Config; `recipe`, of operands.py, is
    how it has its operands: in bf16, or in 8 bits.
    """

    name: str
    module: str
    title: str
    choice: dict = field(default_factory=dict, hash=False)
    recipe: str = "bf16"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, operands: Operands | None = None
    ) -> Tensor:
        """Attention of one head a row: softmax(scale Q K^T) V, with `scale` 1 / sqrt(head_dim) by default.

        Args:
            q, k, v: (batch * heads, seqlen, head_dim) bf16 on a Hopper GPU, head_dim 64 or 128; any seqlen, and the same for all.
            causal: query i sees keys 0..i.
            operands: what `self.operands` made of q, k, v and scale before, which takes a rung in 8 bits longer than its kernel.

        Returns:
            O, (batch * heads, seqlen, head_dim) bf16.

        Raises:
            ShapeError: the tensors do not fit each other.
            ValueError: scale is not positive and finite.
            UnsupportedError: this rung, or this machine, cannot run it; says what to install or do.
        """
        _check_shapes(q, k, v)
        self.require(q.dtype, q.shape[-1], q.device.type)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        return self.run(q, k, v, causal, scale, operands=operands)[0]

    def trace(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False):
        """The phases of a few blocks' warps, as tracing.Trace; the arguments and errors of a call."""
        from tilewise.ladder.tracing import record

        _check_shapes(q, k, v)
        self.require(q.dtype, q.shape[-1], q.device.type)
        return record(self, q, k, v, causal)[0]

    @cached_property
    def code(self) -> ModuleType:
        """The rung's module; imports the DSL, which reads there and then for which GPU it compiles."""
        os.environ.setdefault("CUTE_DSL_ARCH", jit.ARCH)
        return import_module(f"tilewise.ladder.{self.module}")

    def compiled(self, head_dim: int, causal: bool, options: str = "", stamped: bool = False):
        """The kernel for a Hopper GPU, with time stamps if `stamped` (stamps.py); needs the DSL, but no GPU."""
        if missing := jit.why_no_compiler():
            raise UnsupportedError(f"{self.name} cannot be compiled: {'; '.join(missing)}")
        code = stamps.stamped(self.module) if stamped else self.code
        return jit.compiled(code.launch, self.arguments(stamped), code.configure(head_dim, causal, **self.choice), options)

    def arguments(self, stamped: bool = False) -> Callable:
        """Of the launch function, as `jit.compiled` takes them."""
        return _arguments(self.recipe, self._stores_scores, stamped)

    @property
    def _stores_scores(self) -> bool:
        return getattr(self.code, "SCRATCH", False)

    def reasons(self, dtype: torch.dtype, head_dim: int, device: str) -> list[str]:
        """Sentences that say why this rung cannot run on such tensors here; empty where it can."""
        wrong = []
        if dtype != torch.bfloat16:
            wrong.append(f"it takes bfloat16 only, and the tensors are {dtype}")
        if head_dim not in HEAD_DIMS:
            wrong.append(f"it takes head_dim {' and '.join(map(str, HEAD_DIMS))}, and this is {head_dim}")
        if device != "cuda":
            wrong.append(f"it runs on a Hopper GPU, and the tensors are on {device}: move them to 'cuda'")
        return wrong or jit.why_not_here()

    def require(self, dtype: torch.dtype, head_dim: int, device: str) -> None:
        if reasons := self.reasons(dtype, head_dim, device):
            raise UnsupportedError(f"{self.name} cannot run this: {'; '.join(reasons)}")

    @property
    def in_eight_bits(self) -> bool:
        return self.recipe != "bf16"

    def operands(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Operands:
        """What `run` makes of checked tensors ahead of its kernel."""
        return RECIPES[self.recipe].prepare(q, k, v, scale)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, events: Tensor | None = None, operands: Operands | None = None
    ) -> tuple[Tensor, Tensor]:
        """O (heads, seqlen, head_dim) and LSE (heads, seqlen) of checked tensors; with stamps where there is room for them, `events` (tracing.py).

        operands: those of q, k, v and scale, if they are there already.
        """
        heads, seqlen, head_dim = q.shape
        o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty((heads, seqlen), dtype=torch.float32)
        if o.numel() == 0:
            return o, lse
        if heads > MOST_HEADS:
            raise UnsupportedError(
                f"{self.name} takes at most {MOST_HEADS} heads in all (batch * heads), and this is {heads}; cut the batch"
            )
        scratch = [self._scores(q)] if self._stores_scores else []
        kernel = self.compiled(head_dim, causal, stamped=events is not None)
        with torch.cuda.device(q.device):
            tensors, others = operands or self.operands(q, k, v, scale)
            kernel(*tensors, o, lse, *scratch, *others, *([] if events is None else [events]))
        return o, lse

    def _scores(self, q: Tensor) -> Tensor:
        heads, seqlen, _ = q.shape
        need = 4 * heads * seqlen**2
        cached = torch.cuda.memory_reserved(q.device) - torch.cuda.memory_allocated(q.device)
        free = torch.cuda.mem_get_info(q.device)[0] + cached
        if need > free:
            raise UnsupportedError(
                f"{self.name} keeps the score matrix, ({heads}, {seqlen}, {seqlen}) in fp32: {need / 1e9:.1f} GB, "
                f"and {free / 1e9:.1f} GB are free; take fewer tokens or a rung from k2 on, which never stores it"
            )
        return torch.empty((heads, seqlen, seqlen), dtype=torch.float32, device=q.device)

    # The same as a backend (tilewise.backends.Backend), for the checks.

    def why_not(self, problem: Problem) -> list[str]:
        extras = ("softcap", "bias", "alibi", "sink", "dropout", "grad")
        wrong = [f"it has no {name}" for name in extras if getattr(problem, name)]
        if problem.group != 1 or problem.head_dim != problem.head_dim_v:
            wrong.append("it takes as many key heads as query heads, and head_dim_v = head_dim")
        if problem.mask not in ("full", "band"):
            wrong.append("it takes full and causal masks only")
        return wrong or self.reasons(problem.dtype, problem.head_dim, problem.device)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """O (batch, seqlen, heads, head_dim) and LSE (batch, heads, seqlen)."""
        wrong = self.why_not(call.problem)
        if call.mask not in (Full(), Causal()) or call.seqlen_q != call.seqlen_k:
            wrong = [*wrong, "it takes full and causal masks of equal lengths only"]
        if not 0 < call.scale < math.inf:
            wrong = [*wrong, f"it takes a positive scale only, and this is {call.scale}"]
        if wrong:
            raise UnsupportedError(f"{self.name} cannot run this: {'; '.join(wrong)}")
        heads = (x.transpose(1, 2).flatten(0, 1) for x in (call.q, call.k, call.v))
        o, lse = self.run(*heads, call.mask == Causal(), call.scale)
        return o.unflatten(0, (call.batch, call.heads_q)).transpose(1, 2), lse.unflatten(0, (call.batch, call.heads_q))


@cache
def _arguments(recipe: str, scores: bool, stamped: bool) -> Callable[..., list]:
    return partial(_stand_ins, recipe, scores, stamped)


def _stand_ins(recipe: str, scores: bool, stamped: bool, config) -> list:
    """The recipe's operands around o (heads, seqlen, head_dim) bf16, lse (heads, seqlen) fp32 and, where S is stored, S (heads, seqlen, seqlen) fp32;
    with stamps the events last, (blocks * WARPS * SLOTS, 2) int32 (sm90/phases.py).
    """
    from tilewise.sm90.dsl import BFloat16, Float32

    heads, seqlen = jit.size(), jit.size()
    tensors, others = RECIPES[recipe].stand_ins(config, heads, seqlen)
    found = [*tensors, jit.tensor(BFloat16, heads, seqlen, config.head_dim), jit.tensor(Float32, heads, seqlen, aligned=False)]
    if scores:
        found.append(jit.tensor(Float32, heads, seqlen, seqlen, aligned=False))
    return [*found, *others, *([stamps.stand_in()] if stamped else [])]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ShapeError(f"{name} must be (batch * heads, seqlen, head_dim), got {tuple(x.shape)}")
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            given, expected = (f"{tuple(y.shape)} {y.dtype} on {y.device}" for y in (x, q))
            raise ShapeError(f"{name} must be as q, {expected}; got {given}")
