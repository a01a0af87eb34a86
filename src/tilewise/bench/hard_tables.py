"""The set `hard-inputs` as tables: what each distribution costs us in time and accuracy, beside the best of the peers; and a verdict a condition."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tilewise.bench.distributions import DISTRIBUTIONS, FINITE_LIMIT, NON_FINITE_LIMIT, NORMAL
from tilewise.bench.impls import ours
from tilewise.bench.store import Row, latest

OURS, YARDSTICK = "tilewise", "naive"
CLOCKS = ("events", "graph", "wall")
ERROR_LIMIT = 1.05  # of the best peer's
MISSING = "–"
EXPLAINED = (
    "Each cell: throughput of tilewise / of the fastest peer that is right (where none is, of the fastest, marked *); tilewise's time over its "
    "time on normal inputs, the two in turns; RMS error of tilewise / of the most accurate peer, of O forward, and backward of the gradient that "
    "compares worst. The naive formula, whose gradients keep P, is no peer."
)


class Cell(NamedTuple):
    """One distribution under one condition: our row, and the peers' by the same clock."""

    mine: Row
    peers: list[Row]

    @property
    def data(self) -> str:
        return self.mine.case.get("data", NORMAL)

    @property
    def slower(self) -> float | None:
        """Our time over that on normal inputs."""
        return self.mine.over_normal

    @property
    def fastest(self) -> Row | None:
        timed = [row for row in self.peers if row.median_s is not None]
        return min([row for row in timed if row.passed] or timed, key=lambda row: row.median_s, default=None)

    @property
    def errors(self) -> tuple[str, float, float | None] | None:
        """(output, our error, the least of a peer's): of O, or of the gradient where we compare worst; a peer with stray NaN does not count."""
        found = []
        for output, error in (self.mine.rms_error or {}).items():
            if (output == "o") == (self.mine.case["direction"] == "fwd"):
                others = [row.rms_error[output] for row in self.peers if row.places_agree and output in (row.rms_error or {})]
                found.append((output, error, min(others, default=None)))
        return max(found, key=lambda each: _ratio(*each[1:]) or 0.0, default=None)


Condition = tuple[str, int, int, str, str]  # dtype, seqlen, head_dim, direction, mask


