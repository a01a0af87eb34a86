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


def collect(x: Tensor, routes: Routes, heads: Sequence[slice], rank: int, length: int, group: Group) -> Tensor:
    """(length, batch, heads here, width): the tokens that this rank takes, where `routes` says, and zeros between.

    x: this rank's tokens, all heads.
    """
    others = [r for r in range(len(heads)) if r != rank]
    out = x.new_zeros((length, x.shape[1], _width(heads[rank]), x.shape[3]))
    if others:
        arrived = _swap([x[routes.give[r]][:, :, heads[r]] for r in others], [len(routes.take[r]) for r in others], out, rank, group)
        out.index_copy_(0, torch.cat([routes.take[r] for r in others]), arrived)
    return out.index_copy_(0, routes.take[rank], x[routes.give[rank]][:, :, heads[rank]])


def give_back(x: Tensor, routes: Routes, heads: Sequence[slice], rank: int, like: Tensor, group: Group, adds: bool) -> Tensor:
    """(tokens, batch, heads, width), shaped as `like`, this rank's tokens: what all ranks made of them.

    x: (length, batch, heads here, width). adds: several ranks may have a part of one token and head; the parts are added in fp32 (fp64 for fp64), in
    the order of the ranks. Otherwise one has it.
    """
    ranks = range(len(heads))
    sends = {r: x[routes.take[r]] for r in ranks}
    parts = {rank: sends.pop(rank)}
    if sends:
        counts = [len(routes.give[r]) for r in sends]
        parts |= zip(sends, _swap(list(sends.values()), counts, x, rank, group).split(counts), strict=True)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(like.shape, dtype=wide if adds else x.dtype, device=x.device)
    for r in ranks:
        mine = out[:, :, heads[r]]
        if adds:
            mine.index_add_(0, routes.give[r], parts[r].to(wide))
        else:
            mine.index_copy_(0, routes.give[r], parts[r])
    return out.to(x.dtype)


def _width(heads: slice) -> int:
    return heads.stop - heads.start


def _swap(sends: list[Tensor], counts: list[int], like: Tensor, rank: int, group: Group) -> Tensor:
    """(sum of counts, batch, heads, width), rows as those of `like`: what each other rank sent, counts rows; sends: what each is sent."""
    row = like.shape[1] * like.shape[2] * like.shape[3]
    flat = torch.cat([x.reshape(-1) for x in sends])
    received = like.new_empty(sum(counts) * row)
    given, taken = [x.numel() for x in sends], [n * row for n in counts]
    given.insert(rank, 0)
    taken.insert(rank, 0)
    with told("an exchange"):
        dist.all_to_all_single(received, flat, taken, given, group=group)
    return received.view(sum(counts), *like.shape[1:])


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
