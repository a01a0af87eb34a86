"""The report's charts: matplotlib draws them, and their colours become CSS variables, so that one SVG serves a light and a dark page."""

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilewise.bench.plots import apart
from tilewise.demo.sweep import Sweep
from tilewise.demo.train import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that nothing else uses: each stands for a CSS variable of the page, which takes its place in the finished SVG.
INK, FAINT = "#0a0b0c", "#0a0b0d"
SERIES = {"tilewise": "#0a0b01", "SDPA": "#0a0b02", "naive": "#0a0b03"}
OTHER_SERIES = "#0a0b04"
VARIABLES = {INK: "--ink", FAINT: "--grid", **{colour: f"--{name.lower()}" for name, colour in SERIES.items()}, OTHER_SERIES: "--other"}
SIZE = (4.8, 3.3)  # inches; one chart fills a phone's width, two stand side by side on a desk
COLOURS = {
    "tilewise": "#0f7fc4",
    "SDPA": "#d9600e",
    "naive": "#77808a",
}  # of a picture, where there is no page to ask; html.STYLE's on a light one
LINE = {"tilewise": {"linewidth": 4.5, "alpha": 0.55}, "SDPA": {"linewidth": 1.3}, "naive": {"linewidth": 1.3, "linestyle": "--"}}
BELOW_ONE_ULP = 1e-8  # where a difference of exactly zero is drawn on a logarithmic axis


LONGEST_STEP = 2.5  # times the median; what else a machine does would flatten the chart
STEP_TIME_CAPTION = f"The contenders take turns, and who goes first alternates. The axis ends at {LONGEST_STEP:g} times the median."


def colour_of(name: str) -> str:
    return SERIES.get(name, OTHER_SERIES)


def inline_svg(draw: Callable[["Axes"], None], label: str) -> str:
    """The chart that `draw` paints, as an <svg> element to put into a page: no size of its own, text as text, colours as variables."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": label, "font.size": 10, "axes.unicode_minus": False, "path.simplify": False}
    style |= {f"axes.spines.{side}": False for side in ("top", "right")}
    style |= {key: INK for key in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")}
    with matplotlib.rc_context(matplotlib.RcParams(style)):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.locator_params(axis="x", integer=True)
        draw(axes)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return themed(embed(buffer.getvalue(), label))


def embed(svg: str, label: str) -> str:
    """An SVG document as an element: no prologue, no metadata, no fixed size, and `label` for those who do not see it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{body}'.strip()


def themed(svg: str) -> str:
    """`svg` with every colour of VARIABLES replaced by the page's variable."""
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def loss_chart(training: Training) -> str:
    def draw(axes: "Axes") -> None:
        for curve in training.curves:
            axes.plot(range(1, training.steps + 1), curve.losses, label=curve.name, color=colour_of(curve.name), **LINE.get(curve.name, {}))
        axes.set(xlabel="step", ylabel="loss (nats a byte)")

    return inline_svg(draw, "Training loss at each step, one line for each attention function")


def difference_chart(training: Training) -> str:
    allowed = training.place.same_loss

    def draw(axes: "Axes") -> None:
        shown = [max(difference, BELOW_ONE_ULP) for difference in training.differences]
        axes.plot(range(1, training.steps + 1), shown, color=SERIES["tilewise"], marker=".", markersize=4, linewidth=0.8)
        axes.axhline(allowed, color=INK, linestyle="--", linewidth=1)
        axes.annotate(
            f"allowed: {allowed:g}",
            (1, allowed),
            xycoords=("axes fraction", "data"),
            xytext=(0, -11),
            textcoords="offset points",
            ha="right",
        )
        axes.set(xlabel="step", ylabel="relative difference of the losses", yscale="log", ylim=(BELOW_ONE_ULP / 2, 10 * allowed))

    return inline_svg(draw, "Relative difference of the two losses at each step, logarithmic, with the allowed difference")


def step_time_chart(training: Training) -> str:
    def draw(axes: "Axes") -> None:
        first = min(1, training.steps - 1)  # the first step also warms up
        for curve in training.curves:
            ms = [1e3 * seconds for seconds in curve.seconds[first:]]
            axes.plot(
                range(first + 1, training.steps + 1), ms, label=f"{curve.name} (median {curve.median_ms:,.0f})", color=colour_of(curve.name)
            )
        axes.set(xlabel="step", ylabel="time a step (ms)")
        axes.set_ylim(0, LONGEST_STEP * max(curve.median_ms for curve in training.curves))

    return inline_svg(draw, "Time of each training step in milliseconds, one line for each attention function")


def step_memory_chart(training: Training) -> str:
    """Peak memory of a step; empty where it could not be measured."""
    known = {curve.name: curve.peak_bytes / 1e6 for curve in training.curves if curve.peak_bytes is not None}
    if not known:
        return ""

    def draw(axes: "Axes") -> None:
        bars = axes.barh(list(known), list(known.values()), height=0.5, color=[colour_of(name) for name in known])
        axes.bar_label(bars, fmt="{:,.0f} MB", padding=4, color=INK)
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.set(xlabel="peak memory of a step (MB)")

    return inline_svg(draw, "Peak memory of a training step in MB, one bar for each attention function")


def sweep_chart(sweep: Sweep, values: Callable[[str], Sequence[float | None]], ylabel: str, label: str) -> str:
    """One line for each contender over the sequence length, both axes logarithmic. `values(name)`: a value a point, None where unknown."""

    def draw(axes: "Axes") -> None:
        for name in sweep.names:
            known = [(point.seqlen, value) for point, value in zip(sweep.of(name), values(name), strict=True) if value]
            if known:
                x, y = zip(*known, strict=True)
                axes.plot(x, y, label=name, color=colour_of(name), marker="o", markersize=4, **LINE.get(name, {}))
        seqlens = apart({point.seqlen for point in sweep.points})
        axes.set(xlabel="sequence length (tokens)", ylabel=ylabel, xscale="log", yscale="log")
        axes.set_xticks(seqlens, [f"{seqlen:,}" for seqlen in seqlens])
        axes.set_ylim(*whole_decades(axes.get_ylim()))
        axes.minorticks_off()

    return inline_svg(draw, label)


def whole_decades(limits: tuple[float, float]) -> tuple[float, float]:
    """The powers of ten around `limits`, so that a logarithmic axis always shows two."""
    low, high = (math.log10(limit) for limit in limits)
    return 10.0 ** math.floor(low), 10.0 ** math.ceil(high)
