"""Calls of `decode` that a backend computes at once: what it found for the first is kept for those like it (of `attention`: call_cache.py).

A call is like another if the same tensors are there with the same types, dtypes, devices, sizes and strides, all options are equal, and values begin
where keys do in both or in neither. What tensors hold and where they lie may differ otherwise. Only plain calls with index tensors of int32
are kept, and none with values to be checked. New tokens are written first, by what `append` found.
"""

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewise.backends import BoundDecode
from tilewise.masks import Mask
from tilewise.problem import DecodeTensors, Share
from tilewise.runtime import append_operator, bound_call, cache_values, call_cache, operator
from tilewise.runtime.decode_operator import Operands, backend_of, call_of, goes_whole

MOST = 1024
RECENT = 4  # calls that are tried first

AT = {name: i for i, name in enumerate(DecodeTensors._fields)}
SCALES = slice(AT["k_scale"], AT["k"])
INDICES = slice(AT["seqlens"], AT["tree"])
SEQLENS, SLOPES, OUT = AT["seqlens"], AT["alibi_slopes"], AT["out"]
NEW = DecodeTensors.getter(
    "k_cache", "v_cache", "k", "v", "seqlens", "page_table", "cache_batch_idx", "cu_seqlens_q", "rotary_cos", "rotary_sin"
)  # as AppendCall.tensors
_is_nested, _address = attrgetter("is_nested"), Tensor.data_ptr


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
    share: Share | None


class Known:
    """A call that passed its checks, and those like it: by `run` (`Backend.bind_decode`) behind `append` (`Backend.bind_append`)."""

    def __init__(self, run: BoundDecode, append: Callable | None, given: tuple, options: tuple):
        self.run, self.append, self.options, self.types = run, append, options, list(map(type, given + options))
        self.with_lse = Options(*options).return_lse
        where = [i for i, x in enumerate(given) if x is not None]
        self.there = itemgetter(*where)
        self.latent, self.slopes = _latent(given), given[SLOPES] is not None
        self.spans = [(i, _span(given[i])) for i in where]  # in bytes; `out` is the last, where it is there
        self.guard = bound_call.guard(*_there(given))  # of tensors, as in `BoundCall.check`

    def __call__(self, given: tuple) -> tuple[Tensor, Tensor] | None:
        """None where the new tokens have to be written another way, and nothing was done."""
        if self.slopes:
            given = *given[:SLOPES], bound_call.slopes_of(given[SLOPES]), *given[SLOPES + 1 :]
        seqlens, out = given[SEQLENS], given[OUT]
        if self.append is not None and (seqlens := self.append(NEW(given), None)) is None:
            return None
        if out is None:
            return self.run(given, seqlens, None, self.with_lse)
        o, lse = self.run(given, seqlens, out if self._apart(given) else None, self.with_lse)
        if o is out:
            torch.autograd.graph.increment_version(out)
            return o, lse
        return out.copy_(o), lse

    def _apart(self, given: tuple) -> bool:
        """Whether `out` lies before or behind every other tensor."""
        *others, (_, span) = self.spans
        begin = given[OUT].data_ptr()
        return not any([begin < (x := given[i].data_ptr()) + size and x < begin + span for i, size in others])


_KNOWN: dict[tuple, Known] = {}
_recent: tuple[Known, ...] = ()


def find(given: tuple, options: tuple) -> Known | None:
    """What is known of calls like this one, as a function of `given`; plain tuples of the fields of `DecodeTensors` and `Options`."""
    global _recent
    if is_compiling() or forward_ad._current_level >= 0 or cache_values.always():
        return None
    try:
        types = list(map(type, given + options))
        for known in _recent:
            if known.types == types and known.options == options:
                tensors = known.there(given)
                if (
                    not any(map(_is_nested, tensors))  # torch's check aborts the process on one
                    and known.guard is not None
                    and known.guard(*tensors)
                    and torch._C._len_torch_dispatch_stack() == 0  # the guard overlooks the mode of make_fx
                    and all(map(_address, tensors))  # memory that was given back
                    and _latent(given) is known.latent
                ):
                    return known
        tensors = _there(given)
        if any([x.is_nested or not x.data_ptr() for x in tensors]):
            return None
        known = _KNOWN.get(_signature(given, options))
        if known is None or not _may_be_known(tensors):
            return None
        if known.guard:
            _recent = (known, *(each for each in _recent if each is not known))[:RECENT]
        return known
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # no dense tensor, or an option that cannot be a key: for the checks to name
        return None


def first(given: tuple, options: tuple, operands: Operands, written: append_operator.Operands | None) -> tuple[Tensor, Tensor] | None:
    """O and LSE of a call that passed its checks, as `operands`, behind what it appends; what computes it is kept. None, and nothing done, where not
    all of it can be found once and for all.
    """
    known = _bound(given, options, operands, written)
    if known is None or (results := known(given)) is None:
        return None
    if len(_KNOWN) >= MOST:  # a server's batches of prompts and single tokens have new sizes all the time
        _KNOWN.pop(next(iter(_KNOWN), ()), None)  # the oldest
    _KNOWN[_signature(given, options)] = known
    return results


def _bound(given: tuple, options: tuple, operands: Operands, written: append_operator.Operands | None) -> Known | None:
    if operator.traced() or cache_values.wanted(operands.q.device, operands.check):  # values are to be checked every time
        return None
    lengths = given[SEQLENS]
    if not isinstance(lengths, Tensor) or lengths.shape[0] == 0 or not _may_be_known(_there(given)):
        return None
    converted = any(x.dtype != torch.int32 for x in _there(given[INDICES])) or any(x.dtype != torch.float32 for x in _there(given[SCALES]))
    if converted or not all(map(_same_memory, given[:3], operands[:3])):
        return None
    call = call_of(operands, None)
    if call.mask.source is None or not goes_whole(call):  # it holds tensors, and their values may change
        return None
    run = backend_of(call, operands.backend).bind_decode(call)
    append = None if run is None or written is None else append_operator.bind(written)
    return None if run is None or (written is not None and append is None) else Known(run, append, given, options)


def forget() -> None:
    """Keep nothing: for those who change which backends there are."""
    global _recent
    _KNOWN.clear()
    _recent = ()


def _may_be_known(tensors: list[Tensor]) -> bool:
    """Whether nothing takes part in the call, and nobody may want a gradient."""
    return call_cache.is_plain(tuple(tensors)) and not any(x.requires_grad for x in tensors)


def _same_memory(x: Tensor, operand: Tensor) -> bool:
    """Whether x reaches the operator as it is."""
    return x is operand or (x.data_ptr() == operand.data_ptr() and x.shape == operand.shape and x.stride() == operand.stride())


def _latent(given: tuple) -> bool:
    """Whether values begin where keys do, as in a latent cache, which a backend reads once."""
    return given[1].data_ptr() == given[2].data_ptr()


def _span(x: Tensor) -> int:
    """Bytes from x's first to behind its last."""
    return x.itemsize * (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)))


def _there(given: tuple) -> list[Tensor]:
    return [x for x in given if x is not None]


def _signature(given: tuple, options: tuple) -> tuple:
    return call_cache.signature(tuple(_there(given)), (*[x is None for x in given], _latent(given)), options)
