"""A page of benchmark rows: every chart and table that they have, for `tilewise report --html`."""

from collections.abc import Iterable

from tilewise.bench import plots
from tilewise.bench.store import Row, latest
from tilewise.bench.tables.rows import describe, metric_of
from tilewise.demo import charts, html

SHOWN = ("time", "throughput", "memory", "error")


def render(rows: Iterable[Row]) -> str:
    """The page, self-contained. Raises ValueError when no row has a time."""
    rows = latest(rows)
    timed = [row for row in rows if row.median_s is not None]
    if not timed:
        raise ValueError("no row has a time; there is nothing to draw")
    machines = sorted({row.device for row in timed})
    body = ["<h1>Attention, measured</h1>", html.paragraph(f"{len(timed)} measurements on {', '.join(machines)}.")]
    for kind, group in _kinds(timed).items():
        body += [html.heading(kind), html.figures(_charts(group))]
    body += [html.heading("All rows"), _table(rows), html.heading("Machine and versions"), *_environments(timed)]
    return html.page("tilewise: benchmark", body)


def _kinds(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by what they have in common other than their lengths."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        words = describe(row.case).split(" ")
        kinds.setdefault(" ".join(words[2:]), []).append(row)
    return kinds


def _charts(rows: list[Row]) -> list[str]:
    made = []
    for name in SHOWN:
        metric = metric_of(name, rows)
        if any(metric.read(row) is not None for row in rows):
            title = f"{metric.title}, {metric.unit}"
            made.append(html.figure(title, charts.embed(plots.svg(rows, name), title), plate=True))
    return made


def _table(rows: list[Row]) -> str:
    metrics = [metric_of(name, rows) for name in SHOWN]
    header = ("device", "case", "implementation", *(f"{metric.title} ({metric.unit})" for metric in metrics), "note")
    cells = ((row.device, describe(row.case), row.impl, *(metric.text(row) for metric in metrics), row.reason or "") for row in rows)
    return html.table(header, cells)


def _environments(rows: list[Row]) -> list[str]:
    seen = dict.fromkeys(tuple((name, str(value)) for name, value in row.environment.items() if name != "date") for row in rows)
    return [html.table(("", ""), environment) for environment in seen]
