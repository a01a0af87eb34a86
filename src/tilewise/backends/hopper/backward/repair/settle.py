"""NaN by right: holes that are NaN by the formula too, as hidden elements and statistics show, closed by one warp.

Three tests close most holes. No hidden element in reach is large (`hides_nothing`); statistics of a query are NaN (`settle`, `settle_keys`); dO has
NaN, or infinities of both signs, in a column (`settle_signs`). Holes that stay open are left to sums.py.
"""

from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.repair.elements import EIGHT, column_of, either, is_nan, row_of, words_of
from tilewise.backends.hopper.backward.repair.entries import (
    OF_DK,
    OF_DQ,
    OF_DV,
    ROWS,
    Entry,
    Operands,
    Others,
    heads_of,
    others_of,
    ranges_of,
)
from tilewise.backends.hopper.backward.repair.holes import any_hole, bit, keep, nan_bits
from tilewise.backends.hopper.backward.repair.pieces import all_small
from tilewise.backends.hopper.backward.tiles import WARP
from tilewise.backends.hopper.operands import Band
from tilewise.backends.hopper.stand_ins import dsl
from tilewise.backends.hopper.visible.queries import keys_of, queries_of, sees_any, shows
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr

TILE = 128  # rows of the largest tile of the earlier kernels
SIGNS = 16  # groups of ROWS queries in which `settle_signs` looks for infinities of both signs
NONE = -1  # no query
OF_ROW = 0xFF  # bits of a row in a word of holes


@cute.jit
def settle(entry: Entry, holes: cute.Tensor, tensors: Operands, band: Band, looks: Int32, config: Constexpr[RepairConfig]):
    """Close holes that are NaN by right, as far as hidden elements and statistics show it, by a warp: all holes if `hides_nothing`; dQ of a query
    that sees any key and has a NaN log-sum-exp or delta; dK and dV by `settle_keys`.
    """
    if const_expr(config.may_look):  # noqa: SIM102
        if looks != 0 and any_hole(holes):  # noqa: SIM102
            if hides_nothing(entry, tensors, band, config):
                keep(holes, Int32(0))
    if any_hole(holes):
        for g in cutlass.range(heads_of(entry, tensors), unroll=1):
            at = others_of(entry, g, tensors)
            if entry.of == OF_DQ:
                for half in cutlass.range(2, unroll=1):
                    row = row_of(entry.row0, half)
                    if row < entry.gX.rows and (is_nan(at.lse[row]) | is_nan(at.minus_delta[row])):  # noqa: SIM102
                        if sees_any(row, at.which.head, at.which.batch, band, config):
                            keep(holes, OF_ROW << EIGHT * (1 - half))
            else:
                settle_keys(entry, at, holes, band, looks, config)


@cute.jit
def hides_nothing(entry: Entry, tensors: Operands, band: Band, config: Constexpr[RepairConfig]) -> Boolean:
    """Whether all hidden elements in reach of the entry's rows are small, by a warp: then each NaN is NaN by right. A product of tiles reaches
    the tiles that blocks of rows visit; tiles and blocks have at most TILE rows each.
    """
    by_keys = entry.of != OF_DQ
    begin, end = Int32(1 << 30), Int32(0)
    for row in cutlass.range(max(entry.row0 - TILE, 0) + arch.lane_idx(), min(entry.row0 + ROWS + TILE, entry.gX.rows), WARP, unroll=1):
        first, last = keys_of(row, band, config)
        if by_keys:
            first, last = queries_of(row, band, config)
        if first < last:
            begin, end = min(begin, first), max(end, last)
    begin, end = -arch.warp_redux_sync(-begin, "max"), arch.warp_redux_sync(end, "max")
    begin, end = max(begin - TILE, 0), min(end + TILE, tensors.Q.shape[1] if by_keys else tensors.K.shape[1])
    _, _, common_begin, common_end = ranges_of(entry)
    if common_begin >= common_end:
        common_begin, common_end = end, end
    small = Boolean(True)
    for g in cutlass.range(heads_of(entry, tensors), unroll=1):
        at = others_of(entry, g, tensors)
        for i in cutlass.range(5, unroll=1):  # summed rows and other factors of dP, on either side of the common range; own factors of dP
            X = either(i < 2, at.summed, either(i < 4, at.other_dP, at.own_dP))
            first, last = (begin, common_begin) if i % 2 == 0 else (common_end, end)
            if i == 4:
                first, last = entry.row0, entry.row0 + 1
            if small:
                small = all_small(X, first, last, at.minus_delta, config)
    return small


