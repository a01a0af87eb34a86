"""The ladder's measurements as tables: every rung with its peers, in the terminal and in the README and the worklog."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewise.bench.compare import MINE, fastest
from tilewise.bench.sets import tokens
from tilewise.bench.store import Row, latest
from tilewise.bench.tables.rows import MISSING, header, line
from tilewise.ladder import ALIASES, BACKWARD_RUNGS, RUNGS, VARIANTS
from tilewise.machine.sheets import MACHINES

if TYPE_CHECKING:
    from rich.table import Table

CLOCKS = ("graph", "events", "wall")  # the one that counts for a kernel, first
PLACE = {"head_dim": 128, "seqlen_k": 8192}  # where rungs are compared by one number
PRODUCTION = "tilewise:hopper"  # how the ladder's sweep names what other sets name tilewise
NOT_MEASURED = "No measurement of the ladder is committed yet."
MASKS = {"Full()": "full", "Causal()": "causal"}
Cells = dict[tuple[str, int, str, int], Row]  # by contender, head_dim, mask, seqlen


def cells_of(rows: Iterable[Row], direction: str = "fwd") -> Cells:
    """The timed rows of the ladder's sweep, the latest of each place, by the clock that counts; a rung's under its first name."""
    cells: Cells = {}
    timed = (row for row in rows if row.name == "ladder" and row.median_s is not None and row.case["direction"] == direction)
    for row in latest(replace(row, impl=ALIASES.get(row.impl, row.impl)) for row in timed):
        place = row.impl, int(row.case["head_dim"]), MASKS[str(row.case["mask"])], int(row.case["seqlen_k"])
        if place not in cells or CLOCKS.index(row.clock) <= CLOCKS.index(cells[place].clock):
            cells[place] = row
    return cells


def of_one_machine(rows: Iterable[Row], direction: str, name: str | None = None) -> list[Row]:
    """The rows of the first device, in their order, on which the ladder's sweep has a time (of `name`); none where there is no such time."""
    rows = list(rows)
    timed = (row for row in rows if row.name == "ladder" and row.median_s is not None and row.case["direction"] == direction)
    device = next((row.device for row in timed if name in (None, ALIASES.get(row.impl, row.impl))), None)
    return [row for row in rows if row.device == device]


def _contenders(cells: Cells) -> list[str]:
    """The ladder's in its order, then the peers in the rows' order."""
    found = list(dict.fromkeys(impl for impl, *_ in cells))
    return [name for name in (*RUNGS, *VARIANTS, *BACKWARD_RUNGS) if name in found] + [name for name in found if not _ours(name)]


def _ours(name: str) -> bool:
    return name in RUNGS or name in VARIANTS or name in BACKWARD_RUNGS


def rate(row: Row | None) -> str:
    """TFLOP/s on visible pairs."""
    return MISSING if row is None else f"{row.rate * 1e-12:.{0 if row.rate >= 1e14 else 1}f}"


def ladder_table(rows: Iterable[Row]) -> "Table":
    """TFLOP/s for the terminal: a line a contender, a column a length, a block a head_dim and mask."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = list(rows)
    cells = cells_of(rows) or cells_of(rows, "bwd")
    lengths = sorted({seqlen for *_, seqlen in cells})
    made = Table(title="TFLOP/s on visible pairs", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("head_dim, mask")
    made.add_column("contender", style="cyan")
    for seqlen in lengths:
        made.add_column(tokens(seqlen), justify="right")
    for head_dim, mask in dict.fromkeys((head_dim, mask) for _, head_dim, mask, _ in cells):
        here = [name for name in _contenders(cells) if any((name, head_dim, mask, seqlen) in cells for seqlen in lengths)]
        for place, name in enumerate(here):
            made.add_row(f"{head_dim} {mask}" if place == 0 else "", name, *(rate(cells.get((name, head_dim, mask, n))) for n in lengths))
        made.add_section()
    return made


def at_place(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """The rows at PLACE by contender and mask: the ladder's in its order, then the production kernel and the peers.

    Of these the newest row of the same case on the same device counts, be it of the ladder's sweep or of the papers'.
    """
    rows = of_one_machine(rows, "fwd")
    cells = {cell: row for cell, row in cells_of(rows).items() if (cell[1], cell[3]) == tuple(PLACE.values())}
    cases = [row.case for row in cells.values()]
    found: dict[str, dict[str, Row]] = {name: {} for name in (*RUNGS, *VARIANTS)} if cells else {}
    for (name, _, mask, _), row in cells.items():
        if _ours(name):
            found[name][mask] = row
    others = [row for row in rows if row.name in ("ladder", "papers") and row.median_s is not None]
    others = [replace(row, impl=MINE) if row.impl == PRODUCTION else row for row in others if not _ours(ALIASES.get(row.impl, row.impl))]
    for row in sorted(latest(others), key=lambda row: (row.impl != MINE, CLOCKS.index(row.clock))):
        if row.case in cases:
            found.setdefault(row.impl, {}).setdefault(MASKS[str(row.case["mask"])], row)
    return found


def title(name: str) -> str:
    """The idea of a rung; what another contender is."""
    return (RUNGS | VARIANTS)[name].title if _ours(name) else "the library's own kernel" if name == MINE else "peer"


def ladder_markdown(rows: Iterable[Row]) -> str:
    """A line a contender: its idea, its rates at PLACE, the share of the machine's matmul rate in bf16 in the same run, and the day."""
    found = at_place(rows)
    if not found:
        return NOT_MEASURED
    lines = header("", "idea", "full, TFLOP/s", "causal", "full, of a large matmul's", "measured", left=2)
    for name, row in found.items():
        full, causal = row.get("full"), row.get("causal")
        lines.append(line((name, title(name), rate(full), rate(causal), share(full), day(full))))
    measured = [row for masks in found.values() for row in masks.values()]
    return "\n".join([*lines, "", " ".join(filter(None, (caption(measured), of_the_sheet(found))))])


