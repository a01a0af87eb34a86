"""Operations on tables of bands: int64 (n, 6) with the columns q0 q1 k0 k1 lo hi. None loops over bands in Python.

A table is canonical where every band is: see `Bands`. Functions take and give canonical tables unless they say otherwise.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy import ndarray

LONGEST = 1 << 60  # a sequence
INF = 1 << 62  # an unbounded diagonal; with two lengths added it is still an int64
FACTOR = 1 << 30  # products of three coordinates that are no larger are int64s
Q0, Q1, K0, K1, LO, HI = range(6)


def areas(table: ndarray) -> ndarray:
    """The number of pairs of each canonical band (n,): int64, or Python's integers where those would overflow."""
    if table[:, : K1 + 1].max(initial=0) > FACTOR:
        table = table.astype(object)
    q0, q1, k0, k1, lo, hi = table.T
    switch = np.clip(k1 - hi - 1, q0, q1)  # from this row on the upper end is k1; before it, q + hi + 1
    upper = _sum_of_rows(q0, switch) + (switch - q0) * np.where(hi < INF, hi + 1, 0) + (q1 - switch) * k1
    switch = np.clip(k0 - lo, q0, q1)  # up to this row the lower end is k0; from it on, q + lo
    lower = (switch - q0) * k0 + _sum_of_rows(switch, q1) + (q1 - switch) * np.where(lo > -INF, lo, 0)
    return upper - lower


def areas_within(table: ndarray, frames: ndarray) -> ndarray:
    """The number of pairs that band i has in the rectangle frames[i] = (q0, q1, k0, k1), as `areas`."""
    unbounded = np.broadcast_to(np.array([-INF, INF]), (len(frames), 2))
    return areas(canonical(meet(table, np.concatenate([frames, unbounded], axis=1)), keep_empty=True))


