"""The gradients of a call like one before: everything but tensors was found once, so that Python only allocates and launches."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.operands import Given, Gradients, Scratch
from tilewise.backends.tables.keeping import hold
from tilewise.problem import Call
from tilewise.sm90.jit import aligned, readable


class Repeat:
    """dQ, dK and dV of q, k and v like those of `call`, which has no other tensors, on whichever stream is current."""

    def __init__(self, call: Call, kernel: Callable, scratch: tuple, partial: Callable[[Tensor], Tensor] | None, rest: tuple) -> None:
        """`kernel(Given, Gradients, Scratch, *rest)` computes the call. scratch: shapes and dtypes, as in Plan; partial(dQ): Scratch.partial."""
        self.kernel, self.partial, self.device, self.tables = kernel, partial, call.q.device.index, rest
        self.rest = tuple(each if each is None else short.as_operand(each, call.q.is_cuda) for each in rest)
        self.empty = short.allocator(call.q.device)
        self.gradients = tuple((tuple(x.shape), short.strides(x.shape), x.dtype) for x in (call.q, call.k, call.v))
        self.scratch = tuple(None if each is None else (each[0], short.strides(each[0]), each[1]) for each in scratch)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """O and LSE are contiguous; dO may have any strides."""
        if short.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(q, k, v, o, lse, d_o)
        if short.capturing():
            hold(self.tables)
        if not d_o.is_contiguous():
            d_o = readable(d_o)
        empty = self.empty
        d_q, d_k, d_v = gradients = Gradients(*(empty(*each) for each in self.gradients))
        made = (None if each is None else empty(*each) for each in self.scratch)
        scratch = Scratch(*made, partial=None if self.partial is None else self.partial(d_q))
        try:
            self.kernel(Given(q, k, v, o, lse, d_o, lse), gradients, scratch, *self.rest)
        except ValueError:  # where one does not begin at a multiple of 16 bytes: the kernel's function looks, before it launches anything
            given = Given(aligned(q), aligned(k), aligned(v), aligned(o), lse, aligned(d_o), lse)
            self.kernel(given, gradients, scratch, *self.rest)
        return d_q, d_k, d_v
