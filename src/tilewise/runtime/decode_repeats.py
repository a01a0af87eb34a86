"""Calls of `decode` like one before: their checks, choice of backend and kernel are remembered (repeats.py has the same for `attention`).

A call is like another if the same tensors are there with the same types, dtypes, devices, sizes and strides, all options are equal, and values begin
where keys do in both or in neither. What tensors hold and where they lie may differ otherwise. Only plain calls are remembered, whose index tensors
are int32, and none whose values are to be checked. New tokens are written first, by what is remembered of `append`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewise.masks import Mask
from tilewise.problem import AppendCall, DecodeCall, Rotary, with_fields
from tilewise.runtime import append_operator, cache_values, operator, repeats
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
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    out: Tensor | None


AT = {name: i for i, name in enumerate(Given._fields)}
SCALES = slice(AT["k_scale"], AT["k"])
INDICES = slice(AT["seqlens"], AT["tree"])


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

    def __init__(
        self, run: Callable, append: Callable | None, like: DecodeCall, like_append: AppendCall | None, given: tuple, options: tuple
    ):
        self.run, self.append, self.options, self.types = run, append, options, list(map(type, options))
        self.form = _form(given)
        self.fields = [(name, i) for name, i in AT.items() if given[i] is not None and name in DecodeCall.__dataclass_fields__]
        self.slopes, self.interleaved = given[AT["alibi_slopes"]] is not None, like.rotary is not None and like.rotary.interleaved
        self.like = with_fields(like, dict.fromkeys([name for name, _ in self.fields]))
        self.places = []
        if like_append is not None:
            where = {"cache_seqlens": "seqlens", "cu_seqlens": "cu_seqlens_q"}
            there = [name for name, x in vars(like_append).items() if isinstance(x, Tensor)]
            self.places = [(name, AT[where.get(name, name)]) for name in there]
            self.like_append = with_fields(like_append, dict.fromkeys(there))
        self.guard = repeats.guard(*_there(given))  # of tensors, as in `repeats.Known.check`

    def __call__(self, given: tuple) -> tuple[Tensor, Tensor] | None:
        """None where the new tokens have to be written another way, and nothing was done."""
        fields: dict[str, object] = {name: given[i] for name, i in self.fields}
        if self.append is not None:
            ends = self.append(with_fields(self.like_append, {name: given[i] for name, i in self.places}))
            if ends is None:
                return None
            fields["seqlens"] = ends
        if self.slopes:
            fields["alibi_slopes"] = repeats.slopes_of(given[AT["alibi_slopes"]])
        *_, cos, sin, out = given
        if cos is not None:
            fields["rotary"] = Rotary(cos, sin, self.interleaved)
        o, lse = self.run(with_fields(self.like, fields))
        return (o if out is None else out.copy_(o)), lse


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
    run, written, append = backend_of(call, operands.backend).repeat_decode(call), _written(Given(*given), operands), None
    if written is not None:
        append = append_operator.repeat(written)
    if run is not None and (written is None or append is not None):
        if len(_KNOWN) >= MOST:
            forget()
        _KNOWN[_signature(given, options)] = Known(run, append, call, written, given, options)


def _written(given: Given, operands: Operands) -> AppendCall | None:
    """What a call appends; None where that is nothing."""
    if given.k is None or given.v is None:
        return None
    packed = given.k.dim() == 3
    names = "k_cache", "v_cache", "k", "v", "page_table", "cache_batch_idx", "rotary_cos", "rotary_sin"
    rest = {"cache_seqlens": given.seqlens, "cu_seqlens": given.cu_seqlens_q if packed else None, "rotary_first": None}
    return AppendCall(**{name: getattr(given, name) for name in names}, **rest, interleaved=operands.interleaved)


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