def of_the_sheet(found: dict[str, dict[str, Row]]) -> str:
    """What share rungs in 8 bits have of their own peak, by the data sheet; no matmul in 8 bits was timed next to them. Empty without such rows."""
    full = {name: masks["full"] for name, masks in found.items() if in_eight_bits(name) and "full" in masks}
    machine = next((MACHINES[key] for key in MACHINES if any(key in row.device for row in full.values())), None)
    if machine is None:
        return ""
    peak = machine.peak[torch.float8_e4m3fn]
    shares = ", ".join(f"{name} {row.rate / peak:.0%}" for name, row in full.items())
    return f"A matmul in bf16 is no measure of 8 bits; of the data sheet's {peak * 1e-12:,.0f} TFLOP/s in e4m3 they reach: {shares}."


def in_eight_bits(name: str) -> bool:
    return _ours(name) and RUNGS[name.partition(":")[0]].in_eight_bits


def caption(measured: list[Row]) -> str:
    """The case and the machine of these rows of `at_place`."""
    case, where = measured[0].case, measured[0].environment
    eight = [row.impl for row in measured if in_eight_bits(row.impl)]
    dtypes = f"bf16 ({', '.join(dict.fromkeys(eight))}: e4m3, quantised beforehand)" if eight else "bf16"
    words = f"{measured[0].device}, torch {where.get('torch', MISSING)}, CuTe DSL {where.get('nvidia-cutlass-dsl', MISSING)}"
    length = tokens(int(case["seqlen_k"]))
    return (
        f"Forward, batch {case['batch']}, {length} tokens, {case['heads_q']} heads, head_dim {case['head_dim']}, {dtypes}. "
        f"{words}. Rungs of one day, and peers of one day, ran in turns in one process."
    )


def share(row: Row | None) -> str:
    """Of a large matmul's rate in the same run; of one in bf16 a rung in 8 bits has none."""
    if row is None or not row.ceiling_flops_per_s or (in_eight_bits(row.impl) and row.ceiling_dtype is None):
        return MISSING
    return f"{row.rate / row.ceiling_flops_per_s:.{1 if row.rate < 1e14 else 0}%}"


def rung_markdown(rows: Iterable[Row], name: str) -> str:
    """One rung over the sweep, between the rung before it and the best peer of each place. ValueError for another name."""
    if not _ours(name):
        raise ValueError(f"{name} is no rung; there are {', '.join((*RUNGS, *VARIANTS, *BACKWARD_RUNGS))}")
    rows = list(rows)
    direction = "bwd" if name in BACKWARD_RUNGS else "fwd"
    if direction == "fwd" and not cells_of(rows):
        return NOT_MEASURED
    cells = cells_of(of_one_machine(rows, direction, name), direction)
    if not cells:
        return _not_in_the_sweep(rows, name)
    before = _before(name, {impl for impl, *_ in cells})
    lengths = sorted({seqlen for *_, seqlen in cells})
    lines = header("TFLOP/s", "", *map(tokens, lengths), left=2)
    for head_dim, mask in dict.fromkeys((head_dim, mask) for _, head_dim, mask, _ in cells):
        where = f"{head_dim} {mask}"
        for each in (*([before] if before else []), name):
            shown = (rate(cells.get((each, head_dim, mask, seqlen))) for seqlen in lengths)
            lines.append(f"| {where} | {each} | {' | '.join(f'**{text}**' if each == name else text for text in shown)} |")
        best = (_best_peer(cells, head_dim, mask, seqlen) for seqlen in lengths)
        lines.append(f"| {where} | best peer | {' | '.join(f'{rate(row)} {row.impl}' if row else MISSING for row in best)} |")
    kept = {place: row for place, row in cells.items() if place[0] in (before, name) or not _ours(place[0])}
    return "\n".join([*lines, "", _where(kept)])


