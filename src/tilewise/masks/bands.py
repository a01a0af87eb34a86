"""Sets of (query, key) pairs as disjoint bands: the algebra under every structured mask.

A band allows the pairs with query in [q0, q1), key in [k0, k1) and `lo <= key - query <= hi`. Read row by row it is one interval
of keys, [max(k0, q + lo), min(k1, q + hi + 1)): its two ends are constant or walk one key a row; every operation here is a
statement about those two ends. Bands are closed under crop, shift, transposition, intersection and difference, so unions of
disjoint bands form a Boolean algebra in which no pair is ever counted twice.

`band_tables.py` has the operations, vectorised over bands.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from tilewise.errors import ShapeError
from tilewise.masks.band_tables import (
    INF,
    LO,
    areas,
    canonical,
    difference,
    disjoint_union,
    flip,
    frame,
    intersection,
    meet,
    merged,
    rectangle,
)


class Band(NamedTuple):
    """The pairs with query in [q0, q1), key in [k0, k1) and lo <= key - query <= hi (-INF and INF: unbounded)."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int = -INF
    hi: int = INF


@dataclass(frozen=True, eq=False)
class Bands:
    """A set of pairs in a seqlen_q x seqlen_k frame, as disjoint bands: `table` int64 (n, 6), columns q0 q1 k0 k1 lo hi.

    Bands are kept canonical: the rectangle is the smallest that holds the band's pairs, no row of it is empty, and a diagonal that
    cuts nothing off the rectangle is unbounded. Equal bands thus have equal rows.
    """

    table: ndarray
    seqlen_q: int
    seqlen_k: int
    memo: dict = field(default_factory=dict, repr=False)  # what others derive from this object: its transpose, its runs of tiles

    def __post_init__(self) -> None:
        self.table.setflags(write=False)

    @classmethod
    def of(cls, bands: Iterable[Band] | ndarray, seqlen_q: int, seqlen_k: int, disjoint: bool = False) -> "Bands":
        """The union of `bands`, cut to the frame. `disjoint=True` promises that they do not overlap, which saves the check."""
        table = np.asarray(bands if isinstance(bands, ndarray) else list(bands), dtype=np.int64).reshape(-1, 6)
        table = canonical(meet(table, rectangle(0, seqlen_q, 0, seqlen_k)))
        return cls(table if disjoint else disjoint_union(table), seqlen_q, seqlen_k)

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self):
        return (Band(*row) for row in self.table.tolist())

    def __reduce__(self):
        return Bands, (np.array(self.table), self.seqlen_q, self.seqlen_k)

    def __and__(self, other: "Bands") -> "Bands":
        return self._with(intersection(self.table, self._same_frame(other)))

    def __or__(self, other: "Bands") -> "Bands":
        a, b = self.table, self._same_frame(other)
        return self._with(merged(np.concatenate([a, difference(b, a)])))

    def __sub__(self, other: "Bands") -> "Bands":
        return self._with(merged(difference(self.table, self._same_frame(other))))

    def __invert__(self) -> "Bands":
        return self._with(merged(difference(frame(self.seqlen_q, self.seqlen_k), self.table)))

    def crop(self, q0: int, q1: int, k0: int, k1: int) -> "Bands":
        """The pairs inside [q0, q1) x [k0, k1); the frame stays."""
        return self._with(canonical(meet(self.table, rectangle(q0, q1, k0, k1))))

    def rows(self, i0: int, i1: int) -> "Bands":
        """The pairs of queries i0 <= q < i1; the frame stays."""
        return self.crop(i0, i1, 0, self.seqlen_k)

    def shift(self, dq: int, dk: int, seqlen_q: int | None = None, seqlen_k: int | None = None) -> "Bands":
        """Every pair (q, k) as (q + dq, k + dk), in a frame of the given lengths (default: the same); pairs that leave it are dropped."""
        moved = self.table + np.array([dq, dq, dk, dk, dk - dq, dk - dq])
        moved[:, LO:] = np.where(np.abs(self.table[:, LO:]) < INF, moved[:, LO:], self.table[:, LO:])
        return Bands.of(
            moved, self.seqlen_q if seqlen_q is None else seqlen_q, self.seqlen_k if seqlen_k is None else seqlen_k, disjoint=True
        )

    def transpose(self) -> "Bands":
        """The same pairs seen from the keys; the object is kept, and its own transpose is this one."""
        flipped = self.memo.get("transpose")
        if flipped is None:
            flipped = Bands(flip(self.table), self.seqlen_k, self.seqlen_q)
            flipped.memo["transpose"] = self
            self.memo["transpose"] = flipped
        return flipped

    def pairs(self) -> int:
        """How many pairs the set holds: exact for any lengths, O(1) a band."""
        return int(areas(self.table).sum())

    def dense(self) -> ndarray:
        """The set as a boolean matrix (seqlen_q, seqlen_k)."""
        out = np.zeros((self.seqlen_q, self.seqlen_k), dtype=bool)
        for band in self:
            out[band.q0 : band.q1, band.k0 : band.k1] |= within(band, band.q0, band.q1, band.k0, band.k1)
        return out

    def _with(self, table: ndarray) -> "Bands":
        return Bands(table, self.seqlen_q, self.seqlen_k)

    def _same_frame(self, other: "Bands") -> ndarray:
        if (self.seqlen_q, self.seqlen_k) != (other.seqlen_q, other.seqlen_k):
            raise ShapeError(
                f"two sets of bands have the lengths {self.seqlen_q} x {self.seqlen_k} and {other.seqlen_q} x {other.seqlen_k}; "
                "they must agree: shift one into the other's frame first"
            )
        return other.table


def within(band: Band, q0: int, q1: int, k0: int, k1: int) -> ndarray:
    """Which pairs of [q0, q1) x [k0, k1) lie in the band, as booleans (q1 - q0, k1 - k0)."""
    q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None, :]
    inside = (q >= band.q0) & (q < band.q1) & (k >= band.k0) & (k < band.k1)
    return inside & (k - q >= band.lo) & (k - q <= band.hi)
