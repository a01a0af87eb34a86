"""The traces of docs/worklog/traces, read back from their pictures (`ladder/tracing_picture.py` draws them)."""

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
PRODUCTS = ("issues both products", "S = Q Kᵀ", "O += P V")


class Span(NamedTuple):
    phase: str
    start: float  # us
    end: float


class Panel(NamedTuple):
    name: str  # "the beginning", "steady state"
    lanes: dict[str, list[Span]]  # by warp: "warp 4, consumer 0"


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d", ""))]


def fill(path: ElementTree.Element) -> str | None:
    found = re.search(r"fill: (#\w+)", path.get("style", ""))
    return found and found[1]


def texts(group: ElementTree.Element) -> list[tuple[str, float, float]]:
    return [("".join(text.itertext()), float(text.get("x", 0)), float(text.get("y", 0))) for text in group.iter(f"{SVG}text")]


def read(picture: Path) -> tuple[str, list[Panel]]:
    """The title, and the panels."""
    groups = {group.get("id"): group for group in ElementTree.parse(picture).getroot().iter() if group.get("id")}
    (title, *_), *words = texts(groups["legend_1"])
    phases = {}
    for path in groups["legend_1"].iter(f"{SVG}path"):
        if len(at := corners(path)) == 4:  # a patch; its word stands to the right
            right, bottom = at[1]
            phases |= {fill(path): word for word, x, y in words if abs(bottom - y) < 1 and right < x < right + 20}
    return title, [panel(axes, phases) for name, axes in groups.items() if name.startswith("axes_")]


def panel(axes: ElementTree.Element, phases: dict[str | None, str]) -> Panel:
    groups = {group.get("id"): group for group in axes.iter() if group.get("id")}
    along = next(group for name, group in groups.items() if re.match(r"matplotlib.axis_\d*[13579]$", name))
    across = next(group for name, group in groups.items() if re.match(r"matplotlib.axis_\d*[02468]$", name))
    ticks = [(float(word), x) for word, x, _ in texts(along) if re.fullmatch(r"[\d.]+", word.strip())]
    (first, left), (last, right) = ticks[0], ticks[-1]
    heights = texts(across)
    lanes: dict[str, list[Span]] = {name: [] for name, *_ in heights}
    for name, group in groups.items():
        for path in group.iter(f"{SVG}path") if "PolyCollection" in name else ():
            if (phase := phases.get(fill(path))) and (at := corners(path)):
                xs, ys = zip(*at, strict=True)
                lane = next(lane for lane, _, y in heights if min(ys) <= y <= max(ys))
                start, end = (first + (x - left) * (last - first) / (right - left) for x in (min(xs), max(xs)))
                lanes[lane].append(Span(phase, start, end))
    return Panel(texts(axes)[-1][0], lanes)


def softmax_under(picture: Path) -> dict[int, dict[str, int]]:
    """By consumer, in the steady state: how many % of its softmax lie under the other consumer's softmax, and under its products."""
    (steady,) = [each for each in read(picture)[1] if each.name == "steady state"]
    lanes = {int(name[-1]): spans for name, spans in steady.lanes.items() if "consumer" in name}
    found = {}
    for consumer, other in ((0, 1), (1, 0)):
        mine = [span for span in lanes[consumer] if span.phase == "softmax"]
        under = {
            name: sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in mine for b in lanes[other] if b.phase in phases)
            for name, phases in (("softmax", ("softmax",)), ("products", PRODUCTS))
        }
        found[consumer] = {name: round(100 * us / sum(span.end - span.start for span in mine)) for name, us in under.items()}
    return found


def spent(picture: Path) -> dict[str, dict[str, int]]:
    """By lane, in the steady state: how many % of its time each phase takes."""
    (steady,) = [each for each in read(picture)[1] if each.name == "steady state"]
    found: dict[str, dict[str, int]] = {}
    for lane, spans in steady.lanes.items():
        whole = sum(span.end - span.start for span in spans)
        by_phase = {phase: sum(span.end - span.start for span in spans if span.phase == phase) for phase in {span.phase for span in spans}}
        found[lane] = {phase: round(100 * us / whole) for phase, us in by_phase.items()}
    return found


def cost_of_stamps(picture: Path) -> float:
    """% of the time."""
    return float(re.search(r"stamps cost (-?[\d.]+) %", read(picture)[0])[1])
