"""Collectives of a plan beside attention: the whole sequence on every rank, a roll, and whether all ranks have the same plan."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.axis import Axis, Routes
from tilewise.distributed.exchange import Group, all_to_all

if TYPE_CHECKING:
    from tilewise.distributed.planning import Plan


def agree(digest: int, group: Group, device: torch.device, what: str) -> None:
    """ValueError unless all ranks of the group have the same digest, below 2**62; one collective of two numbers."""
    numbers = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    try:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks could not compare their plans: another rank of the group has ended, has raised, or made another call ({str(error).splitlines()[0]:.300})"
        ) from error
    most, least = numbers.tolist()
    if most != -least:
        raise ValueError(
            f"the ranks have different plans: mask, lengths, heads, layout and tile must be the same on all of them. This rank has {what}"
        )


def _rows(x: Tensor, dim: int) -> Tensor:
    """(tokens, ...), contiguous."""
    return x.movedim(dim, 0).contiguous()


def _send(rows: Tensor, routes: Routes, length: int, plan: "Plan") -> Tensor:
    """(length, ...): rows (tokens, ...) of all ranks where their routes say."""
    out = rows.new_empty((length, *rows.shape[1:]))
    others = [r for r in range(plan.place.world) if r != plan.place.rank]
    if others:
        row = rows[:1].numel() if len(rows) else int(np.prod(rows.shape[1:], dtype=np.int64))
        given = [len(routes.give[r]) * row * (r != plan.place.rank) for r in range(plan.place.world)]
        taken = [len(routes.take[r]) * row * (r != plan.place.rank) for r in range(plan.place.world)]
        received = rows.new_empty(sum(taken))
        all_to_all(received, torch.cat([rows[routes.give[r]].reshape(-1) for r in others]), taken, given, plan.place.group)
        out[torch.cat([routes.take[r] for r in others])] = received.view(-1, *rows.shape[1:])
    out[routes.take[plan.place.rank]] = rows[routes.give[plan.place.rank]]
    return out


class Whole(torch.autograd.Function):
    """`Plan.undispatch`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: "Plan", dim: int) -> Tensor:
        ctx.plan, ctx.dim = plan, dim
        plan.check_runs(x.device)
        everything = [np.array([[0, plan.q.length]], np.int64)] * plan.place.world
        routes = plan._routes("whole", x.device, lambda: Routes.of(plan.q, everything, plan.place.rank))
        return _send(_rows(x, dim), routes, plan.q.length, plan).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = grad.contiguous()
        if ctx.plan.place.world > 1:
            whole = whole.clone()
            dist.all_reduce(whole, group=ctx.plan.place.group)
        return ctx.plan.dispatch(whole, ctx.dim), None, None


class Rolled(torch.autograd.Function):
    """`Plan.roll`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: "Plan", shift: int, dim: int) -> Tensor:
        ctx.plan, ctx.shift, ctx.dim = plan, shift, dim
        plan.check_runs(x.device)
        routes = plan._routes(f"roll {shift}", x.device, lambda: roll_routes(plan.q, shift, plan.place.rank))
        return _send(_rows(x, dim), routes, plan.seqlen, plan).movedim(0, dim)

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
    return Routes(tuple(give), tuple(take))
