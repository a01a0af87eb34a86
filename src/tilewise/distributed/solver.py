"""Who computes which chunk of queries: equal shares of the visible pairs, with few keys to fetch.

All candidates give every rank as many chunks as the others, or one fewer. Chunks of the most loaded rank are exchanged for others', and the
assignment with the shortest predicted step on the way is taken. Integers and stable sorts alone decide, so that every rank finds the same one.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy import ndarray

# What predictions are made with: an H100's dense bf16 rate as tilewise reaches it, and NVLink's rate for exchanges between all ranks.
FLOPS, BYTES = 600e12, 350e9
FAIR = 1.02  # a larger share of the mean costs three times what it is
CLOSE, EVEN = 1.005, 1.015  # nothing is exchanged for a better balance; a balance that is given up for fewer keys to fetch
UNEVEN = 1.04  # such assignments are not looked at twice
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
    near = (needs + needs.T).astype(np.float64)
    np.fill_diagonal(near, 0)  # a chunk's own keys go with it
    best, least = contiguous(n, ranks), float("inf")
    good = costs.pair * load.sum() / ranks * FAIR
    for start in (contiguous(n, ranks), zigzag(n, ranks), largest_first(load, ranks)):
        if np.ptp(np.bincount(start, minlength=ranks)) > 1:
            continue
        state = _State(load, needs, near, start.copy(), ranks, costs)
        owner, seconds = _explored(state, state.evening)
        if seconds < least:
            best, least = owner, seconds
        share = np.bincount(best, weights=load, minlength=ranks)
        if least <= good or (start[-1] == 0 and share.max() <= FAIR * share.mean()):  # after zigzag: what balances best fetches most
            break
    if least <= good:
        return best
    state = _State(load, needs, near, best.copy(), ranks, costs)
    return _explored(state, state.nearing)[0]


def received(needs: ndarray, owner: ndarray, ranks: int) -> ndarray:
    """(ranks,) keys that each rank fetches from others, at most: of a chunk those of its queries' chunk that need most of it."""
    order, count = np.argsort(owner, kind="stable"), np.bincount(owner, minlength=ranks)
    there = count > 0
    most = np.zeros((ranks, len(owner)), needs.dtype)
    most[there] = np.maximum.reduceat(needs[order], (np.cumsum(count) - count)[there], axis=0)
    own = np.bincount(owner, weights=most[owner, np.arange(len(owner))], minlength=ranks)
    return most.sum(axis=1) - own


def _seconds(share: ndarray, needs: ndarray, owner: ndarray, ranks: int, costs: Costs) -> float:
    most, over = share.max(), max(share.max() - FAIR * share.mean(), 0.0)
    return costs.pair * float(most + 3 * over) + costs.key * float(received(needs, owner, ranks).max())


def _explored(state: "_State", step: Callable[[], tuple[int, int] | None]) -> tuple[ndarray, float]:
    """The best assignment on a way of at most `EXCHANGES`, and its predicted seconds."""
    best, least = state.owner.copy(), state.seconds()
    for _ in range(EXCHANGES):
        pair = step()
        if pair is None:
            break
        state.exchange(*pair)
        if state.share.max() > UNEVEN * state.mean:  # on the way
            continue
        seconds = state.seconds()
        if seconds < least:
            best, least = state.owner.copy(), seconds
    return best, least


class _State:
    """An assignment, and what follows from it. Sums in fp64 are of integers, and exact.

    near: (n, n), keys that two chunks need of each other. together: (n, ranks), keys that a chunk and a rank's chunks do.
    """

    def __init__(self, load: ndarray, needs: ndarray, near: ndarray, owner: ndarray, ranks: int, costs: Costs) -> None:
        self.load, self.needs, self.near, self.owner, self.ranks, self.costs = load.astype(np.float64), needs, near, owner, ranks, costs
        self.share = np.bincount(owner, weights=load, minlength=ranks)
        self.mean = self.share.mean()
        self.together = near @ (owner[:, None] == np.arange(ranks)).astype(np.float64)

    def seconds(self) -> float:
        return _seconds(self.share, self.needs, self.owner, self.ranks, self.costs)

    def exchange(self, a: int, b: int) -> None:
        one, other = self.owner[a], self.owner[b]
        self.owner[a], self.owner[b] = other, one
        change, moved = self.near[:, b] - self.near[:, a], self.load[b] - self.load[a]
        self.together[:, one] += change
        self.together[:, other] -= change
        self.share[one] += moved
        self.share[other] -= moved

    def evening(self) -> tuple[int, int] | None:
        """A chunk of the busiest rank and another's, which evens out most for the keys that are then further away; None where all is even."""
        load, share, owner, together = self.load, self.share, self.owner, self.together
        busiest = int(share.argmax())
        if share[busiest] <= CLOSE * self.mean:
            return None
        mine, others = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        theirs = owner[others]
        shift = np.subtract.outer(load[mine], load[others])
        gain = share[busiest] - np.maximum(np.maximum(share[busiest] - shift, share[theirs] + shift), self.mean)
        most = gain.max()
        if most <= 0:
            return None
        apart = (together[mine, busiest][:, None] - together[mine][:, theirs]) + (together[others, theirs] - together[others, busiest])
        score = gain / (most * self.costs.pair * 0.25 + self.costs.key / len(load) * np.maximum(apart, 0))
        a, b = divmod(int(score.argmax()), len(others))
        return int(mine[a]), int(others[b])

    def nearing(self) -> tuple[int, int] | None:
        """Two chunks that have more keys in common with each other's ranks, and leave shares even; None where there are none."""
        load, owner, together = self.load, self.owner, self.together
        cap = max(EVEN * self.mean, self.share.max())
        drawn = together[:, owner]
        drawn -= np.diagonal(drawn).copy()[:, None]  # keys nearer, were a with b's rank
        gain = drawn + drawn.T
        gain -= 2 * self.near
        room = (cap - self.share)[owner] + load  # what may come in a's place
        gain[(load[None] > room[:, None]) | (load[:, None] > room[None])] = -1
        a, b = divmod(int(gain.argmax()), len(load))
        return (a, b) if gain[a, b] > 0 else None
