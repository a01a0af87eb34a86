"""Calls like one before: their checks, choice of backend and arguments are remembered, and the kernel runs at once.

What is remembered is found by everything that those depend on (`signature`); what a tensor holds, and how many threads there are, is no part of
it. Only plain eager calls are remembered, whose tensors are q, k, v and those of `Beside`. Bad input is never remembered, so it gets its error.

The calls before are tried first, by a check of tensors that torch's compiler has for its own guards: it takes 0.4 us where a signature takes 3. It
aborts the process on a nested tensor, so that is asked first. The gradient asks again, because hooks on saved tensors may give back others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewise.backends import Bound
from tilewise.masks import Mask
from tilewise.masks.constructors import Unread
from tilewise.runtime import operator, plain, saved
from tilewise.runtime.dispatch import choose
from tilewise.views import part

MOST = 1024
RECENT = 4  # calls that are tried first


class Beside(NamedTuple):
    """The tensors of a call beside q, k and v, as its caller gave them. A plain tuple of these does as well, with or without the last three, and is
    made in less time.
    """

    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    rng: Tensor | None = None  # (2,) int64 on the CPU, the seed and offset of dropout: new at each call, and no part of what is remembered
    cu_seqlens_q: Tensor | None = None  # of documents, which the backend leaves on the device
    cu_seqlens_k: Tensor | None = None
    q_scale: Tensor | None = None  # of numbers of 8 bits
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


ALONE = Beside()
PACKED = "packed"  # (total, heads, head_dim): no batch
TURNED, TURNED_INPUTS = "turned", "turned inputs"  # (batch, heads, seqlen, head_dim), all or q, k and v alone
INSIDE = {"": lambda x: x, PACKED: lambda x: x.unsqueeze(0)} | dict.fromkeys((TURNED, TURNED_INPUTS), lambda x: x.transpose(1, 2))
OUTSIDE = INSIDE | {PACKED: lambda x: x.squeeze(0)}
_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # those that take what is saved, or None


@dataclass(slots=True)
class Known:
    """A call that can be repeated: the backend's short way (see `backends`), and the operands of the long way but for the tensors."""

    bound: Bound
    given: operator.Operands
    grad: bool
    return_lse: bool
    options: tuple
    there: tuple  # as `_tensors` gives it
    check: Callable | None  # of the tensors: whether they are such, and nothing beside autograd takes part; None: torch cannot say
    grad_enabled: bool | None  # whether autograd was on, which `check` does not ask; None: nothing requires grad
    layouts: tuple  # of the tensors, as `_layout` gives them
    check_back: dict[tuple, tuple] = field(
        default_factory=dict
    )  # by what there is beside: the check of what `_way_back` has, and how dO lies for the backend, once it went the short way
    check_whole: tuple | None = None  # likewise of q, k, v, O, LSE and dO as the caller has them, and how each lies, of `gradients`
    draws: bool = False  # there is dropout
    heads_first: bool = (
        False  # without a gradient O shall lie in memory as (batch, heads, seqlen, head_dim_v), where the backend can have it so
    )
    arrangement: str = ""  # of q, k, v and O as the caller has them: a key of INSIDE
    places: tuple = ()  # where it is arranged in another way: how q, k and v lie for the backend, and O for the caller, once that is known
    gradients: tuple = ()  # likewise how dQ, dK and dV lie for the caller
    goes_back: bool | None = (
        None  # whether the backend has the gradient of a call that asked for none, once someone wanted it (`gradients`)
    )

    of_outputs: str = field(default="", init=False)  # how O and dO are arranged: a key of INSIDE

    def __post_init__(self) -> None:
        self.of_outputs = "" if self.arrangement == TURNED_INPUTS else self.arrangement

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, beside: tuple = ALONE) -> Tensor | tuple[Tensor, Tensor]:
        """O, and LSE where the call returns it, arranged as q, k and v are. With dropout and no `Beside.rng`, the seed is drawn here."""
        if not (self.there or self.draws):
            beside = ALONE
            if self.grad:
                return _repeated(self, q, k, v)
        else:
            bias, slopes, sink, rng, *rest = beside
            if slopes is not None:
                slopes = slopes_of(slopes)
            if self.draws and rng is None:
                rng = operator.random_state()
            beside = bias, slopes, sink, rng, *rest
        if self.grad:
            return _repeated(self, q, k, v, *beside)
        if not self.arrangement:
            results = self.bound.forward(q, k, v, beside, self.return_lse)
            return results if self.return_lse else results[0]
        *_, o, lse = self.compute(q, k, v, beside, self.return_lse)
        o, lse = self.outside(o, lse)
        return (o, lse) if self.return_lse else o

    def compute(self, q: Tensor, k: Tensor, v: Tensor, beside: tuple, with_lse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, O and LSE as the backend has them: parts of the caller's tensors, of which autograd knows nothing."""
        if not self.places:
            self.places = *(_place(INSIDE[self.arrangement](x)) for x in (q, k, v)), None
        of_q, of_k, of_v, _ = self.places
        q, k, v = part(q, *of_q), part(k, *of_k), part(v, *of_v)
        return q, k, v, *self.bound.forward(q, k, v, beside, with_lse, self.heads_first)

    def outside(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """O as the caller has it, and LSE if it is returned."""
        if self.of_outputs:
            if self.places[3] is None:
                self.places = *self.places[:3], _place(OUTSIDE[self.of_outputs](o))
            o = part(o, *self.places[3])
        if self.return_lse and self.arrangement == PACKED:
            lse = part(lse, lse.shape[1:], lse.stride()[1:], 0)
        return o, lse

    def inputs_and_o(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The caller's tensors as the backend has them, as views."""
        inside = INSIDE[self.arrangement]
        return inside(q), inside(k), inside(v), INSIDE[self.of_outputs](o)

    def backward(self, *operands) -> tuple[Tensor | None, ...]:
        """The short way's, but gradients of q, k and v are arranged as the caller has these: by parts, for they are nobody's yet."""
        found = self.bound.backward(*operands)
        if not self.arrangement:
            return found
        d_q, d_k, d_v, d_bias, d_sink = found
        if not self.gradients:
            self.gradients = tuple(_place(OUTSIDE[self.arrangement](x)) for x in (d_q, d_k, d_v))
        of_q, of_k, of_v = self.gradients
        return part(d_q, *of_q), part(d_k, *of_k), part(d_v, *of_v), d_bias, d_sink


_KNOWN: dict[tuple, Known] = {}
_recent: tuple[Known, ...] = ()


class _Repeated(torch.autograd.Function):
    """The short way with a gradient. To hooks it gives what the long way saves (`saved.in_order`); autograd itself has an eye on the caller's
    tensors, whether they are changed in place, while `ctx.parts` are these as the backend has them.
    """

    @staticmethod
    def forward(ctx, known, q, k, v, *beside):
        ctx.known, ctx.arrangement, ctx.parts = known, "", None  # that of the tensors that are saved
        arrangement, more = known.arrangement, beside or ALONE
        if not arrangement:
            o, lse = known.bound.forward(q, k, v, more, True)
            ctx.save_for_backward(*saved.in_order((q, k, v, *beside), [], o, lse))
        else:
            *parts, o, lse = known.compute(q, k, v, more, True)
            if _hooks(False) is not None:
                inside, outside = INSIDE[arrangement], OUTSIDE[known.of_outputs]
                ctx.save_for_backward(*saved.in_order((inside(q), inside(k), inside(v), *beside), [], o, lse))
                o, lse = outside(o).detach(), lse.squeeze(0).detach() if arrangement == PACKED else lse  # for autograd, views of nothing
            else:
                if known.of_outputs:  # O itself is none of the parts: it holds the graph that holds them
                    parts.append(o)
                ctx.arrangement, ctx.parts = arrangement, parts
                o, lse = known.outside(o, lse)
                ctx.save_for_backward(*saved.in_order((q, k, v, *beside), [], o, lse))
        if known.return_lse:
            ctx.set_materialize_grads(False)
            return o, lse
        return o

    @staticmethod
    def backward(ctx, d_o, d_lse=None):
        known, (q, k, v, o, lse, *beside) = ctx.known, ctx.saved_tensors
        parts, ctx.parts = ctx.parts, None  # they are gone behind this as what is saved is
        arrangement, beside = known.arrangement, beside or ALONE
        bias_grad = beside[0] is not None and ctx.needs_input_grad[4]
        if ctx.arrangement:
            if parts is None or torch.is_grad_enabled() or is_compiling():
                q, k, v, o = known.inputs_and_o(q, k, v, o)
            elif known.of_outputs:
                q, k, v, o = parts
            else:
                q, k, v = parts
            if known.return_lse and arrangement == PACKED:
                lse = lse.unsqueeze(0)
        if arrangement == PACKED and d_lse is not None:
            d_lse = d_lse.unsqueeze(0)
        if d_o is None:
            d_o = OUTSIDE[known.of_outputs](torch.zeros_like(o))
        d_o, short = _way_back(known, q, k, v, o, lse, d_o, d_lse, beside)
        if short:
            d_q, d_k, d_v, d_bias, d_sink = known.backward(q, k, v, o, lse, d_o, d_lse, beside, bias_grad)
        else:
            bias, slopes, sink, rng, *lengths = beside
            lengths = [x for x in lengths if x is not None]
            given = known.given._replace(q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, sink=sink, rng=rng, mask_tensors=lengths)
            *of_inputs, d_bias, d_sink = operator.differentiate(o, lse, d_o, given, d_lse, bias_grad)
            d_q, d_k, d_v = map(OUTSIDE[arrangement], of_inputs)
        if beside is ALONE:
            return None, d_q, d_k, d_v
        return None, d_q, d_k, d_v, d_bias if bias_grad else None, None, None if beside[2] is None else d_sink, None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        operator.refuse_forward_mode()


# Without a look for wrappers of torch.func, which are not plain. (Helpers that compile have no torch, and no such method.)
_repeated = getattr(super(torch.autograd.Function, _Repeated), "apply", None)


def find(q: Tensor, k: Tensor, v: Tensor, options: tuple, beside: tuple = ALONE) -> Known | None:
    """What is known of calls with this signature, as a function of q, k, v and `beside`."""
    global _recent
    if is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        tensors, there = _tensors(q, k, v, beside)
        for x in tensors:
            if x.is_nested:
                return None
        for x in tensors[3:]:
            if not x.data_ptr():  # its memory was given back, or it has none; those of q, k and v backends look at
                return None
        for known in _recent:
            if (
                known.there == there
                and _same(options, known.options)
                and known.check(*tensors)
                and torch._C._len_torch_dispatch_stack() == 0  # `check` overlooks the mode of make_fx
                and (known.grad_enabled is None or torch.is_grad_enabled() is known.grad_enabled)
            ):
                return known
        known = _KNOWN.get(signature(tensors, there, options))
    except (AttributeError, RuntimeError, TypeError):  # no dense tensor, or an option that cannot be a key: for the checks to name
        return None
    if known is None or not is_plain(tensors):
        return None
    known.options = options  # equal ones, of which these are likelier to come again as the same objects
    if known.check:
        _recent = (known, *(each for each in _recent if each is not known))[:RECENT]
    return known


def gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, options: tuple, beside: tuple = ALONE
) -> tuple[Tensor, ...] | None:
    """dQ, dK and dV of a call like one before, for whoever keeps O and LSE himself and is below autograd; None where there is no short way.

    All are arranged as the call was, which had no bias, slopes, sink or dropout.
    """
    whole = q, k, v, o, lse, d_o
    known = _went_back(whole, options) if beside[4] is None else None
    if known is not None:
        if known.arrangement:
            of_q, of_k, of_v, of_o, of_lse, of_d_o = known.check_whole[1]
            q, k, v, o, d_o = part(q, *of_q), part(k, *of_k), part(v, *of_v), part(o, *of_o), part(d_o, *of_d_o)
            lse = lse if of_lse is None else part(lse, *of_lse)
        return known.backward(q, k, v, o, lse, d_o, None, beside, False)[:3]
    known = find(q, k, v, options, beside)
    if known is None:
        return None
    q, k, v, o = known.inputs_and_o(q, k, v, o)
    if known.arrangement == PACKED:
        lse = lse.unsqueeze(0)
    if known.goes_back is None:
        lengths = [x for x in beside[4:] if x is not None]
        problem = operator.call_of(known.given._replace(q=q, k=k, v=v, mask_tensors=lengths)).problem
        known.goes_back = choose(replace(problem, grad=True, deterministic=True), known.given.backend) is choose(
            problem, known.given.backend
        )
    if not known.goes_back:
        return None
    d_o, short = _way_back(known, q, k, v, o, lse, d_o, None, beside)
    if not short:
        return None
    known.check_whole = guard(*whole), [_place(x) if x is not lse or known.arrangement == PACKED else None for x in (q, k, v, o, lse, d_o)]
    return known.backward(q, k, v, o, lse, d_o, None, beside, False)[:3]


def _went_back(whole: tuple[Tensor, ...], options: tuple) -> Known | None:
    """What is known of calls without other tensors whose q, k, v, O, LSE and dO were such when `gradients` went the short way."""
    if is_compiling() or forward_ad._current_level >= 0 or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0:
        return None
    for x in whole:
        if x.is_nested:
            return None
    for known in _recent:
        if not known.there and known.check_whole is not None and _same(options, known.options) and known.check_whole[0](*whole):
            return known
    return None


def bind(q: Tensor, k: Tensor, v: Tensor, options: tuple, given: operator.Operands, beside: tuple = ALONE) -> Known | None:
    """The checked call `given` as a function of q, k, v and `beside`, by which it is computed at once and, where it may be kept, whenever it comes
    again. None for a call whose mask holds tensors, that is no plain one, or of a backend that binds none: it is the operator's.
    """
    tensors, there = _tensors(q, k, v, beside)
    if given.diagonal is not None or given.by_document or given.row_max or operator.traced() or not is_plain(tensors):
        return None
    *_, precision, mask, return_lse = options
    if given.grad and precision is not None:  # the backward pass computes O once more
        return None
    if mask is not None and not (isinstance(mask, Mask) and mask.source is not None):  # it holds tensors, whose values may change
        return None
    bias, slopes, sink, _, *lengths = beside[:6]
    same = (bias, given.bias), (sink, given.sink), *zip(beside[6:], (given.q_scale, given.k_scale, given.v_scale), strict=False)
    as_given = all(map(_untouched, (q, k, v), given[:3])) and all(mine is theirs for mine, theirs in same)
    if not as_given or (slopes is not None and slopes.requires_grad):
        return None
    call = operator.call_of(given)
    if given.mask_tensors and not (isinstance(call.mask, Unread) and len(given.mask_tensors) == 2):
        return None
    bound = choose(call.problem, given.backend).bind(call)
    if bound is None:
        return None
    rest = given._replace(**dict.fromkeys(operator.Operands._fields[: operator.TENSORS]), mask_tensors=[])
    layouts = tuple(map(_layout, (*given[:3], *(x for x in (bias, given.alibi_slopes, sink, *lengths) if x is not None))))
    arrangement, check = PACKED if lengths[0] is not None else "", guard(*tensors) if bound.kept else None
    known = Known(
        bound, rest, given.grad, return_lse, options, there, check, _grad_enabled(tensors), layouts,
        draws=given.dropout_p > 0.0, arrangement=arrangement,
    )  # fmt: skip
    if bound.kept:
        if len(_KNOWN) >= MOST:
            forget()
        _KNOWN[signature(tensors, there, options)] = known
    return known


def remember_as(
    arrangement: str, q: Tensor, k: Tensor, v: Tensor, options: tuple, beside: tuple, call: tuple, heads_first: bool = False
) -> None:
    """Remember that a front end's call is `call`, (q, k, v, options, beside), arranged in another way, where there is a short way for that one.

    `options` are nine values that say what the front end makes of them, one of which is the front end's alone; heads_first: as in `Known`.
    """
    known = find(*call)
    if known is not None:
        tensors, there = _tensors(q, k, v, beside)
        mine = {"check": guard(*tensors), "grad_enabled": _grad_enabled(tensors), "check_back": {}, "check_whole": None}
        mine |= {"arrangement": arrangement, "heads_first": heads_first, "places": (), "gradients": ()}
        _KNOWN[signature(tensors, there, options)] = replace(known, options=options, there=there, **mine)


def forget() -> None:
    """Remember nothing: for those who change which backends there are."""
    global _recent
    _KNOWN.clear()
    _recent = ()


def _tensors(q: Tensor, k: Tensor, v: Tensor, beside: tuple) -> tuple[tuple[Tensor, ...], tuple]:
    """Those that are there, each once, as torch's check wants them, and which of `beside` these are; `rng` is none of them."""
    if beside is ALONE:
        return (q, k, v), ()
    bias, slopes, sink, _, cu_seqlens_q, cu_seqlens_k, *scales = beside
    if bias is slopes is sink is cu_seqlens_q is None and not scales:
        return (q, k, v), ()
    same = cu_seqlens_q is cu_seqlens_k
    there = bias is not None, slopes is not None and (True, slopes.requires_grad), sink is not None, same
    found = [q, k, v]
    for x in (bias, slopes, sink, cu_seqlens_q, None if same else cu_seqlens_k):
        if x is not None:
            found.append(x)
    if not scales:
        return tuple(found), (*there, cu_seqlens_q is not None)
    of_q, of_k, of_v = scales
    alike = of_k is of_q, of_v is of_q, of_v is of_k
    for x in (of_q, None if alike[0] else of_k, None if alike[1] or alike[2] else of_v):
        if x is not None:
            found.append(x)
    return tuple(found), (*there, cu_seqlens_q is not None, of_q is not None, of_k is not None, of_v is not None, *alike)


def _untouched(x: Tensor, given: Tensor) -> bool:
    """Whether x reaches the operator as it is, but for a batch dimension."""
    return x is given or (x.dim() == 3 and given.data_ptr() == x.data_ptr() and given.stride()[1:] == x.stride())


def slopes_of(alibi_slopes: Tensor) -> Tensor:
    """As the operator takes them, (batch or 1, heads_q) fp32."""
    slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes.unsqueeze(0)
    return slopes if slopes.dtype == torch.float32 else slopes.float()


def _same(options: tuple, others: tuple) -> bool:
    """Whether all are the same objects, or equal numbers; written out, it takes half the time of a loop."""
    a, b, c, d, e, f, g, h, i = options
    j, k, l, m, n, o, p, q, r = others
    return (
        a is j
        and (b is k or (type(b) is type(k) is float and b == k))
        and (c is l or (type(c) is type(l) is float and c == l))
        and (d is m or (type(d) is type(m) is float and d == m))
        and e is n
        and f is o
        and g is p
        and h is q
        and i is r
    )


def _way_back(
    known: Known, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, beside: tuple
) -> tuple[Tensor, bool]:
    """dO, which comes as the caller has it, as the backend has it; and whether the short way may be taken back: the tensors lie as those of the
    forward did, and nothing beside autograd looks on.

    Hooks on saved tensors may give back copies, and any gradient may arrive: that of a sum has strides of 0.
    """
    inside = INSIDE[known.of_outputs]
    if torch.is_grad_enabled():
        return inside(d_o), False
    tensors, there = _tensors(q, k, v, beside)
    tensors = (*tensors, o, lse, d_o) if d_lse is None else (*tensors, o, lse, d_o, d_lse)
    for x in tensors:
        if x.is_nested:
            return inside(d_o), False
    kind = there, d_lse is None
    check, place = known.check_back.get(kind, (None, None))
    if check is not None and check(*tensors) and torch._C._len_torch_dispatch_stack() == 0 and forward_ad._current_level < 0:
        return d_o if place is None else part(d_o, *place), True
    others = (x for x in (*beside[:3], *beside[4:]) if x is not None)
    d_o, outside = inside(d_o), d_o
    if plain.watched(tensors) or tuple(map(_layout, (q, k, v, *others))) != known.layouts:
        return d_o, False
    like_o, like_lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    results = (o, like_o, q.dtype), (d_o, like_o, q.dtype), (lse, like_lse, torch.float32), (d_lse, like_lse, torch.float32)
    for x, shape, dtype in results if d_lse is not None else results[:3]:
        if x.shape != shape or x.dtype != dtype or x.device != q.device or not (x is not lse or x.is_contiguous()):
            return d_o, False
    if q is not k and k is not v and (check := guard(*tensors)):  # it wants them apart
        known.check_back[kind] = check, None if d_o is outside else _place(d_o)
    return d_o, True


def _place(x: Tensor) -> tuple:
    """As `part` has it, of a view that begins where its base does."""
    return x.shape, x.stride(), 0


def _layout(x: Tensor) -> tuple:
    return x.dtype, x.device, x.shape, x.stride()


def guard(*tensors: Tensor) -> Callable | None:
    """Whether tensors have the types, dtypes, devices, sizes, strides and need of gradients of these, and whether dispatch is as it is now."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):  # torch's own business, which another version may do otherwise
        return None


def _grad_enabled(tensors: tuple[Tensor, ...]) -> bool | None:
    """As `Known` has it."""
    return torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None


def signature(tensors: tuple[Tensor, ...], there: tuple, options: tuple) -> tuple:
    """Types stand beside the values, because 1, 1.0 and True are equal, and not all of them are allowed."""
    grad = torch.is_grad_enabled() and any([x.requires_grad for x in tensors])
    return grad, there, tuple([(type(x), x.dtype, x.device, x.shape, x.stride()) for x in tensors]), options, *map(type, options)


def is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nothing beside autograd takes part in the call, a tracer and autocast included."""
    return not (operator.traced() or plain.watched(tensors) or torch._C._is_any_autocast_enabled())
