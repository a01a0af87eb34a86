"""What crosses between ranks: rows of tokens to those who want them, and sums back to those who hold them, in one collective each.

A tensor is (tokens, batch, heads, width) here. `heads[r]` is the slice of heads that rank r computes, as many as every other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.axis import Routes

Group = dist.ProcessGroup | None


def collect(x: Tensor, routes: Routes, heads: Sequence[slice], length: int, group: Group) -> Tensor:
    """(length, batch, heads here, width): the tokens that this rank takes, where `routes` says, and zeros between.

    x: this rank's tokens, all heads.
    """
    here = heads[routes.rank]
    out = x.new_zeros((length, x.shape[1], _width(here), x.shape[3]))
    if routes.others:
        if _width(here) == x.shape[2]:
            sent = x[routes.given].reshape(-1)
        else:
            sent = torch.cat([x[routes.give[r]][:, :, heads[r]].reshape(-1) for r in routes.others])
        out.index_copy_(0, routes.taken, _swapped(sent, routes.give, routes.take, out, routes.rank, group))
    return out.index_copy_(0, routes.take[routes.rank], x[routes.give[routes.rank]][:, :, here])


def give_back(x: Tensor, routes: Routes, heads: Sequence[slice], like: Tensor, group: Group, adds: bool) -> Tensor:
    """(tokens, batch, heads, width), shaped as `like`, this rank's tokens: what all ranks made of them.

    x: (length, batch, heads here, width). adds: several ranks may have a part of one token and head; the parts are added in fp32 (fp64 for fp64), in
    the order of the ranks. Otherwise one has it.
    """
    parts = {routes.rank: x[routes.take[routes.rank]]}
    if routes.others:
        came = _swapped(x[routes.taken].reshape(-1), routes.take, routes.give, x, routes.rank, group)
        parts |= zip(routes.others, came.split([len(routes.give[r]) for r in routes.others]), strict=True)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(like.shape, dtype=wide if adds else x.dtype, device=x.device)
    for r, part in sorted(parts.items()):
        mine = out[:, :, heads[r]]
        if adds:
            mine.index_add_(0, routes.give[r], part.to(wide))
        else:
            mine.index_copy_(0, routes.give[r], part)
    return out.to(x.dtype)


def _width(heads: slice) -> int:
    return heads.stop - heads.start


def _swapped(sent: Tensor, there: Sequence[Tensor], here: Sequence[Tensor], like: Tensor, rank: int, group: Group) -> Tensor:
    """(rows, batch, heads, width), rows as those of `like`: what the others sent, by rank; sent: what they are sent, flat.

    there, here: of each rank, as many as the rows that it is sent and that it sends.
    """
    row = like.shape[1] * like.shape[2] * like.shape[3]
    given, taken = ([0 if r == rank else len(each) * row for r, each in enumerate(side)] for side in (there, here))
    received = like.new_empty(sum(taken))
    with told("an exchange"):
        dist.all_to_all_single(received, sent, taken, given, group=group)
    return received.view(sum(len(each) for r, each in enumerate(here) if r != rank), *like.shape[1:])


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
