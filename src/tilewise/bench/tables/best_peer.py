"""Tables of ours against the fastest peer: of any workloads, of the set `models` by both clocks, and of decoding; and why ours is behind."""

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from tilewise.bench.compare import (
    MINE,
    UNEXPLAINED,
    Cell,
    Pair,
    ahead,
    cells,
    cells_by_clock,
    geometric_mean,
    pairs,
    ratios,
)
from tilewise.bench.peers import ours
from tilewise.bench.sets import DECODE, WHY_BEHIND, model_shapes, title_of, tokens
from tilewise.bench.store import Row, latest
from tilewise.bench.tables.rows import MISSING, describe, escaped, header, line, measured_on, metric_of
from tilewise.ladder import DECODE_RUNGS

BY_CLOCK = {"kernel": [("events", "graph")], "wall": [("wall",)]}  # of the set models
# Why ours is behind in cells that decode, by a pattern of their titles (`title_of`); the first that matches counts.
WHY: dict[str, str] = {
    "b* 1k 32:1 *": "adding up the pieces of one key head takes longer than reading its keys",
}


def against(rows: Iterable[Row], theirs: str = "sdpa") -> str:
    """How many times faster ours is than `theirs` on each case, as a markdown table; below 1 it is slower."""
    lines = header("case", f"{MINE}, ms", f"{theirs}, ms", "ratio")
    for cell in cells_by_clock(latest(rows)):
        if cell.mine is not None and (other := cell.timed.get(theirs)) is not None:
            mine, other = cell.mine.seconds, other.seconds
            lines.append(line((_title(cell), f"{mine * 1e3:.3f}", f"{other * 1e3:.3f}", f"{other / mine:.2f}x")))
    return "\n".join(lines)


def against_best(rows: Iterable[Row]) -> str:
    """Ours against the fastest peer on each case, as a markdown table with the geometric mean of the ratios; below 1 it is slower."""
    rows = [row for row in latest(rows) if row.median_s is not None]
    compared = pairs(cells_by_clock(rows))
    measure = metric_of("throughput", rows)
    lines = header(f"{measure.title} ({measure.unit})", MINE, "best other", "ratio")
    for pair in compared:
        theirs = f"{measure.text(pair.best)} {pair.best.impl}"
        lines.append(line((_title(pair), measure.text(pair.mine), theirs, f"{pair.ratio:.2f}")))
    if numbers := [pair.ratio for pair in compared]:
        lines.append(f"| geometric mean; ahead in {ahead(numbers)} | | | {geometric_mean(numbers):.3f} |")
    return "\n".join(lines)


def by_kind(rows: Iterable[Row], mine: str = MINE) -> str:
    """`against_best` with a line for all lengths of a direction, head_dim and mask: throughput at the longest, and the mean ratio.

    mine: the contender that stands for ours.
    """
    rows = [replace(row, impl=MINE) if row.impl == mine else row for row in latest(rows) if row.median_s is not None]
    measure = metric_of("throughput", rows)
    lines = header(f"{measure.unit}, longest length", mine, "best other", "mean ratio, all lengths", "ahead")
    for (direction, head_dim, mask), group in kinds(rows).items():
        longest, numbers = longest_of(group), [pair.ratio for pair in group]
        kind = escaped(f"{direction} d{head_dim} {mask}, {longest.case['seqlen_k']} tokens")
        rates = measure.text(longest.mine), f"{measure.text(longest.best)} {longest.best.impl}"
        lines.append(line((kind, *rates, f"{geometric_mean(numbers):.2f}", ahead(numbers))))
    return "\n".join([*lines, "", measured_on(rows)])


def kinds(rows: Iterable[Row]) -> dict[tuple[str, int, str], list[Pair]]:
    """By direction, head_dim and mask."""
    found: dict[tuple[str, int, str], list[Pair]] = {}
    for pair in pairs(cells_by_clock(rows)):
        found.setdefault((pair.case["direction"], pair.case["head_dim"], pair.case["mask"]), []).append(pair)
    return found


def longest_of(group: list[Pair]) -> Pair:
    return max(group, key=lambda pair: pair.case["seqlen_k"])


def _title(cell: Cell | Pair) -> str:
    return escaped(f"{cell.name}: {describe(cell.case)}")


def _peers(compared: list[Cell], untimed: bool = False) -> str:
    """A sentence about who else was measured, and where."""
    names = dict.fromkeys(impl for cell in compared for impl in (*cell.timed, *(cell.untimed if untimed else ())) if not ours(impl))
    return f"Peers: {', '.join(names) or 'none'}. {measured_on([row for cell in compared for row in cell.timed.values()])}"


