"""Rows as charts (SVG): time, throughput, memory and error over sequence length, a line for each implementation."""

import io
import math
import re
from collections.abc import Iterable
from pathlib import Path

from tilewise.bench.report import Metric, describe, metric_of
from tilewise.bench.store import Row, latest
from tilewise.display.style import STYLE

# Okabe and Ito's palette, told apart by every kind of colour vision; markers tell the lines apart without any.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOGARITHMIC = ("time", "memory", "error")
MOST_LABELS = 7  # along an axis of lengths; more would touch each other
STEPS = (1, 2, 5)  # of a logarithmic axis that shows few decades


def svg(rows: Iterable[Row], metric: str = "time") -> str:
    """A chart of one metric (see report.METRICS) over sequence length, one panel for each kind of case and device, as SVG text.

    Times show the 10th to 90th percentile as a band. Raises ValueError for an unknown metric and when no row has the metric.
    """
    rows = latest(rows)
    measure = metric_of(metric, rows)
    rows = [row for row in rows if row.median_s is not None and measure.read(row) is not None]
    if not rows:
        raise ValueError(f"no row has a {measure.title} to draw")
    panels: dict[str, list[Row]] = {}
    several = len({row.device for row in rows}) > 1
    for row in rows:
        panels.setdefault(_panel(row) + (f", {row.device}" if several else ""), []).append(row)
    return _chart(panels, metric, measure, columns=min(2, len(panels)), width=5.4, height=3.6)


OVERVIEW = "papers-h100.svg"


def overview(rows: Iterable[Row], device: str = "h100") -> str | None:
    """README's picture: throughput of the papers' causal sweep on `device`, a row of panels a direction, a column a head_dim; None without rows."""
    papers = [row for row in rows if row.name == "papers"]  # other sets have some of their cells
    chosen = [row for row in latest(papers) if row.clock == "events" and device in row.device.lower()]
    chosen = [row for row in chosen if row.case["mask"] == "Causal()" and row.case["direction"] in WAYS and row.median_s is not None]
    panels: dict[str, list[Row]] = {}
    for row in sorted(chosen, key=lambda row: (list(WAYS).index(row.case["direction"]), row.case["head_dim"])):
        panels.setdefault(f"{WAYS[row.case['direction']]}, head_dim {row.case['head_dim']}", []).append(row)
    if not panels:
        return None
    columns = len({row.case["head_dim"] for row in chosen})
    return _chart(panels, "throughput", metric_of("throughput", chosen), columns=columns, width=3.2, height=2.5, label="TFLOP/s")


WAYS = {"fwd": "forward", "bwd": "backward"}


def _chart(panels: dict[str, list[Row]], metric: str, measure: Metric, columns: int, width: float, height: float, label: str = "") -> str:
    """Panels in `columns`, each of `width` by `height` inches, with one legend and one y axis a line, as SVG text; `label` is of the y axes."""
    impls = dict.fromkeys(row.impl for rows in panels.values() for row in rows)
    impls = sorted(impls, key=lambda impl: impl.partition(":")[0] != "tilewise")  # ours first, so in the same colour everywhere

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        lines = -(-len(panels) // columns)
        figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False, sharey="row").ravel()
        for axes, (title, panel) in zip(grid, panels.items(), strict=False):
            _draw(axes, panel, impls, metric, measure)
            axes.set_title(title, fontsize=10, loc="left")
        for place, axes in enumerate(grid[: len(panels)]):
            if place % columns == 0:
                axes.set_ylabel(label or f"{measure.title} ({measure.unit})")
            if place + columns >= len(panels):
                axes.set_xlabel("sequence length (keys)")
        for axes in grid[: len(panels) : columns]:  # one of each line, whose panels share the scale
            if metric in LOGARITHMIC:
                _logarithmic(axes)
            else:
                axes.set_ylim(bottom=0)  # after the last panel is drawn, as it fixes the other end, too
        for axes in grid[len(panels) :]:
            axes.remove()
        handles = {text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(5, len(impls)))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return small(file.getvalue())


def small(text: str) -> str:
    """SVG with coordinates to a hundredth of a point, the viewer's own font and no indentation: a third smaller, and the same to the eye."""
    number = re.compile(r"-?\d+\.\d{3,}")
    tag = re.compile(r"<[a-z][^>]*>")  # not the labels, which are text between tags
    text = tag.sub(lambda tag: number.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), tag[0]), text)
    return re.sub(r"\n\s+", "\n", re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", text))


def save_overview(rows: Iterable[Row], folder: str | Path) -> list[Path]:
    """Write `overview` into `folder`, where there are rows for it; the file written."""
    text = overview(rows)
    if text is None:
        return []
    path = Path(folder) / OVERVIEW
    path.write_text(text, encoding="utf-8")
    return [path]


def save(rows: Iterable[Row], folder: str | Path, metrics: Iterable[str] = ("time", "throughput", "memory", "error")) -> list[Path]:
    """Write one `METRIC.svg` a metric that the rows have; the files written."""
    rows, folder = list(rows), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for metric in metrics:
        if any(row.median_s is not None and metric_of(metric, rows).read(row) is not None for row in rows):
            path = folder / f"{metric}.svg"
            path.write_text(svg(rows, metric), encoding="utf-8")
            written.append(path)
    return written


def folder_of(device: str) -> str:
    """Its name for a path: nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _panel(row: Row) -> str:
    """The case without what varies along the axis: its lengths, and the batch that keeps the number of tokens."""
    words = describe(row.case).split(" ")
    clock = "" if row.clock == "wall" else f" ({row.clock})"
    return " ".join(words[2:]) + clock


def _draw(axes, rows: list[Row], impls: list[str], metric: str, measure: Metric) -> None:
    for place, impl in enumerate(impls):
        points = sorted((row for row in rows if row.impl == impl), key=lambda row: row.case["seqlen_k"])
        if not points:
            continue
        x = [row.case["seqlen_k"] for row in points]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        axes.plot(x, [measure.read(row) for row in points], label=impl, color=colour, marker=marker, markersize=5, linewidth=1.8)
        if metric == "time":
            low, high = ([getattr(row, end) * 1e3 for row in points] for end in ("p10_s", "p90_s"))
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    lengths = apart({row.case["seqlen_k"] for row in rows})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
    axes.minorticks_off()


def apart(lengths: Iterable[int]) -> list[int]:
    """Those of `lengths` that have room for a label on a logarithmic axis, in order, the longest among them."""
    ordered = sorted(set(lengths))
    room = math.log(ordered[-1] / ordered[0]) / MOST_LABELS
    kept = ordered[-1:]
    for length in reversed(ordered[:-1]):
        if math.log(kept[-1] / length) >= room:
            kept.append(length)
    return kept[::-1]


def _logarithmic(axes) -> None:
    """A logarithmic y axis from one labelled tick to another, labels in plain numbers, and none between the ticks."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = STEPS if high / low < 1e3 else (1,)
    axes.set_ylim(_tick_below(low, steps), 1 / _tick_below(1 / high, steps))
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.minorticks_off()  # after the scale, which brings labelled ones where it shows less than a decade


def _tick_below(value: float, steps: tuple[int, ...]) -> float:
    """The largest step of a decade that is at most `value`. The steps 1, 2 and 5 are their own reciprocals, a power of ten apart."""
    decade = 10.0 ** math.floor(math.log10(value))
    return decade * max(step for step in steps if step * decade <= value or step == 1)
