"""The set `models` as a table: each cell by both clocks, beside the fastest peer by each, and why where ours is not ahead of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilewise.bench.impls import ours
from tilewise.bench.models import WHY, model_shapes
from tilewise.bench.report import MISSING, describe, escaped, geometric_mean, measured_on
from tilewise.bench.store import Row

MINE = "tilewise"
CLOCKS = {"kernel": ("events", "graph"), "wall": ("wall",)}
UNEXPLAINED = "not explained yet"


@dataclass
class Cell:
    """The last row of each contender by each of CLOCKS, and those without a time."""

    name: str
    case: dict
    timed: dict[str, dict[str, Row]] = field(default_factory=lambda: {clock: {} for clock in CLOCKS})
    untimed: dict[str, Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Later rows replace earlier ones: one without a time those with one, too, which are of an older kernel."""
        if row.median_s is None:
            self.untimed[row.impl] = row
            for by_impl in self.timed.values():
                by_impl.pop(row.impl, None)
            return
        self.untimed.pop(row.impl, None)
        for clock, names in CLOCKS.items():
            if row.clock in names:
                self.timed[clock][row.impl] = row

    def mine(self, clock: str) -> Row | None:
        return self.timed[clock].get(MINE)

    def best(self, clock: str) -> Row | None:
        """The fastest peer."""
        return min((row for impl, row in self.timed[clock].items() if not ours(impl)), key=lambda row: row.median_s, default=None)

    def ratio(self, clock: str) -> float | None:
        """The best peer's time over ours; above 1 ours is faster."""
        mine, best = self.mine(clock), self.best(clock)
        return None if mine is None or best is None else best.median_s / mine.median_s

    @property
    def ahead(self) -> bool:
        """By every clock that both have; without a time of ours, no; without a peer that can, yes."""
        if not any(self.mine(clock) for clock in CLOCKS):
            return False
        return all(ratio is None or ratio >= 1.0 for ratio in map(self.ratio, CLOCKS))

    @property
    def why(self) -> str:
        """Why ours is not ahead: what models.WHY says, or that ours has no time."""
        if self.ahead:
            return ""
        row = self.untimed.get(MINE)
        told = WHY.get((self.name, self.case["direction"]), UNEXPLAINED)
        return told if row is None else f"no time: {row.reason}"


def cells_of_models(rows: Iterable[Row]) -> list[Cell]:
    """The cells of the set, in its order, that `rows` have something of; rows of what the set no longer holds are left out."""
    order = {workload.name: (place, _sizes(workload.case)) for place, workload in enumerate(model_shapes())}
    found: dict[tuple, Cell] = {}
    for row in rows:
        place, sizes = order.get(row.name, (0, None))
        if sizes == _sizes(row.case):
            key = place, str(row.case["direction"]), str(row.case["dtype"])
            found.setdefault(key, Cell(row.name, row.case)).add(row)
    return [found[key] for key in sorted(found)]


def _sizes(case: dict) -> dict:
    return {name: value for name, value in case.items() if name not in ("dtype", "direction")}


def models_table(rows: Iterable[Row]) -> str:
    """The table, in markdown; the last line is the geometric mean of the ratios by each clock."""
    cells = cells_of_models(rows)
    clocks = " | ".join(f"{clock}, ms | best peer, ms | ratio" for clock in CLOCKS)
    lines = [f"| model | case | {clocks} | why not ahead |", f"|---|---|{'---:|' * 6}---|"]
    for cell in cells:
        texts = [text for clock in CLOCKS for text in _by_clock(cell, clock)]
        lines.append(f"| {cell.name} | {escaped(describe(cell.case))} | {' | '.join(texts)} | {escaped(cell.why)} |")
    if not cells:
        return "\n".join(lines)
    means = []
    for clock in CLOCKS:
        ratios = [ratio for cell in cells if (ratio := cell.ratio(clock)) is not None]
        means += ["", "", f"**{geometric_mean(ratios):.3f}**" if ratios else MISSING]
    ahead = sum(cell.ahead for cell in cells)
    lines.append(f"| **geometric mean** | ahead by both clocks in {ahead} of {len(cells)} | {' | '.join(means)} | |")
    peers = dict.fromkeys(impl for cell in cells for by_impl in (*cell.timed.values(), cell.untimed) for impl in by_impl if not ours(impl))
    last = [row for cell in cells for by_impl in cell.timed.values() for row in by_impl.values()]
    return "\n".join([*lines, "", f"Peers: {', '.join(peers) or 'none'}. {measured_on(last)}"])


def _by_clock(cell: Cell, clock: str) -> tuple[str, str, str]:
    mine, best, ratio = cell.mine(clock), cell.best(clock), cell.ratio(clock)
    wrong = MINE in cell.untimed and cell.untimed[MINE].passed is False
    return (
        ("wrong" if wrong else MISSING) if mine is None else f"{mine.median_s * 1e3:.3f}",
        MISSING if best is None else f"{best.median_s * 1e3:.3f} {best.impl}",
        MISSING if ratio is None else f"{ratio:.2f}",
    )
