"""Calls of `decode` like one before: their checks, choice of backend and kernel are remembered (repeats.py has the same for `attention`).

A call is like another if the same tensors are there with the same types, dtypes, devices, sizes and strides, all options are equal, and values begin
where keys do in both or in neither. What tensors hold and where they lie may differ otherwise. Only plain calls are remembered, whose index tensors
are int32, and none whose values are to be checked.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewise.masks import Mask
from tilewise.problem import DecodeCall, with_tensors
from tilewise.runtime import cache_values, operator, repeats
from tilewise.runtime.decode_operator import Operands, backend_of, call_of, goes_whole

MOST = 1024
RECENT = 4  # calls that are tried first


class Given(NamedTuple):
    """The tensors of a call, as its caller gave them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seqlens: Tensor | int | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad: Tensor | None
    tree: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


SCALES = slice(Given._fields.index("k_scale"), None)
INDICES = slice(Given._fields.index("seqlens"), Given._fields.index("tree"))


class Options(NamedTuple):
    """All else that may differ between calls which can be remembered."""

    causal: bool
    mask: Mask | None
    scale: float | None
    softcap: float
    shared_prefix: int
    split: int | None
    interleaved: bool
    backend: str | None
    return_lse: bool
    check: bool


class Known:
    """A call that can be repeated: by `run`, with other tensors in the place of those of `like`."""

    def __init__(self, run: Callable[[DecodeCall], tuple[Tensor, Tensor]], like: DecodeCall, given: tuple, options: tuple) -> None:
        self.run, self.options, self.types = run, options, list(map(type, options))
        self.form = _form(given)
        self.names = [name for name, x in zip(Given._fields, given, strict=True) if x is not None]
        self.slopes = "alibi_slopes" in self.names
        self.like = with_tensors(like, dict.fromkeys(self.names))
        self.guard = repeats.guard(*_there(given))  # of tensors, as in `repeats.Known.check`

    def __call__(self, given: tuple) -> tuple[Tensor, Tensor]:
        tensors = dict(zip(self.names, [x for x in given if x is not None], strict=True))
        if self.slopes:
            tensors["alibi_slopes"] = repeats.slopes_of(tensors["alibi_slopes"])
        return self.run(with_tensors(self.like, tensors))


_KNOWN: dict[tuple, Known] = {}
_recent: tuple[Known, ...] = ()


def find(given: tuple, options: tuple) -> Known | None:
    """What is known of calls like this one, as a function of `given`; both are plain tuples of the fields of `Given` and `Options`."""
    global _recent
    if is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        tensors = _there(given)
        for x in tensors:
            if x.is_nested or not x.data_ptr():  # torch's check aborts the process on one; memory that was given back
                return None
        form, types = _form(given), list(map(type, options))
        for known in _recent:
            if (
                known.form == form
                and known.types == types
                and known.options == options
                and known.guard(*tensors)
                and torch._C._len_torch_dispatch_stack() == 0  # the guard overlooks the mode of make_fx
            ):
                break
        else:
            known = _KNOWN.get(_signature(given, options))
            if known is None or not _may_be_known(tensors):
                return None
            if known.guard:
                _recent = (known, *(each for each in _recent if each is not known))[:RECENT]
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # no dense tensor, or an option that cannot be a key: for the checks to name
        return None
    return None if cache_values.wanted(given[0].device, False) else known


def remember(given: tuple, options: tuple, operands: Operands) -> None:
    """Remember a call that went the long way as `operands`, where there is a shorter one."""
    if operator.traced():
        return
    tensors, lengths, indices = _there(given), given[INDICES.start], _there(given[INDICES])
    values_count = cache_values.wanted(operands.q.device, operands.check)  # they are to be checked every time
    if values_count or not isinstance(lengths, Tensor) or lengths.shape[0] == 0 or not _may_be_known(tensors):
        return
    converted = any(x.dtype != torch.int32 for x in indices) or any(x.dtype != torch.float32 for x in _there(given[SCALES]))
    if converted or not all(map(_same_memory, given[:3], operands[:3])):
        return
    call = call_of(operands, None)
    if call.mask.source is None or not goes_whole(call):  # it holds tensors, whose values may change
        return
    run = backend_of(call, operands.backend).repeat_decode(call)
    if run is not None:
        if len(_KNOWN) >= MOST:
            forget()
        _KNOWN[_signature(given, options)] = Known(run, call, given, options)


def forget() -> None:
    """Remember nothing: for those who change which backends there are."""
    global _recent
    _KNOWN.clear()
    _recent = ()


def _may_be_known(tensors: list[Tensor]) -> bool:
    """Whether nothing takes part in the call, and nobody may want a gradient."""
    return repeats.is_plain(tuple(tensors)) and not any(x.requires_grad for x in tensors)


def _same_memory(x: Tensor, operand: Tensor) -> bool:
    """Whether x reaches the operator as it is."""
    return x is operand or (x.data_ptr() == operand.data_ptr() and x.shape == operand.shape and x.stride() == operand.stride())


def _form(given: tuple) -> list[bool]:
    """Which tensors are missing; and whether values begin where keys do, as in a latent cache, which a backend reads once."""
    return [*[x is None for x in given], given[1].data_ptr() == given[2].data_ptr()]


def _there(given: tuple) -> list[Tensor]:
    return [x for x in given if x is not None]


def _signature(given: tuple, options: tuple) -> tuple:
    return repeats.signature(tuple(_there(given)), tuple(_form(given)), options)
