"""Ours against the fastest peer: one `Cell` a case, from which every table and chart that compares the two is made."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tilewise.bench.peers import ours
from tilewise.bench.store import Row

MINE = "tilewise"
UNEXPLAINED = "not explained yet"  # why ours is behind


@dataclass(frozen=True)
class Pair:
    """Ours and the best peer on one case, both with a time."""

    name: str  # of the workload
    case: dict
    mine: Row
    best: Row

    @property
    def ratio(self) -> float:
        """The best peer's time over ours; above 1 ours is faster."""
        return self.best.seconds / self.mine.seconds


@dataclass
class Cell:
    """The last row of each contender on one case by one clock, and of those without a time; later rows replace earlier ones of an older kernel."""

    name: str  # of the workload
    case: dict
    timed: dict[str, Row] = field(default_factory=dict)
    untimed: dict[str, Row] = field(default_factory=dict)

    @property
    def mine(self) -> Row | None:
        return self.timed.get(MINE)

    @property
    def best(self) -> Row | None:
        """The fastest peer that is right; where none is, the fastest."""
        peers = [row for impl, row in self.timed.items() if not ours(impl)]
        return fastest([row for row in peers if row.passed is not False] or peers)

    @property
    def pair(self) -> Pair | None:
        mine, best = self.mine, self.best
        return None if mine is None or best is None else Pair(self.name, self.case, mine, best)

    @property
    def ratio(self) -> float | None:
        return None if self.pair is None else self.pair.ratio

    @property
    def wrong(self) -> bool:
        """Whether ours missed the tolerance, and so has no time."""
        return MINE in self.untimed and self.untimed[MINE].passed is False

    def add(self, row: Row, clocks: tuple[str, ...]) -> None:
        new, old = (self.untimed, self.timed) if row.median_s is None else (self.timed, self.untimed)
        old.pop(row.impl, None)
        if row.median_s is None or row.clock in clocks:
            new[row.impl] = row


def fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row.seconds, default=None)


def cells(rows: Iterable[Row], clocks: Sequence[tuple[str, ...]]) -> list[Cell]:
    """A cell for each workload and case, in order of first appearance, by the first of `clocks` that ours has a time by, or else that anybody has.

    An item of `clocks` is one or several that count as the same.
    """
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault((row.name, tuple(sorted(row.case.items()))), []).append(row)
    return [_cell(group, clocks) for group in found.values()]


def cells_by_clock(rows: Iterable[Row]) -> list[Cell]:
    """A cell for each workload, case and clock of the rows with a time."""
    found: dict[tuple, Cell] = {}
    for row in rows:
        if row.median_s is not None:
            cell = found.setdefault((row.name, tuple(sorted(row.case.items())), row.clock), Cell(row.name, row.case))
            cell.add(row, (row.clock,))
    return list(found.values())


def _cell(rows: list[Row], clocks: Sequence[tuple[str, ...]]) -> Cell:
    def measured(by: tuple[str, ...], of: list[Row]) -> bool:
        return any(row.clock in by and row.median_s is not None for row in of)

    mine, cell = [row for row in rows if row.impl == MINE], Cell(rows[0].name, rows[0].case)
    counts = next((by for of in (mine, rows) for by in clocks if measured(by, of)), ())
    for row in rows:
        cell.add(row, counts)
    return cell


def pairs(compared: Iterable[Cell]) -> list[Pair]:
    """Of the cells that have both."""
    return [cell.pair for cell in compared if cell.pair is not None]


def ratios(compared: Iterable[Cell]) -> list[float]:
    """Of the cells that have one."""
    return [pair.ratio for pair in pairs(compared)]


def ahead(numbers: Sequence[float]) -> str:
    """In how many of these ratios ours is at least as fast: "3 of 5"."""
    return f"{sum(ratio >= 1.0 for ratio in numbers)} of {len(numbers)}"


def geometric_mean(numbers: Sequence[float]) -> float:
    """Of at least one."""
    return math.exp(sum(map(math.log, numbers)) / len(numbers))
