"""The set `decode` as tables: microseconds and TB/s of K and V beside the fastest peer, a table for each number of heads and of new tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tilewise.bench.decode_cells import NAME, short
from tilewise.bench.impls import ours
from tilewise.bench.report import MISSING, geometric_mean, measured_on
from tilewise.bench.store import Row
from tilewise.ladder import DECODE_RUNGS

MINE = "tilewise"
CLOCKS = "graph", "wall"  # the first that a row has
UNEXPLAINED = "not explained yet"
# Why ours is behind in cells, by a pattern of their titles (`Cell.title`); the first that matches counts.
WHY: dict[str, str] = {
    "b* 1k 32:1 *": "adding up the pieces of one key head takes longer than reading its keys",
}


@dataclass
class Measured:
    """The last row of each contender on one cell, and those without a time."""

    case: dict
    timed: dict[str, Row] = field(default_factory=dict)
    untimed: dict[str, Row] = field(default_factory=dict)

    @property
    def title(self) -> str:
        case, kind = self.case, "" if self.case["kind"] == "even" else f"{self.case['kind']}-"
        heads = f"{case['heads_q']}:{case['heads_k']}"
        return f"b{case['batch']} {kind}{short(int(case['seqlen_k']))} {heads} p{case['page']} q{case['seqlen_q']}"

    @property
    def mine(self) -> Row | None:
        return self.timed.get(MINE)

    @property
    def best(self) -> Row | None:
        """The fastest peer."""
        return min((row for impl, row in self.timed.items() if not ours(impl)), key=lambda row: row.median_s, default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours; above 1 ours is faster."""
        return None if self.mine is None or self.best is None else self.best.median_s / self.mine.median_s

    @property
    def why(self) -> str:
        return next((text for pattern, text in WHY.items() if fnmatchcase(self.title, pattern)), UNEXPLAINED)


def measured(rows: Iterable[Row], clock: str | None = None) -> list[Measured]:
    """The cells that rows have something of, in order of first appearance, by a clock; without one by the first of CLOCKS that there is."""
    rows = [row for row in rows if row.name == NAME]
    clock = clock or next((each for each in CLOCKS if any(row.clock == each for row in rows)), CLOCKS[0])
    found: dict[tuple, Measured] = {}
    for row in rows:
        cell = found.setdefault(tuple(sorted(row.case.items())), Measured(row.case))
        if row.clock == clock:
            cell.timed[row.impl] = row
            cell.untimed.pop(row.impl, None)
        elif row.median_s is None:  # of a newer kernel than the time before it
            cell.untimed[row.impl] = row
            cell.timed.pop(row.impl, None)
    return list(found.values())


def decode_tables(rows: Iterable[Row]) -> str:
    """The tables, in markdown, the cells in which ours is behind and why, and the geometric mean of the ratios."""
    cells = measured(rows)
    if not any(cell.timed for cell in cells):
        return "Not measured yet."
    groups: dict[tuple, list[Measured]] = {}
    for cell in cells:
        case = cell.case
        key = ("even", case["heads_q"], case["heads_k"], case["seqlen_q"]) if case["kind"] == "even" else ("other",)
        groups.setdefault(key, []).append(cell)
    parts = [_even(group) if key[0] == "even" else _others(group) for key, group in groups.items()]
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    if ratios:
        ahead = sum(ratio >= 1.0 for ratio in ratios)
        parts.append(
            f"Ahead of the fastest peer in {ahead} of {len(ratios)} cells; geometric mean of the ratios {geometric_mean(ratios):.3f}."
        )
    parts += _behind(cells)
    peers = dict.fromkeys(impl for cell in cells for impl in cell.timed if not ours(impl))
    last = [row for cell in cells for row in cell.timed.values()]
    return "\n\n".join([*parts, f"Peers: {', '.join(peers) or 'none'}. {measured_on(last)}"])


