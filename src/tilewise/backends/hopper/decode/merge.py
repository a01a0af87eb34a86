"""Pieces of a unit that several thread blocks have computed, and their sum, in the order of their keys.

A piece is O divided by its own sum, fp32, and the rows' log-sum-exp. Sums are weighted by exp(lse_i - lse) and taken in an order that the number of
pieces alone decides, so the bits are the same whichever blocks add up (arrivals.py), and however many. Of many pieces of a fixed size, groups are
added up first.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

from tilewise.backends.hopper.decode import arrivals, rows, scheduler
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import Prior, Tensors, Work
from tilewise.backends.hopper.decode.rows import Unit
from tilewise.backends.hopper.decode.scheduler import Piece, Shape
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr
from tilewise.sm90.fragments import LN2, LOG2_E
from tilewise.sm90.pointers import known

WARP = 32
WIDE = 4  # numbers that a thread reads or writes at a time
PARTS = 4  # sums that a lane has at a time
DEEP = 6  # reads for each of them at a time


class Ending(NamedTuple):
    """What joins a unit when all of its pieces are together."""

    sinks: cute.Tensor | None  # (heads_q,) fp32
    prior: Prior | None


class Level(NamedTuple):
    """Pieces number first, first + step, ... of a unit, `count` of them, which count themselves at `counter`."""

    first: Int32
    step: Int32
    count: Int32
    most: Int32  # as many as `count` may be, wherever the bits have to be the same
    counter: Int32
    plane: Int32  # of the log-sum-exps that are read
    last: Boolean  # the sum is the unit's


class Spread(NamedTuple):
    """How the numbers that a warp adds up at a time are spread over its lanes' sums: logarithms.

    Of few pieces a warp has several rows, of more one row, of many some columns of one: with up to 6 pieces four rows of 128 columns, with up to 12
    two, with 24 one row, with 48 half of it, with more a quarter, 96 pieces at a time. A lane has PARTS sums of WIDE columns.
    """

    strands: Int32  # of lanes: the pieces i, i + strands, ...; a warp has PARTS / strands rows
    chunks: Int32  # of pieces that follow each other, a sum each

    @property
    def rows(self) -> Int32:
        return Int32(PARTS) >> self.strands

    @property
    def columns(self) -> Int32:
        return Int32(WARP * WIDE) >> self.chunks

    @property
    def width(self) -> Int32:
        """Columns of a sum, over the lanes that have it."""
        return Int32(WARP * WIDE) >> self.strands

    @property
    def deep(self) -> Int32:
        """Pieces of a chunk."""
        return Int32(DEEP) << self.strands


@cute.jit
def together(acc_O: cute.Tensor, lse: cute.Tensor, tensors: Tensors, work: Work, ending: Ending, told: cute.Tensor, piece: Piece, unit: Unit,
             shape: Shape, config: Constexpr[Config], column0: Constexpr[int] = 0):  # fmt: skip
    """Keep this block's piece, and store of the unit what is this block's turn. told: (2,) int32 in shared memory. column0: the first of O that this
    warpgroup has.
    """
    keep(acc_O, lse, work, scheduler.slot_of(piece.number, piece, shape, config), unit, tensors.O.shape[3], column0, config)
    counter = scheduler.counter_of(piece)
    level = Level(Int32(0), Int32(1), piece.count, piece.most, counter, Int32(0), Boolean(True))
    if const_expr(not config.split):
        sum_up(level, tensors, work, ending, told, piece, unit, shape, config)
    else:
        groups, most = (cute.ceil_div(x, config.group) for x in (piece.count, piece.most))
        if piece.most > config.most_pieces:
            first = piece.number // config.group * config.group
            count, of_group = min(Int32(config.group), piece.count - first), scheduler.counter_of_group(first, piece, shape, config)
            level = Level(first, Int32(1), count, Int32(config.group), of_group, Int32(0), Boolean(False))
        going = Boolean(True)
        while going:
            summed = sum_up(level, tensors, work, ending, told, piece, unit, shape, config)
            going = summed and not level.last
            level = Level(Int32(0), Int32(config.group), groups, most, counter, Int32(1), Boolean(True))


@cute.jit
def sum_up(level: Level, tensors: Tensors, work: Work, ending: Ending, told: cute.Tensor, piece: Piece, unit: Unit, shape: Shape,
           config: Constexpr[Config]) -> Boolean:  # fmt: skip
    """By all that compute: of the level's pieces the sum, or as much of it as is this block's turn. Returns whether there is any.

    Slices of rows, for each warp about as much as it has on its way at a time. A unit of one slice is the last block's.
    """
    warps, spread = const_expr(config.threads // WARP), spread_of(level.most)
    across = cute.ceil_div(tensors.O.shape[3], spread.columns)  # as many warps have a row side by side
    height = spread.rows * max(warps // across, 1)
    slices = cute.ceil_div(unit.rows, height)
    shared, counter = level.last and slices > 1 and level.count <= arrivals.MOST, work.arrivals.iterator + level.counter
    turn = arrivals.arrive(counter, level.count, shared, shared and piece.ends != 0, told, config)
    if turn.step > 0:
        before = arrivals.leave(counter, shared, turn)
        for each in cutlass.range(turn.first, slices, turn.step, unroll=1):
            for task in cutlass.range(arch.make_warp_uniform(arch.warp_idx()), height // spread.rows * across, warps, unroll=1):
                row0, column0 = each * height + task // across * spread.rows, task % across * spread.columns
                if row0 < unit.rows:
                    add_up(level, spread, row0, column0, tensors, work, ending, piece, unit, shape, config)
        arrivals.clear(counter, shared, turn, before)
    return turn.step > 0


@cute.jit
def spread_of(pieces: Int32) -> Spread:
    """For so many at most."""
    strands, chunks = Int32(0), Int32(0)
    for i in range_constexpr(2):
        strands += Int32(pieces > DEEP << i)
        chunks += Int32(pieces > DEEP << 2 + i)
    return Spread(strands, chunks)


@cute.jit
def keep(acc_O: cute.Tensor, lse: cute.Tensor, work: Work, slot: Int32, unit: Unit, dim: Int32, column0: Constexpr[int],
         config: Constexpr[Config]):  # fmt: skip
    O, pair = fragments.by_rows(acc_O), cute.make_rmem_tensor(2, Float32)
    for r in range_constexpr(fragments.ROWS):
        row, column = rows.row_of(r, config), column0 + arch.lane_idx() % fragments.QUAD * 2
        if row < unit.rows:
            first = work.sums[slot, row, None].iterator + column
            for c in range_constexpr(0, cute.size(O, mode=[1]), 2):
                if column0 + fragments.column(c) < dim:
                    pair[0], pair[1] = O[r, c], O[r, c + 1]
                    cute.autovec_copy(pair, cute.make_tensor(known(first + fragments.column(c), 8), cute.make_layout(2)))
            if column == 0:
                work.lse[0, slot, row] = lse[r]


@cute.jit
def add_up(level: Level, spread: Spread, row0: Int32, column0: Int32, tensors: Tensors, work: Work, ending: Ending, piece: Piece, unit: Unit,
           shape: Shape, config: Constexpr[Config]):  # fmt: skip
    """By a warp: `spread.columns` columns of `spread.rows` rows, into O and L or over the first of the level's pieces.

    What weighs a row's pieces is computed by 8, 16 or all lanes, one piece each, and handed to the others: a lane that computed all weights for
    itself would wait for one exponential after the other.
    """
    lane, dim, strands = arch.lane_idx(), tensors.O.shape[3], spread.strands
    slot0, slot1, slot2 = (scheduler.slot_of(level.first + i * level.step, piece, shape, config) for i in range(3))
    size, row_size, each = Int32(work.sums.stride[0]), Int32(work.sums.stride[1]), slot2 - slot1
    strand = ((lane >> 4) + ((lane >> 3 & 1) << 1)) & ((Int32(1) << strands) - 1)
    column = (lane & ((Int32(WARP) >> strands) - 1)) * WIDE  # of a sum's
    chunk_of = [Int32(c) & ((Int32(1) << spread.chunks) - 1) for c in range(PARTS)]
    # Whose weights this lane computes, and of which piece of a chunk.
    own, number = row0 + (lane >> 3 + strands), lane & ((Int32(8) << strands) - 1)
    weighs = number < spread.deep and own < unit.rows
    total, part = cute.make_rmem_tensor((WIDE, PARTS), Float32), cute.make_rmem_tensor((WIDE, DEEP, PARTS), Float32)
    lse, mine = (cute.make_rmem_tensor(PARTS, Float32) for _ in range(2))
    top, weight = -Float32.inf, Float32(0.0)
    total.fill(0.0)
    for first in cutlass.range(0, level.count, spread.deep << spread.chunks, unroll=1):
        lse.fill(-Float32.inf)
        part.fill(0.0)
        for c in range_constexpr(PARTS):
            n = first + chunk_of[c] * spread.deep + number
            if weighs and n < level.count:
                lse[c] = work.lse[level.plane, slot0 if n == 0 else slot1 + (n - 1) * each, own]
        for c in range_constexpr(PARTS):
            n, row = first + chunk_of[c] * spread.deep + strand, row0 + (Int32(c) >> strands)
            at = column0 + ((Int32(c) & ((Int32(1) << strands) - 1)) >> spread.chunks) * spread.width + column
            there = (level.count - n + (Int32(1) << strands) - 1) >> strands if row < unit.rows and at < dim else Int32(0)
            source, at = work.sums.iterator + (row * row_size + at), (slot1 + (n - 1) * each) * size
            for k in range_constexpr(DEEP):
                if k < there:
                    own_place = slot0 * size if const_expr(k == 0) and n == 0 else at  # the very first piece has a slot of its own
                    cute.autovec_copy(cute.make_tensor(known(source + own_place, 16), cute.make_layout(WIDE)), part[None, k, c])
                at += (each << strands) * size
        higher = top
        for c in range_constexpr(PARTS):
            higher = arch.fmax(higher, lse[c])
        higher = over_row(higher, strands, arch.fmax)
        base = Float32(0.0) if higher == -Float32.inf else higher
        before, weights, top = cute.math.exp2((top - base) * LOG2_E, fastmath=True), Float32(0.0), higher
        for c in range_constexpr(PARTS):
            mine[c] = cute.math.exp2((lse[c] - base) * LOG2_E, fastmath=True)
            weights += mine[c] if chunk_of[c] == c else Float32(0.0)  # of each chunk once
        weight = weight * before + over_row(weights, strands, operator.add)
        for c in range_constexpr(PARTS):
            of_row = Int32(c) >> strands << 3 + strands  # the first lane that weighs the row
            factor = arch.shuffle_sync(before, of_row)
            for i in range_constexpr(WIDE):
                total[i, c] *= factor
            for k in range_constexpr(DEEP):
                factor = arch.shuffle_sync(mine[c], of_row + (Int32(k) << strands) + strand)
                for i in range_constexpr(WIDE):
                    total[i, c] += part[i, k, c] * factor
    gather(total, spread)
    whole = top + cute.math.log2(weight) * LN2
    whole = -Float32.inf if weight == 0.0 else whole
    factor, earlier = Float32(1.0) if weight == 0.0 else 1.0 / weight, Float32(0.0)
    if level.last:
        token, head = rows.place_of(min(own, unit.rows - 1), unit)
        whole, share, earlier = weights_of(whole, ending, unit, token, head, config)
        factor *= share
    weights, column = (factor, earlier, whole), column0 + (strand >> spread.chunks) * spread.width + column
    for j in range_constexpr(PARTS):
        if j < spread.rows:
            row, (factor, earlier, of_row) = row0 + j, (arch.shuffle_sync(x, Int32(j) << 3 + strands) for x in weights)
            if row < unit.rows and column < dim and strand & ((Int32(1) << spread.chunks) - 1) == 0:
                if level.last:
                    store_sum(total[None, j], factor, earlier, of_row, tensors, ending, unit, row, column, config)
                else:
                    for i in range_constexpr(WIDE):
                        total[i, j] *= factor
                    cute.autovec_copy(total[None, j], wide(work.sums, slot0, row, column))
                    if column == 0:
                        work.lse[1, slot0, row] = of_row


@cute.jit
def gather(total: cute.Tensor, spread: Spread):
    """Sums of chunks and of strands, to where they are stored: strand i of 2 or 4 ends with those whose number is i, from the first on."""
    low, high = arch.lane_idx() >> 4 == 0, arch.lane_idx() >> 3 & 1 == 0
    if spread.chunks >= 1:
        for i in range_constexpr(WIDE):
            total[i, 0] += total[i, 1]
            total[i, 2] += total[i, 3]
    if spread.chunks == 2:
        for i in range_constexpr(WIDE):
            total[i, 0] += total[i, 2]
    if spread.strands >= 1:
        for i in range_constexpr(WIDE):
            total[i, 0] = exchanged(total[i, 0], total[i, 1], low, WARP // 2)
            total[i, 1] = exchanged(total[i, 2], total[i, 3], low, WARP // 2)
    if spread.strands == 2:
        for i in range_constexpr(WIDE):
            total[i, 0] = exchanged(total[i, 0], total[i, 1], high, WARP // 4)


@cute.jit
def exchanged(x: Float32, y: Float32, first: Boolean, distance: Constexpr[int]) -> Float32:
    """x of this lane and of the other one, added up, where this is the first of both, or y."""
    kept, given = x if first else y, y if first else x
    return kept + arch.shuffle_sync_bfly(given, distance)


@cute.jit
def over_row(x: Float32, strands: Int32, combine: Constexpr[Callable]) -> Float32:
    """Of a number of each lane, combined over the lanes that weigh a row, in the same order for every lane."""
    for i in range_constexpr(3):
        x = combine(x, arch.shuffle_sync_bfly(x, 1 << i))
    for i in range_constexpr(2):
        both = combine(x, arch.shuffle_sync_bfly(x, 8 << i))
        x = both if strands > i else x
    return x


@cute.jit
def store_sum(total: cute.Tensor, factor: Float32, earlier: Float32, lse: Float32, tensors: Tensors, ending: Ending, unit: Unit, row: Int32,
              column: Int32, config: Constexpr[Config]):  # fmt: skip
    """WIDE columns of a unit's row, times `factor`, and of the prefix's, times `earlier`."""
    token, head = rows.place_of(row, unit)
    numbers, found = cute.make_rmem_tensor(WIDE, tensors.O.element_type), cute.make_rmem_tensor(WIDE, Float32)
    found.fill(0.0)
    if const_expr(config.onto):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
        if earlier != 0.0:
            cute.autovec_copy(vector(ending.prior.O, unit, token, head, column, WIDE), found)
    for c in range_constexpr(WIDE):
        numbers[c] = (total[c] * factor + found[c] * earlier).to(tensors.O.element_type)
    cute.autovec_copy(numbers, vector(tensors.O, unit, token, head, column, WIDE))
    if column == 0:
        tensors.L[unit.entry, head, unit.first_query + token] = lse


@cute.jit
def wide(sums: cute.Tensor, slot: Int32, row: Int32, column: Int32) -> cute.Tensor:
    return cute.make_tensor(known(sums[slot, row, None].iterator + column, 16), cute.make_layout(WIDE))


@cute.jit
def vector(mX: cute.Tensor, unit: Unit, token: Int32, head: Int32, column: Int32, n: Constexpr[int]) -> cute.Tensor:
    """n numbers of a row of O, or of what is shaped like it, from `column` on."""
    first = mX[unit.entry, unit.first_query + token, head, None].iterator + column
    return cute.make_tensor(known(first, n * mX.element_type.width // 8), cute.make_layout(n))


@cute.jit
def weights_of(
    lse: Float32, ending: Ending, unit: Unit, token: Int32, head: Int32, config: Constexpr[Config]
) -> tuple[Float32, Float32, Float32]:
    """A row's log-sum-exp in the end, and what its O is multiplied with, and that of the prefix."""
    earlier, sink = -Float32.inf, -Float32.inf
    if const_expr(config.onto):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
        if unit.joins:
            earlier = ending.prior.L[unit.entry, head, unit.first_query + token]
    if const_expr(config.sinks):
        sink = ending.sinks[head]
    if const_expr(not (config.onto or config.sinks)):
        return lse, Float32(1.0), Float32(0.0)
    top = arch.fmax(arch.fmax(lse, earlier), sink)
    base = Float32(0.0) if top == -Float32.inf else top
    own, before, other = (cute.math.exp2((x - base) * LOG2_E, fastmath=True) for x in (lse, earlier, sink))
    total = own + before + other
    whole = -Float32.inf if total == 0.0 else base + cute.math.log2(total) * LN2
    inverse = Float32(1.0) if total == 0.0 else 1.0 / total
    return whole, own * inverse, before * inverse


