"""Rows as charts (SVG): time, throughput, memory and error over sequence length, a line for each implementation; decoding; trainings."""

import io
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tilewise.bench.compare import Cell
from tilewise.bench.peers import ours
from tilewise.bench.sets import DECODE, tokens
from tilewise.bench.store import Row, latest
from tilewise.bench.tables import NAMES, Metric, cells_of_decode, describe, metric_of, trainings
from tilewise.bench.training import NAME as TRAINING
from tilewise.bench.training import OUT_OF_MEMORY
from tilewise.display.style import STYLE

# Okabe and Ito's palette, told apart by every kind of colour vision; markers tell the lines apart without any.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOGARITHMIC = ("time", "memory", "error")
MOST_LABELS = 7  # along an axis of lengths; more would touch each other
PEER = "fastest peer"
STEPS = (1, 2, 5)  # of a logarithmic axis that shows few decades


def svg(rows: Iterable[Row], metric: str = "time") -> str:
    """A chart of one metric (see tables.METRICS) over sequence length, one panel for each kind of case and device, as SVG text.

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
    for row in sorted(chosen, key=lambda row: (list(WAYS).index(str(row.case["direction"])), row.case["head_dim"])):
        panels.setdefault(f"{WAYS[str(row.case['direction'])]}, head_dim {row.case['head_dim']}", []).append(row)
    if not panels:
        return None
    columns = len({row.case["head_dim"] for row in chosen})
    return _chart(panels, "throughput", metric_of("throughput", chosen), columns=columns, width=3.2, height=2.5, label="TFLOP/s")


WAYS = {"fwd": "forward", "bwd": "backward"}


def _chart(panels: dict[str, list[Row]], metric: str, measure: Metric, columns: int, width: float, height: float, label: str = "") -> str:
    """Panels in `columns`, each of `width` by `height` inches, with one legend and one y axis a line, as SVG text; `label` is of the y axes."""
    impls = dict.fromkeys(row.impl for rows in panels.values() for row in rows)
    impls = sorted(impls, key=lambda impl: impl.partition(":")[0] != "tilewise")  # ours first, so in the same colour everywhere
    lines = -(-len(panels) // columns)

    def draw(figure) -> None:
        grid = figure.subplots(lines, columns, squeeze=False, sharey="row").ravel()
        for axes, (title, panel) in zip(grid, panels.items(), strict=False):
            _draw(axes, panel, impls, metric, measure)
            axes.set_title(title, fontsize=10, loc="left")
        for place, axes in enumerate(grid[: len(panels)]):
            if place % columns == 0:
                axes.set_ylabel(label or f"{measure.title} ({measure.unit})")
            if place + columns >= len(panels):
                axes.set_xlabel("sequence length (keys)")
        for axes in grid[: len(panels) : columns]:  # one of each line; panels of a line share the scale
            if metric in LOGARITHMIC:
                _logarithmic(axes)
            else:
                axes.set_ylim(bottom=0)  # after the last panel is drawn, as it fixes the other end, too
        for axes in grid[len(panels) :]:
            axes.remove()
        handles = legend_of(figure)
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(5, len(impls)))

    return as_svg(draw, width * columns, height * lines)


def legend_of(figure) -> dict:
    """What a legend shows by its text, of all panels."""
    return {text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}


def as_svg(draw: Callable, width: float, height: float) -> str:
    """`draw(figure)` on a figure of `width` by `height` inches, as SVG text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(matplotlib.RcParams(STYLE)):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
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
    lengths = apart({int(row.case["seqlen_k"]) for row in rows})
    axes.set_xticks(lengths, [tokens(n) for n in lengths])
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


def _even(rows: Iterable[Row]) -> list[Cell]:
    """Batches of equal lengths with one new token that ours has a time of."""
    return [cell for cell in cells_of_decode(rows) if cell.case["kind"] == "even" and cell.case["seqlen_q"] == 1 and cell.mine]