def hard_tables(rows: Iterable[Row]) -> str:
    """Markdown: a table for each dtype, length, head_dim and direction, with a line a distribution and three columns a mask; below it verdicts."""
    conditions = _conditions(rows)
    if not conditions:
        return "| distribution | no rows yet: `tilewise bench --set hard-inputs --out FILE` makes them |\n|---|---|"
    groups: dict[tuple, dict[str, dict[str, Cell]]] = {}
    for (*kind, mask), cells in conditions.items():
        groups.setdefault(tuple(kind), {})[mask] = cells
    unit, factor = _unit(conditions)
    parts = [EXPLAINED]
    for (dtype, seqlen, head_dim, direction), masks in groups.items():
        title = f"d{head_dim} {direction} {dtype}, {seqlen} tokens"
        heads = [f"{_short(mask)}: {unit} | over normal | error" for mask in masks]
        lines = [f"| {title} | {' | '.join(heads)} |", f"|---|{'---:|' * 3 * len(masks)}"]
        for data in DISTRIBUTIONS:
            if any(data in cells for cells in masks.values()):
                lines.append(f"| {data} | {' | '.join(_texts(cells.get(data), factor) for cells in masks.values())} |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in _verdicts(conditions)), _measured_on(conditions)])


def hard_verdicts(rows: Iterable[Row]) -> str:
    """A line a condition: the worst slow-down of finite inputs and of the others, the worst error beside the best peer's, and what was wrong."""
    return "\n".join(_verdicts(_conditions(rows)))


def _conditions(rows: Iterable[Row]) -> dict[Condition, dict[str, Cell]]:
    """By condition and distribution, in the order of the rows. Of several clocks the first of CLOCKS that our row has counts."""
    found: dict[tuple[Condition, str], dict[str, dict[str, Row]]] = {}
    for row in latest(rows):
        case = row.case
        condition = (case["dtype"], case["seqlen_k"], case["head_dim"], case["direction"], case["mask"])
        found.setdefault((condition, case.get("data", NORMAL)), {}).setdefault(row.impl, {})[row.clock] = row
    conditions: dict[Condition, dict[str, Cell]] = {}
    for (condition, data), by_impl in found.items():
        if (mine := by_impl.get(OURS)) is None:
            continue
        clock = next((clock for clock in CLOCKS if clock in mine), "none")
        others = [by_clock for impl, by_clock in by_impl.items() if impl != YARDSTICK and not ours(impl)]
        peers = [row for by_clock in others if (row := by_clock.get(clock, by_clock.get("none"))) is not None]
        conditions.setdefault(condition, {})[data] = Cell(mine.get(clock, next(iter(mine.values()))), peers)
    return conditions


def _unit(conditions: dict[Condition, dict[str, Cell]]) -> tuple[str, float]:
    rates = [cell.mine.flops_per_s or 0.0 for cells in conditions.values() for cell in cells.values()]
    return ("TFLOP/s", 1e-12) if max(rates) >= 1e12 else ("GFLOP/s", 1e-9)


def _texts(cell: Cell | None, factor: float) -> str:
    """The three columns of a mask."""
    if cell is None:
        return " | ".join([MISSING] * 3)
    best, errors = cell.fastest, cell.errors
    rate = "wrong" if cell.mine.passed is False else _number(cell.mine.flops_per_s, "{:.1f}", factor)
    if best is not None:
        rate += f" / {_number(best.flops_per_s, '{:.1f}', factor)} {best.impl}{'' if best.passed else '*'}"
    error = MISSING if errors is None else f"{_number(errors[1])} / {_number(errors[2])}{'' if errors[0] == 'o' else ' ' + errors[0]}"
    return f"{rate} | {_number(cell.slower, '{:.2f}')} | {error}"


def _verdicts(conditions: dict[Condition, dict[str, Cell]]) -> list[str]:
    lines = []
    for (dtype, seqlen, head_dim, direction, mask), cells in conditions.items():
        finite = {data: cell for data, cell in cells.items() if DISTRIBUTIONS[data].finite}
        others = {data: cell for data, cell in cells.items() if data not in finite}
        meant = {data: cell for data, cell in finite.items() if not DISTRIBUTIONS[data].subnormal}
        words = [
            _worst("finite inputs", finite, lambda cell: cell.slower, "times the normal time", FINITE_LIMIT),
            _worst("not finite", others, lambda cell: cell.slower, "times", NON_FINITE_LIMIT),
            _worst("error", meant, lambda cell: _ratio(*cell.errors[1:]) if cell.errors else None, "times the best peer's", ERROR_LIMIT),
        ]
        wrong = [data for data, cell in cells.items() if cell.mine.passed is False]
        words += [f"wrong: {', '.join(wrong)}"] if wrong else []
        lines.append(f"d{head_dim} {direction} {_short(mask)} {dtype}, {seqlen} tokens: {'; '.join(filter(None, words))}")
    return lines


def _worst(what: str, cells: dict[str, Cell], read: Callable[[Cell], float | None], of_what: str, limit: float) -> str:
    numbers = {data: number for data, cell in cells.items() if (number := read(cell)) is not None}
    if not numbers:
        return ""
    data = max(numbers, key=numbers.get)
    return f"{what} at most {numbers[data]:.2f} {of_what} ({data}), {'within' if numbers[data] <= limit else 'beyond'} {limit:g}"


def _ratio(mine: float | None, best: float | None) -> float | None:
    return None if mine is None or not best else mine / best


def _number(number: float | None, text: str = "{:.1e}", factor: float = 1.0) -> str:
    return MISSING if number is None else text.format(number * factor)


def _short(mask: str) -> str:
    text = mask if len(mask) <= 24 else mask[:21] + "..."
    return text.replace("|", "\\|")


def _measured_on(conditions: dict[Condition, dict[str, Cell]]) -> str:
    mine = [cell.mine for cells in conditions.values() for cell in cells.values()]
    dates = sorted({str(row.environment.get("date", MISSING))[:10] for row in mine})
    where = f"{', '.join(dict.fromkeys(row.device for row in mine))}, torch {mine[-1].environment.get('torch', MISSING)}"
    return f"Measured on {where}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; medians, side by side in one process."
