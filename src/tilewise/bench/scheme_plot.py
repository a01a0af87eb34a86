"""The chart of the set context-parallel, from rows of tools/gpu/context_parallel.py: what a GPU computes a second, by scheme (SVG)."""

import json
from collections.abc import Iterable
from pathlib import Path

from tilewise.bench.plots import COLOURS, as_svg, folder_of, legend_of
from tilewise.bench.sets import tokens

SET = "context-parallel"
SCHEMES = "tilewise", "ulysses", "all-gather", "ring", "torch:cudnn", "torch:flash"  # of those measured, the ones that others have, too
ALONE = "one"  # the scheme of a GPU that has the whole sequence
HEADS = [64, 8]
WAYS = "forward", "backward"


def load(folder: str | Path) -> list[dict]:
    """Rows with a rate, of every file of `folder`."""
    lines = (line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines())
    rows = (json.loads(line) for line in lines)
    return [
        row
        for row in rows
        if row.get("set") == SET and row.get("direction") in WAYS and row.get("tflops_per_gpu") and row["heads"] == HEADS
    ]


def scheme_svg(rows: Iterable[dict]) -> str:
    """A panel a direction, a group of bars a mask and length that others were measured on, a bar a scheme, and a line at the rate of one GPU alone.

    Raises ValueError without rows.
    """
    rates: dict[str, dict[tuple[str, int], dict[str, float]]] = {}
    worlds = set()
    for row in sorted(rows, key=lambda row: row["seqlen"]):  # a mask's lengths side by side; later rows replace earlier ones
        group = rates.setdefault(row["direction"], {}).setdefault((row["mask"], row["seqlen"]), {})
        group[row["scheme"]] = row["tflops_per_gpu"]
        worlds.add(row["world"])
    if not rates:
        raise ValueError("no row of the set context-parallel has a rate to draw")
    panels = [way for way in WAYS if way in rates]

    def draw(figure) -> None:
        for axes, way in zip(figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0], panels, strict=True):
            masks = dict.fromkeys(mask for mask, _ in rates[way])
            groups = [(key, rates[way][key]) for mask in masks for key in rates[way] if key[0] == mask and len(rates[way][key]) > 2]
            _draw(axes, groups)
            axes.set_title(f"{way}, {max(worlds)} GPUs, heads {HEADS[0]}:{HEADS[1]} of 128", fontsize=10, loc="left")
            axes.set_ylabel("TFLOP/s a GPU")
        handles = legend_of(figure)
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)

    return as_svg(draw, 9.0, 2.9 * len(panels))


def _draw(axes, groups: list[tuple[tuple[str, int], dict[str, float]]]) -> None:
    width = 0.84 / len(SCHEMES)
    for place, scheme in enumerate(SCHEMES):
        found = [(at, group[scheme]) for at, (_, group) in enumerate(groups) if scheme in group]
        x = [at + (place - (len(SCHEMES) - 1) / 2) * width for at, _ in found]
        axes.bar(x, [rate for _, rate in found], width, label=scheme, color=COLOURS[place % len(COLOURS)])
    alone = [(at, group[ALONE]) for at, (_, group) in enumerate(groups) if ALONE in group]
    axes.hlines(
        [rate for _, rate in alone], [at - 0.45 for at, _ in alone], [at + 0.45 for at, _ in alone], colors="black", label="one GPU alone"
    )
    axes.set_xticks(range(len(groups)), [f"{mask}\n{tokens(seqlen)}" for (mask, seqlen), _ in groups])
    axes.grid(axis="x", visible=False)


def save_schemes(results: str | Path, folder: str | Path) -> list[Path]:
    """Write `context-parallel-DEVICE.svg` of every kind of GPU with rows in `results` into `folder`; the files written."""
    rows, written = load(results), []
    for device in dict.fromkeys(row["environment"]["device"] for row in rows):
        path = Path(folder) / f"{SET}-{folder_of(device)}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(scheme_svg(row for row in rows if row["environment"]["device"] == device), encoding="utf-8")
        written.append(path)
    return written