def rungs_table(rows: Iterable[Row]) -> str:
    """The ladder's rungs beside tilewise.decode and the fastest peer, on the cells that a rung has a time of: microseconds (TB/s)."""
    cells = [cell for cell in measured(rows) if any(name in cell.timed for name in DECODE_RUNGS)]
    if not cells:
        return "Not measured yet."
    names = [*DECODE_RUNGS, MINE]
    lines = [f"| us (TB/s) | {' | '.join(names)} | best peer |", f"|---|{'---:|' * (len(names) + 1)}"]
    for cell in sorted(
        cells, key=lambda cell: (cell.case["heads_q"], -int(cell.case["heads_k"]), cell.case["seqlen_k"], cell.case["batch"])
    ):
        case, best = cell.case, cell.best
        texts = [_us(cell.timed.get(name)) for name in names]
        texts.append(MISSING if best is None else f"{_us(best)} {best.impl}")
        heads = f"{case['heads_q']}:{case['heads_k']}"
        lines.append(f"| {case['batch']} x {short(int(case['seqlen_k']))}, heads {heads} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", measured_on([row for cell in cells for row in cell.timed.values()])])


def _us(row: Row | None) -> str:
    return MISSING if row is None else f"{row.median_s * 1e6:,.1f} ({row.bytes / row.median_s * 1e-12:.2f})"


def _even(cells: list[Measured]) -> str:
    """A line a batch and length, three columns a layout."""
    case = cells[0].case
    pages = sorted({int(cell.case["page"]) for cell in cells})
    names = ["contiguous" if page == 0 else f"pages of {page}" for page in pages]
    new = f"{case['seqlen_q']} new token{'s' if case['seqlen_q'] != 1 else ''}"
    lines = [
        f"{case['heads_q']} query and {case['heads_k']} key heads of {case['head_dim']}, {new}:",
        "",
        f"| sequences x tokens | {' | '.join(f'{name}, us (TB/s) | best peer, us | ratio' for name in names)} |",
        f"|---|{'---:|' * 3 * len(pages)}",
    ]
    by_place = {(cell.case["batch"], cell.case["seqlen_k"], cell.case["page"]): cell for cell in cells}
    for batch, length in sorted({(int(cell.case["batch"]), int(cell.case["seqlen_k"])) for cell in cells}):
        texts = [text for page in pages for text in _numbers(by_place.get((batch, length, page)))]
        lines.append(f"| {batch} x {short(length)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _others(cells: list[Measured]) -> str:
    """Ragged batches and common prefixes, a line each."""
    lines = ["| batch | tokens | us (TB/s) | best peer, us | ratio |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {cell.title} | {int(cell.case['tokens']):,} | {' | '.join(_numbers(cell))} |" for cell in cells]
    return "\n".join(["Ragged batches, and a prefix that all sequences have, whose bytes count once:", "", *lines])


def _numbers(cell: Measured | None) -> tuple[str, str, str]:
    if cell is None:
        return MISSING, MISSING, MISSING
    wrong = MINE in cell.untimed and cell.untimed[MINE].passed is False
    mine, best, ratio = cell.mine, cell.best, cell.ratio
    return (
        "wrong" if mine is None and wrong else _us(mine),
        MISSING if best is None else f"{best.median_s * 1e6:,.1f} {best.impl}",
        MISSING if ratio is None else f"{ratio:.2f}",
    )


def _behind(cells: list[Measured]) -> list[str]:
    """A paragraph with a line for each reason, and the cells that it is the reason for; none where there are no such cells."""
    reasons: dict[str, list[Measured]] = {}
    for cell in cells:
        if cell.ratio is not None and cell.ratio < 1.0:
            reasons.setdefault(cell.why, []).append(cell)
    lines = []
    for why, group in reasons.items():
        ratios = [cell.ratio for cell in group]
        lines.append(f"- {why} ({min(ratios):.2f} to {max(ratios):.2f}): {', '.join(cell.title for cell in group)}")
    return ["Behind:\n\n" + "\n".join(lines)] if lines else []