def cells_of_models(rows: Iterable[Row]) -> list[dict[str, Cell]]:
    """The cells of the set by each of BY_CLOCK, in its order, that `rows` have something of; rows of what the set no longer holds are left out."""
    order = {workload.name: (place, _sizes(workload.case)) for place, workload in enumerate(model_shapes())}
    rows = [row for row in rows if order.get(row.name, (0, None))[1] == _sizes(row.case)]
    found = [
        dict(zip(BY_CLOCK, by_clock, strict=True)) for by_clock in zip(*(cells(rows, each) for each in BY_CLOCK.values()), strict=True)
    ]
    return sorted(found, key=lambda cell: (order[cell["wall"].name][0], cell["wall"].case["direction"], cell["wall"].case["dtype"]))


def _sizes(case: dict) -> dict:
    return {name: value for name, value in case.items() if name not in ("dtype", "direction")}


def leads(cell: dict[str, Cell]) -> bool:
    """Whether ours is ahead by every clock that both have; without a time of ours, no; without a peer that can, yes."""
    return any(each.mine for each in cell.values()) and all(ratio >= 1.0 for ratio in ratios(cell.values()))


def why_behind(cell: dict[str, Cell]) -> str:
    """Why ours is not ahead: what WHY_BEHIND says, or that ours has no time."""
    either = cell["wall"]
    if leads(cell):
        return ""
    row = either.untimed.get(MINE)
    return WHY_BEHIND.get((either.name, either.case["direction"]), UNEXPLAINED) if row is None else f"no time: {row.reason}"


def models_table(rows: Iterable[Row]) -> str:
    """The table, in markdown; the last line is the geometric mean of the ratios by each clock."""
    compared = cells_of_models(rows)
    titles = [text for clock in BY_CLOCK for text in (f"{clock}, ms", "best peer, ms", "ratio")]
    lines = [line(("model", "case", *titles, "why not ahead")), f"|---|---|{'---:|' * 6}---|"]
    for cell in compared:
        texts = [text for each in cell.values() for text in _compared(each, lambda row: f"{row.seconds * 1e3:.3f}")]
        either = cell["wall"]
        lines.append(line((either.name, escaped(describe(either.case)), *texts, escaped(why_behind(cell)))))
    if not compared:
        return "\n".join(lines)
    means = []
    for clock in BY_CLOCK:
        numbers = ratios(cell[clock] for cell in compared)
        means += ["", "", f"**{geometric_mean(numbers):.3f}**" if numbers else MISSING]
    led = sum(map(leads, compared))
    lines.append(f"| **geometric mean** | ahead by both clocks in {led} of {len(compared)} | {' | '.join(means)} | |")
    return "\n".join([*lines, "", _peers([each for cell in compared for each in cell.values()], untimed=True)])


def _compared(cell: Cell | None, text, short=None) -> tuple[str, str, str]:
    """Ours by `text`, the best peer by `short` or in the same way, and the ratio."""
    if cell is None:
        return MISSING, MISSING, MISSING
    mine, best, ratio = cell.mine, cell.best, cell.ratio
    return (
        ("wrong" if cell.wrong else MISSING) if mine is None else text(mine),
        MISSING if best is None else f"{(short or text)(best)} {best.impl}",
        MISSING if ratio is None else f"{ratio:.2f}",
    )


def cells_of_decode(rows: Iterable[Row]) -> list[Cell]:
    return cells([row for row in rows if row.name == DECODE], [("graph",), ("wall",)])


def decode_tables(rows: Iterable[Row]) -> str:
    """The tables, in markdown, the cells in which ours is behind and why, and the geometric mean of the ratios."""
    compared = cells_of_decode(rows)
    if not any(cell.timed for cell in compared):
        return "Not measured yet."
    groups: dict[tuple, list[Cell]] = {}
    for cell in compared:
        case = cell.case
        key = (case["kind"], case["heads_q"], case["heads_k"], case["seqlen_q"]) if case["kind"] in TABLES else ("other",)
        groups.setdefault(key, []).append(cell)
    parts = [TABLES.get(key[0], _others)(group) for key, group in groups.items()]
    if numbers := ratios(compared):
        mean = geometric_mean(numbers)
        parts.append(f"Ahead of the fastest peer in {ahead(numbers)} cells; geometric mean of the ratios {mean:.3f}.")
    return "\n\n".join([*parts, *_behind(compared), _peers(compared)])


