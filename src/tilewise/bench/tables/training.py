"""Trainings as a table: tokens/s, TFLOP/s, MFU and peak memory of each contender, a block of lines a model and length."""

from collections.abc import Iterable

from tilewise.bench.store import Row, latest
from tilewise.bench.tables.rows import MISSING, escaped, measured_on
from tilewise.bench.training import NAME

NAMES = {"sdpa:math": "no flash (sdpa:math)"}


def trainings(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """By (model, length), the last row of each contender: those of the last run's number of layers."""
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in latest([row for row in rows if row.name == NAME]):
        key = str(row.case["model"]), int(row.case["seqlen_q"])
        cell = cells.setdefault(key, {})
        if any(other.case != row.case for other in cell.values()):
            cell.clear()
        cell[row.impl] = row
    return {key: list(cells[key].values()) for key in sorted(cells)}


def training_table(rows: Iterable[Row]) -> str:
    """The table, in markdown; the fastest of a model and length is bold."""
    lines = [
        "| model, tokens of a sequence | contender | tokens/s | TFLOP/s | MFU | peak memory, GB | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    cells = trainings(rows)
    for cell in cells.values():
        best = max((row.tokens_per_s for row in cell if row.tokens_per_s), default=None)
        first = _title(cell[0])
        for row in cell:
            mark = "**" if row.tokens_per_s is not None and row.tokens_per_s == best else ""
            numbers = " | ".join(f"{mark}{text}{mark}" if text != MISSING else text for text in _numbers(row))
            lines.append(f"| {first} | {NAMES.get(row.impl, row.impl)} | {numbers} | {escaped(row.reason or '')} |")
            first = ""
    if not cells:
        return "\n".join(lines)
    return "\n".join([*lines, "", measured_on([row for cell in cells.values() for row in cell])])


def _title(row: Row) -> str:
    case = row.case
    layers = case["layers"] if case["layers"] == case["layers_of_model"] else f"{case['layers']} of its {case['layers_of_model']}"
    how = "".join(f", {name}" for name in ("autocast", "compiled") if name in case)
    return f"GPT {case['model']}, {case['seqlen_q']:,}: {layers} layers, {case['batch']} x {case['seqlen_q']:,} tokens a step{how}"


def _numbers(row: Row) -> tuple[str, str, str, str]:
    if row.tokens_per_s is None:
        return MISSING, MISSING, MISSING, MISSING
    return (
        f"{row.tokens_per_s:,.0f}",
        f"{row.rate * 1e-12:.0f}" if row.rate >= 1e12 else f"{row.rate * 1e-12:.2g}",
        MISSING if row.mfu is None else f"{row.mfu:.1%}",
        MISSING if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f}",
    )
