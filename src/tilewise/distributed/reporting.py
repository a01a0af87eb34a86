"""What a plan costs: pairs, keys and bytes of each rank, predicted seconds, and a picture of who has which queries."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tilewise.distributed.solver import BYTES, FLOPS

if TYPE_CHECKING:
    from tilewise.distributed.planning import Plan

CELLS = 64  # of the picture
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Report:
    """Of each rank: visible pairs of its heads, tokens, keys that it fetches from others, and bytes that it receives in a forward pass and in a
    backward pass.

    seconds: predicted, of the slowest rank, (compute, exchange) of the forward and the backward pass together, one after the other; with rates of
    H100s that are linked by NVLink (solver.py), so of other machines no more than a proportion.
    """

    pairs: tuple[int, ...]
    tokens: tuple[int, ...]
    fetched: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    all_gather: int  # keys that a rank would fetch in an all-gather
    seconds: tuple[float, float]
    picture: str
    pieces: tuple[int, int]  # in how many parts of heads, and of keys, one after another
    at_once: int  # bytes of keys and values of a piece, of the whole sequence's length or its part

    @property
    def imbalance(self) -> float:
        """The largest share of the pairs, by the mean."""
        mean = sum(self.pairs) / len(self.pairs)
        return max(self.pairs) / mean if mean else 1.0

    @property
    def traffic(self) -> float:
        """Keys fetched, by those of an all-gather: the mean of the ranks."""
        return sum(self.fetched) / len(self.fetched) / self.all_gather if self.all_gather else 0.0

    def __str__(self) -> str:
        lines = [
            f"{len(self.pairs)} ranks; largest share of the pairs {self.imbalance:.3f} of the mean; keys fetched {self.traffic:.2f} of an all-gather",
            f"predicted on H100s, forward and backward: {1e3 * self.seconds[0]:.3f} ms of kernels, {1e3 * self.seconds[1]:.3f} ms of exchanges",
            f"queries by rank: {self.picture}",
            f"keys and values: {self.at_once / 2**20:.1f} MiB at a time, in {self.pieces[0]} parts of heads and {self.pieces[1]} of keys",
        ]
        for rank, (pairs, tokens, fetched, there, back) in enumerate(
            zip(self.pairs, self.tokens, self.fetched, self.forward_bytes, self.backward_bytes, strict=True)
        ):
            received = f"{there / 2**20:.1f} MiB forward, {back / 2**20:.1f} MiB backward"
            lines.append(f"  rank {rank}: {tokens} tokens, {pairs} pairs, {fetched} keys fetched, {received}")
        return "\n".join(lines)


def report(plan: "Plan", itemsize: int, most_bytes: int | None, batch: int) -> Report:
    world, sharing, (heads_q, heads_k) = plan.place.world, plan.sharing, plan.heads
    load = np.bincount(plan.owner, weights=plan.work.load, minlength=len(plan.rows)).astype(np.int64)
    pairs = tuple(int(load[r // sharing]) // sharing for r in range(world))
    held = [plan.k.holders(plan.needs[r // sharing]) for r in range(world)]
    fetched = tuple(int((last - first)[holder != r].sum()) for r, (holder, first, last, _) in enumerate(held))
    key = 2 * heads_k // sharing * plan.head_dim * itemsize
    of_group = [sum(last - first for first, last in rows) for rows in plan.rows]
    query = heads_q // sharing * plan.head_dim * itemsize
    moved = [(of_group[r // sharing] - plan.q.count(r)) * query if sharing > 1 else 0 for r in range(world)]  # Q, O, dO and dQ each
    sent = np.zeros(world, np.int64)
    for r, (holder, first, last, _) in enumerate(held):
        np.add.at(sent, holder[holder != r], (last - first)[holder != r])
    forward = tuple(n * key + 2 * m for n, m in zip(fetched, moved, strict=True))
    wide = max(itemsize, 4) // itemsize if len(plan.rows) > 1 else 1  # gradients that are to be added cross in fp32
    backward = tuple((n + int(s) * wide) * key + 2 * m for n, s, m in zip(fetched, sent, moved, strict=True))
    kernels = 3.5 * 4 * plan.head_dim * max(pairs) / FLOPS
    exchanges = max(map(sum, zip(forward, backward, strict=True))) / BYTES
    all_gather = plan.k.length - min(plan.k.count(r) for r in range(world))
    of_key = 2 * plan.head_dim * itemsize * batch
    stages, parts = plan.pieces(of_key, most_bytes)
    widest = max((last - first for first, last in filter(None, plan.key_parts(parts))), default=plan.k.length)
    at_once = heads_k // sharing // stages * of_key * widest
    tokens = tuple(plan.q.count(r) for r in range(world))
    seconds, pieces = (kernels, exchanges), (stages, parts)
    return Report(pairs, tokens, fetched, forward, backward, all_gather, seconds, picture(plan), pieces, at_once)


def picture(plan: "Plan") -> str:
    """A character for each of at most `CELLS` equal pieces of the sequence: the rank that holds its first query."""
    length = plan.q.length
    cells = min(CELLS, length)
    where = np.arange(cells) * length // max(cells, 1)
    holder = plan.q.holders(np.stack([where, where + 1], axis=1))[0]
    return "".join(DIGITS[r % len(DIGITS)] for r in holder.tolist())