@cute.jit
def store(
    acc_O: cute.Tensor, lse: cute.Tensor, tensors: Tensors, ending: Ending, unit: Unit, config: Constexpr[Config], column0: Constexpr[int] = 0
):  # fmt: skip
    """A unit that is this block's alone, or the columns of it from column0 on."""
    O, pair, found = fragments.by_rows(acc_O), cute.make_rmem_tensor(2, tensors.O.element_type), cute.make_rmem_tensor(2, Float32)
    found.fill(0.0)
    for r in range_constexpr(fragments.ROWS):
        row, column = rows.row_of(r, config), column0 + arch.lane_idx() % fragments.QUAD * 2
        if row < unit.rows:
            token, head = rows.place_of(row, unit)
            whole, own, earlier = weights_of(lse[r], ending, unit, token, head, config)
            for c in range_constexpr(0, cute.size(O, mode=[1]), 2):
                at = column + const_expr(fragments.column(c))
                if column0 + fragments.column(c) < tensors.O.shape[3]:
                    if const_expr(config.onto):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
                        if earlier != 0.0:
                            cute.autovec_copy(vector(ending.prior.O, unit, token, head, at, 2), found)
                    for i in range_constexpr(2):
                        pair[i] = (O[r, c + i] * own + found[i] * earlier).to(tensors.O.element_type)
                    cute.autovec_copy(pair, vector(tensors.O, unit, token, head, at, 2))
            if column == 0:
                tensors.L[unit.entry, head, unit.first_query + token] = whole


@cute.jit
def store_nothing(tensors: Tensors, shape: Shape, config: Constexpr[Config]):
    """O = 0 and LSE = -inf for the rows of ragged queries behind the last sequence, spread over all blocks."""
    (column, block, _), (columns, blocks, _) = arch.block_idx(), arch.grid_dim()
    zeros, thread = cute.make_rmem_tensor(WIDE, tensors.O.element_type), arch.thread_idx()[0]
    zeros.fill(0.0)
    first, heads, per_head = (
        min(max(scheduler.number(shape.lengths.cu_seqlens_q, shape.batch), 0), shape.total),
        tensors.O.shape[2],
        tensors.O.shape[3] // WIDE,
    )
    for row in cutlass.range(first + block * columns + column, shape.total, blocks * columns, unroll=1):
        for which in cutlass.range(thread, heads * per_head, config.threads, unroll=1):
            place = tensors.O[0, row, which // per_head, None].iterator + which % per_head * WIDE
            cute.autovec_copy(zeros, cute.make_tensor(known(place, WIDE * tensors.O.element_type.width // 8), cute.make_layout(WIDE)))
        for head in cutlass.range(thread, heads, config.threads, unroll=1):
            tensors.L[0, head, row] = -Float32.inf
