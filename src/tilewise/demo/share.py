"""The picture that goes with the report: one glance at a run, to send to somebody. Its numbers are the page's."""

import io
from textwrap import fill, shorten
from typing import TYPE_CHECKING

from tilewise.bench.plots import apart
from tilewise.demo.charts import COLOURS
from tilewise.demo.numbers import Headline, byline, headlines, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tilewise.demo.page import Report

SIZE, DPI = (12.0, 6.3), 100  # 1,200 x 630 pixels, what programs show of a link
INK, SOFT, GRID = "#1d2126", "#5d6670", "#dde1e5"
SHOWN = 3  # headlines


def draw(report: "Report") -> bytes:
    """A PNG: the first headlines, attention's time by length or else the loss, the verdict, and where it was measured."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 12,
        "axes.unicode_minus": False,
    }
    with matplotlib.rc_context(matplotlib.RcParams(style)):
        figure = Figure(figsize=SIZE, dpi=DPI, facecolor="white")
        figure.text(0.04, 0.9, "Exact attention without the score matrix", fontsize=24, weight="bold", color=INK)
        for place, each in enumerate(headlines(report)[:SHOWN]):
            _headline(figure, 0.73 - 0.19 * place, each)
        axes = figure.add_axes((0.6, 0.28, 0.36, 0.52))
        _times(axes, report) if report.sweep.points else _losses(axes, report)
        axes.grid(color=GRID, linewidth=0.6)
        axes.legend(frameon=False, fontsize=11)
        figure.text(0.04, 0.105, fill(verdict(report.training), 118), fontsize=12, color=INK)
        figure.text(0.04, 0.04, shorten(byline(report), 130, placeholder=" ..."), fontsize=11, color=SOFT)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _headline(figure, y: float, each: Headline) -> None:
    figure.text(0.04, y, each.number, fontsize=26, weight="bold", color=COLOURS["tilewise"])
    figure.text(0.04, y - 0.02, fill(each.text, 58), fontsize=12, color=SOFT, verticalalignment="top")


def _times(axes: "Axes", report: "Report") -> None:
    for name in report.sweep.names:
        points = report.sweep.of(name)
        axes.plot([p.seqlen for p in points], [p.both_ms for p in points], label=name, color=COLOURS[name], marker="o", linewidth=2)
    seqlens = apart({point.seqlen for point in report.sweep.points})
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms")
    axes.set_xticks(seqlens, [f"{seqlen:,}" for seqlen in seqlens])
    axes.minorticks_off()


def _losses(axes: "Axes", report: "Report") -> None:
    for curve in report.training.curves:
        axes.plot(range(1, report.training.steps + 1), curve.losses, label=curve.name, color=COLOURS[curve.name], linewidth=2)
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
