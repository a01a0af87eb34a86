"""One band: the columns that a row sees, and the tiles of columns that a block of rows does.

Rows are queries and columns keys; of the `transposed` band rows are keys and columns queries.
"""

from tilewise.backends.hopper.operands import Band
from tilewise.sm90.dsl import Constexpr, Int32, cute


def transposed(band: Band) -> Band:
    return Band(band.k0, band.k1, band.q0, band.q1, -band.hi, -band.lo, None)


@cute.jit
def band_of(ref: Int32, bands: cute.Tensor) -> Band:
    """The band of a run, or of a visit of the backward pass, with ref < 0. bands: (bands, 6)."""
    edges = bands[-1 - ref, None]
    return Band(edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], None)


@cute.jit
def interval(row: Int32, band: Band):
    """The columns [begin, end) that a row sees."""
    begin, end = max(band.k0, row + band.lo), min(band.k1, row + band.hi + 1)
    if row < band.q0 or row >= band.q1:
        end = begin
    return begin, end


@cute.jit
def some_of(row0: Int32, rows: Constexpr[int], band: Band) -> tuple[Int32, Int32, Int32, Int32]:
    """Of `rows` rows from row0 on the first and the last that see anything, if the one is not behind the other; and the columns [begin, end) that
    some of them see.
    """
    top, bottom = max(row0, band.q0), min(row0 + rows, band.q1) - 1
    return top, bottom, max(band.k0, top + band.lo), min(band.k1, bottom + band.hi + 1)


@cute.jit
def all_of(row0: Int32, rows: Constexpr[int], band: Band) -> tuple[Int32, Int32]:
    """The columns [begin, end) that all of these rows see that see anything."""
    top, bottom = max(row0, band.q0), min(row0 + rows, band.q1) - 1
    return max(band.k0, bottom + band.lo), min(band.k1, top + band.hi + 1)


@cute.jit
def tiles_of(begin: Int32, end: Int32, tile: Constexpr[int]) -> tuple[Int32, Int32]:
    """[first, last) of the tiles that hold some of the columns [begin, end)."""
    first = max(begin, 0) // tile
    return first, max(cute.ceil_div(max(end, 0), tile), first)


@cute.jit
def tiles_seen(row0: Int32, rows: Constexpr[int], tile: Constexpr[int], band: Band) -> tuple[Int32, Int32]:
    """[first, last) of the tiles of columns of which some of these rows see some; empty where none sees a column."""
    top, bottom, begin, end = some_of(row0, rows, band)
    first, last = tiles_of(begin, end, tile)
    if top > bottom or begin >= end:
        last = first
    return first, last
