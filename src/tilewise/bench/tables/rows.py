"""Rows as tables: for the terminal, and as markdown, a column an implementation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewise.bench.sets import change_words
from tilewise.bench.store import Row, latest

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "–"
CASE = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v", "mask", "dtype", "direction")


@dataclass(frozen=True)
class Metric:
    """A column of numbers: how to read it from a row, its unit, and how it is written."""

    title: str
    unit: str
    read: Callable[[Row], float | None]
    format: str = "{:.3g}"

    def text(self, row: Row) -> str:
        number = self.read(row)
        return MISSING if number is None else self.format.format(number)


def _scaled(field: str, factor: float) -> Callable[[Row], float | None]:
    def read(row: Row) -> float | None:
        found = getattr(row, field)
        return None if found is None else found * factor

    return read


METRICS = ("time", "throughput", "paper-throughput", "ceiling", "memory", "error")


def metric_of(name: str, rows: Iterable[Row]) -> Metric:
    """The metric `name` in a unit that suits these rows: TFLOP/s, or GFLOP/s where none reaches one. ValueError for another name."""
    tera = any((row.flops_per_s or 0.0) >= 1e12 for row in rows)
    rate, factor, digits = ("TFLOP/s", 1e-12, "{:.1f}") if tera else ("GFLOP/s", 1e-9, "{:.1f}")
    metrics = {
        "time": Metric("time", "ms, median", _scaled("median_s", 1e3), "{:.3f}"),
        "throughput": Metric("throughput", f"{rate} on visible pairs", _scaled("flops_per_s", factor), digits),
        "paper-throughput": Metric("throughput", f"{rate} as the papers count", _scaled("paper_flops_per_s", factor), digits),
        "ceiling": Metric("share of the roofline", "% of the rates measured in the same run", _scaled("ceiling_share", 100), "{:.0f}"),
        "memory": Metric("peak extra memory", "MB", _scaled("peak_extra_bytes", 1e-6), "{:.1f}"),
        "error": Metric("largest error of O", "against fp64", _scaled("error", 1.0), "{:.1e}"),
    }
    if name not in metrics:
        raise ValueError(f"metric is {name!r}; it must be one of {', '.join(METRICS)}")
    return metrics[name]


LEFT_OUT_FIRST = ("clock", "papers'", "p10 – p90 ms", "% of roofline", "error", "MB extra")


def table(rows: Iterable[Row], width: int | None = None) -> "Table":
    """Every timed row with all its numbers, for the terminal; below it why the others have none.

    What all cases have in common is in the title. A table that would need more than `width` columns loses numbers, LEFT_OUT_FIRST, and
    says which.
    """
    from rich.console import Console
    from rich.text import Text

    rows = list(rows)
    notes = list(dict.fromkeys(f"{row.impl}: {row.reason or 'not timed'}" for row in rows if row.median_s is None or row.reason))
    wide = Console(width=10_000)
    left_out = 0
    made = _table(rows, ())
    while width is not None and wide.measure(made).maximum > width and left_out < len(LEFT_OUT_FIRST):
        left_out += 1
        made = _table(rows, LEFT_OUT_FIRST[:left_out])
    if left_out:
        notes.append(f"Not shown, as {width} columns have no room for them: {', '.join(LEFT_OUT_FIRST[:left_out])}.")
    made.caption = Text("\n".join(notes))
    return made


def _table(rows: list[Row], without: tuple[str, ...]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    time, rate, papers, ceiling, memory, error = (metric_of(name, rows) for name in METRICS)
    columns: dict[str, Callable[[Row], str]] = {
        "ms": time.text,
        rate.unit.split()[0]: rate.text,
        "papers'": papers.text,
        "% of roofline": ceiling.text,
        "MB extra": memory.text,
        "error": error.text,
        "p10 – p90 ms": lambda row: MISSING if row.p10_s is None or row.p90_s is None else f"{row.p10_s * 1e3:.3f} – {row.p90_s * 1e3:.3f}",
        "clock": lambda row: row.clock,
    }
    columns = {heading: text for heading, text in columns.items() if heading not in without}
    shown = [row for row in rows if row.median_s is not None or row.passed is False]
    common, cases = in_common([row.case for row in shown])
    style = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "collapse_padding": True, "header_style": "bold"}
    made = Table(title=f"attention, {common}".rstrip(", "), title_justify="left", caption_justify="left", **style)
    made.add_column("case")
    made.add_column("impl", style="cyan")
    for heading in columns:
        made.add_column(heading, justify="right")
    before = None
    for row, case in zip(shown, cases, strict=True):
        if before is not None and case != before:
            made.add_section()
        first, before = case if case != before else "", case
        cells = ["[bold red]wrong"] if row.median_s is None else [text(row) for text in columns.values()]
        made.add_row(first, row.impl, *cells)
    return made


def in_common(cases: list[dict]) -> tuple[str, list[str]]:
    """The words that all cases share, and for each case the others. A case on its own keeps its lengths and its mask."""
    words = [_words(case) for case in cases]
    own = [len(set(column)) > 1 or (len(set(words)) == 1 and place in (1, 4)) for place, column in enumerate(zip(*words, strict=True))]
    shared = [word for word, alone in zip(words[0], own, strict=True) if word and not alone] if words else []
    return " ".join(shared), [" ".join(word for word, alone in zip(each, own, strict=True) if word and alone) for each in words]


def describe(case: dict) -> str:
    """A case in a few words: `b8 s512 h8/2 d64 Causal() fp32 fwd`."""
    return " ".join(filter(None, _words(case)))


def _words(case: dict) -> tuple[str, ...]:
    def pair(first: str, second: str, between: str) -> str:
        return str(case[first]) if case[first] == case[second] else f"{case[first]}{between}{case[second]}"

    lacking = [name for name in CASE if name not in case]
    if lacking:
        raise ValueError(f"a row's case has no {', '.join(lacking)}, by which tables describe it; it has {', '.join(case) or 'nothing'}")
    mask = str(case["mask"])
    return (
        f"b{case['batch']}",
        f"s{pair('seqlen_q', 'seqlen_k', 'x')}",
        f"h{pair('heads_q', 'heads_k', '/')}",
        f"d{pair('head_dim', 'head_dim_v', '/')}",
        mask if len(mask) <= 32 else mask[:29] + "...",
        str(case["dtype"]),
        str(case["direction"]),
        f"({case['data']})" if "data" in case else "",
        ", ".join(change_words(case)),
    )


def header(*titles: str, left: int = 1) -> list[str]:
    """The first two lines of a markdown table, in which all columns but `left` are of numbers."""
    return [line(titles).replace("|  |", "| |"), f"|{'---|' * left}{'---:|' * (len(titles) - left)}"]


def line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def markdown(rows: Iterable[Row], metric: str = "time", clocks: tuple[str, ...] = ("wall", "graph", "events")) -> str:
    """One metric as a markdown table: a line for each case, a column for each implementation; the best of a line is bold.

    With several rows for a cell the last one counts, by the first of `clocks` that has one. ValueError for an unknown metric.
    """
    rows = latest(rows)
    measure = metric_of(metric, rows)
    impls = list(dict.fromkeys(row.impl for row in rows))
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((f"{row.name}: {describe(row.case)}", row.impl), {})[row.clock] = row
    lines = header(f"{measure.title} ({measure.unit})", *impls)
    for case in dict.fromkeys(case for case, _ in cells):
        texts = [_cell(cells.get((case, impl), {}), measure, clocks) for impl in impls]
        lines.append(line((escaped(case), *_best_bold(texts, highest=metric in ("throughput", "paper-throughput", "ceiling")))))
    return "\n".join(lines)


def _cell(by_clock: dict[str, Row], measure: Metric, clocks: tuple[str, ...]) -> str:
    row = next((by_clock[clock] for clock in clocks if clock in by_clock), None)
    if row is not None:
        return measure.text(row)
    return "wrong" if any(row.passed is False for row in by_clock.values()) else MISSING


def _best_bold(texts: list[str], highest: bool) -> list[str]:
    numbers = {text: float(text) for text in texts if text not in (MISSING, "wrong")}
    if len(numbers) < 2:
        return texts
    best = (max if highest else min)(numbers.values())
    return [f"**{text}**" if numbers.get(text) == best else text for text in texts]


def measured_on(rows: list[Row]) -> str:
    """A sentence about the machine of the last of these rows, and the days of all."""
    return f"Measured on {where(rows)}; medians, side by side in one process."


def where(rows: list[Row]) -> str:
    """The machine and the software of the last of these rows, and the first and the last day."""
    last = rows[-1].environment if rows else {}
    days = sorted(str(row.environment.get("date", MISSING))[:10] for row in rows) or [MISSING]
    words = [
        rows[-1].device if rows else "no machine",
        f"torch {last.get('torch', MISSING)}",
        " to ".join(dict.fromkeys((days[0], days[-1]))),
    ]
    if last.get("threads"):
        words.insert(1, f"{last['threads']} thread{'' if last['threads'] == 1 else 's'}")
    return ", ".join(words)


def escaped(text: str) -> str:
    """Text inside a markdown table, where the | of a mask would end the cell."""
    return text.replace("|", "\\|")


def machines(rows: Iterable[Row]) -> str:
    """Where the rows come from: one line for each device, software and commit, with the first and the last date."""
    names = ("device", "torch", "python", "threads", "tilewise", "commit")
    dates: dict[tuple[str, ...], list[str]] = {}
    for environment in (row.environment for row in rows):
        shown = [str(environment.get(name) or MISSING) for name in names]
        if environment.get("dirty"):
            shown[-1] += " with changes"
        dates.setdefault(tuple(shown), []).append(str(environment.get("date") or MISSING)[:16].replace("T", " "))
    lines = header("device", "torch", "Python", "threads", "tilewise", "commit", "date (UTC)", left=7)
    for shown, when in dates.items():
        lines.append(line((*shown, " to ".join(dict.fromkeys((min(when), max(when)))))))
    return "\n".join(lines)


def verdicts(rows: Iterable[Row]) -> "Table":
    """What was checked and how it ended, without times."""
    from rich.table import Table

    made = Table("contender", "case", "result", "error of O", title="Against the fp64 oracle", title_justify="left")
    results = {True: "[green]passed[/]", False: "[bold red]wrong[/]", None: "[yellow]not run[/]"}
    for row in rows:
        result = results[row.passed]
        note = "" if row.reason is None else f"{result}: {_plain(row.reason)}"
        made.add_row(row.impl, _plain(describe(row.case)), note or result, MISSING if row.error is None else f"{row.error:.1e}")
    return made


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
