"""Of the backward pass: which keys a query sees and which queries see a key, and the tiles that blocks of either visit: tables.py.

For "tiles" a walk goes over visits, which are row numbers of a table, where for all others it goes over tiles of queries.
"""

from typing import NamedTuple

from tilewise.backends.hopper.operands import Band, KeyTables
from tilewise.backends.hopper.visible.bands import band_of, interval, transposed
from tilewise.backends.hopper.visible.hiding import WORD, bit_in, hide, keep
from tilewise.backends.tables.runs import EVERYTHING
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, range_constexpr

FIELDS = 4  # of a visit
FAR = 1 << 30  # beyond every row
UNMASKED = -1 - EVERYTHING


class Visit(NamedTuple):
    """A block of keys at a tile of queries, or the other way round: tables.Visits."""

    tile: Int32
    ref: Int32
    turn: Int32
    unused: Int32  # it is copied in 16 bytes


class Walk(NamedTuple):
    """Tiles of queries [first, last) that a block of keys visits, from `start` on; those in [free_first, free_last) need no mask.

    For "tiles" these are the visits of a query head (walk_of_head), and so of its group where all of it sees the same.
    """

    start: Int32
    step: Int32  # 1 ascending, -1 descending
    first: Int32
    last: Int32
    free_first: Int32
    free_last: Int32


@cute.jit
def keys_of(row: Int32, band: Band, config: Constexpr):
    """[begin, end) of the keys that a query sees, which may lie beyond the last one; for "tiles" those that it may see."""
    if const_expr(config.mask_kind == "varlen"):
        return interval_in(band.tables.keys, row)
    return interval(row, band)


@cute.jit
def queries_of(key: Int32, band: Band, config: Constexpr):
    """[begin, end) of the queries that see a key, which may lie beyond the last one; for "tiles" those that may see it."""
    if const_expr(config.mask_kind == "varlen"):
        return interval_in(band.tables.queries, key)
    return interval(key, transposed(band))


@cute.jit
def queries_of_rows(tScS: cute.Tensor, n0: Int32, band: Band, config: Constexpr) -> tuple[cute.Tensor, cute.Tensor]:
    """Begin and end of the queries that see a thread's keys, (ROWS,) int32 each; (FAR, 0) for none. tScS: (key, query) of each element."""
    at = fragments.by_rows(tScS)
    begin, end = (cute.make_rmem_tensor(fragments.ROWS, Int32) for _ in range(2))
    for r in range_constexpr(fragments.ROWS):
        begin[r], end[r] = queries_of(n0 + at[r, 0][0], band, config)
        if begin[r] >= end[r]:
            begin[r], end[r] = Int32(FAR), Int32(0)
    return begin, end


@cute.jit
def interval_in(ends: cute.Tensor, at: Int32):
    """Column `at` of (2, .), empty beyond the last."""
    there = min(at, ends.shape[1] - 1)
    begin, end = ends[0, there], ends[1, there]
    if at > there:
        end = begin
    return begin, end


@cute.jit
def sees_any(row: Int32, head: Int32, batch: Int32, band: Band, config: Constexpr) -> Boolean:
    """Whether a query sees any key."""
    if const_expr(config.mask_kind == "tiles"):
        return band.tables.seeing[band.tables.planes[batch, head], row] != 0
    begin, end = keys_of(row, band, config)
    return begin < end


@cute.jit
def walk_of_head(walk: Walk, block, head: Int32, band: Band, config: Constexpr) -> Walk:
    """A block's walk for one query head: for "tiles" every head has its own."""
    if const_expr(config.mask_kind == "tiles"):
        plane, n_block = band.tables.planes[block.batch, head], block.n0 // config.tile_n
        first, last = band.tables.spans[plane, n_block, 0], band.tables.spans[plane, n_block, 1]
        return Walk(first, Int32(1), first, last, first, first)
    return walk


def walks_of(block, group: Int32, config) -> tuple[Int32, Int32]:
    """[begin, end): for each of these a block of keys has a walk, beginning with this head of the group."""
    if config.block_per_q_head:
        return block.member, block.member + 1
    return 0, group if config.q_heads_in_turn else 1


def heads_per_step(group: Int32, config) -> Int32:
    """Heads that visit every tile of a walk together."""
    return 1 if config.block_per_q_head or config.q_heads_in_turn else group


@cute.jit
def next_in(place: Int32, walk: Walk, config: Constexpr) -> Int32:
    """The place after this one."""
    if const_expr(config.mask_kind == "tiles"):
        return place + 1
    return place + walk.step


@cute.jit
def tile_at(place: Int32, band: Band, config: Constexpr) -> Int32:
    """The tile of queries at a place of a walk."""
    if const_expr(config.mask_kind == "tiles"):
        return band.tables.visits[place, 0]
    return place


