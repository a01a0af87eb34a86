"""Poison: what must never be read is NaN or infinite, and what must never be written is watched.

`memory` poisons what an implementation allocates, `hide` what the mask hides from it, `Guarded` the surroundings of its inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan, prod

import torch
from torch import Tensor
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.backends import reference
from tilewise.problem import Call

CANARIES = 64  # elements on either side of an allocation
CANARY = 107  # exact in every dtype
GAPS = (0, 2, 1, 8)  # how far apart neighbours along (batch, seqlen, heads, dim) are moved by Guarded
TENSORS = ("q", "k", "v", "bias", "sink", "alibi_slopes")  # the floating point tensors of a Call

_new = torch.ops.aten
ALLOCATIONS = frozenset(
    {_new.empty.memory_format, _new.empty_strided.default, _new.empty_like.default, _new.new_empty.default, _new.new_empty_strided.default}
    | {
        _new.zeros.default,
        _new.zeros_like.default,
        _new.new_zeros.default,
        _new.full.default,
        _new.full_like.default,
        _new.new_full.default,
    }
)


@contextmanager
def memory() -> Iterator[None]:
    """Poison what is allocated inside: fresh memory is NaN (integers: their largest), writes past its ends raise AssertionError on exit.

    The canaries stand around what is allocated from Python (torch.empty, torch.zeros and their relatives); NaN is in all that torch leaves
    uninitialised.
    """
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]  (torch makes it at run time)
    canaries = _Canaries()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fill_uninitialized_memory takes effect only under it
    deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]  (likewise)
    try:
        with canaries:
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]  (likewise)
    canaries.verify()


class _Canaries(TorchDispatchMode):
    """Moves every allocation into a buffer with canaries on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        plain = func(*args, **(kwargs or {}))
        if func not in ALLOCATIONS or plain.numel() == 0 or plain.dtype == torch.bool or plain.is_meta:
            return plain
        extent = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        buffer = torch.full((extent + 2 * CANARIES,), CANARY, dtype=plain.dtype, device=plain.device)
        self.buffers.append(buffer)
        return buffer.as_strided(plain.shape, plain.stride(), CANARIES).copy_(plain)

    def verify(self) -> None:
        for buffer in self.buffers:
            for side, canaries in (("before", buffer[:CANARIES]), ("after", buffer[-CANARIES:])):
                if changed := int((canaries != CANARY).sum()):
                    size = len(buffer) - 2 * CANARIES
                    raise AssertionError(f"{changed} elements {side} an allocation of {size} {buffer.dtype} elements were overwritten")


class Guarded:
    """A copy of a floating point tensor with NaN before, after and between its rows: a read beyond its bounds shows in the result."""

    def __init__(self, x: Tensor) -> None:
        shape = [size + gap for size, gap in zip(x.shape, GAPS[-x.dim() :], strict=True)]
        self.buffer = torch.full((prod(shape) + 2 * CANARIES,), nan, dtype=x.dtype, device=x.device)
        self.outside = torch.ones_like(self.buffer, dtype=torch.bool)
        place = tuple(slice(size) for size in x.shape)
        self.view, outside = (flat[CANARIES : len(flat) - CANARIES].view(shape)[place] for flat in (self.buffer, self.outside))
        outside.fill_(False)
        self.view.copy_(x)
        self.content = x.clone()

    def verify(self, name: str) -> None:
        """Raise AssertionError if the tensor, or what is around it, has been written to."""
        if changed := int((~self.buffer[self.outside].isnan()).sum()):
            raise AssertionError(f"{name}: {changed} elements outside the tensor were overwritten")
        if not torch.equal(self.view.nan_to_num(nan=CANARY), self.content.nan_to_num(nan=CANARY)):
            raise AssertionError(f"{name}: an input was modified")


def guard(call: Call) -> tuple[Call, dict[str, Guarded]]:
    """The call on guarded copies of its tensors, and the guards by name."""
    guards = {name: Guarded(getattr(call, name)) for name in TENSORS if getattr(call, name) is not None}
    return replace(call, **{name: guard.view for name, guard in guards.items()}), guards


def hide(call: Call, d_o: Tensor, d_lse: Tensor | None = None) -> tuple[Call, Tensor, Tensor | None]:
    """The same problem with NaN and infinities in all that the mask hides from the result.

    That is: keys and values no query of their group sees; queries that see no key, and what reaches their O and LSE (LSE's stays where
    there is a sink, which it then depends on); entries of the bias no visible pair reads; without a sink, also what reaches the O and LSE of
    queries to which a bias of -inf leaves nothing to see.
    """
    shown = reference.visibility(call).reshape(call.batch, call.heads_k, call.group, call.seqlen_q, call.seqlen_k)
    unseen = ~shown.any(3).any(2)  # (batch, heads_k, seqlen_k)
    blind = ~shown.any(-1).reshape(call.batch, call.heads_q, call.seqlen_q)
    bias, idle = call.bias, blind
    if bias is not None:
        read = shown.reshape(call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
        if call.sink is None:
            idle = ~(read & (bias > -inf)).any(-1)
        bias = _spoil(bias, ~(read.long().sum_to_size(bias.shape) > 0))
    hidden = replace(call, q=_spoil_rows(call.q, blind), k=_spoil_rows(call.k, unseen), v=_spoil_rows(call.v, unseen), bias=bias)
    d_lse = d_lse if d_lse is None or call.sink is not None else _spoil(d_lse, idle)
    return hidden, _spoil_rows(d_o, idle), d_lse


def _spoil(x: Tensor, where: Tensor) -> Tensor:
    """A copy of x with NaN, inf and -inf in turns `where` (bool, shaped as x)."""
    out = x.clone(memory_format=torch.contiguous_format)
    places = where.nonzero(as_tuple=True)
    out[places] = torch.tensor([nan, inf, -inf], dtype=x.dtype, device=x.device).repeat(len(places[0]) // 3 + 1)[: len(places[0])]
    return out


def _spoil_rows(x: Tensor, where: Tensor) -> Tensor:
    """`_spoil` for whole rows: x (batch, seqlen, heads, dim), where (batch, heads, seqlen)."""
    return _spoil(x, where.transpose(1, 2)[..., None].expand(x.shape))
