"""Decoding as a chart (SVG): TB/s of K and V over the length of the sequences, a colour a batch; the fastest peer is dashed."""

import io
from collections.abc import Iterable
from pathlib import Path

from tilewise.bench.decode_cells import NAME, short
from tilewise.bench.decode_tables import Measured, measured
from tilewise.bench.plots import COLOURS, MARKERS, folder_of, small
from tilewise.bench.store import Row
from tilewise.display.style import STYLE

PEER = "fastest peer"


def decode_svg(rows: Iterable[Row]) -> str:
    """The chart of one device's even batches with one new token, as SVG text; ValueError where none has a time."""
    cells = [cell for cell in measured(rows) if cell.case["kind"] == "even" and cell.case["seqlen_q"] == 1 and cell.mine is not None]
    if not cells:
        raise ValueError("no row of decoding has a time to draw")
    panels: dict[str, list[Measured]] = {}
    for cell in sorted(cells, key=lambda cell: (-int(cell.case["heads_q"]), -int(cell.case["heads_k"]), cell.case["page"])):
        layout = f"pages of {cell.case['page']}" if cell.case["page"] else "contiguous"
        panels.setdefault(f"heads {cell.case['heads_q']}:{cell.case['heads_k']}, {layout}", []).append(cell)
    batches = sorted({int(cell.case["batch"]) for cell in cells})
    most = max(row.bytes / row.median_s * 1e-12 for cell in cells for row in (cell.mine, cell.best) if row is not None)

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        columns = len({cell.case["page"] for cell in cells})
        lines = -(-len(panels) // columns)
        figure = Figure(figsize=(3.4 * columns, 2.8 * lines), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for place, (axes, (title, panel)) in enumerate(zip(grid, panels.items(), strict=False)):
            for colour, batch in enumerate(batches):
                _draw(axes, [cell for cell in panel if cell.case["batch"] == batch], colour)
            axes.set_title(title, fontsize=10, loc="left")
            if place % columns == 0:
                axes.set_ylabel("TB/s of K and V")
            if place + columns >= len(panels):
                axes.set_xlabel("tokens of a sequence")
        lengths = sorted({int(cell.case["seqlen_k"]) for cell in cells})
        grid[0].set_xscale("log", base=2)
        grid[0].set_xticks(lengths, [short(length) for length in lengths])
        grid[0].minorticks_off()
        grid[0].set_ylim(0, most * 1.08)
        for axes in grid[len(panels) :]:
            axes.remove()
        handles = {text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        texts = sorted(handles, key=lambda text: text == PEER)
        figure.legend([handles[text] for text in texts], texts, loc="outside upper center", ncols=6)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return small(file.getvalue())


def _draw(axes, cells: list[Measured], colour: int) -> None:
    """The lines of one batch: ours, and the fastest peer's."""
    cells = sorted(cells, key=lambda cell: cell.case["seqlen_k"])
    if not cells:
        return
    batch = cells[0].case["batch"]
    for dashed, label in ((False, f"{batch} sequence{'s' if batch != 1 else ''}"), (True, PEER)):
        found = [(cell.case["seqlen_k"], row.bytes / row.median_s * 1e-12) for cell in cells if (row := cell.best if dashed else cell.mine)]
        if found:
            style = (
                {"linestyle": "--", "linewidth": 1.0}
                if dashed
                else {"marker": MARKERS[colour % len(MARKERS)], "markersize": 4, "linewidth": 1.8}
            )
            axes.plot(*zip(*found, strict=True), color=COLOURS[colour % len(COLOURS)], label=label, **style)


def save_decoding(rows: Iterable[Row], folder: str | Path) -> list[Path]:
    """Write `decode-DEVICE.svg` of every device that decoded into `folder`; the files written."""
    mine = [row for row in rows if row.name == NAME and row.median_s is not None]
    written = []
    for device in dict.fromkeys(row.device for row in mine):
        chosen = [row for row in mine if row.device == device]
        if any(cell.case["kind"] == "even" and cell.case["seqlen_q"] == 1 and cell.mine for cell in measured(chosen)):
            path = Path(folder) / f"decode-{folder_of(device)}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(decode_svg(chosen), encoding="utf-8")
            written.append(path)
    return written