def decode_svg(rows: Iterable[Row]) -> str:
    """The chart of one device's even batches with one new token, as SVG text; ValueError where none has a time."""
    cells = _even(rows)
    if not cells:
        raise ValueError("no row of decoding has a time to draw")
    panels: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (-int(cell.case["heads_q"]), -int(cell.case["heads_k"]), cell.case["page"])):
        layout = f"pages of {cell.case['page']}" if cell.case["page"] else "contiguous"
        panels.setdefault(f"heads {cell.case['heads_q']}:{cell.case['heads_k']}, {layout}", []).append(cell)
    batches = sorted({int(cell.case["batch"]) for cell in cells})
    most = max(row.bytes / row.seconds * 1e-12 for cell in cells for row in (cell.mine, cell.best) if row is not None)
    columns = len({cell.case["page"] for cell in cells})
    lines = -(-len(panels) // columns)

    def draw(figure) -> None:
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for place, (axes, (title, panel)) in enumerate(zip(grid, panels.items(), strict=False)):
            for colour, batch in enumerate(batches):
                _draw_batch(axes, [cell for cell in panel if cell.case["batch"] == batch], colour)
            axes.set_title(title, fontsize=10, loc="left")
            if place % columns == 0:
                axes.set_ylabel("TB/s of K and V")
            if place + columns >= len(panels):
                axes.set_xlabel("tokens of a sequence")
        lengths = sorted({int(cell.case["seqlen_k"]) for cell in cells})
        grid[0].set_xscale("log", base=2)
        grid[0].set_xticks(lengths, [tokens(length) for length in lengths])
        grid[0].minorticks_off()
        grid[0].set_ylim(0, most * 1.08)
        for axes in grid[len(panels) :]:
            axes.remove()
        handles = legend_of(figure)
        texts = sorted(handles, key=lambda text: text == PEER)
        figure.legend([handles[text] for text in texts], texts, loc="outside upper center", ncols=6)

    return as_svg(draw, 3.4 * columns, 2.8 * lines)


def _draw_batch(axes, cells: list[Cell], colour: int) -> None:
    """The lines of one batch: ours, and the fastest peer's."""
    cells = sorted(cells, key=lambda cell: cell.case["seqlen_k"])
    if not cells:
        return
    batch = cells[0].case["batch"]
    for dashed, label in ((False, f"{batch} sequence{'s' if batch != 1 else ''}"), (True, PEER)):
        found = [(cell.case["seqlen_k"], row.bytes / row.seconds * 1e-12) for cell in cells if (row := cell.best if dashed else cell.mine)]
        if found:
            style = (
                {"linestyle": "--", "linewidth": 1.0}
                if dashed
                else {"marker": MARKERS[colour % len(MARKERS)], "markersize": 4, "linewidth": 1.8}
            )
            axes.plot(*zip(*found, strict=True), color=COLOURS[colour % len(COLOURS)], label=label, **style)


def training_svg(rows: Iterable[Row]) -> str:
    """The chart of one device's rows, as SVG text; ValueError where none has a time."""
    cells = {key: cell for key, cell in trainings(rows).items() if any(row.flops_per_s for row in cell)}
    if not cells:
        raise ValueError("no row of a training has a time to draw")
    models = list(dict.fromkeys(model for model, _ in cells))
    impls = dict.fromkeys(row.impl for cell in cells.values() for row in cell)
    impls = sorted(impls, key=lambda impl: not ours(impl))  # ours first, so in the same colour everywhere

    def draw(figure) -> None:
        panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
        for axes, model in zip(panels, models, strict=True):
            _draw_bars(axes, {length: cell for (name, length), cell in cells.items() if name == model}, impls)
            axes.set_title(f"GPT {model}", fontsize=10, loc="left")
            axes.set_xlabel("tokens of a sequence")
        panels[0].set_ylabel("TFLOP/s of a training step")
        handles, texts = panels[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper center", ncols=min(5, len(impls)))

    return as_svg(draw, 4.8 * len(models), 3.2)


def _draw_bars(axes, cells: dict[int, list[Row]], impls: list[str]) -> None:
    width = 0.84 / len(impls)
    for place, impl in enumerate(impls):
        x = [group + (place - (len(impls) - 1) / 2) * width for group in range(len(cells))]
        rows = [next((row for row in cell if row.impl == impl), None) for cell in cells.values()]
        heights = [0.0 if row is None or row.flops_per_s is None else row.flops_per_s * 1e-12 for row in rows]
        axes.bar(x, heights, width, label=NAMES.get(impl, impl), color=COLOURS[place % len(COLOURS)])
        for at, row in zip(x, rows, strict=True):
            if row is not None and row.reason and row.median_s is None and (OUT_OF_MEMORY in row.reason or "score matrices" in row.reason):
                axes.annotate(OUT_OF_MEMORY, (at, 0), (0, 4), textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(cells)), [tokens(length) for length in cells])
    axes.grid(axis="x", visible=False)


def save_decoding(rows: Iterable[Row], folder: str | Path) -> list[Path]:
    """Write `decode-DEVICE.svg` of every device that decoded into `folder`; the files written."""
    return _by_device(rows, DECODE, lambda mine: decode_svg(mine) if _even(mine) else None, folder)


def save_trainings(rows: Iterable[Row], folder: str | Path) -> list[Path]:
    """Write `training-DEVICE.svg` of every device that trained into `folder`; the files written."""
    return _by_device(rows, TRAINING, training_svg, folder)


def _by_device(rows: Iterable[Row], name: str, chart: Callable[[list[Row]], str | None], folder: str | Path) -> list[Path]:
    """Write `chart` of the rows of each device with times of `name`, where there is one; the files written."""
    rows, written = [row for row in rows if row.name == name], []
    for device in dict.fromkeys(row.device for row in rows if row.median_s is not None):
        text = chart([row for row in rows if row.device == device])
        if text is not None:
            path = Path(folder) / f"{name}-{folder_of(device)}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written