def rungs_table(rows: Iterable[Row]) -> str:
    """The ladder's rungs next to tilewise.decode and the fastest peer, on the cells that a rung has a time of: microseconds (TB/s)."""
    compared = [cell for cell in cells_of_decode(rows) if any(name in cell.timed for name in DECODE_RUNGS)]
    if not compared:
        return "Not measured yet."
    names = [*DECODE_RUNGS, MINE]
    lines = [f"| us (TB/s) | {' | '.join(names)} | best peer |", f"|---|{'---:|' * (len(names) + 1)}"]
    for cell in sorted(
        compared, key=lambda cell: (cell.case["heads_q"], -int(cell.case["heads_k"]), cell.case["seqlen_k"], cell.case["batch"])
    ):
        case, best = cell.case, cell.best
        texts = [_us(cell.timed.get(name)) for name in names]
        texts.append(MISSING if best is None else f"{_us(best)} {best.impl}")
        heads = f"{case['heads_q']}:{case['heads_k']}"
        lines.append(f"| {case['batch']} x {tokens(int(case['seqlen_k']))}, heads {heads} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", measured_on([row for cell in compared for row in cell.timed.values()])])


def _us(row: Row | None) -> str:
    return MISSING if row is None else f"{row.seconds * 1e6:,.1f} ({row.bytes / row.seconds * 1e-12:.2f})"


def _us_of(cell: Cell | None) -> tuple[str, str, str]:
    return _compared(cell, _us, lambda row: f"{row.seconds * 1e6:,.1f}")


def _even(compared: list[Cell]) -> str:
    """A line a batch and length, three columns a layout."""
    case = compared[0].case
    pages = sorted({int(cell.case["page"]) for cell in compared})
    names = ["contiguous" if page == 0 else f"pages of {page}" for page in pages]
    new = f"{case['seqlen_q']} new token{'s' if case['seqlen_q'] != 1 else ''}"
    lines = [
        f"{case['heads_q']} query and {case['heads_k']} key heads of {case['head_dim']}, {new}:",
        "",
        f"| sequences x tokens | {' | '.join(f'{name}, us (TB/s) | best peer, us | ratio' for name in names)} |",
        f"|---|{'---:|' * 3 * len(pages)}",
    ]
    by_place = {(cell.case["batch"], cell.case["seqlen_k"], cell.case["page"]): cell for cell in compared}
    for batch, length in sorted({(int(cell.case["batch"]), int(cell.case["seqlen_k"])) for cell in compared}):
        texts = [text for page in pages for text in _us_of(by_place.get((batch, length, page)))]
        lines.append(f"| {batch} x {tokens(length)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _latent(compared: list[Cell]) -> str:
    """A line a batch and length of a latent cache, with its bytes counted once."""
    case = compared[0].case
    new = f"{case['seqlen_q']} new token{'s' if case['seqlen_q'] != 1 else ''}"
    lines = [
        f"A latent cache (MLA, {case['head_dim']} columns of which {case['head_dim_v']} are the values), {case['heads_q']} heads, {new}:",
        "",
        "| sequences x tokens | us (TB/s) | TFLOP/s | best peer, us | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for cell in sorted(compared, key=lambda cell: (cell.case["batch"], cell.case["seqlen_k"])):
        us, peer, ratio = _us_of(cell)
        rate = MISSING if cell.mine is None else f"{cell.mine.flops / cell.mine.seconds * 1e-12:,.0f}"
        lines.append(f"| {cell.case['batch']} x {tokens(int(cell.case['seqlen_k']))} | {us} | {rate} | {peer} | {ratio} |")
    return "\n".join(lines)


def _others(compared: list[Cell]) -> str:
    """Ragged batches and common prefixes, a line each."""
    lines = ["| batch | tokens | us (TB/s) | best peer, us | ratio |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {title_of(cell.case)} | {int(cell.case['tokens']):,} | {' | '.join(_us_of(cell))} |" for cell in compared]
    return "\n".join(["Ragged batches, and a prefix that all sequences have (its bytes count once):", "", *lines])


TABLES = {"even": _even, "latent": _latent}  # by kind; the others share one


def _why(title: str) -> str:
    return next((text for pattern, text in WHY.items() if fnmatchcase(title, pattern)), UNEXPLAINED)


MOST_NAMED = 12  # cells in a line, which are the farthest behind; the tables above have all


def _behind(compared: list[Cell]) -> list[str]:
    """A paragraph with a line for each reason, and cells that it is the reason for; none where there are no such cells."""
    reasons: dict[str, list[Cell]] = {}
    for cell in compared:
        if cell.ratio is not None and cell.ratio < 1.0:
            reasons.setdefault(_why(title_of(cell.case)), []).append(cell)
    lines = []
    for why, group in reasons.items():
        numbers = ratios(group)
        named = [title_of(cell.case) for cell in sorted(group, key=lambda cell: cell.ratio or 0.0)]
        more = f", and {len(named) - MOST_NAMED} more" * (len(named) > MOST_NAMED)
        lines.append(f"- {why} ({min(numbers):.2f} to {max(numbers):.2f}): {', '.join(named[:MOST_NAMED])}{more}")
    return ["Behind:\n\n" + "\n".join(lines)] if lines else []
