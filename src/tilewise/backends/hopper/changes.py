"""What changes a call's scores, seen from torch: the fields of a kernel's configuration and the operands of its launch."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from tilewise.backends import philox
from tilewise.backends.hopper.operands import Changes, Draw, Scores
from tilewise.problem import Call, Dropout, in_fp32

FLOAT_MAX = torch.finfo(torch.float32).max
# The upper bound of Draw.lift. Without a lift fp16 has few bits for what a dropped pair adds to dS, P delta (1 - p); as it is at most 1 / (1 - p), no
# dS is larger than by the formula.
LIFT = 1024.0
LEAST = 1e-30  # in place of a factor that is 0 in fp32, which would make NaN of a hidden score; either leaves nothing of a score


def fields(call: Call) -> dict:
    """Of a configuration, besides the sink and whether a bias comes in pairs."""
    return {
        "softcap": call.softcap > 0.0,
        "bias": None if call.bias is None else call.bias.dtype,
        "alibi": call.alibi_slopes is not None,
        "diagonal": call.alibi_slopes is not None and call.diagonal is not None,
        "dropout": call.dropout is not None,
    }


def factors(config, scale: float, softcap: float) -> tuple[float | None, float | None]:
    """inner and factor of `Scores` and `Changes`, as finite fp32."""
    inner = max(-FLOAT_MAX, min(scale / in_fp32(softcap), FLOAT_MAX)) if config.softcap else None
    return inner, outer(config, scale, softcap) if config.natural else None


def outer(config, scale: float, softcap: float) -> float:
    """What multiplies a product of Q and K, or its tanh."""
    return in_fp32(softcap) if config.softcap else scale


def outer_log2(config, scale: float, softcap: float) -> float:
    """`outer` for powers of two, with a magnitude that is normal in fp32."""
    factor = outer(config, scale, softcap) / math.log(2)
    return math.copysign(max(LEAST, min(abs(factor), FLOAT_MAX)), factor)


def scores(call: Call, config, scale: float, row_max: Tensor | None = None) -> Scores:
    """Of a forward pass; `scale` in place of the call's own. row_max: where each row's largest score goes."""
    shift = call.seqlen_k - call.seqlen_q
    return Scores(*numbers(call, config, scale), *_tensors(call), dense(call.sink), row_max, shift, draw(call))


def numbers(call: Call, config, scale: float) -> tuple[float, float | None, float | None]:
    """The first fields of `Scores`."""
    return outer_log2(config, scale, call.softcap), *factors(config, scale, call.softcap)


def changes(call: Call, config) -> Changes:
    """Of a backward pass."""
    shift = call.seqlen_k - call.seqlen_q if config.alibi else None
    return Changes(*factors(config, call.scale, call.softcap), *_tensors(call), shift, draw(call))


def draw(call: Call) -> Draw | None:
    if call.dropout is None:
        return None
    p = call.dropout.p
    threshold = min(philox.threshold(p), (1 << 32) - 1)
    rescale, kept = (philox.keep_scale(p), 1.0 - p) if p < 1.0 else (1.0, 1.0)
    lift = min(2.0 ** math.floor(math.log2(rescale)), LIFT) if call.q.dtype == torch.float16 else 1.0
    words = (_signed(x) for x in (call.dropout.offset, threshold, call.heads_q, 0))
    return Draw(_keys(call.dropout), *words, rescale, lift, rescale / lift, kept * lift)


def drawer(call: Call) -> Callable[[Tensor | None], Draw | None]:
    """What gives `draw` of calls like this one, each with its own `Extras.rng`, or the call's where that is None."""
    like, dropout = draw(call), call.dropout
    if like is None:
        return lambda rng: None

    def drawn(rng: Tensor | None) -> Draw:
        if rng is None:
            return like
        drawn_now = dropout.drawn_by(rng)
        return like._replace(keys=_keys(drawn_now), offset=_signed(drawn_now.offset))

    return drawn


def rest(call: Call) -> float:
    """What sums over dS are still to be multiplied by for dropout; 1 without it."""
    drawn = draw(call)
    return 1.0 if drawn is None else drawn.rest


@lru_cache(64)  # a gradient asks for those of its forward pass
def _keys(dropout: Dropout) -> tuple[int, ...]:
    return tuple([_signed(x) for pair in philox.round_keys(philox.key_of(dropout)) for x in pair])


def _signed(word: int) -> int:
    """The low 32 bits as an int32."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def or_none(bundle: tuple) -> tuple | None:
    """The bundle, or None where it holds nothing, which a launch cannot be given."""
    return bundle if any(x is not None for x in bundle) else None


def _tensors(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """bias, slopes and diagonal, as the kernels can read them."""
    return *readable(call.bias, call.alibi_slopes), diagonal_of(call)


def diagonal_of(call: Call) -> Tensor | None:
    return None if call.alibi_slopes is None or call.diagonal is None else call.diagonal.contiguous()


def dense(sink: Tensor | None) -> Tensor | None:
    """The sink as the forward kernels read it."""
    as_it_is = sink is None or (sink.dtype == torch.float32 and sink.is_contiguous())
    return sink if as_it_is else sink.float().contiguous()


def readable(bias: Tensor | None, slopes: Tensor | None, pairs: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """bias and slopes, or copies that the kernels can read; with `pairs`, a bias `in_pairs` but for its address."""
    if bias is not None and ((bias.stride(-1) != 1 and bias.shape[-1] > 1) or (pairs and bias.data_ptr() % 4)):
        bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device).copy_(bias)
    return bias, slopes if slopes is None or slopes.stride(-1) == 1 else slopes.contiguous()


def in_pairs(bias: Tensor) -> bool:
    """Whether all rows of a bias of 16 bits have an even length and start at a multiple of 32 bits, as the kernel gets it.

    Pairs of fp32 would take registers that there are not.
    """
    if bias.itemsize != 2 or bias.shape[-1] % 2:
        return False
    if bias.stride(-1) != 1:
        return True  # `_tensors` copies it, densely
    steps = (step for size, step in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if size > 1)
    return bias.data_ptr() % 4 == 0 and not any(step % 2 for step in steps)
