"""What the launches of 8 bits leave for each other: tensors that live as long as a call, or that all calls of a stream have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.eight_bits.config import GROUP, TOKENS, QuantiserConfig
from tilewise.backends.hopper.eight_bits.operands import Made, Scales
from tilewise.problem import Call
from tilewise.views import part

ALIGNED = 128  # bytes: tensors begin at multiples of a line of the cache

Layout = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Scratch:
    """What makes tensors in one allocation of `bytes`, on the current device: their own, or with a stream the one that all its calls share."""

    make: Callable
    bytes: int

    def __call__(self, stream: int | None = None):
        return self.make(stream)


def of_quantiser(call: Call, config: QuantiserConfig) -> Scratch:
    """What makes the quantiser's results and its `channels` for calls like this one, on the current device."""
    batch, heads_q, heads_k, seqlen_q, seqlen_k = call.batch, call.heads_q, call.heads_k, call.seqlen_q, call.seqlen_k
    groups = -(-seqlen_k // GROUP)
    operands = (heads_q, seqlen_q, config.head_dim), (heads_k, seqlen_k, config.head_dim), transposed(call)[1:] if config.values else None
    rows, keys, columns = (heads_q, seqlen_q), (heads_k, groups), (heads_k, call.head_dim_v) if config.values else None
    of_lost = (keys, (heads_k, groups * GROUP)) if config.loses else (None, None)
    numbers = (heads_k, config.surveyed, config.head_dim), rows, keys, columns, columns, rows, *of_lost
    dtypes = [torch.int8] * len(operands) + [torch.float32] * len(numbers)
    layouts = [shape and (dtype, (batch, *shape)) for dtype, shape in zip(dtypes, (*operands, *numbers), strict=True)]
    whole = together(layouts, call.q.device, turned=2)

    def made(stream: int | None = None) -> tuple[Made, Scales, Tensor]:
        q, k, v, channels, *scales = whole(stream)
        return Made(q, k, v), Scales(*scales, None, None), channels

    return Scratch(made, whole.bytes)


def of_transposer(call: Call, config: QuantiserConfig) -> Scratch:
    """Likewise V transposed and, where there are any, `columns`, `weights` and `units` of `OfTokens`."""
    groups = -(-call.seqlen_k // GROUP)
    wanted = (config.tokens_k, groups * GROUP), (config.tokens_v, groups * GROUP), (config.tokens_v, groups)
    of_tokens = [(torch.float32, (call.batch, call.heads_k, last)) if there else None for there, last in wanted]
    return together([(torch.int8, transposed(call)), *of_tokens], call.q.device)


def transposed(call: Call) -> tuple[int, int, int, int]:
    """The shape of V as the forward kernel reads it: (batch, heads_k, head_dim_v, tokens)."""
    return call.batch, call.heads_k, call.head_dim_v, -(-call.seqlen_k // TOKENS) * TOKENS


def together(layouts: Sequence[Layout | None], device: torch.device, turned: int = 0) -> Scratch:
    """Contiguous tensors of int8 and fp32, and None for None; the first `turned` with the middle two of their four dimensions exchanged."""
    empty, places, end = short.allocator(device), [], 0
    for n, layout in enumerate(layouts):
        if layout is None:
            places.append(None)
            continue
        dtype, shape = layout
        strides = short.strides(shape)
        if n < turned:
            shape, strides = ((batch, tokens, heads, dim) for batch, heads, tokens, dim in (shape, strides))
        places.append((dtype == torch.int8, (shape, strides, end // dtype.itemsize)))
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    whole = (end // 4,), (1,), torch.float32

    def make(stream: int | None = None) -> list[Tensor | None]:
        numbers = empty(*whole) if stream is None else short.shared("8 bits", whole[:1], torch.float32, device, stream)[0]
        small = numbers.view(torch.int8)
        return [each and part(small if each[0] else numbers, *each[1]) for each in places]

    return Scratch(make, end)
