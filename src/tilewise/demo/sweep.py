"""Attention alone, causal, over growing sequences: time, peak extra memory and error against fp64, next to SDPA and the naive formula."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.bench.memory import peak_extra_bytes
from tilewise.bench.timing import interleave
from tilewise.demo.model import Attention, GPTConfig
from tilewise.demo.place import CPU, Place

CHECKED_ROWS = 128
RUNS = 7  # of each contender in each direction at least: error, warm-up, three timed, memory
NAIVE_LIMIT_BYTES = 512 << 20
TIMING_BUDGET_S = 0.5  # for one contender in one direction at one length


class Point(NamedTuple):
    """What one contender needed at one length; times are medians in milliseconds, errors the largest absolute ones against fp64."""

    name: str
    seqlen: int
    forward_ms: float
    both_ms: float
    peak_bytes: int | None
    error_o: float
    error_grad: float


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All points of a sweep, and in a sentence each what was left out and why."""

    heads_q: int
    heads_k: int
    head_dim: int
    points: tuple[Point, ...]
    omitted: tuple[str, ...]
    place: Place = CPU

    def of(self, name: str) -> list[Point]:
        return [point for point in self.points if point.name == name]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(point.name for point in self.points))


def naive_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
    """The formula as written, score matrix and all. q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_k, head_dim).

    `rows` (seqlen_q,) int64 says which position each query has, where q holds a choice of rows; by default they are all of them.
    """
    group = q.shape[2] // k.shape[2]
    q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)  # (batch, heads_k, group, seqlen_q, head_dim)
    k, v = (x.permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))  # (batch, heads_k, 1, seqlen_k, head_dim)
    new = {"dtype": torch.int64, "device": q.device}
    position = torch.arange(q.shape[3], **new) if rows is None else rows
    hidden = torch.arange(k.shape[3], **new) > position[:, None]
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    o = scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3)


