"""A trace as a picture: a lane a warp, a colour a phase; how a block begins, and a few tiles of its steady state."""

from itertools import pairwise
from pathlib import Path
from statistics import median

from tilewise.display.style import STYLE
from tilewise.ladder.tracing import Span, Trace
from tilewise.sm90.phases import Phase

BEGINNING_US = 15  # at least, and three tiles
TILES = 3  # of the steady state
# Okabe and Ito's palette for what computes and loads; greys for what waits.
COLOURS = {
    Phase.START: "#f2f2f2",
    Phase.EMPTY: "#dddddd",
    Phase.LOAD: "#E69F00",
    Phase.WAIT: "#bbbbbb",
    Phase.TURN: "#888888",
    Phase.ISSUE: "#56B4E9",
    Phase.SCORES: "#0072B2",
    Phase.SOFTMAX: "#D55E00",
    Phase.OUTPUT: "#009E73",
    Phase.ADD: "#F0E442",
    Phase.STORE: "#CC79A7",
}


def draw(trace: Trace, path: Path) -> Path:
    """Write the picture as the path's ending says, .svg or .png; the path. ValueError for a trace in which nothing computes."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    windows = {"the beginning": beginning(trace), "steady state": steady(trace)}
    shown = {title: _lanes(trace, window) for title, window in windows.items()}
    heights = [len(lanes) for lanes in shown.values()]
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(11, 1.8 + 0.24 * sum(heights)), layout="constrained")
        for axes, (title, window) in zip(figure.subplots(2, 1, height_ratios=heights), windows.items(), strict=True):
            _panel(axes, trace, shown[title], window)
            axes.set_title(title, fontsize=10, loc="left")
        seen = {span.phase for lanes in shown.values() for spans in lanes.values() for span in spans}
        handles = [Patch(facecolor=COLOURS[phase], label=trace.words[phase]) for phase in COLOURS if phase in seen]
        case = trace.case
        mask = "causal" if case.causal else "full"
        what = f"{case.rung}, {case.device}: {case.heads} heads, {case.seqlen} tokens, head_dim {case.head_dim}, {mask}"
        title = f"{what}; {trace.ghz:.2f} GHz; stamps cost {100 * case.cost:.1f} % of the time"
        figure.legend(handles=handles, loc="outside upper center", ncols=5, title=title)
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)
    return path


def beginning(trace: Trace) -> tuple[int, int]:
    """In clocks: from the first stamp on."""
    return 0, round(max(BEGINNING_US * trace.ghz * 1e3, TILES * period(trace)))


def steady(trace: Trace) -> tuple[int, int]:
    """In clocks: some tiles from the middle of the first block."""
    ends = [span.end for span in trace.spans if span.block == 0 and span.phase != Phase.START]
    middle = max(ends) // 2
    return middle, middle + round(TILES * period(trace))


def period(trace: Trace) -> float:
    """Clocks from one tile to the next, the median over a block's warps."""
    starts: dict[int, list[int]] = {}
    for span in trace.spans:
        if span.block == 0 and span.phase == Phase.SCORES:
            starts.setdefault(span.warp, []).append(span.start)
    steps = [after - before for each in starts.values() for before, after in pairwise(each)]
    if not starts:
        raise ValueError("no warp of this trace computes scores: there is nothing to draw")
    return median(steps) if steps else BEGINNING_US * trace.ghz * 1e3 / TILES


def _lanes(trace: Trace, window: tuple[int, int]) -> dict[tuple[int, int], list[Span]]:
    """(block, warp) -> spans within the window. Where roles are separate, one warp speaks for its warpgroup, as all four share its products."""
    lanes: dict[tuple[int, int], list[Span]] = {}
    for span in trace.spans:
        if span.start < window[1] and span.end > window[0] and not (trace.specialised and span.warp % 4):
            lanes.setdefault((span.block, span.warp), []).append(span)
    return lanes


def _panel(axes, trace: Trace, lanes: dict[tuple[int, int], list[Span]], window: tuple[int, int]) -> None:
    for place, spans in enumerate(lanes.values()):
        for phase in COLOURS:
            clipped = [(max(span.start, window[0]), min(span.end, window[1])) for span in spans if span.phase == phase]
            bars = [(trace.us(start), trace.us(end - start)) for start, end in clipped]
            axes.broken_barh(bars, (place - 0.42, 0.84), facecolors=COLOURS[phase], linewidth=0)
    several = len({block for block, _ in lanes}) > 1
    axes.set_yticks(
        range(len(lanes)), [trace.role(warp) + (f" ({trace.block_name(block)})" if several else "") for block, warp in lanes], fontsize=8
    )
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(*map(trace.us, window))
    axes.set_xlabel("us")
