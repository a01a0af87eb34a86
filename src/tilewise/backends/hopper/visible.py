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
    """Tiles of keys [first, last) that a block of queries visits; those in [free_first, free_last) need no mask.

    The blocks of a cluster load the same tiles, [loaded_first, loaded_last), and each leaves out those that are the others' alone.
    """

    first: Int32
    last: Int32
    free_first: Int32
    free_last: Int32
    loaded_first: Int32
    loaded_last: Int32


@cute.jit
def walk_of(m0: Int32, band: Band, seqlen_q: Int32, seqlen_k: Int32, config) -> Walk:
    first, last = seen(m0, config.tile_m, band, seqlen_q, seqlen_k, config)
    free_first, free_last = seen_by_all(m0, band, seqlen_k, config)
    free_first = min(max(free_first, first), last)
    loaded_first, loaded_last = first, last
    if const_expr(config.cluster > 1):
        rows = config.cluster * config.tile_m
        loaded_first, loaded_last = seen(m0 // rows * rows, rows, band, seqlen_q, seqlen_k, config)
    return Walk(first, last, free_first, min(max(free_last, free_first), last), loaded_first, loaded_last)


@cute.jit
def seen(m0: Int32, rows: Constexpr[int], band: Band, seqlen_q: Int32, seqlen_k: Int32, config):
    """Tiles of keys [first, last) that hold all that any of the rows from m0 on sees; at least one, so that all blocks walk alike."""
    tile_n = config.tile_n
    first, last = Int32(0), cute.ceil_div(seqlen_k, tile_n)
    if const_expr(config.sees != "all"):
        top, bottom = max(m0, band.q0), min(m0 + rows, band.q1) - 1
        begin, end = max(band.k0, top + band.lo), min(band.k1, bottom + band.hi + 1)
        if top > bottom:
            end = begin
        if const_expr(config.sees == "interval"):
            first = min(max(begin, 0) // tile_n, last - 1)
        last = min(max(cute.ceil_div(max(end, 0), tile_n), first + 1), last)
    if const_expr(config.cluster > 1) and m0 >= seqlen_q:
        last = first + 1
    return first, last


@cute.jit
def seen_by_all(m0: Int32, band: Band, seqlen_k: Int32, config):
    """Tiles of keys [first, last) of which every row of the tile from m0 on sees everything; none where last <= first."""
    if const_expr(config.sees == "all"):
        return Int32(0), seqlen_k // config.tile_n
    top, bottom = max(m0, band.q0), min(m0 + config.tile_m, band.q1) - 1
    begin, end = max(band.k0, bottom + band.lo), min(band.k1, top + band.hi + 1)
    if m0 < band.q0 or m0 + config.tile_m > band.q1:
        end = begin
    if const_expr(config.sees == "until"):
        return Int32(0), max(end, 0) // config.tile_n
    return cute.ceil_div(max(begin, 0), config.tile_n), max(end, 0) // config.tile_n


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
        first_column = n0 + at[r, 0][1]
        begin, end = begin - first_column, end - first_column  # as distances from it, which are constants for the other columns
        for c in range_constexpr(cute.size(S, mode=[1])):
            column = fragments.column(c)
            seen = column < end
            if const_expr(config.sees == "interval"):
                seen = seen and column >= begin
            S[r, c] = S[r, c] if seen else -Float32.inf
