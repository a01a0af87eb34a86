"""Gradients by kernels and arguments that were found once, so that Python only allocates and launches."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.plan import Plan, elements_of_part
from tilewise.backends.hopper.backward.repair import call as repairs
from tilewise.backends.hopper.operands import Band, Changes, Given, Gradients, RepairScalars, Scratch
from tilewise.backends.tables.keeping import hold
from tilewise.problem import Call, gradient_like
from tilewise.sm90.jit import aligned, readable, rows, steps

KEPT_BYTES = 1 << 18  # larger scratch is allocated anew; its kernels take longer than that
Found = tuple[Band, Callable[[Tensor, Tensor], None]]  # tables, and what writes into them what documents of cu_seqlens see


class Bound:
    """Gradients of tensors like those of `call`, on whichever stream is current.

    Little scratch is kept, one a stream, as in hopper/bound.py. A call takes it away while it launches its kernels: those of two threads may
    alternate on a stream.
    """

    def __init__(
        self,
        call: Call,
        kernel: Callable,
        plan: Plan,
        scalars: Callable[[bool], tuple],
        seen: Band | Callable[[bool], Found],
        changes: Changes | Callable[..., Changes] | None,
        *,
        repair: tuple[Callable, RepairScalars] | None = None,
        of_bias: Callable | None = None,
        of_sink: Callable | None = None,
        gradient: Callable[[Tensor], Tensor] = gradient_like,
        kept: bool = True,
    ) -> None:
        """`kernel(Given, Gradients, Scratch, turns, scalars(whether there is dLSE), seen, changes)` computes the call.

        turns: those of the plan's first launch. seen: of packed documents, what gives tables, by whether they are kept, and what finds them.
        changes: or what makes them of the call's other tensors (`problem.Extras`). repair: the launch that follows, and its scalars. of_bias(Given,
        Scratch, Changes) gives dBias, of_sink(sink, L and -delta of Scratch) dSink. gradient: how an input's gradient lies. kept: as in
        `backends.Bound`.
        """
        self.kernel, self.plan, self.device, self.tables = kernel, plan, call.q.device.index, (seen, changes, of_bias)
        self.kept, self.of_bias, self.of_sink = kept, of_bias, of_sink
        operand = functools.partial(short.as_operand, on_gpu=call.q.is_cuda and kept)
        self.turns, self.scalars = operand(plan.turns[0][1]), tuple(operand(scalars(has)) for has in (False, True))
        self.find, self.change = seen if callable(seen) else None, changes if callable(changes) else None
        self.changes = None if changes is None or self.change is not None else operand(changes)
        self.repair, self.numbers = (None, None) if repair is None else (repair[0], operand(repair[1]))
        self.seen = None if self.find is not None else (operand(seen), self.repair and operand(repairs.band(seen)))
        self.empty = short.allocator(call.q.device)
        wide = torch.float32 if plan.config.wide_keys else call.q.dtype
        of_inputs = (call.q, call.q.dtype, not plan.lends), (call.k, wide, True), (call.v, wide, True)
        self.gradients = tuple(_layout(x, gradient(x), dtype, any_strides) for x, dtype, any_strides in of_inputs)
        self.scratch = tuple(None if each is None else (each[0], short.strides(each[0]), each[1]) for each in plan.scratch)
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in filter(None, plan.scratch))
        self.keeps, self.scratch_of = kept and not plan.lends and size <= KEPT_BYTES, {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        d_o: Tensor,
        d_lse: Tensor | None,
        extras: tuple[Tensor | None, ...],
        bias_grad: bool,
    ) -> tuple[Tensor | None, ...]:
        """LSE is contiguous; O, dO and dLSE may have any strides."""
        if short.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, k, v, o, lse, d_o, d_lse, extras, bias_grad)
        captures = short.capturing()
        if captures:
            hold(self.tables)
        if not d_o.is_contiguous():
            d_o = readable(d_o)
        if not o.is_contiguous():
            o = readable(o)
        d_q, d_k, d_v = gradients = Gradients(*(self.empty(*each) for each in self.gradients))
        keeps = self.keeps and not captures  # a graph may be replayed on any stream
        stream = short.current_stream(self.device) if keeps else None
        kept = self.scratch_of.pop(stream, None) if keeps else None
        scratch, operand, spoiled, band, of_repairs, look = kept = kept or self._scratch(d_q, keeps)
        if look is not None:
            look(extras[4], extras[5])
        changes = self.changes if self.change is None else self.change(*extras)
        rest = self.turns, self.scalars[d_lse is not None], band, changes
        given = Given(q, k, v, o, lse, d_o, lse if d_lse is None else rows(d_lse))
        try:
            self.kernel(given, gradients, operand, *rest)
        except ValueError:  # where one does not begin at a multiple of 16 bytes: the kernel's function looks, before it launches anything
            given = Given(aligned(q), aligned(k), aligned(v), aligned(o), lse, aligned(d_o), given.dL)
            self.kernel(given, gradients, operand, *rest)
        if self.repair is not None:
            self.repair(repairs.repaired(given, gradients), spoiled, self.numbers, of_repairs, changes)
        if bias_grad and not keeps:  # the bias gradient's sums take the memory that is free by now
            scratch, kept, operand, spoiled = Scratch(*scratch[:2], None, None, None, None, None), None, None, None
        d_bias = self.of_bias(given, scratch, changes) if bias_grad else None
        d_sink = None if self.of_sink is None else self.of_sink(extras[2], scratch.lse, scratch.minus_delta)
        if keeps:
            self.scratch_of[stream] = kept
        return d_q, d_k, d_v, d_bias, d_sink

    def _scratch(self, d_q: Tensor, keeps: bool) -> tuple:
        """Scratch as torch has it, and as the kernel takes it; what repairs take of it; what is seen, as the kernel and repairs take it, and what
        finds that.
        """
        scratch = Scratch(*(None if each is None else self.empty(*each) for each in self.scratch))
        if self.plan.lends:
            scratch = scratch._replace(partial=place_of_parts(self.plan.config, self.plan.parts, d_q))
        operand = functools.partial(short.as_operand, on_gpu=d_q.is_cuda and keeps)
        spoiled = None if self.repair is None else operand(repairs.spoiled(scratch))
        if self.find is None:
            return scratch, operand(scratch), spoiled, *self.seen, None
        band, look = self.find(keeps)
        return scratch, operand(scratch), spoiled, operand(band), self.repair and operand(repairs.band(band)), look


def place_of_parts(config: Config, parts: int, d_q: Tensor) -> Tensor:
    """(parts, elements) fp32: the end of dQ, which is not written before the kernel is through (of the queries that `shares.lent` counts)."""
    elements = elements_of_part(config)
    return d_q.view(-1)[d_q.numel() - 2 * parts * elements :].view(torch.float32).view(parts, elements)


def _layout(x: Tensor, gradient: Tensor, dtype: torch.dtype, any_strides: bool) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of x's gradient, which lies as `gradient` where the kernels can write it so."""
    return tuple(x.shape), (steps(gradient) if any_strides else None) or short.strides(x.shape), dtype
