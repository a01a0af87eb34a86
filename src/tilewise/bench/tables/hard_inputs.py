"""The set `hard-inputs` as tables: what each distribution costs us in time and accuracy, against the best of the peers; and a verdict a condition."""

from collections.abc import Callable, Iterable

from tilewise.bench.compare import MINE, Cell
from tilewise.bench.compare import cells as compared
from tilewise.bench.peers import ours
from tilewise.bench.sets import DISTRIBUTIONS, FINITE_LIMIT, NON_FINITE_LIMIT, NORMAL
from tilewise.bench.store import Row, latest
from tilewise.bench.tables.rows import MISSING, header, line

YARDSTICK = "naive"
CLOCKS = [("events",), ("graph",), ("wall",)]
ERROR_LIMIT = 1.05  # of the best peer's
EXPLAINED = (
    "Each cell: throughput of tilewise / of the fastest peer that is right (where none is, of the fastest, marked *); tilewise's time over its "
    "time on normal inputs, the two in turns; RMS error of tilewise / of the most accurate peer, of O forward, and backward of the gradient that "
    "compares worst. The naive formula, which keeps P for its gradients, is no peer."
)


def _mine(cell: Cell) -> Row:
    return cell.mine or cell.untimed[MINE]


def _slower(cell: Cell) -> float | None:
    """Our time over that on normal inputs."""
    return _mine(cell).over_normal


def _errors(cell: Cell) -> tuple[str, float, float | None] | None:
    """(output, our error, the least of a peer's): of O, or of the gradient where we compare worst; a peer with stray NaN does not count."""
    found, mine = [], _mine(cell)
    peers = [row for impl, row in (cell.timed | cell.untimed).items() if not ours(impl) and row.places_agree]
    for output, error in (mine.rms_error or {}).items():
        if (output == "o") == (mine.case["direction"] == "fwd"):
            found.append((output, error, min((each[output] for row in peers if output in (each := row.rms_error or {})), default=None)))
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
        heads = [(f"{_short(mask)}: {unit}", "over normal", "error") for mask in masks]
        lines = header(title, *(text for each in heads for text in each))
        for data in DISTRIBUTIONS:
            if any(data in cells for cells in masks.values()):
                lines.append(line((data, *(_texts(cells.get(data), factor) for cells in masks.values()))))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in _verdicts(conditions)), _measured_on(conditions)])


def hard_verdicts(rows: Iterable[Row]) -> str:
    """A line a condition: the worst slow-down of finite inputs and of the others, the worst error against the best peer's, and what was wrong."""
    return "\n".join(_verdicts(_conditions(rows)))


def _conditions(rows: Iterable[Row]) -> dict[Condition, dict[str, Cell]]:
    """By condition and distribution, in the order of the rows. Of several clocks the first of CLOCKS that our row has counts."""
    conditions: dict[Condition, dict[str, Cell]] = {}
    for cell in compared((row for row in latest(rows) if row.impl != YARDSTICK), CLOCKS):
        case = cell.case
        if MINE in cell.timed or MINE in cell.untimed:
            if cell.mine is None:
                cell.timed.clear()  # no peer is compared with a result that is wrong
            condition = (case["dtype"], case["seqlen_k"], case["head_dim"], case["direction"], case["mask"])
            conditions.setdefault(condition, {})[case.get("data", NORMAL)] = cell
    return conditions


def _unit(conditions: dict[Condition, dict[str, Cell]]) -> tuple[str, float]:
    rates = [_mine(cell).flops_per_s or 0.0 for cells in conditions.values() for cell in cells.values()]
    return ("TFLOP/s", 1e-12) if max(rates) >= 1e12 else ("GFLOP/s", 1e-9)


def _texts(cell: Cell | None, factor: float) -> str:
    """The three columns of a mask."""
    if cell is None:
        return " | ".join([MISSING] * 3)
    mine, best, errors = _mine(cell), cell.best, _errors(cell)
    rate = "wrong" if mine.passed is False else _number(mine.flops_per_s, "{:.1f}", factor)
    if best is not None:
        rate += f" / {_number(best.flops_per_s, '{:.1f}', factor)} {best.impl}{'' if best.passed else '*'}"
    error = MISSING if errors is None else f"{_number(errors[1])} / {_number(errors[2])}{'' if errors[0] == 'o' else ' ' + errors[0]}"
    return f"{rate} | {_number(_slower(cell), '{:.2f}')} | {error}"


def _verdicts(conditions: dict[Condition, dict[str, Cell]]) -> list[str]:
    lines = []
    for (dtype, seqlen, head_dim, direction, mask), cells in conditions.items():
        finite = {data: cell for data, cell in cells.items() if DISTRIBUTIONS[data].finite}
        others = {data: cell for data, cell in cells.items() if data not in finite}
        meant = {data: cell for data, cell in finite.items() if not DISTRIBUTIONS[data].subnormal}
        words = [
            _worst("finite inputs", finite, _slower, "times the normal time", FINITE_LIMIT),
            _worst("not finite", others, _slower, "times", NON_FINITE_LIMIT),
            _worst(
                "error",
                meant,
                lambda cell: _ratio(*errors[1:]) if (errors := _errors(cell)) else None,
                "times the best peer's",
                ERROR_LIMIT,
            ),
        ]
        wrong = [data for data, cell in cells.items() if _mine(cell).passed is False]
        words += [f"wrong: {', '.join(wrong)}"] if wrong else []
        lines.append(f"d{head_dim} {direction} {_short(mask)} {dtype}, {seqlen} tokens: {'; '.join(filter(None, words))}")
    return lines


def _worst(what: str, cells: dict[str, Cell], read: Callable[[Cell], float | None], of_what: str, limit: float) -> str:
    numbers = {data: number for data, cell in cells.items() if (number := read(cell)) is not None}
    if not numbers:
        return ""
    data = max(numbers, key=numbers.__getitem__)
    return f"{what} at most {numbers[data]:.2f} {of_what} ({data}), {'within' if numbers[data] <= limit else 'beyond'} {limit:g}"


def _ratio(mine: float | None, best: float | None) -> float | None:
    return None if mine is None or not best else mine / best


def _number(number: float | None, text: str = "{:.1e}", factor: float = 1.0) -> str:
    return MISSING if number is None else text.format(number * factor)


def _short(mask: str) -> str:
    text = mask if len(mask) <= 24 else mask[:21] + "..."
    return text.replace("|", "\\|")


def _measured_on(conditions: dict[Condition, dict[str, Cell]]) -> str:
    mine = [_mine(cell) for cells in conditions.values() for cell in cells.values()]
    dates = sorted({str(row.environment.get("date", MISSING))[:10] for row in mine})
    where = f"{', '.join(dict.fromkeys(row.device for row in mine))}, torch {mine[-1].environment.get('torch', MISSING)}"
    return f"Measured on {where}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; medians, side by side in one process."
