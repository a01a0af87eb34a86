"""Collectives of a plan other than attention: the whole sequence on every rank, a roll, and whether all ranks have the same plan."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.axis import Axis, Routes
from tilewise.distributed.exchange import Group, collect, told

if TYPE_CHECKING:
    from tilewise.distributed.planning import Plan


def agree(digest: int, group: Group, device: torch.device, what: str) -> None:
    """ValueError unless all ranks of the group have the same digest, below 2**62; one collective of two numbers."""
    numbers = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    with told("a comparison of plans"):
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    most, least = numbers.tolist()
    if most != -least:
        raise ValueError(
            f"the ranks have different plans: mask, lengths, heads, layout and tile must be the same on all of them. This rank has {what}"
        )


def _send(x: Tensor, routes: Routes, length: int, plan: "Plan", dim: int) -> Tensor:
    """x with `length` tokens along `dim`: those of all ranks where their routes say."""
    rows = x.movedim(dim, 0)
    place, one_head = plan.place, [slice(0, 1)] * plan.place.world
    out = collect(rows.reshape(len(rows), 1, 1, int(np.prod(rows.shape[1:]))), routes, one_head, length, place.group)
    return out.reshape(length, *rows.shape[1:]).movedim(0, dim)


class Whole(torch.autograd.Function):
    """`Plan.undispatch`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: "Plan", dim: int) -> Tensor:
        ctx.plan, ctx.dim = plan, dim
        plan.check_runs(x.device)
        everything = [np.array([[0, plan.q.length]], np.int64)] * plan.place.world
        routes = plan._routes("whole", x.device, lambda: Routes.of(plan.q, everything, plan.place.rank))
        return _send(x, routes, plan.q.length, plan, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = grad.contiguous()
        if ctx.plan.place.world > 1:
            whole = whole.clone()
            with told("a sum of gradients"):
                dist.all_reduce(whole, group=ctx.plan.place.group)
        return ctx.plan.dispatch(whole, ctx.dim), None, None


class Rolled(torch.autograd.Function):
    """`Plan.roll`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: "Plan", shift: int, dim: int) -> Tensor:
        ctx.plan, ctx.shift, ctx.dim = plan, shift, dim
        plan.check_runs(x.device)
        routes = plan._routes(f"roll {shift}", x.device, lambda: roll_routes(plan.q, shift, plan.place.rank))
        return _send(x, routes, plan.seqlen, plan, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Rolled.apply(grad, ctx.plan, -ctx.shift, ctx.dim), None, None, None


def roll_routes(axis: Axis, shift: int, rank: int) -> Routes:
    """From where each rank's tokens come when the axis rolls by `shift`: position p has the token of position p - shift, round the end."""
    first, _, holder, before = axis.segments
    length = max(axis.length, 1)

    def sources(of: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank, place among its tokens) of what each token of rank `of` becomes."""
        wanted = (axis.places(of) - shift) % length
        segment = torch.from_numpy(np.searchsorted(first, wanted.numpy(), side="right") - 1)
        return torch.from_numpy(holder)[segment], torch.from_numpy(before)[segment] + wanted - torch.from_numpy(first)[segment]

    give, take = [], []
    mine, _ = sources(rank)
    for other in range(len(axis.ranges)):
        theirs, place = sources(other)
        give.append(place[theirs == rank])
        take.append(torch.nonzero(mine == other).flatten())
    return Routes(rank, tuple(give), tuple(take))