def expand(counts: ndarray) -> tuple[ndarray, ndarray]:
    """For each item i, counts[i] entries: (the item of each entry, the entry's place within its item)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def rectangle(q0: int, q1: int, k0: int, k1: int) -> ndarray:
    return np.array([[q0, q1, k0, k1, -INF, INF]], dtype=np.int64)


def frame(seqlen_q: int, seqlen_k: int) -> ndarray:
    return canonical(rectangle(0, seqlen_q, 0, seqlen_k))


def flip(table: ndarray) -> ndarray:
    flipped = table[:, [K0, K1, Q0, Q1, HI, LO]]
    flipped[:, LO:] *= -1
    return flipped


def _sum_of_rows(a: ndarray, b: ndarray) -> ndarray:
    return (b - a) * (a + b - 1) // 2  # a + (a + 1) + ... + (b - 1)


def meet(a: ndarray, b: ndarray) -> ndarray:
    """Row by row a intersected with b (broadcast), not yet canonical."""
    low, high = np.maximum(a, b), np.minimum(a, b)
    return np.stack([low[:, Q0], high[:, Q1], low[:, K0], high[:, K1], low[:, LO], high[:, HI]], axis=1)


def canonical(table: ndarray, keep_empty: bool = False) -> ndarray:
    """Bands shrunk to the smallest rectangle, diagonals that cut nothing unbounded; empty bands dropped (or made all zero)."""
    q0, q1, k0, k1, lo, hi = table.T
    empty = (q0 >= q1) | (k0 >= k1) | (lo > hi)
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)  # the rows with an interval of keys that is not empty
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)  # the keys that those rows reach
    empty |= q0 >= q1
    lo = np.where(q1 - 1 + lo <= k0, -INF, lo)
    hi = np.where(q0 + hi >= k1 - 1, INF, hi)
    tight = np.stack([q0, q1, k0, k1, lo, hi], axis=1)
    return np.where(empty[:, None], 0, tight) if keep_empty else tight[~empty]


def overlapping(a0: ndarray, a1: ndarray, b0: ndarray, b1: ndarray) -> tuple[ndarray, ndarray]:
    """All (i, j) for which [a0, a1)[i] and [b0, b1)[j] share a number. The one that starts later starts inside the other."""
    found = []
    sides: tuple[tuple[tuple[ndarray, ndarray], ndarray, Literal["left", "right"]], ...] = (((a0, a1), b0, "left"), ((b0, b1), a0, "right"))
    for (x0, x1), y0, side in sides:
        order = np.argsort(y0, kind="stable")
        first = np.searchsorted(y0[order], x0, side=side)  # equal starts are found from the first side only
        owner, place = expand(np.maximum(np.searchsorted(y0[order], x1, side="left") - first, 0))
        found.append((owner, order[first[owner] + place]))
    (i, j), (jj, ii) = found
    return np.concatenate([i, ii]), np.concatenate([j, jj])


def common(a: ndarray, b: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """(i, j, table): the nonempty intersections of a[i] with b[j]. Candidates are cut down by the overlap of their rows."""
    i, j = overlapping(a[:, Q0], a[:, Q1], b[:, Q0], b[:, Q1])
    keep = (a[i, K0] < b[j, K1]) & (b[j, K0] < a[i, K1])
    i, j = i[keep], j[keep]
    both = canonical(meet(a[i], b[j]), keep_empty=True)
    keep = both[:, Q1] > 0
    return i[keep], j[keep], both[keep]


def intersection(a: ndarray, b: ndarray) -> ndarray:
    return common(a, b)[2]


def disjoint_union(table: ndarray) -> ndarray:
    """The union of bands that may overlap, as disjoint bands: those that overlap nothing stay, the others are united pairwise."""
    i, j, _ = common(table, table)
    tangled = np.zeros(len(table), dtype=bool)
    tangled[i[i != j]] = True
    return np.concatenate([table[~tangled], _union_tree(table[tangled])]) if tangled.any() else table


def _union_tree(table: ndarray) -> ndarray:
    if len(table) <= 1:
        return table
    a, b = _union_tree(table[: len(table) // 2]), _union_tree(table[len(table) // 2 :])
    return merged(np.concatenate([a, difference(b, a)]))


def straight(table: ndarray) -> tuple[ndarray, ndarray]:
    """Bands cut at the rows where an end turns from constant to walking or back: (the band each piece comes from, pieces).

    In a canonical piece `lo == -INF` means that the lower end is the constant k0, otherwise it is q + lo in every row; so for hi.
    """
    q0, q1, k0, k1, lo, hi = table.T
    cuts = np.sort(np.stack([q0, np.clip(k0 - lo, q0, q1), np.clip(k1 - 1 - hi, q0, q1), q1], axis=1), axis=1)
    pieces = np.repeat(table, 3, axis=0)
    pieces[:, Q0], pieces[:, Q1] = cuts[:, :3].ravel(), cuts[:, 1:].ravel()
    keep = pieces[:, Q0] < pieces[:, Q1]
    return np.repeat(np.arange(len(table)), 3)[keep], canonical(pieces[keep])


def difference(a: ndarray, b: ndarray) -> ndarray:
    """a minus b (both disjoint). Rows of a are cut into slabs in which the ends of everything taken away are straight.

    Disjoint bands keep their order from row to row (their ends move at most one key a row), so within a slab what is left of a
    is the gaps between neighbours, and a gap between straight ends is one band.
    """
    owner, _, taken = common(a, b)
    touched = np.zeros(len(a), dtype=bool)
    touched[owner] = True
    piece_of, taken = straight(taken)
    owner = owner[piece_of]

    span = max(int(a[:, Q1].max(initial=0)), 0) + 1
    own, places = np.flatnonzero(touched), _places(len(a), span)
    marks = np.unique(
        np.concatenate([places(own, a[own, Q0]), places(own, a[own, Q1]), places(owner, taken[:, Q0]), places(owner, taken[:, Q1])])
    )
    begin, end = marks[:-1], marks[1:]
    inside = begin // span == end // span
    begin, end = begin[inside], end[inside]
    slab_of, slab_q0, slab_q1 = (x.astype(np.int64) for x in (begin // span, begin % span, end % span))

    first = np.searchsorted(begin, places(owner, taken[:, Q0]))
    piece, place = expand(np.searchsorted(begin, places(owner, taken[:, Q1])) - first)
    slab = first[piece] + place
    start = np.maximum(taken[piece, K0], slab_q0[slab] + taken[piece, LO])

    # One gap after each piece, and one before the first piece of each slab (start -1).
    slab = np.concatenate([np.arange(len(begin)), slab])
    order = np.lexsort((np.concatenate([np.full(len(begin), -1), start]), slab))
    slab = slab[order]
    _, _, k0, k1, lo, hi = np.concatenate([np.tile(np.array([0, 0, 0, 0, -INF, INF]), (len(begin), 1)), taken[piece]])[order].T
    last = np.append(slab[1:] != slab[:-1], True)[: len(slab)]
    gap = np.empty((len(slab), 6), dtype=np.int64)
    gap[:, Q0], gap[:, Q1] = slab_q0[slab], slab_q1[slab]
    gap[:, K0], gap[:, LO] = np.where(hi < INF, 0, k1), np.where(hi < INF, hi + 1, -INF)
    gap[:, K1] = np.where(last | (np.roll(lo, -1) > -INF), INF, np.roll(k0, -1))
    gap[:, HI] = np.where(last | (np.roll(lo, -1) == -INF), INF, np.roll(lo, -1) - 1)
    return np.concatenate([a[~touched], canonical(meet(a[slab_of[slab]], gap))])


def _places(firsts: int, span: int) -> Callable[[ndarray, ndarray], ndarray]:
    """What makes one number of (first, second), 0 <= first < firsts and second < span, in their order; Python's where an int64 would overflow."""
    if firsts * span < LONGEST:
        return lambda first, second: first * span + second
    return lambda first, second: first.astype(object) * span + second


