"""What crosses between ranks: rows of tokens to those who want them, and sums back to those who hold them, in one collective each.

A tensor is (tokens, batch, heads, width) here. `heads[r]` is the slice of heads that rank r computes, as many as every other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.axis import Routes

Group = dist.ProcessGroup | None


class Underway(NamedTuple):
    """Rows on their way: `arrived` (rows, batch, heads, width) holds them, by rank, once `work` is done; None: there are none."""

    arrived: Tensor
    work: dist.Work | None

    def rows(self) -> Tensor:
        """Those rows; the current stream, or this thread, waits for them."""
        if self.work is not None:
            with told("an exchange"):
                self.work.wait()
        return self.arrived


def begin(x: Tensor, routes: Routes, heads: Sequence[slice], group: Group) -> Underway:
    """Send this rank's tokens x (all heads) to those who want them, each its heads."""
    shape = x.shape[1], _width(heads[routes.rank]), x.shape[3]
    if not routes.others:
        return Underway(x.new_empty((0, *shape)), None)
    if shape[1] == x.shape[2]:
        sent = x[routes.given].reshape(-1)
    else:
        sent = torch.cat([x[routes.give[r]][:, :, heads[r]].reshape(-1) for r in routes.others])
    return _swapped(sent, routes.give, routes.take, shape, routes.rank, group)


def finish(underway: Underway, x: Tensor, routes: Routes, heads: Sequence[slice], length: int) -> Tensor:
    """(length, batch, heads here, width): the tokens that this rank takes, where `routes` says, and zeros between."""
    out = x.new_zeros((length, *underway.arrived.shape[1:]))
    out.index_copy_(0, routes.take[routes.rank], x[routes.give[routes.rank]][:, :, heads[routes.rank]])
    return out.index_copy_(0, routes.taken, underway.rows())


def collect(x: Tensor, routes: Routes, heads: Sequence[slice], length: int, group: Group) -> Tensor:
    """`begin`, then `finish`."""
    return finish(begin(x, routes, heads, group), x, routes, heads, length)


def begin_back(x: Tensor, routes: Routes, group: Group) -> Underway:
    """Send what this rank made of the tokens that it took, x (length, batch, heads here, width), to those who hold them."""
    if not routes.others:
        return Underway(x[:0], None)
    return _swapped(x[routes.taken].reshape(-1), routes.take, routes.give, tuple(x.shape[1:]), routes.rank, group)


def finish_back(underway: Underway, own: Tensor, routes: Routes, heads: Sequence[slice], out: Tensor, adds: bool) -> None:
    """Put what all ranks made of this rank's tokens into `out` (tokens, batch, heads, width): added in the order of the ranks, in out's dtype, where
    several ranks may have a part of one token and head (`adds`). own: what this rank made of its own.
    """
    came = underway.rows().split([len(routes.give[r]) for r in routes.others]) if routes.others else ()
    parts = {routes.rank: own} | dict(zip(routes.others, came, strict=True))
    for r, part in sorted(parts.items()):
        mine = out[:, :, heads[r]]
        if adds:
            mine.index_add_(0, routes.give[r], part.to(out.dtype))
        else:
            mine.index_copy_(0, routes.give[r], part.to(out.dtype))


def _width(heads: slice) -> int:
    return heads.stop - heads.start


def _swapped(sent: Tensor, there: Sequence[Tensor], here: Sequence[Tensor], shape: tuple[int, ...], rank: int, group: Group) -> Underway:
    """Rows of `shape`: what the others send, by rank; sent: what they are sent, flat, which stays alive until it is.

    there, here: of each rank, as many as the rows that it is sent and that it sends.
    """
    row = shape[0] * shape[1] * shape[2]
    given, taken = ([0 if r == rank else len(each) * row for r, each in enumerate(side)] for side in (there, here))
    received = sent.new_empty(sum(taken))
    with told("an exchange"):
        work = dist.all_to_all_single(received, sent, taken, given, group=group, async_op=True)
    return Underway(received.view(sum(len(each) for r, each in enumerate(here) if r != rank), *shape), work)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Where a collective fails because of another rank, say so; what torch says of it is about sockets."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} of tilewise.distributed failed: another rank of the group has ended, has raised, or made another call; its own message says "
            f"which ({str(error).splitlines()[0]:.300})"
        ) from error
