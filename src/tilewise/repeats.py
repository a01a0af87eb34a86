"""Calls like one before: their checks, choice of backend and arguments are remembered, and the kernel runs at once.

What is remembered is found by everything that those depend on (`_signature`); what a tensor holds, and how many threads there are, is no part of
it. Only plain calls are remembered: eager, without gradient, on q, k and v alone. Bad input is never remembered, so it gets its error.
"""

import torch
from torch import Tensor

from tilewise import ops
from tilewise.dispatch import choose
from tilewise.masks import Mask

MOST = 1024
_KNOWN: dict[tuple, object] = {}


def find(q: Tensor, k: Tensor, v: Tensor, options: tuple):
    """The shorter way for a call of this signature, as a function of (q, k, v, return_lse); None where there is none."""
    if torch.compiler.is_compiling():
        return None
    try:
        repeat = _KNOWN.get(_signature(q, k, v, options))
    except (AttributeError, RuntimeError, TypeError):  # no dense tensor, or an option that cannot be a key: for the checks to name
        return None
    return repeat if repeat is not None and _plain(q, k, v) else None


def remember(q: Tensor, k: Tensor, v: Tensor, options: tuple, given: ops.Operands) -> None:
    """Remember a call that went the long way as the operands `given`, where there is a shorter one."""
    if torch.compiler.is_compiling() or given.dropout_p > 0.0 or not _plain(q, k, v):
        return
    mask = options[1]
    if mask is not None and not (isinstance(mask, Mask) and mask.source is not None):  # it holds tensors, whose values may change
        return
    if not all(x is y and type(x) in ops.PLAIN for x, y in ((q, given.q), (k, given.k), (v, given.v))):
        return
    call = ops.call_of(given)
    repeat = getattr(choose(call.problem, given.backend), "repeat", None)
    if repeat is not None:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[_signature(q, k, v, options)] = repeat(call)


def forget() -> None:
    """Remember nothing: for those who change which backends there are."""
    _KNOWN.clear()


def _signature(q: Tensor, k: Tensor, v: Tensor, options: tuple) -> tuple:
    """Types stand beside the values, because 1, 1.0 and True are equal, and not all of them are allowed."""
    tensors = type(q), q.dtype, q.device, q.shape, q.stride(), type(k), k.dtype, k.device, k.shape, k.stride()
    return tensors, type(v), v.dtype, v.device, v.shape, v.stride(), options, *map(type, options)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing beside the caller takes part in the call: no gradient, transform, dispatch mode, autocast or lazy negation."""
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    lazy = q.is_neg() or k.is_neg() or v.is_neg()
    return not (gradient or lazy or ops.watched(q) or torch.is_autocast_enabled(q.device.type))