@cute.jit
def visit_in(sVisits: cute.Tensor, stage: Int32) -> Visit:
    """What the producer has put into a stage. sVisits: (FIELDS, stages)."""
    found = cute.make_rmem_tensor(FIELDS, Int32)
    cute.autovec_copy(cute.make_tensor(sVisits[None, stage].iterator.align(16), cute.make_layout(FIELDS)), found)
    return Visit(found[0], found[1], found[2], found[3])


@cute.jit
def hide_in(
    tile, acc: cute.Tensor, n0: Int32, stage: Int32, m_block: Int32, masked: Boolean, hidden: Constexpr[float], config: Constexpr
):  # fmt: skip
    """What a tile of queries hides of S^T of the keys from n0 on. `hidden`: as in `hide`."""
    if const_expr(config.mask_kind == "tiles"):
        hide_unseen(acc, visit_in(tile.visits, stage), n0, tile.band.tables.bitmaps, tile.band.tables.bands, hidden)
    elif masked:
        hide(tile, acc, tile.tScS, m_block * config.tile_m, config.mask_kind, hidden)


@cute.jit
def hide_unseen(
    acc: cute.Tensor, visit: Visit, row0: Int32, bitmaps: cute.Tensor, bands: cute.Tensor, hidden: Constexpr[float] = 0.0
):  # fmt: skip
    """0 for the pairs of a masked tile that are hidden; its rows from row0 on. bitmaps, bands: those that the visit refers to. `hidden`: as in
    `hide`.
    """
    if visit.ref != UNMASKED:
        P = fragments.by_rows(acc)
        columns = const_expr(4 * cute.size(P, mode=[1]))
        row, column0 = place_in_tile()
        if visit.ref >= 0:
            for r in range_constexpr(fragments.ROWS):
                for w in range_constexpr(columns // WORD):
                    hide_by_word(P, r, w, bitmaps[visit.ref, row + 8 * r, w] >> column0, hidden)
        else:
            edges = band_of(visit.ref, bands)
            first = visit.tile * columns + column0
            for r in range_constexpr(fragments.ROWS):
                begin, end = interval(row0 + row + 8 * r, edges)
                keep(P, r, begin - first, end - first, hidden)


@cute.jit
def place_in_tile() -> tuple[Int32, Int32]:
    """(row, column) of this consumer's thread's first element of S^T, or S. Worked out anew each time: there is no register to keep it in."""
    thread = arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[arch.thread_idx()[0]]) - 128
    return thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2


@cute.jit
def hide_by_word(P: cute.Tensor, r: Constexpr[int], w: Constexpr[int], word: Int32, hidden: Constexpr[float]):
    """Row r of P = 0 for those queries from 32 w on that have a bit of 0; the lowest bit is of this thread's first query."""
    for c in range_constexpr(WORD // 4):
        shown = word & (1 << fragments.column(c)) != 0
        P[r, w * (WORD // 4) + c] = P[r, w * (WORD // 4) + c] if shown else Float32(hidden)


@cute.jit
def visit_of(m_block: Int32, n_block: Int32, plane: Int32, tables: KeyTables) -> tuple[Boolean, Int32]:
    """Whether block n_block of the keys visits a tile of queries, and by which row of `visits`."""
    low, end = tables.spans[plane, n_block, 0], tables.spans[plane, n_block, 1]
    high, most = end, tables.visits.shape[0] - 1
    while low < high:  # the first visit of this tile or of one behind it
        middle = (low + high) // 2
        if tables.visits[tables.visits[middle, 3], 0] < m_block:
            low = middle + 1
        else:
            high = middle
    there = tables.visits[min(low, most), 3]
    return low < end and tables.visits[there, 0] == m_block, there


@cute.jit
def shows(query: Int32, key: Int32, head: Int32, batch: Int32, band: Band, config: Constexpr) -> Boolean:
    """Whether a query sees a key, for "tiles"."""
    tables = band.tables
    found, (visited, there) = Boolean(False), visit_of(query // config.tile_m, key // config.tile_n, tables.planes[batch, head], tables)
    if visited:
        found = shows_in(tables.visits[there, 1], query, key, tables, config)
    return found


@cute.jit
def shows_in(ref: Int32, query: Int32, key: Int32, tables: KeyTables, config: Constexpr) -> Boolean:
    """Likewise, of a visit that refers to `ref`."""
    found = Boolean(False)
    if ref >= 0:
        at = query % config.tile_m
        found = bit_in(tables.bitmaps, ref, key % config.tile_n, at)
    else:
        first, last = interval(key, band_of(ref, tables.bands))
        found = query >= first and query < last
    return found
