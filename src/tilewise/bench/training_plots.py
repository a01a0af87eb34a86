"""Trainings as a chart (SVG): bars of TFLOP/s, a panel a model, a group of bars a length; who ran out of memory has none, and a word in its place."""

import io
from collections.abc import Iterable
from pathlib import Path

from tilewise.bench.impls import ours
from tilewise.bench.plots import COLOURS, folder_of, small
from tilewise.bench.store import Row
from tilewise.bench.training import NAME, OUT_OF_MEMORY
from tilewise.bench.training_tables import NAMES, trainings
from tilewise.display.style import STYLE


def training_svg(rows: Iterable[Row]) -> str:
    """The chart of one device's rows, as SVG text; ValueError where none has a time."""
    cells = {key: cell for key, cell in trainings(rows).items() if any(row.flops_per_s for row in cell)}
    if not cells:
        raise ValueError("no row of a training has a time to draw")
    models = list(dict.fromkeys(model for model, _ in cells))
    impls = dict.fromkeys(row.impl for cell in cells.values() for row in cell)
    impls = sorted(impls, key=lambda impl: not ours(impl))  # ours first, so in the same colour everywhere

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.8 * len(models), 3.2), layout="constrained")
        panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
        for axes, model in zip(panels, models, strict=True):
            _draw(axes, {length: cell for (name, length), cell in cells.items() if name == model}, impls)
            axes.set_title(f"GPT {model}", fontsize=10, loc="left")
            axes.set_xlabel("tokens of a sequence")
        panels[0].set_ylabel("TFLOP/s of a training step")
        handles, texts = panels[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper center", ncols=min(5, len(impls)))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return small(file.getvalue())


def _draw(axes, cells: dict[int, list[Row]], impls: list[str]) -> None:
    width = 0.84 / len(impls)
    for place, impl in enumerate(impls):
        x = [group + (place - (len(impls) - 1) / 2) * width for group in range(len(cells))]
        rows = [next((row for row in cell if row.impl == impl), None) for cell in cells.values()]
        heights = [0.0 if row is None or row.flops_per_s is None else row.flops_per_s * 1e-12 for row in rows]
        axes.bar(x, heights, width, label=NAMES.get(impl, impl), color=COLOURS[place % len(COLOURS)])
        for at, row in zip(x, rows, strict=True):
            if row is not None and row.reason and row.median_s is None and (OUT_OF_MEMORY in row.reason or "score matrices" in row.reason):
                axes.annotate(OUT_OF_MEMORY, (at, 0), (0, 4), textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(cells)), [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in cells])
    axes.grid(axis="x", visible=False)


def save_trainings(rows: Iterable[Row], folder: str | Path) -> list[Path]:
    """Write `training-DEVICE.svg` of every device that trained into `folder`; the files written."""
    mine = [row for row in rows if row.name == NAME and row.median_s is not None]
    written = []
    for device in dict.fromkeys(row.device for row in mine):
        path = Path(folder) / f"training-{folder_of(device)}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(training_svg([row for row in rows if row.device == device]), encoding="utf-8")
        written.append(path)
    return written
