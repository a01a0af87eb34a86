"""Which keys a row sees, and which tiles of keys a block of rows visits."""

from typing import NamedTuple

from tilewise.hopper import fragments
from tilewise.hopper.dsl import Constexpr, Float32, Int32, const_expr, cute, range_constexpr


class Band(NamedTuple):
    """Row q of [q0, q1) sees the keys [max(k0, q + lo), min(k1, q + hi + 1)); other rows see none."""

    q0: Int32
    q1: Int32
    k0: Int32
    k1: Int32
    lo: Int32
    hi: Int32


class Walk(NamedTuple):
    """Tiles of keys [first, last) that a block of queries visits; those in [free_first, free_last) need no mask."""

    first: Int32
    last: Int32
    free_first: Int32
    free_last: Int32


@cute.jit
def walk_of(m0: Int32, band: Band, seqlen_k: Int32, config) -> Walk:
    """At least one tile, so that a block whose rows see nothing walks like the others."""
    tile_n = config.tile_n
    if const_expr(config.sees == "all"):
        last = cute.ceil_div(seqlen_k, tile_n)
        return Walk(Int32(0), last, Int32(0), seqlen_k // tile_n)
    top, bottom = max(m0, band.q0), min(m0 + config.tile_m, band.q1) - 1
    begin, end = max(band.k0, top + band.lo), min(band.k1, bottom + band.hi + 1)  # seen by some row
    first = min(max(begin, 0) // tile_n, cute.ceil_div(seqlen_k, tile_n) - 1)
    last = max(cute.ceil_div(max(end, 0), tile_n), first + 1)
    if top > bottom:
        last = first + 1
    begin, end = max(band.k0, bottom + band.lo), min(band.k1, top + band.hi + 1)  # seen by all
    if m0 < band.q0 or m0 + config.tile_m > band.q1:
        end = begin
    free_first = min(max(cute.ceil_div(max(begin, 0), tile_n), first), last)
    if const_expr(config.sees == "until"):
        first, free_first = Int32(0), Int32(0)
    free_last = min(max(max(end, 0) // tile_n, free_first), last)
    return Walk(first, last, free_first, free_last)


@cute.jit
def interval(row: Int32, band: Band):
    """The keys [begin, end) that a row sees."""
    begin, end = max(band.k0, row + band.lo), min(band.k1, row + band.hi + 1)
    if row < band.q0 or row >= band.q1:
        end = begin
    return begin, end


@cute.jit
def hide(acc_S: cute.Tensor, tScS: cute.Tensor, m0: Int32, n0: Int32, band: Band, config: Constexpr):
    """-inf for the keys that a row does not see, or that do not exist. tScS: (row, column) of each number of S."""
    S, at = fragments.by_rows(acc_S), fragments.by_rows(tScS)
    for r in range_constexpr(fragments.ROWS):
        begin, end = Int32(0), band.k1
        if const_expr(config.sees != "all"):
            begin, end = interval(m0 + at[r, 0][0], band)
        for c in range_constexpr(cute.size(S, mode=[1])):
            seen = at[r, c][1] < end - n0
            if const_expr(config.sees == "interval"):
                seen = seen and at[r, c][1] >= begin - n0
            S[r, c] = S[r, c] if seen else -Float32.inf