def _not_in_the_sweep(rows: list[Row], name: str) -> str:
    """That the sweep has no time of this rung, and the sets that have one."""
    timed = [row for row in rows if row.median_s is not None and ALIASES.get(row.impl, row.impl) == name]
    if not timed:
        return f"{name} is not measured yet."
    others = ", ".join(dict.fromkeys(f"{row.name} on {row.device}" for row in timed))
    return f"The ladder's sweep has no row of {name} yet. Sets that have: {others}."


def _before(name: str, measured: set[str]) -> str | None:
    """The next rung below that is measured; of a variant, the rung it is a variant of."""
    if name in VARIANTS:
        return name.partition(":")[0]
    order = list(BACKWARD_RUNGS if name in BACKWARD_RUNGS else RUNGS)
    return next((rung for rung in reversed(order[: order.index(name)]) if rung in measured), None)


def _best_peer(cells: Cells, head_dim: int, mask: str, seqlen: int) -> Row | None:
    others = {impl: row for (impl, *place), row in cells.items() if place == [head_dim, mask, seqlen] and not _ours(impl)}
    peers = [row for impl, row in others.items() if impl.partition(":")[0] != MINE]
    return fastest(peers)


def _where(cells: Cells) -> str:
    """The machine and the software of the first row; runs of several days are told apart."""
    runs = {_date(row): row for row in sorted(cells.values(), key=_date, reverse=True)}  # each day's first row
    first, *later = (runs[date] for date in sorted(runs))
    found = first.environment
    words = [str(found.get("device", "no machine")), f"torch {found.get('torch', MISSING)}"]
    if found.get("nvidia-cutlass-dsl"):
        words.append(f"CuTe DSL {found['nvidia-cutlass-dsl']}")
    text = f"Measured on {', '.join(words)}, {_date(first)}; medians, side by side in one process{_matmul(first)}."
    return " ".join([text, *(f"Of {_date(row)}: {_names(cells, row)}{_matmul(row)}." for row in later)])


def _names(cells: Cells, of: Row) -> str:
    return ", ".join(dict.fromkeys(row.impl for row in cells.values() if _date(row) == _date(of)))


def day(row: Row | None) -> str:
    return MISSING if row is None else _date(row)


def _date(row: Row) -> str:
    return str(row.environment.get("date", MISSING))[:10]


def _matmul(row: Row) -> str:
    if not row.ceiling_flops_per_s:
        return ""
    return f"; a large matmul {f'in {row.ceiling_dtype} ' if row.ceiling_dtype else ''}in the same run: {row.ceiling_flops_per_s * 1e-12:.0f} TFLOP/s"


_LADDER = re.compile(r"(<!-- ladder:begin -->\n).*?(<!-- ladder:end -->)", re.DOTALL)
_RUNG = re.compile(r"(<!-- table:(?P<name>\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def fill_ladder(text: str, rows: Iterable[Row], where: str = "text") -> str:
    """`text` with what stands between `<!-- ladder:begin -->` and `<!-- ladder:end -->`, and between `<!-- table:RUNG -->` and
    `<!-- /table -->`, rewritten. Raises ValueError for a table of no rung, and for a begin without its end."""
    rows = list(rows)
    for begin, pattern in ((r"<!-- ladder:begin -->", _LADDER), (r"<!-- table:\S+ -->", _RUNG)):
        begun, ended = len(re.findall(begin, text)), len(pattern.findall(text))
        if begun != ended:
            raise ValueError(f"{where}: {begun} {begin!r} and {ended} with an end after them, each marker on a line of its own")
    text = _LADDER.sub(lambda match: f"{match[1]}\n{ladder_markdown(rows)}\n\n{match[2]}", text)
    return _RUNG.sub(lambda match: f"{match[1]}\n{rung_markdown(rows, match['name'])}\n\n{match[3]}", text)