def merged(table: ndarray) -> ndarray:
    """Neighbours that together are one band become one, until none are left: above one another, then side by side."""
    while True:
        i, j, joint = _neighbours(table)
        if len(i) == 0:
            return table
        chosen = _matching(i, j, len(table))
        keep = np.ones(len(table), dtype=bool)
        keep[i[chosen]] = keep[j[chosen]] = False
        table = np.concatenate([table[keep], joint[chosen]])


def _neighbours(table: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """(i, j, joint): bands i and j with the band `joint` as their union; j lies below i or to its right."""
    q0, q1, k0, k1, lo, hi = table.T
    top_l, top_u = np.maximum(k0, q0 + lo), np.minimum(k1, q0 + hi + 1)  # the interval of the first row
    end_l = np.maximum(k0, q1 - 1 + lo)  # the lower end of the last row
    span = int(k1.max(initial=0)) + 2
    places = _places(int(q1.max(initial=0)) + 1, span)
    sources = [places(q1, end_l), places(q1, end_l + 1), places(q0, top_u)]
    links = [_equal(source, places(q0, top_l)) for source in sources]
    i, j = (np.concatenate([link[side] for link in links]) for side in (0, 1))

    one, two = table[i], table[j]
    joint = np.concatenate([np.minimum(one, two)[:, :4], np.zeros((len(i), 2), np.int64)], axis=1)
    joint[:, Q1], joint[:, K1] = np.maximum(one[:, Q1], two[:, Q1]), np.maximum(one[:, K1], two[:, K1])
    below = one[:, Q1] == two[:, Q0]
    steps = below & (top_l[j] == end_l[i] + 1)
    end_u = np.minimum(one[:, K1], one[:, Q1] + one[:, HI])
    lo = np.select([one[:, LO] > -INF, two[:, LO] > -INF, steps], [one[:, LO], two[:, LO], top_l[j] - two[:, Q0]], -INF)
    hi = np.select([one[:, HI] < INF, two[:, HI] < INF, top_u[j] == end_u + 1], [one[:, HI], two[:, HI], top_u[j] - 1 - two[:, Q0]], INF)
    joint[:, LO], joint[:, HI] = np.where(below, lo, one[:, LO]), np.where(below, hi, two[:, HI])
    joint = canonical(joint, keep_empty=True)
    good = areas(joint) == areas(one) + areas(two)
    for part in (one, two):  # the union is inside `joint`, and as large
        good &= (canonical(meet(joint, part), keep_empty=True) == part).all(axis=1)
    return i[good], j[good], joint[good]


def _equal(a: ndarray, b: ndarray) -> tuple[ndarray, ndarray]:
    """All (i, j) with a[i] == b[j], where b's values are distinct."""
    order = np.argsort(b)
    place = np.minimum(np.searchsorted(b[order], a), len(b) - 1)
    hit = b[order[place]] == a if len(b) else np.zeros(0, dtype=bool)
    return np.flatnonzero(hit), order[place[hit]]


def _matching(i: ndarray, j: ndarray, n: int) -> ndarray:
    """Indices of links i -> j of which no two share a band: every second link of each chain."""
    kept = np.unique(i, return_index=True)[1]
    kept = kept[np.unique(j[kept], return_index=True)[1]]
    before = np.arange(n)
    before[j[kept]] = i[kept]
    depth = (before != np.arange(n)).astype(np.int64)
    while (depth[before] > 0).any():  # pointer doubling: the distance to the head of the chain
        depth, before = depth + depth[before], before[before]
    return kept[depth[i[kept]] % 2 == 0]
