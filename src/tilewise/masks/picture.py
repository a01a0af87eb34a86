"""The picture of a mask: which tiles are skipped, partial or full, and inside the partial ones which pairs are visible."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray

from tilewise.errors import UnsupportedError
from tilewise.masks.tiles import FULL, Runs, lower

if TYPE_CHECKING:
    from tilewise.masks.mask import Mask

SKIPPED, PARTIAL, FILLED, HIDDEN = range(4)  # HIDDEN: a pair of a partial tile that the mask hides
COLOURS = np.array([[0.5, 0.5, 0.5, 0.14], [0.86, 0.45, 0.10, 1.0], [0.18, 0.42, 0.70, 1.0], [0.97, 0.83, 0.62, 1.0]])
MARKS = ".+#"  # the text picture's skipped, partial and full tiles
MOST_PAIRS = 2048  # up to this many queries and keys each pair is drawn, beyond only tiles
MOST_TILES = 2048  # tiles a side that a picture may have
WANTED_TILES = 32  # about this many tiles a side by default
GRID_TILES = 64  # up to this many tiles a side have lines between them
PIXELS = 1024  # a picture is drawn at about this size, so that each pair has sharp edges


@dataclass(frozen=True)
class Tiling:
    """A mask as tiles: `grid` (m_blocks, n_blocks) of SKIPPED, PARTIAL, FILLED."""

    runs: Runs
    grid: ndarray


def show(
    mask: "Mask",
    seqlen_q: int,
    seqlen_k: int,
    *,
    tile_m: int | None = None,
    tile_n: int | None = None,
    format: str = "text",
    path: str | Path | None = None,
    batch: int = 0,
    head: int = 0,
) -> str | bytes:
    """A picture of `mask` for one batch entry and query head; queries run down, keys to the right.

    tile_m, tile_n: the tile size in queries and keys (default: a power of two that makes about 32 tiles a side).
    format: "text" (one character a tile, str), "svg" (str) or "png" (bytes); the last two need matplotlib. path: also written there.
    Raises ValueError for another format, tiles so small that more than 2048 are on a side, and a batch entry or head that is not there,
    UnsupportedError where matplotlib is needed and not installed.
    """
    if format not in ("text", "svg", "png"):
        raise ValueError(f"format must be 'text', 'svg' or 'png', got {format!r}")
    tiling = _tiling(mask, seqlen_q, seqlen_k, tile_m, tile_n, batch, head)
    drawn = _text(tiling) if format == "text" else _image(tiling, f"{mask!r}", format)
    if path is not None:
        Path(path).write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())
    return drawn


def _tiling(mask: "Mask", seqlen_q: int, seqlen_k: int, tile_m: int | None, tile_n: int | None, batch: int, head: int) -> Tiling:
    planes = mask.planes(seqlen_q, seqlen_k, *mask.extent)
    at = (0 if mask.extent[0] == 1 else batch, 0 if mask.extent[1] == 1 else head)  # a mask of extent 1 is the same for all
    region = next((plane.region for plane in planes if at[0] in plane.batch and at[1] in plane.heads), None)
    if region is None:
        raise ValueError(f"batch {batch}, head {head} is not there: the mask has {mask.extent[0]} batch entries and {mask.extent[1]} heads")
    tile_m, tile_n = (_fitting(max(seqlen_q, seqlen_k)) if tile is None else tile for tile in (tile_m, tile_n))
    if tile_m > 0 < tile_n and max(-(-seqlen_q // tile_m), -(-seqlen_k // tile_n)) > MOST_TILES:
        raise ValueError(
            f"tiles of {tile_m} x {tile_n} are too small for a picture of {seqlen_q} x {seqlen_k}: at most {MOST_TILES} a side"
        )
    runs = lower(region, tile_m, tile_n)
    grid = np.full((runs.m_blocks, runs.n_blocks), SKIPPED, dtype=np.int8)
    for m_block in range(runs.m_blocks):
        for run in runs.row(m_block):
            grid[m_block, runs.n0[run] : runs.n1[run]] = FILLED if runs.kind[run] == FULL else PARTIAL
    return Tiling(runs, grid)


def _fitting(seqlen: int) -> int:
    return 1 << max((seqlen - 1) // WANTED_TILES, 0).bit_length()


def _counts(tiling: Tiling) -> tuple[str, str, str]:
    full, partial, skipped = tiling.runs.tiles()
    return f"{skipped} skipped", f"{partial} partial", f"{full} full"


def _share(tiling: Tiling) -> str:
    region = tiling.runs.region
    pairs, total = region.pairs(), region.seqlen_q * region.seqlen_k
    return f"{pairs:,} of {total:,} pairs visible" + (f" ({pairs / total:.1%})" if total else "")


def _text(tiling: Tiling) -> str:
    rows = ["".join(MARKS[tile] for tile in row) for row in tiling.grid]
    legend = ", ".join(f"{mark} {count}" for mark, count in zip(MARKS, _counts(tiling), strict=True))
    return "\n".join([*rows, f"tiles of {tiling.runs.tile_m} x {tiling.runs.tile_n}: {legend}; {_share(tiling)}"])


def _classes(tiling: Tiling) -> ndarray:
    """What to paint, one cell a pair, or one cell a tile where there are too many pairs."""
    runs, region = tiling.runs, tiling.runs.region
    if max(region.seqlen_q, region.seqlen_k) > MOST_PAIRS:
        return tiling.grid
    cells = tiling.grid.repeat(runs.tile_m, axis=0).repeat(runs.tile_n, axis=1)[: region.seqlen_q, : region.seqlen_k]
    return np.where((cells == PARTIAL) & ~region.dense(), HIDDEN, cells)


def _image(tiling: Tiling, title: str, format: str) -> str | bytes:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        way_out = "pip install \"tilewise[cli]\", or take format='text'"
        raise UnsupportedError(
            f"format is {format!r}, which needs the package {error.name}, and that is not installed: {way_out}"
        ) from None

    runs, region = tiling.runs, tiling.runs.region
    cells = _classes(tiling)
    zoom = max(PIXELS // max(*cells.shape, 1), 1)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{title} {runs.tile_m} {runs.tile_n}"}):
        aspect = min(max(region.seqlen_q, 1) / max(region.seqlen_k, 1), 3)
        figure = Figure(figsize=(5.2, 4.6 * aspect + 1.1))
        figure.set_layout_engine("constrained", h_pad=0.1)  # inches; the label above the keys would touch the edge
        axes = figure.add_subplot()
        if cells.size:
            extent = (0, runs.n_blocks * runs.tile_n, runs.m_blocks * runs.tile_m, 0) if cells is tiling.grid else None
            extent = extent or (0, region.seqlen_k, region.seqlen_q, 0)
            axes.imshow(COLOURS[cells.repeat(zoom, axis=0).repeat(zoom, axis=1)], extent=extent, interpolation="nearest", aspect="auto")
            if max(tiling.grid.shape) <= GRID_TILES:
                line = {"color": "white", "linewidth": 0.6}
                axes.hlines(np.arange(1, runs.m_blocks) * runs.tile_m, 0, region.seqlen_k, **line)
                axes.vlines(np.arange(1, runs.n_blocks) * runs.tile_n, 0, region.seqlen_q, **line)
            axes.set(xlim=(0, region.seqlen_k), ylim=(region.seqlen_q, 0))
        axes.set_box_aspect(aspect)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set(xlabel="key", ylabel="query")
        axes.locator_params(integer=True, nbins=6)
        colours = zip(COLOURS[[SKIPPED, PARTIAL, FILLED]], _counts(tiling), strict=True)
        handles = [Patch(facecolor=colour, label=label) for colour, label in colours]
        heading = f"tiles of {runs.tile_m} x {runs.tile_n}; {_share(tiling)}"
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, title=heading, fontsize=9, title_fontsize=9)
        buffer = io.BytesIO()
        metadata = {"Date": None, "Title": title} if format == "svg" else {"Title": title}
        figure.savefig(buffer, format=format, transparent=format == "svg", dpi=200, metadata=metadata)
    return buffer.getvalue().decode() if format == "svg" else buffer.getvalue()
