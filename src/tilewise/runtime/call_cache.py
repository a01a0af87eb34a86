"""Bound calls of attention that serve more calls: those with the same tensors' types, dtypes, sizes and strides, and the same options.

A call is found by everything that its checks, its backend and its arguments depend on (`signature`); what a tensor holds, and how many threads there
are, is no part of it. Only plain eager calls are kept, of q, k, v and `problem.Extras`. Bad input is never kept, so it gets its error.

The newest calls are tried first, by a check of tensors that torch's compiler has for its own guards: it takes 0.4 us where a signature takes 3. It
aborts the process on a nested tensor, so that is asked first.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewise.masks import Mask
from tilewise.masks.constructors import DeviceDocuments
from tilewise.problem import NO_EXTRAS
from tilewise.runtime import operator, plain
from tilewise.runtime.bound_call import PACKED, BoundCall, guard, layout_of, place_of, tensors_of, way_back
from tilewise.runtime.dispatch import choose
from tilewise.views import part

MOST = 1024
RECENT = 4  # calls that are tried first


class Options(NamedTuple):
    """All of a call but its tensors, as its caller gave it. `frontend` says how to read the other words: "" for attention and
    attention_varlen, else a name that the front end chooses.
    """

    causal: bool
    scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool
    backend: str | None
    precision: str | None
    mask: object
    return_lse: bool
    frontend: str = ""


_KNOWN: dict[tuple, BoundCall] = {}
_recent: tuple[BoundCall, ...] = ()


def find(q: Tensor, k: Tensor, v: Tensor, options: Options, extras: tuple = NO_EXTRAS) -> BoundCall | None:
    """The bound call that serves these tensors and options, as a function of q, k, v and `extras`."""
    global _recent
    if is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        tensors, present = tensors_of(q, k, v, extras)
        for x in tensors:
            if x.is_nested:
                return None
        for x in tensors[3:]:
            if not x.data_ptr():  # its memory was given back, or it has none; those of q, k and v backends look at
                return None
        for known in _recent:
            if (
                known.present == present
                and _same(options, known.options)
                and known.check is not None
                and known.check(*tensors)
                and torch._C._len_torch_dispatch_stack() == 0  # `check` overlooks the mode of make_fx
                and (known.grad_enabled is None or torch.is_grad_enabled() is known.grad_enabled)
            ):
                return known
        known = _KNOWN.get(signature(tensors, present, options))
    except (AttributeError, RuntimeError, TypeError):  # no dense tensor, or an option that cannot be a key: for the checks to name
        return None
    if known is None or not is_plain(tensors):
        return None
    known.options = options  # equal ones, of which these are likelier to come again as the same objects
    if known.check:
        _recent = (known, *(each for each in _recent if each is not known))[:RECENT]
    return known


def gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, options: Options, extras: tuple = NO_EXTRAS
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dQ, dK and dV of a call like one before, for whoever keeps O and LSE himself and is below autograd; None where no bound call gives them.

    All are arranged as the call was, which had no bias, slopes, sink or dropout.
    """
    whole = q, k, v, o, lse, d_o
    known = _went_back(whole, options) if extras[4] is None else None
    if known is not None:
        if known.arrangement:
            assert known.check_whole is not None
            of_q, of_k, of_v, of_o, of_lse, of_d_o = known.check_whole[1]
            q, k, v, o, d_o = part(q, *of_q), part(k, *of_k), part(v, *of_v), part(o, *of_o), part(d_o, *of_d_o)
            lse = lse if of_lse is None else part(lse, *of_lse)
        return known.backward(q, k, v, o, lse, d_o, None, extras, False)[:3]
    known = find(q, k, v, options, extras)
    if known is None:
        return None
    q, k, v, o = known.inputs_and_o(q, k, v, o)
    if known.arrangement == PACKED:
        lse = lse.unsqueeze(0)
    if known.backward_supported is None:
        lengths = [x for x in extras[4:] if x is not None]
        problem = operator.call_of(known.given._replace(q=q, k=k, v=v, mask_tensors=lengths)).problem
        known.backward_supported = choose(replace(problem, grad=True, deterministic=True), known.given.backend) is choose(
            problem, known.given.backend
        )
    if not known.backward_supported:
        return None
    d_o, fits = way_back(known, q, k, v, o, lse, d_o, None, extras)
    if not fits:
        return None
    known.check_whole = (
        guard(*whole),
        [place_of(x) if x is not lse or known.arrangement == PACKED else None for x in (q, k, v, o, lse, d_o)],
    )
    return known.backward(q, k, v, o, lse, d_o, None, extras, False)[:3]


def _went_back(whole: tuple[Tensor, ...], options: Options) -> BoundCall | None:
    """The bound call without other tensors that last gave these gradients for such q, k, v, O, LSE and dO."""
    if is_compiling() or forward_ad._current_level >= 0 or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0:
        return None
    for x in whole:
        if x.is_nested:
            return None
    for known in _recent:
        if not known.present and known.check_whole is not None and _same(options, known.options) and known.check_whole[0](*whole):
            return known
    return None


