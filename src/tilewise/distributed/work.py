"""What a mask makes of each chunk of queries: how many pairs, and which keys. Arrays only, no loop over bands."""

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from tilewise.masks import Bands, Bitmap, Mask
from tilewise.masks.band_tables import areas, canonical, expand


class Work(NamedTuple):
    """Of n chunks of queries [edges[i], edges[i + 1]).

    load: (n,) int64, visible pairs, summed over batch entries and heads. chunk, first, last: (m,) int64, ascending by chunk and key and apart:
    chunk[x] needs the keys [first[x], last[x]).
    """

    edges: ndarray
    load: ndarray
    chunk: ndarray
    first: ndarray
    last: ndarray

    def needed_by(self, owner: ndarray, ranks: int) -> list[ndarray]:
        """The keys of each rank that owns chunks, (intervals, 2) each, ascending and apart; owner: (n,) ranks."""
        rank, first, last = united(owner[self.chunk], self.first, self.last)
        ends = np.searchsorted(rank, np.arange(ranks + 1))
        pairs = np.stack([first, last], axis=1)
        return np.split(pairs, ends[1:-1])


def survey(mask: Mask, edges: ndarray, seqlen_k: int, batch: int, heads: int) -> Work:
    """The work of `mask` on chunks of queries that end at `edges`, int64 (n + 1,), from 0 to seqlen_q."""
    n, seqlen_q = len(edges) - 1, int(edges[-1])
    load, needs = np.zeros(n, np.int64), [np.zeros((0, 3), np.int64)]
    seen: dict[int, tuple[ndarray, ndarray]] = {}
    for plane in mask.planes(seqlen_q, seqlen_k, batch, heads):
        region = plane.region
        if id(region) not in seen:
            seen[id(region)] = found = _of_bands(region, edges) if isinstance(region, Bands) else _of_bits(region, edges)
            needs.append(found[1])
        load += seen[id(region)][0] * len(plane.batch) * len(plane.heads)
    return Work(edges, load, *united(*np.concatenate(needs).T))


def _of_bands(region: Bands, edges: ndarray) -> tuple[ndarray, ndarray]:
    """Pairs of each chunk, and rows (chunk, first key, last key)."""
    table = region.table
    begin = np.searchsorted(edges, table[:, 0], side="right") - 1
    band, place = expand(np.searchsorted(edges, table[:, 1] - 1, side="right") - begin)
    chunk = begin[band] + place
    rows = table[band]
    rows[:, 0], rows[:, 1] = np.maximum(rows[:, 0], edges[chunk]), np.minimum(rows[:, 1], edges[chunk + 1])
    pieces = canonical(rows, keep_empty=True)
    load = np.bincount(chunk, weights=areas(pieces), minlength=len(edges) - 1).astype(np.int64)
    return load, np.stack([chunk, pieces[:, 2], pieces[:, 3]], axis=1)


def _of_bits(region: Bitmap, edges: ndarray) -> tuple[ndarray, ndarray]:
    load, needs = np.zeros(len(edges) - 1, np.int64), [np.zeros((0, 3), np.int64)]
    for chunk, (first, last) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        rows = region.rows(first, last)
        load[chunk] = np.count_nonzero(rows)
        change = np.diff(np.concatenate([[False], rows.any(axis=0), [False]]).astype(np.int8))
        starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
        needs.append(np.stack([np.full(len(starts), chunk), starts, ends], axis=1))
    return load, np.concatenate(needs)


def united(owner: ndarray, first: ndarray, last: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Intervals [first, last) of each owner with those that overlap or touch made one; ascending by owner and place."""
    owner, first, last = (x[first < last] for x in (owner, first, last))
    order = np.lexsort((first, owner))
    owner, first, last = owner[order], first[order], last[order]
    if len(owner) == 0:
        return owner, first, last
    span = int(last.max()) + 1  # owners one behind another on one line
    begin, end = owner * span + first, np.maximum.accumulate(owner * span + last)
    new = np.append(True, begin[1:] > end[:-1])
    starts = np.flatnonzero(new)
    return owner[starts], first[starts], end[np.append(starts[1:], len(owner)) - 1] - owner[starts] * span


def overlap(chunk: ndarray, first: ndarray, last: ndarray, edges: ndarray, n: int) -> ndarray:
    """How many keys of each piece of the key axis, which ends at `edges` (m + 1,), each of n chunks needs: (n, m) int64."""
    begin = np.searchsorted(edges, first, side="right") - 1
    need, place = expand(np.searchsorted(edges, last - 1, side="right") - begin)
    piece = begin[need] + place
    length = np.minimum(last[need], edges[piece + 1]) - np.maximum(first[need], edges[piece])
    m = len(edges) - 1
    return np.bincount(chunk[need] * m + piece, weights=length, minlength=n * m).astype(np.int64).reshape(n, m)
