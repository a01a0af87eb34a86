"""Tables between markers in markdown documents, so that no number there is typed by hand.

A document holds `<!-- tilewise:begin NAME -->` and `<!-- tilewise:end NAME -->`; `refresh` writes the table NAME (TABLES) between them.
Those of the ladder have markers of their own: ladder.py.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tilewise.bench.store import Row
from tilewise.bench.tables import readme
from tilewise.bench.tables.best_peer import (
    against,
    against_best,
    by_kind,
    cells_of_decode,
    cells_of_models,
    decode_tables,
    models_table,
    rungs_table,
)
from tilewise.bench.tables.goals import goals_table
from tilewise.bench.tables.hard_inputs import hard_tables, hard_verdicts
from tilewise.bench.tables.ladder import cells_of, fill_ladder, ladder_table
from tilewise.bench.tables.rows import METRICS, Metric, describe, machines, markdown, metric_of, table, verdicts
from tilewise.bench.tables.training import NAMES, training_table, trainings

__all__ = [
    "NAMES",
    "TABLES",
    "Metric",
    "cells_of",
    "cells_of_decode",
    "cells_of_models",
    "decode_tables",
    "describe",
    "fill",
    "hard_tables",
    "hard_verdicts",
    "ladder_table",
    "markdown",
    "metric_of",
    "models_table",
    "refresh",
    "table",
    "training_table",
    "trainings",
    "verdicts",
]

TABLES: dict[str, Callable[[list[Row]], str]] = {
    **{name: partial(markdown, metric=name) for name in METRICS},
    "against-sdpa": against,
    "against-best": against_best,
    "by-kind": by_kind,
    "by-kind-triton": partial(by_kind, mine="tilewise:triton"),
    "machines": machines,
    **{f"readme-{each.__name__}": each for each in (readme.papers, readme.ladder, readme.decode, readme.eight_bits, readme.cpu)},
    "goals": goals_table,
    "hard-inputs": hard_tables,
    "models": models_table,
    "training": training_table,
    "decode": decode_tables,
    "decode-rungs": rungs_table,
}
_MARKED = re.compile(r"(<!-- tilewise:begin (?P<name>\S+) -->\n).*?(<!-- tilewise:end (?P=name) -->)", re.DOTALL)


def refresh(documents: Iterable[str | Path], rows: Iterable[Row]) -> list[Path]:
    """Write the tables between the markers of these markdown files; the files that changed.

    A marker `NAME` or `NAME:SET` takes the table NAME, of the rows of the set SET alone (the rows' `name`; several joined by +, behind ! sets
    that have some of the cases, which are left out, in another table); `NAME:SET:DIRECTION` of those in one direction; `NAME:SET:DIRECTION:DEVICE` of
    machines with DEVICE in the device's name (h100).
    Raises ValueError for a name that is no table, for a begin without its end, and for a table with several devices side by side.
    """
    rows, changed = list(rows), []
    for path in map(Path, documents):
        before = path.read_text(encoding="utf-8")
        after = fill(before, rows, path.name)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def fill(text: str, rows: list[Row], where: str = "text") -> str:
    """`text` with the tables between its markers rewritten from `rows`, the ladder's among them; see `refresh`."""
    begins = re.findall(r"<!-- tilewise:begin (\S+) -->", text)
    ended = [match["name"] for match in _MARKED.finditer(text)]
    if missing := [name for name in begins if name not in ended]:
        raise ValueError(f"{where}: tilewise:begin {missing[0]} has no tilewise:end {missing[0]} after it, or no line of its own")

    def written(match: re.Match) -> str:
        name, sets, direction, device = [*match["name"].split(":"), "", "", ""][:4]
        if name not in TABLES:
            raise ValueError(f"{where}: {name} is no table; there are {', '.join(TABLES)}")
        sets, _, others = sets.partition("!")
        elsewhere = {describe(row.case) for row in rows if row.name in others.split("+")}
        chosen = [row for row in rows if (not sets or row.name in sets.split("+")) and describe(row.case) not in elsewhere]
        chosen = [row for row in chosen if direction in ("", row.case["direction"]) and device.lower() in row.device.lower()]
        if name not in ("machines", "goals") and (devices := _side_by_side(chosen)):
            raise ValueError(f"{where}: {match['name']} would mix {' and '.join(devices)}; {name}:{sets}:{direction}:DEVICE names one")
        return f"{match[1]}\n{TABLES[name](chosen)}\n\n{match[3]}"

    return fill_ladder(_MARKED.sub(written, text), rows, where)


def _side_by_side(rows: list[Row]) -> list[str]:
    """Devices with rows of the same case and clock, which so would stand side by side."""
    found: dict[tuple, set[str]] = {}
    for row in rows:
        found.setdefault((row.name, describe(row.case), row.clock), set()).add(row.device)
    return sorted(set().union(*(devices for devices in found.values() if len(devices) > 1)))
