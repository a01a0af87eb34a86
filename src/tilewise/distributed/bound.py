"""A rank's calls, bound once: each of a plan's pieces is the same call in every layer and step, and its masks and kernels need not be found again."""

from dataclasses import replace

from torch import Tensor

from tilewise.backends import Bound
from tilewise.distributed.planning import Plan
from tilewise.problem import Extras
from tilewise.runtime import operator, plain, saved
from tilewise.runtime.dispatch import choose

MOST = 64  # of a plan


def attend(plan: Plan, given: operator.Operands) -> tuple[Tensor, Tensor]:
    """O and LSE, of which autograd knows nothing."""
    bound = _bound(plan, given)
    if bound is None:
        return operator.attend(given, wide_keys=True)[:2]
    o, lse = bound.forward(given.q, given.k, given.v, _extras(given), True)
    return o, lse.contiguous()


def differentiate(
    plan: Plan, o: Tensor, lse: Tensor, d_o: Tensor, given: operator.Operands, d_lse: Tensor | None, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dQ, dK, dV, dBias and dSink; dK and dV in fp32 where the backend can."""
    bound = _bound(plan, given)
    if bound is None:
        return operator.differentiate(o, lse, d_o, given, d_lse, bias_grad, wide_keys=True)
    saved.check(given.q, given.k, given.v, o, lse, d_o, d_lse, (given.bias, given.alibi_slopes, given.sink, None))
    return bound.backward(given.q, given.k, given.v, o, lse.contiguous(), d_o, d_lse, _extras(given), bias_grad)


def _bound(plan: Plan, given: operator.Operands) -> Bound | None:
    """What serves calls like this one; None where it depends on what a mask's tensors hold, or anything but autograd takes part in it."""
    tensors: tuple = given[: operator.TENSORS]
    if given.mask_tensors or given.diagonal is not None or operator.traced() or plain.needs_dispatch(tensors):
        return None
    known = plan.state.setdefault("bound", {})
    key = tuple(None if x is None else (x.dtype, x.device, x.shape, x.stride()) for x in tensors), given[operator.TENSORS + 1 :]
    if key not in known:
        call = replace(operator.call_of(given), wide_keys=given.grad)
        bound = choose(call.problem, given.backend).bind(call)
        if len(known) >= MOST:
            known.clear()
        known[key] = bound if bound is not None and bound.kept else None
    return known[key]


def _extras(given: operator.Operands) -> Extras:
    return Extras(bias=given.bias, alibi_slopes=given.alibi_slopes, sink=given.sink, rng=given.rng)