def bind(q: Tensor, k: Tensor, v: Tensor, options: Options, given: operator.Operands, extras: tuple = NO_EXTRAS) -> BoundCall | None:
    """The checked call `given` as a function of q, k, v and `extras`, by which it is computed at once and, where it may be kept, whenever it comes
    again. None for a call with tensors in its mask, that is no plain one, or of a backend that binds none: it is the operator's.
    """
    tensors, present = tensors_of(q, k, v, extras)
    if given.diagonal is not None or given.by_document or given.row_max or operator.traced() or not is_plain(tensors):
        return None
    mask = options.mask
    if given.grad and options.precision is not None:  # the backward pass computes O once more
        return None
    if mask is not None and not (isinstance(mask, Mask) and mask.source is not None):  # it holds tensors, and their values may change
        return None
    bias, slopes, sink, _, cu_seqlens_q, cu_seqlens_k, *scales = extras
    same = (bias, given.bias), (sink, given.sink), *zip(scales, (given.q_scale, given.k_scale, given.v_scale), strict=True)
    as_given = all(map(_untouched, (q, k, v), given[:3])) and all(mine is theirs for mine, theirs in same)
    if not as_given or (slopes is not None and slopes.requires_grad):
        return None
    call = operator.call_of(given)
    if given.mask_tensors and not (isinstance(call.mask, DeviceDocuments) and len(given.mask_tensors) == 2):
        return None
    bound = choose(call.problem, given.backend).bind(call)
    if bound is None:
        return None
    rest = given._replace(**dict.fromkeys(operator.Operands._fields[: operator.TENSORS]), mask_tensors=[])
    others = (x for x in (bias, given.alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k) if x is not None)
    layouts = tuple(map(layout_of, (*given[:3], *others)))
    arrangement, check = "" if cu_seqlens_q is None else PACKED, guard(*tensors) if bound.kept else None
    known = BoundCall(
        bound, rest, given.grad, options.return_lse, options, present, check, _grad_enabled(tensors), layouts,
        draws=given.dropout_p > 0.0, arrangement=arrangement,
    )  # fmt: skip
    if bound.kept:
        if len(_KNOWN) >= MOST:
            forget()
        _KNOWN[signature(tensors, present, options)] = known
    return known


def bind_as(
    arrangement: str, q: Tensor, k: Tensor, v: Tensor, options: Options, extras: tuple, call: tuple, heads_first: bool = False
) -> None:
    """Keep a front end's call, with options of its own, as `call`, (q, k, v, options, extras) of attention, where that is kept. arrangement: how the
    front end arranges q, k, v and O; heads_first: as in `BoundCall`.
    """
    known = find(*call)
    if known is not None:
        tensors, present = tensors_of(q, k, v, extras)
        mine = {"check": guard(*tensors), "grad_enabled": _grad_enabled(tensors), "check_back": {}, "check_whole": None}
        mine |= {"arrangement": arrangement, "heads_first": heads_first, "places": (), "gradients": ()}
        _KNOWN[signature(tensors, present, options)] = replace(known, options=options, present=present, **mine)


def forget() -> None:
    """Keep nothing: for those who change which backends there are."""
    global _recent
    _KNOWN.clear()
    _recent = ()


def _untouched(x: Tensor, given: Tensor) -> bool:
    """Whether x reaches the operator as it is, but for a batch dimension."""
    return x is given or (x.dim() == 3 and given.data_ptr() == x.data_ptr() and given.stride()[1:] == x.stride())


def _same(options: Options, others: tuple) -> bool:
    """Whether all are the same objects, or equal numbers; written out, it takes half the time of a loop."""
    causal, scale, softcap, dropout_p, deterministic, backend, precision, mask, return_lse, frontend = options
    a, b, c, d, e, f, g, h, i, j = others
    return (
        causal is a
        and (scale is b or (type(scale) is type(b) is float and scale == b))
        and (softcap is c or (type(softcap) is type(c) is float and softcap == c))
        and (dropout_p is d or (type(dropout_p) is type(d) is float and dropout_p == d))
        and deterministic is e
        and backend is f
        and precision is g
        and mask is h
        and return_lse is i
        and frontend is j
    )


def _grad_enabled(tensors: tuple[Tensor, ...]) -> bool | None:
    """As `BoundCall` has it."""
    return torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None


def signature(tensors: tuple[Tensor, ...], present: tuple, options: tuple) -> tuple:
    """Types stand next to the values, because 1, 1.0 and True are equal, and not all of them are allowed. Which tensors want a gradient is part of
    it, as it is of torch's check.
    """
    grad = torch.is_grad_enabled()
    found = tuple([(type(x), x.dtype, x.device, x.shape, x.stride(), grad and x.requires_grad) for x in tensors])
    return present, found, options, *map(type, options)


def is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nothing but autograd takes part in the call, a tracer and autocast included."""
    return not (operator.traced() or plain.needs_dispatch(tensors) or torch._C._is_any_autocast_enabled())
