"""Calls like one before: their checks, choice of backend and arguments are remembered, and the kernel runs at once.

What is remembered is found by everything that those depend on (`_signature`); what a tensor holds, and how many threads there are, is no part of
it. Only plain calls are remembered: eager, on q, k and v alone. Bad input is never remembered, so it gets its error.

The call before is tried first, by a check of tensors that torch's compiler has for its own guards: it takes 0.4 us where a signature takes 3. It
aborts the process on a nested tensor, so that is asked first. The gradient asks again, because hooks on saved tensors may give back others.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewise.masks import Mask
from tilewise.runtime import operator, plain
from tilewise.runtime.dispatch import choose

MOST = 1024


@dataclass(slots=True)
class Known:
    """A call that can be repeated: the backend's short way (see `backends`), and the operands of the long way but for the tensors."""

    short: object
    given: operator.Operands
    grad: bool
    return_lse: bool
    options: tuple
    check: Callable | None  # of q, k and v: whether they are such tensors, and nothing beside autograd takes part; None: torch cannot say
    grad_enabled: bool | None  # whether autograd was on, which `check` does not ask; None: nothing requires grad
    layouts: tuple  # of q, k and v, as `_layout` gives them
    check_back: Callable | None = None  # of q, k, v, O, LSE and dO, once a gradient went the short way
    goes_back: bool | None = (
        None  # whether the backend has the gradient of a call that asked for none, once someone wanted it (`gradients`)
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.grad:
            return _Repeated.apply(q, k, v, self)
        results = self.short.forward(q, k, v, self.return_lse)
        return results if self.return_lse else results[0]


_KNOWN: dict[tuple, Known] = {}
_last: Known | None = None


class _Repeated(torch.autograd.Function):
    """The short way with a gradient, of O alone. It saves what the long way saves (`saved.in_order`)."""

    @staticmethod
    def forward(ctx, q, k, v, known):
        o, lse = known.short.forward(q, k, v, True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.known = known
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, o, lse = ctx.saved_tensors
        known = ctx.known
        if _may_go_back(known, q, k, v, o, lse, d_o):
            return *known.short.backward(q, k, v, o, lse, d_o), None
        return *operator.differentiate(o, lse, d_o, known.given._replace(q=q, k=k, v=v)), None

    @staticmethod
    def jvp(ctx, *tangents):
        operator.refuse_forward_mode()


def find(q: Tensor, k: Tensor, v: Tensor, options: tuple) -> Known | None:
    """What is known of calls with this signature, as a function of q, k and v."""
    global _last
    if is_compiling() or forward_ad._current_level >= 0:
        return None
    last = _last
    try:
        if (
            last is not None
            and q is not k  # `check` wants them apart
            and not (q.is_nested or k.is_nested or v.is_nested)
            and last.check(q, k, v)
            and torch._C._len_torch_dispatch_stack() == 0  # `check` overlooks the mode of make_fx
            and _same(options, last.options)
            and (last.grad_enabled is None or torch.is_grad_enabled() is last.grad_enabled)
        ):
            return last
        known = _KNOWN.get(_signature(q, k, v, options))
    except (AttributeError, RuntimeError, TypeError):  # no dense tensor, or an option that cannot be a key: for the checks to name
        return None
    if known is None or not _plain(q, k, v):
        return None
    _last = known if known.check else None
    return known


def gradients(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, options: tuple) -> tuple[Tensor, Tensor, Tensor] | None:
    """dQ, dK and dV of a call like one before, for whoever keeps O and LSE himself and is below autograd; None where there is no short way."""
    known = find(q, k, v, options)
    if known is None:
        return None
    if known.goes_back is None:
        problem = operator.call_of(known.given._replace(q=q, k=k, v=v)).problem
        known.goes_back = choose(replace(problem, grad=True), known.given.backend) is choose(problem, known.given.backend)
    if known.goes_back and _may_go_back(known, q, k, v, o, lse, d_o):
        return known.short.backward(q, k, v, o, lse, d_o)
    return None


def remember(q: Tensor, k: Tensor, v: Tensor, options: tuple, given: operator.Operands) -> None:
    """Remember a call that went the long way as the operands `given`, where there is a shorter one."""
    if operator.traced() or given.dropout_p > 0.0 or not _plain(q, k, v):
        return
    *_, mask, return_lse = options
    if mask is not None and not (isinstance(mask, Mask) and mask.source is not None):  # it holds tensors, whose values may change
        return
    if (return_lse and given.grad) or not (q is given.q and k is given.k and v is given.v):
        return
    call = operator.call_of(given)
    short = choose(call.problem, given.backend).repeat(call)
    if short is not None:
        if len(_KNOWN) >= MOST:
            forget()
        rest, layouts = given._replace(q=None, k=None, v=None), tuple(map(_layout, (q, k, v)))
        grad_enabled = torch.is_grad_enabled() if q.requires_grad or k.requires_grad or v.requires_grad else None
        known = Known(short, rest, given.grad, return_lse, options, _check(q, k, v), grad_enabled, layouts)
        _KNOWN[_signature(q, k, v, options)] = known


def forget() -> None:
    """Remember nothing: for those who change which backends there are."""
    global _last
    _KNOWN.clear()
    _last = None


def _same(options: tuple, others: tuple) -> bool:
    """Whether all are the same objects; written out, it takes half the time of a loop."""
    a, b, c, d, e, f, g, h = options
    i, j, k, l, m, n, o, p = others
    return a is i and b is j and c is k and d is l and e is m and f is n and g is o and h is p


def _may_go_back(known: Known, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> bool:
    return (
        known.check_back is not None
        and not (q.is_nested or k.is_nested or v.is_nested or o.is_nested or lse.is_nested or d_o.is_nested)
        and known.check_back(q, k, v, o, lse, d_o)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.is_grad_enabled()
        and forward_ad._current_level < 0
    ) or (not torch.is_grad_enabled() and _as_remembered(known, q, k, v, o, lse, d_o))


def _as_remembered(known: Known, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> bool:
    """Whether the short way may be taken back: the tensors lie as those of the forward did, and nothing beside autograd looks on.

    Hooks on saved tensors may give back copies, and any gradient may arrive: that of a sum has strides of 0.
    """
    if any(x.is_nested for x in (q, k, v, o, lse, d_o)):
        return False
    if plain.watched((q, k, v, o, lse, d_o)) or tuple(map(_layout, (q, k, v))) != known.layouts:
        return False
    like_o, like_lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    for x, shape, dtype in ((o, like_o, q.dtype), (d_o, like_o, q.dtype), (lse, like_lse, torch.float32)):
        if x.shape != shape or x.dtype != dtype or x.device != q.device or not (x is d_o or x.is_contiguous()):
            return False
    if q is not k and k is not v:  # it wants them apart
        known.check_back = _check(q, k, v, o, lse, d_o)
    return True


def _layout(x: Tensor) -> tuple:
    return x.dtype, x.device, x.shape, x.stride()


def _check(*tensors: Tensor) -> Callable | None:
    """Whether tensors have the types, dtypes, devices, sizes, strides and need of gradients of these, and whether dispatch is as it is now."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):  # torch's own business, which another version may do otherwise
        return None


def _signature(q: Tensor, k: Tensor, v: Tensor, options: tuple) -> tuple:
    """Types stand beside the values, because 1, 1.0 and True are equal, and not all of them are allowed."""
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tensors = type(q), q.dtype, q.device, q.shape, q.stride(), type(k), k.dtype, k.device, k.shape, k.stride()
    return grad, tensors, type(v), v.dtype, v.device, v.shape, v.stride(), options, *map(type, options)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing beside autograd takes part in the call, a tracer and autocast included."""
    return not (operator.traced() or plain.watched((q, k, v)) or torch._C._is_any_autocast_enabled())