class Inputs(NamedTuple):
    """q, k, v and the gradient that reaches the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor


def make_inputs(seqlen: int, config: GPTConfig, place: Place = CPU, seed: int = 0) -> Inputs:
    """Fresh normal inputs of batch 1, the same ones on every device but for rounding to its dtype."""
    generator = torch.Generator().manual_seed(seed + seqlen)
    heads = (config.heads_q, config.heads_k, config.heads_k, config.heads_q)
    shapes = ((1, seqlen, n, config.head_dim) for n in heads)
    new = {"dtype": torch.float32, "device": "cpu"}
    q, k, v, d_o = (torch.randn(shape, generator=generator, **new).to(place.device, place.dtype) for shape in shapes)
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_o)


class Result(NamedTuple):
    """The checked rows of the output and of dQ, and the whole of dK and dV."""

    o: Tensor
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor


class Yardstick:
    """The exact answer (fp64) and the naive formula's (in the inputs' dtype) on a choice of query rows.

    The gradient that reaches every other row is zero, so these rows alone determine dK and dV: the check is complete for them,
    at a cost of O(rows * seqlen).
    """

    def __init__(self, inputs: Inputs) -> None:
        seqlen = inputs.q.shape[1]
        self.inputs = inputs
        rows = torch.linspace(0, seqlen - 1, min(seqlen, CHECKED_ROWS), dtype=torch.float32, device="cpu")
        self.rows = rows.round().long().unique().to(inputs.q.device)
        self.d_o = torch.zeros_like(inputs.d_o)
        self.d_o[:, self.rows] = inputs.d_o[:, self.rows]
        self.exact = self._on_rows(torch.float64)
        self.naive = self._on_rows(inputs.q.dtype)

    def _on_rows(self, dtype: torch.dtype) -> Result:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (self.inputs.q[:, self.rows], self.inputs.k, self.inputs.v)]
        o = naive_attention(*leaves, rows=self.rows)
        return Result(o.detach(), *torch.autograd.grad(o, leaves, self.d_o[:, self.rows].to(dtype)))

    def measure(self, attention: Attention) -> Result:
        """What `attention` gives for the same rows."""
        o = attention(*self.inputs[:3])
        d_q, d_k, d_v = torch.autograd.grad(o, self.inputs[:3], self.d_o)
        return Result(o.detach()[:, self.rows], d_q[:, self.rows], d_k, d_v)

    def errors(self, got: Result) -> tuple[float, float]:
        """Largest absolute error of O, and of dQ, dK and dV."""
        error_o, *error_grad = ((x - exact).abs().max() for x, exact in zip(got, self.exact, strict=True))
        return error_o.item(), torch.stack(error_grad).max().item()  # torch's max lets NaN through


def score_bytes(seqlen: int, config: GPTConfig, place: Place = CPU) -> int:
    """Bytes of one score matrix, all heads."""
    return place.dtype.itemsize * config.heads_q * seqlen * seqlen


def forward(attention: Attention, inputs: Inputs) -> None:
    with torch.no_grad():
        attention(*inputs[:3])


def forward_backward(attention: Attention, inputs: Inputs) -> None:
    torch.autograd.grad(attention(*inputs[:3]), inputs[:3], inputs.d_o)


def sweep(
    attentions: Mapping[str, Attention],
    seqlens: Sequence[int],
    config: GPTConfig,
    *,
    place: Place = CPU,
    deadline: float = math.inf,
    on_point: Callable[[int], None] = lambda seqlen: None,
) -> Sweep:
    """Measure every attention function, and the naive formula, at every length.

    The naive formula stops where one score matrix would take more than NAIVE_LIMIT_BYTES. A length is left out that, judged by the one
    before, would end after `deadline` (`time.monotonic()` seconds). `on_point(seqlen)` is called after each length.
    """
    points: list[Point] = []
    omitted: list[str] = []
    for seqlen in sorted(set(seqlens)):
        if time.monotonic() + predicted_s(points, seqlen) > deadline:
            omitted.append(f"{seqlen:,} tokens: left out, the time budget was spent.")
            continue
        contenders = dict(attentions)
        need, limit = score_bytes(seqlen, config, place), NAIVE_LIMIT_BYTES
        if need <= limit:
            contenders["naive"] = naive_attention
        else:
            omitted.append(
                f"naive formula at {seqlen:,} tokens: not run, one score matrix would take {need >> 20:,} MiB (limit {limit >> 20:,} MiB)."
            )
        points += measure(contenders, make_inputs(seqlen, config, place), place)
        on_point(seqlen)
    sizes = {"heads_q": config.heads_q, "heads_k": config.heads_k, "head_dim": config.head_dim}
    return Sweep(**sizes, points=tuple(points), omitted=tuple(omitted), place=place)


def predicted_s(points: Sequence[Point], seqlen: int) -> float:
    """How long `measure` will take at `seqlen`, judged by the longest length so far: the time of attention grows with its square."""
    longest = max((point.seqlen for point in points), default=0)
    last = [point for point in points if point.seqlen == longest]
    growth = (seqlen / longest) ** 2 if last else 0.0
    runs_s = (RUNS * growth * 1e-3 * (point.forward_ms + point.both_ms) for point in last)
    return sum(max(2 * TIMING_BUDGET_S, run_s) for run_s in runs_s)


def measure(contenders: Mapping[str, Attention], inputs: Inputs, place: Place = CPU) -> list[Point]:
    """The points of one length. The error comes first, which also warms every contender up."""
    yardstick = Yardstick(inputs)
    errors = {name: yardstick.errors(yardstick.measure(attention)) for name, attention in contenders.items()}
    only = {name: partial(forward, attention, inputs) for name, attention in contenders.items()}
    both = {name: partial(forward_backward, attention, inputs) for name, attention in contenders.items()}
    only_s, both_s = (interleave(tasks, budget_s=TIMING_BUDGET_S, device=place.device, clock=place.clock) for tasks in (only, both))
    peak = {name: peak_extra_bytes(task, place.device)[1] for name, task in both.items()}
    seqlen = inputs.q.shape[1]
    return [Point(name, seqlen, 1e3 * only_s[name].median, 1e3 * both_s[name].median, peak[name], *errors[name]) for name in contenders]