@cute.jit
def settle_keys(entry: Entry, at: Others, holes: cute.Tensor, band: Band, looks: Int32, config: Constexpr[RepairConfig]):
    """Close dK of the keys that a query of NaN statistics sees, and their dV in the columns where the query's dO is NaN. If the log-sum-exp is
    NaN, so are P and all columns of dV. Three such queries are tried: the last one that sees all ROWS keys, and the last and first that see any.
    """
    begin, end, common_begin, common_end = ranges_of(entry)
    for i in cutlass.range(3, unroll=1):
        query = Int32(NONE)
        if any_hole(holes):
            query = lost_query(at, common_begin if i == 0 else begin, common_end if i == 0 else end, i < 2)
        if query >= 0:
            everywhere = entry.of == OF_DK or is_nan(at.lse[query])
            rows = Int32(0)  # bits of the rows that the query is seen by
            for half in range_constexpr(2):
                mask_kind = (query >= entry.begin[half]) & (query < entry.end[half])
                if const_expr(config.mask_kind == "tiles"):  # noqa: SIM102
                    if mask_kind:
                        mask_kind = shows(query, row_of(entry.row0, half), at.which.head, at.which.batch, band, config)
                if const_expr(config.bias is not None):
                    mask_kind = mask_kind & (at.lse[query] != Float32.inf)
                rows |= bit(mask_kind, EIGHT * half)
            for step in cutlass.range(cute.size(holes), unroll=1):
                found = Int32(OF_ROW)
                if not everywhere:
                    found = nan_bits(at.other_dP, query, column_of(entry.column0, step), config)
                holes[step] = holes[step] & ~(found * rows)
    if const_expr(config.may_look):  # noqa: SIM102
        if looks != 0 and entry.of == OF_DV:
            settle_signs(entry, at, common_begin, common_end, holes, config)


@cute.jit
def lost_query(at: Others, begin: Int32, end: Int32, last: Boolean) -> Int32:
    """The last query in [begin, end) with a log-sum-exp or delta of NaN, or the first one if not `last`; NONE if there is none. A lane reads four
    queries at a time.
    """
    found, statistics = Int32(NONE), cute.make_rmem_tensor((4, 2), Float32)
    at_once = const_expr(4 * WARP)
    base, sign = begin // 4 * 4, Int32(1) if last else Int32(-1)
    steps = cute.ceil_div(max(end - base, 0), at_once)
    while steps > 0 and found == NONE:
        steps -= 1
        query0 = base + at_once * steps + 4 * arch.lane_idx()
        if not last:
            query0 = base + 4 * arch.lane_idx()
            base += at_once
        best = Int32(-(1 << 30))
        if query0 < end:
            for i, gX in enumerate((at.lse, at.minus_delta)):
                cute.autovec_copy(cute.make_tensor((gX.iterator + query0).align(16), cute.make_layout(4)), statistics[None, i])
            for x in range_constexpr(4):
                if query0 + x >= begin and query0 + x < end and (is_nan(statistics[x, 0]) or is_nan(statistics[x, 1])):
                    best = max(best, sign * (query0 + x))
        best = arch.warp_redux_sync(best, "max")
        if best > -(1 << 30):
            found = sign * best
    return found


@cute.jit
def settle_signs(entry: Entry, at: Others, begin: Int32, end: Int32, holes: cute.Tensor, config: Constexpr[RepairConfig]):
    """Close the columns of dV in which dO has NaN, or both inf and -inf, at queries in [begin, end). Each of these queries sees all keys that any
    query sees. Every P gives NaN there, as P is never negative.
    """
    own = Int32(0)
    for half in range_constexpr(2):
        own |= bit(entry.begin[half] < entry.end[half], EIGHT * half)
    for step in cutlass.range(cute.size(holes), unroll=1):
        column, found, last, turns = column_of(entry.column0, step), Int32(0), end, Int32(SIGNS)  # EIGHT bits for inf, EIGHT for -inf
        while turns > 0 and begin < last and arch.vote_any_sync(holes[step] != 0):
            turns -= 1
            last -= ROWS
            for half in cutlass.range(2, unroll=1):
                words = words_of(at.other_dP, max(row_of(last, half), begin), column)
                numbers = cute.recast_tensor(words, dsl(config.dtype))
                for x in range_constexpr(EIGHT):
                    number = numbers[x].to(Float32)
                    found |= bit(~(number < Float32.inf), x) | bit(~(number > -Float32.inf), EIGHT + x)
            for apart in (4, 8, 16):
                found |= arch.shuffle_sync_bfly(found, apart)
            holes[step] = holes[step] & ~((found & found >> EIGHT & OF_ROW) * own)
