"""The gradients of a call like one before: everything but tensors was found once, so that Python only allocates and launches."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.operands import Given, Gradients, Scratch
from tilewise.backends.tables.keeping import hold
from tilewise.problem import Call
from tilewise.sm90.jit import aligned, readable

KEPT_BYTES = 1 << 18  # larger scratch is allocated anew; its kernels take longer than that


class Repeat:
    """dQ, dK and dV of q, k and v like those of `call`, which has no other tensors, on whichever stream is current.

    Little scratch is kept, one a stream, as in hopper/repeat.py. A call takes it away while it launches its kernels: those of two threads may
    alternate on a stream.
    """

    def __init__(self, call: Call, kernel: Callable, scratch: tuple, partial: Callable[[Tensor], Tensor] | None, rest: tuple) -> None:
        """`kernel(Given, Gradients, Scratch, *rest)` computes the call. scratch: shapes and dtypes, as in Plan; partial(dQ): Scratch.partial."""
        self.kernel, self.partial, self.device, self.tables = kernel, partial, call.q.device.index, rest
        self.rest = tuple(each if each is None else short.as_operand(each, call.q.is_cuda) for each in rest)
        self.empty = short.allocator(call.q.device)
        self.gradients = tuple((tuple(x.shape), short.strides(x.shape), x.dtype) for x in (call.q, call.k, call.v))
        self.scratch = tuple(None if each is None else (each[0], short.strides(each[0]), each[1]) for each in scratch)
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in filter(None, scratch))
        self.keeps, self.kept = partial is None and size <= KEPT_BYTES, {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """O and LSE are contiguous; dO may have any strides."""
        if short.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, k, v, o, lse, d_o)
        captures = short.capturing()
        if captures:
            hold(self.tables)
        if not d_o.is_contiguous():
            d_o = readable(d_o)
        d_q, d_k, d_v = gradients = Gradients(*(self.empty(*each) for each in self.gradients))
        keeps = self.keeps and not captures  # a graph may be replayed on any stream
        stream = short.current_stream(self.device) if keeps else None
        scratch = (self.kept.pop(stream, None) if keeps else None) or self._scratch(d_q, keeps)
        try:
            self.kernel(Given(q, k, v, o, lse, d_o, lse), gradients, scratch, *self.rest)
        except ValueError:  # where one does not begin at a multiple of 16 bytes: the kernel's function looks, before it launches anything
            given = Given(aligned(q), aligned(k), aligned(v), aligned(o), lse, aligned(d_o), lse)
            self.kernel(given, gradients, scratch, *self.rest)
        if keeps:
            self.kept[stream] = scratch
        return d_q, d_k, d_v

    def _scratch(self, d_q: Tensor, keeps: bool) -> object:
        made = (None if each is None else self.empty(*each) for each in self.scratch)
        scratch = Scratch(*made, partial=None if self.partial is None else self.partial(d_q))
        return short.as_operand(scratch, d_q.is_cuda) if keeps else scratch
