"""The gradient of a sink on Hopper, seen from torch: the call of sink/kernel.py, in one launch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, short
from tilewise.backends.hopper.operands import RowSums
from tilewise.backends.hopper.stand_ins import Of, StandIns
from tilewise.problem import Call
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.backward.sink.kernel:launch"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the kernel is compiled for."""

    dtype: torch.dtype  # of the sink and its gradient


class SinkTensors(NamedTuple):
    """lse and minus_delta are those of operands.Scratch."""

    sink: Annotated[Tensor, Of("heads_q")]
    lse: RowSums
    minus_delta: RowSums
    d_sink: Annotated[Tensor, Of("heads_q")]  # written


class SinkScalars(NamedTuple):
    """Scalars of a sink's gradient."""

    unit: float  # of lse: in natural units it is 1
    rest: float  # what the sum is still to be multiplied by (changes.rest)


def kernels(call: Call) -> list[jit.Kernel]:
    """For a sink of q's dtype or in fp32; others are converted."""
    return [_kernel(dtype) for dtype in dict.fromkeys((call.q.dtype, torch.float32))]


def kernel(call: Call) -> jit.Kernel:
    """Of `kernels`, the one that the call launches."""
    return _kernel(call.sink.dtype if call.sink.dtype == call.q.dtype else torch.float32)


def bind(call: Call, natural: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What gives dSink, (heads_q,) in the sink's dtype, of the sink, and of lse and minus_delta as operands.Scratch has them; natural: lse's unit."""
    found = kernel(call)
    launch, dtype, of_sink = jit.compiled(*found), found.config.dtype, call.sink.dtype
    numbers = short.as_operand(SinkScalars(1.0 if natural else math.log(2), changes.rest(call)), call.q.is_cuda)
    empty, layout = short.allocator(call.q.device), ((call.heads_q,), (1,), dtype)

    def compute(sink: Tensor, lse: Tensor, minus_delta: Tensor) -> Tensor:
        if sink.dtype != dtype or not sink.is_contiguous():
            sink = sink.to(dtype).contiguous()
        d_sink = empty(*layout)
        launch((sink, lse, minus_delta, d_sink), numbers)
        return d_sink if dtype == of_sink else d_sink.to(of_sink)

    return compute


def _kernel(dtype: torch.dtype) -> jit.Kernel:
    return jit.Kernel(LAUNCH, arguments, Config(dtype=dtype))


def arguments(config: Config) -> list:
    """Stand-ins for the launch's operands."""
    return [*map(StandIns(config), (SinkTensors, SinkScalars))]
