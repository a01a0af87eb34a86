"""Who computes which chunk of queries: equal shares of the visible pairs, with few keys to fetch.

All candidates give every rank as many chunks as the others, or one fewer. Chunks of the most loaded rank are exchanged for others', and the
assignment with the shortest predicted step on the way is taken. Integers and stable sorts alone decide, so that every rank finds the same one.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numpy import ndarray

# What predictions are made with: an H100's dense bf16 rate as tilewise reaches it, and NVLink's rate for exchanges between all ranks.
FLOPS, BYTES = 600e12, 350e9
FAIR = 1.02  # a larger share of the mean costs three times what it is
CLOSE = 1.005  # nothing is exchanged for a better balance
EXCHANGES = 24  # at most, from each start


class Costs(NamedTuple):
    """Seconds of a forward and a backward pass."""

    pair: float  # one visible pair of one head
    key: float  # one key and its value, fetched twice, and their gradients given back

    @classmethod
    def of(cls, heads_k: int, head_dim: int, itemsize: int = 2) -> "Costs":
        return cls(3.5 * 4 * head_dim / FLOPS, 3 * 2 * heads_k * head_dim * itemsize / BYTES)


def contiguous(n: int, ranks: int) -> ndarray:
    """(n,) ranks, in order."""
    return np.arange(n) * ranks // max(n, 1)


def zigzag(n: int, ranks: int) -> ndarray:
    """The r-th and the r-th last of 2 ranks pieces to rank r: equal shares of a causal mask."""
    place = np.arange(n) * 2 * ranks // max(n, 1)
    return np.minimum(place, 2 * ranks - 1 - place)


def largest_first(load: ndarray, ranks: int) -> ndarray:
    """Each chunk, the largest first, to the rank with the least so far that has room."""
    owner, most = np.zeros(len(load), np.int64), -(-len(load) // ranks)
    heap, count = [(0, rank) for rank in range(ranks)], [0] * ranks
    loads = load.tolist()
    for chunk in np.argsort(-load, kind="stable").tolist():
        sofar, rank = heapq.heappop(heap)
        owner[chunk], count[rank] = rank, count[rank] + 1
        if count[rank] < most:
            heapq.heappush(heap, (sofar + loads[chunk], rank))
    return owner


def solve(load: ndarray, needs: ndarray, ranks: int, costs: Costs) -> ndarray:
    """The owner of each of n chunks, (n,) int64.

    load: (n,) pairs. needs: (n, n), the keys of chunk j that queries of chunk i see; keys are where the queries of their chunk are.
    """
    n = len(load)
    if ranks == 1 or n <= ranks:
        return contiguous(n, ranks)
    best, least = contiguous(n, ranks), float("inf")
    for start in (contiguous(n, ranks), zigzag(n, ranks), largest_first(load, ranks)):
        if start.max() >= ranks or np.ptp(np.bincount(start, minlength=ranks)) > 1:
            continue
        owner, seconds = _exchanged(load, needs, start, ranks, costs)
        if seconds < least:
            best, least = owner, seconds
        if least <= costs.pair * load.sum() / ranks * FAIR and least > 0:
            break
    return best


def received(needs: ndarray, owner: ndarray, ranks: int) -> ndarray:
    """(ranks,) keys that each rank fetches from others, at most: of a chunk those of its queries' chunk that need most of it."""
    order = np.argsort(owner, kind="stable")
    count = np.bincount(owner, minlength=ranks)
    starts = np.minimum(np.cumsum(count) - count, len(owner) - 1)
    most = np.maximum.reduceat(needs[order], starts, axis=0)
    return (most.sum(axis=1) - np.bincount(owner, weights=most[owner, np.arange(len(owner))], minlength=ranks)) * (count > 0)


def _seconds(share: ndarray, needs: ndarray, owner: ndarray, ranks: int, costs: Costs) -> float:
    most, over = share.max(), max(share.max() - FAIR * share.mean(), 0.0)
    return costs.pair * float(most + 3 * over) + costs.key * float(received(needs, owner, ranks).max())


def _exchanged(load: ndarray, needs: ndarray, start: ndarray, ranks: int, costs: Costs) -> tuple[ndarray, float]:
    """The best assignment that exchanges lead to from `start`, and its predicted seconds. Sums in fp64 are of integers, and exact."""
    owner, near = start.copy(), (needs + needs.T).astype(np.float64)
    share, mean = np.bincount(owner, weights=load, minlength=ranks), load.sum() / ranks
    best, least = start, _seconds(share, needs, owner, ranks, costs)
    together = near @ (owner[:, None] == np.arange(ranks)).astype(np.float64)  # (n, ranks): keys that chunk and rank need of each other
    for _ in range(EXCHANGES):
        busiest = int(share.argmax())
        if share[busiest] <= CLOSE * mean:
            break
        mine, others = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        theirs = owner[others]
        shift = np.subtract.outer(load[mine], load[others])
        larger = np.maximum(share[busiest] - shift, share[theirs] + shift)
        gain = share[busiest] - np.maximum(larger, mean)
        most = gain.max()
        if most <= 0:
            break
        apart = (together[mine, busiest][:, None] - together[mine][:, theirs]) + (together[others, theirs] - together[others, busiest])
        score = gain / (most * costs.pair * 0.25 + costs.key / len(load) * np.maximum(apart, 0))
        a, b = divmod(int(score.argmax()), len(others))
        a, b, other = mine[a], others[b], theirs[b]
        owner[a], owner[b] = other, busiest
        change = near[:, b] - near[:, a]
        together[:, busiest] += change
        together[:, other] -= change
        share[busiest] += load[b] - load[a]
        share[other] += load[a] - load[b]
        seconds = _seconds(share, needs, owner, ranks, costs)
        if seconds < least:
            best, least = owner.copy(), seconds
    return best, least
