"""An axis of tokens shared out over ranks, as intervals, and the routes of what one rank has and others want."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from tilewise.masks.band_tables import expand

Ranges = tuple[tuple[int, int], ...]  # half open, ascending, apart


def merged(ranges: ndarray) -> Ranges:
    """Ascending ranges (n, 2), neighbours that touch made one."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    first = np.append(True, ranges[1:, 0] != ranges[:-1, 1])[: len(ranges)]
    last = np.append(first[1:], True)[: len(ranges)]
    return tuple(zip(ranges[first, 0].tolist(), ranges[last, 1].tolist(), strict=True))


def cut(ranges: ndarray, first: int, last: int) -> ndarray:
    """What of intervals (n, 2) lies in [first, last)."""
    found = ranges.clip(first, last)
    return found[found[:, 0] < found[:, 1]]


def positions(first: ndarray, last: ndarray) -> Tensor:
    """Every position of [first, last) each, in order, int64 on the CPU."""
    which, place = expand(last - first)
    return torch.from_numpy(first[which] + place)


@dataclass(frozen=True, eq=False)
class Axis:
    """Tokens 0 .. length - 1, of which rank r holds those in ranges[r], in this order; each token is held once."""

    length: int
    ranges: tuple[Ranges, ...]

    def count(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(last - first for first, last in self.ranges[rank])

    def places(self, rank: int) -> Tensor:
        """(count,) int64: the positions of a rank's tokens."""
        return positions(*np.array(self.ranges[rank], np.int64).reshape(-1, 2).T)

    @cached_property
    def segments(self) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """(first, last, rank, first place among the rank's tokens) of all ranges, ascending."""
        rank = np.repeat(np.arange(len(self.ranges)), [len(each) for each in self.ranges])
        first, last = np.array([pair for each in self.ranges for pair in each], np.int64).reshape(-1, 2).T
        before = np.concatenate([np.cumsum([0, *(b - a for a, b in each)])[:-1] for each in self.ranges]).astype(np.int64)
        order = np.argsort(first, kind="stable")
        return first[order], last[order], rank[order], before[order]

    def holders(self, wanted: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """Intervals (n, 2) cut by who holds them: (rank, first, last, first place among the rank's tokens), ascending by position."""
        first, last, rank, before = self.segments
        begin = np.searchsorted(first, wanted[:, 0], side="right") - 1
        which, place = expand(np.searchsorted(first, wanted[:, 1] - 1, side="right") - begin)
        segment = begin[which] + place
        start, stop = np.maximum(wanted[which, 0], first[segment]), np.minimum(wanted[which, 1], last[segment])
        return rank[segment], start, stop, before[segment] + start - first[segment]


@dataclass(frozen=True, eq=False)
class Routes:
    """What rank `rank` gives and takes of tokens: give[r] (n,), places among its own tokens of those that rank r wants; take[r] (n,), where those
    that it has from rank r go. Both ascend by position, so that what is given arrives in order. int64, on one device.
    """

    rank: int
    give: tuple[Tensor, ...]
    take: tuple[Tensor, ...]

    @classmethod
    def of(cls, axis: Axis, wanted: list[ndarray], rank: int, into: ndarray | None = None) -> "Routes":
        """wanted: of each rank the positions that it wants, as intervals (n, 2), ascending and apart. into: where each interval of `rank` begins,
        (n,), if they lie one behind another; None: a token goes to its position.
        """
        give = []
        cuts: dict[int, tuple] = {}  # by array, as several ranks may want the same
        for each in wanted:
            holder, first, last, place = cuts.setdefault(id(each), axis.holders(each))
            mine = holder == rank
            give.append(positions(place[mine], place[mine] + (last - first)[mine]))
        holder, first, last, _ = axis.holders(wanted[rank])
        if into is not None:
            interval = np.searchsorted(wanted[rank][:, 0], first, side="right") - 1
            shift = (into - wanted[rank][:, 0])[interval]
            first, last = first + shift, last + shift
        take = (positions(first[holder == other], last[holder == other]) for other in range(len(axis.ranges)))
        return cls(rank, tuple(give), tuple(take))

    def to(self, device: torch.device) -> "Routes":
        return Routes(self.rank, *(tuple(x.to(device) for x in each) for each in (self.give, self.take)))

    @cached_property
    def others(self) -> list[int]:
        return [other for other in range(len(self.give)) if other != self.rank]

    @cached_property
    def given(self) -> Tensor:
        """What all others want, by rank."""
        return torch.cat([self.give[self.rank][:0], *(self.give[other] for other in self.others)])

    @cached_property
    def taken(self) -> Tensor:
        """Where what all others have goes, by rank."""
        return torch.cat([self.take[self.rank][:0], *(self.take[other] for other in self.others)])
