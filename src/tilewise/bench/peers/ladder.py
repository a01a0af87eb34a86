"""The rungs of the ladder as contenders, under their plain names."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.bench.sets import Attend, Caches, Cell, Workload
from tilewise.ladder import BackwardRung, DecodeRung, Rung
from tilewise.masks import Causal, Full


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
        return _beyond(workload, self.rung.why_not(workload.problem(device)))

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        causal, kept = workload.mask == Causal(), []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given, batch, heads = (q, k, v), q.shape[0], q.shape[2]
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in given)  # views, as heads come first in memory
            if self.in_eight_bits and not (kept and all(x is y for x, y in zip(given, kept[0], strict=True))):
                kept[:] = given, self.rung.operands(q, k, v, workload.softmax_scale)
            o = self.rung(q, k, v, causal=causal, operands=kept[1] if kept else None)
            return o.unflatten(0, (batch, heads)).transpose(1, 2)

        return attend


@dataclass(frozen=True)
class BackwardOnLadder:
    """A rung of the ladder's branch for gradients, behind a forward pass of the ladder."""

    rung: BackwardRung
    heads_first: bool = True

    @property
    def name(self) -> str:
        return self.rung.name

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        wrong = ["it is a backward pass: give direction bwd"] if workload.direction == "fwd" else []
        return wrong + _beyond(workload, self.rung.why_not(workload.problem(device)))

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        causal, scale = workload.mask == Causal(), workload.softmax_scale
        return lambda q, k, v: _WithRung.apply(q, k, v, self.rung, causal, scale)


class _WithRung(torch.autograd.Function):
    """Attention of q, k, v (batch, seqlen, heads, head_dim), with a rung's gradients."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, rung: BackwardRung, causal: bool, scale: float) -> Tensor:
        ctx.rung, ctx.rest, ctx.batch = rung, (causal, scale), q.shape[0]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # views, as heads come first in memory
        o, lse = rung.attend(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        return o.unflatten(0, (ctx.batch, -1)).transpose(1, 2)

    @staticmethod
    def backward(ctx, d_o: Tensor):
        found = ctx.rung(*ctx.saved_tensors, d_o.transpose(1, 2).flatten(0, 1), *ctx.rest)
        return *(x.unflatten(0, (ctx.batch, -1)).transpose(1, 2) for x in found), None, None, None


def _beyond(workload: Workload, wrong: list[str]) -> list[str]:
    """What is beyond a rung, with what no rung has but those for decoding."""
    other = workload.mask not in (Full(), Causal()) or workload.seqlen_q != workload.seqlen_k
    wrong = ["the ladder takes full and causal masks of equal lengths only"] * other + wrong
    return wrong + (["the ladder has the usual scale only"] if workload.scale is not None else [])


@dataclass(frozen=True)
class DecodeOnLadder:
    """A rung of the ladder's branch for decoding: contiguous caches, one new token."""

    rung: DecodeRung

    @property
    def name(self) -> str:
        return self.rung.name

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        wrong = ["the ladder takes contiguous caches only"] if cell.page else []
        wrong += ["the ladder takes one new token only"] if cell.new > 1 else []
        return wrong + ([f"{self.name} runs on a Hopper GPU"] if device.type != "cuda" else [])

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]:
        q = caches.q.squeeze(1)
        return lambda copy: self.rung(q, *caches.copies[copy], caches.seqlens).unsqueeze(1)
