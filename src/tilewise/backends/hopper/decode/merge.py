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
from tilewise.backends.hopper.decode.operands import Tensors, Work
from tilewise.backends.hopper.decode.rows import Unit
from tilewise.backends.hopper.decode.scheduler import Piece, Shape
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr
from tilewise.sm90.fragments import LN2, LOG2_E
from tilewise.sm90.pointers import known

WARP = 32
WIDE = 4  # elements that a thread reads or writes at a time
SUMS = 4  # that a lane has at a time
DEEP = 6  # pieces that are read for each of them at a time; up to as many are few
FEW = 8  # lanes that weigh a row's few pieces, or that lie side by side where there are more
STRANDS = WARP // FEW
CHUNK = STRANDS * DEEP  # pieces of a sum, over its strands
COLUMNS = (WARP * WIDE).bit_length() - 1  # of a warp: a logarithm


class Level(NamedTuple):
    """Pieces number first, first + step, ... of a unit, `count` of them, which count themselves at `counter`."""

    first: Int32
    step: Int32
    count: Int32
    most: Int32  # as many as `count` may be, wherever the bits have to be the same
    counter: Int32
    plane: Int32  # of the log-sum-exps that are read
    last: Boolean  # the sum is the unit's


@cute.jit
def together(acc_O: cute.Tensor, lse: cute.Tensor, tensors: Tensors, work: Work, sinks: cute.Tensor | None, broadcast: cute.Tensor, piece: Piece,
             unit: Unit, shape: Shape, config: Constexpr[Config], column0: Constexpr[int] = 0):  # fmt: skip
    """Keep this block's piece, and store of the unit what is this block's turn. told: (2,) int32 in shared memory. column0: the first of O that this
    warpgroup has.
    """
    keep(acc_O, lse, work, scheduler.slot_of(piece.number, piece, shape, config), unit, tensors.O.shape[3], column0, config)
    counter = scheduler.counter_of(piece)
    level = Level(Int32(0), Int32(1), piece.count, piece.most, counter, Int32(0), Boolean(True))
    if const_expr(not config.split):
        sum_up(level, tensors, work, sinks, broadcast, piece, unit, shape, config)
    else:
        groups, most = (cute.ceil_div(x, config.group) for x in (piece.count, piece.most))
        if piece.most > config.most_pieces:
            first = piece.number // config.group * config.group
            count, of_group = min(Int32(config.group), piece.count - first), scheduler.counter_of_group(first, piece, shape, config)
            level = Level(first, Int32(1), count, Int32(config.group), of_group, Int32(0), Boolean(False))
        going = Boolean(True)
        while going:
            summed = sum_up(level, tensors, work, sinks, broadcast, piece, unit, shape, config)
            going = summed and not level.last
            level = Level(Int32(0), Int32(config.group), groups, most, counter, Int32(1), Boolean(True))


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
def sum_up(level: Level, tensors: Tensors, work: Work, sinks: cute.Tensor | None, broadcast: cute.Tensor, piece: Piece, unit: Unit, shape: Shape,
           config: Constexpr[Config]) -> Boolean:  # fmt: skip
    """By all that compute: of the level's pieces the sum, or as much of it as is this block's turn. Returns whether there is any.

    Of few pieces a warp adds up four rows at a time. Of up to 24 it has one row of 128 columns, of up to 48 half of it, of more a quarter. A slice of
    rows is what all warps have at a time, or half of that where there are many blocks; a unit of one slice is the last block's. All sizes are powers
    of two, as divisions take time.
    """
    few, warps = level.most <= DEEP, const_expr((config.threads // WARP).bit_length() - 1)
    rows_each, chunks = Int32(2) if few else Int32(0), Int32(level.most > CHUNK) + Int32(level.most > 2 * CHUNK)
    across = max(chunks + const_expr((config.head_dim_v - 1).bit_length() - COLUMNS), 0)  # as many warps have a row side by side
    height = rows_each + max(warps - across, 0)
    slices = (unit.rows + (Int32(1) << height) - 1) >> height
    if slices > 1 and 2 * slices <= level.count and height > rows_each:
        height -= 1
        slices = (unit.rows + (Int32(1) << height) - 1) >> height
    shared, counter = level.last and slices > 1 and level.count <= arrivals.MOST, work.arrivals.iterator + level.counter
    turn = arrivals.arrive(counter, level.count, shared, shared and scheduler.ends_with(piece, config), work.polls, broadcast, config)
    if turn.step > 0:
        before, tasks = arrivals.leave(counter, shared, turn), Int32(1) << (height - rows_each + across)
        for each in cutlass.range(turn.first, slices, turn.step, unroll=1):
            for task in cutlass.range(arch.make_warp_uniform(arch.warp_idx()), tasks, const_expr(1 << warps), unroll=1):
                row0 = (each << height) + (task >> across << rows_each)
                column0 = (task & ((Int32(1) << across) - 1)) << (COLUMNS - chunks)
                if few:
                    add_up(level, row0, column0, chunks, tensors, work, sinks, piece, unit, shape, True, config)
                else:
                    add_up(level, row0, column0, chunks, tensors, work, sinks, piece, unit, shape, False, config)
        arrivals.clear(counter, shared, turn, before)
    return turn.step > 0


@cute.jit
def add_up(level: Level, row0: Int32, column0: Int32, chunks: Int32, tensors: Tensors, work: Work, sinks: cute.Tensor | None, piece: Piece,
           unit: Unit, shape: Shape, few: Constexpr[bool], config: Constexpr[Config]):  # fmt: skip
    """By a warp: 128 columns of four rows, where pieces are few; else 128 >> chunks columns of one. Into O and L, or over the first of the pieces.

    A lane has SUMS sums of WIDE columns: of four rows, or of a row's columns or chunks of pieces, or both. Where pieces are not few, 8 lanes lie side
    by side, and each of four strands of lanes has every fourth piece. What weighs pieces is computed by a lane each, and handed to the others: a lane
    that computed all weights for itself would wait for one exponential after the other.
    """
    lane, dim = arch.lane_idx(), tensors.O.shape[3]
    slot0, slot1, slot2 = (scheduler.slot_of(level.first + i * level.step, piece, shape, config) for i in range(3))
    size, row_size, rows_kept, each = Int32(work.sums.stride[0]), Int32(work.sums.stride[1]), Int32(work.lse.stride[1]), slot2 - slot1
    strand, number, own, column = Int32(0), lane % FEW, row0 + lane // FEW, lane * WIDE
    if const_expr(not few):
        strand, number, own, column = (lane >> 4) + ((lane >> 3 & 1) << 1), lane, row0, lane % FEW * WIDE
    lse_of, weighs = work.lse[level.plane, 0, None].iterator + own, number < (DEEP if const_expr(few) else CHUNK) and own < unit.rows
    total, part = cute.make_rmem_tensor((WIDE, SUMS), Float32), cute.make_rmem_tensor((WIDE, DEEP, SUMS), Float32)
    lse, mine = (cute.make_rmem_tensor(SUMS, Float32) for _ in range(2))
    top, weight = -Float32.inf, Float32(0.0)
    total.fill(0.0)
    for first in cutlass.range(0, level.count, const_expr(DEEP if few else SUMS * CHUNK), unroll=1):
        lse.fill(-Float32.inf)
        part.fill(0.0)
        for c in range_constexpr(1 if few else SUMS):
            n = first + c * CHUNK + number
            if weighs and n < level.count:
                slot = slot0 if const_expr(c == 0) and n == 0 else slot1 + (n - 1) * each
                lse[c] = (lse_of + slot * rows_kept).load()
        for c in range_constexpr(SUMS):
            n, row, at = first + strand, row0, column0 + column
            if const_expr(few):
                row += c
            else:
                n += (c & ((Int32(1) << chunks) - 1)) * CHUNK
                at += (Int32(c) >> chunks) * (FEW * WIDE)
            there = level.count - n if row < unit.rows and at < dim else Int32(0)
            source, at = work.sums.iterator + (row * row_size + at), (slot1 + (n - 1) * each) * size
            for k in range_constexpr(DEEP):
                if k * const_expr(1 if few else STRANDS) < there:
                    own_place = slot0 * size if const_expr(k == 0) and n == 0 else at  # the very first piece has a slot of its own
                    cute.autovec_copy(cute.make_tensor(known(source + own_place, 16), cute.make_layout(WIDE)), part[None, k, c])
                at += const_expr(1 if few else STRANDS) * each * size
        if row0 < unit.rows:  # not before: all reads are to be on their way before the first shuffle waits for one
            higher = over_row(arch.fmax(arch.fmax(lse[0], lse[1]), arch.fmax(lse[2], lse[3])), few, arch.fmax)
            higher = arch.fmax(top, higher)
            base = Float32(0.0) if higher == -Float32.inf else higher
            before, top = cute.math.exp2((top - base) * LOG2_E, fastmath=True), higher
            for c in range_constexpr(SUMS):
                mine[c] = cute.math.exp2((lse[c] - base) * LOG2_E, fastmath=True)
            weight = weight * before + over_row((mine[0] + mine[1]) + (mine[2] + mine[3]), few, operator.add)
            mine[1] = mine[1] if chunks >= 1 else mine[0]  # sums of other columns take the same pieces
            mine[2] = mine[2] if chunks == 2 else mine[0]
            mine[3] = mine[3] if chunks == 2 else mine[1]
            for c in range_constexpr(SUMS):
                for i in range_constexpr(WIDE):
                    total[i, c] *= before
                for k in range_constexpr(DEEP):
                    factor = arch.shuffle_sync(mine[c], c * FEW + k if const_expr(few) else k * STRANDS + strand)
                    for i in range_constexpr(WIDE):
                        total[i, c] += part[i, k, c] * factor
    if const_expr(not few):
        gather(total, chunks)
    whole = top + cute.math.log2(weight) * LN2
    whole = -Float32.inf if weight == 0.0 else whole
    factor = Float32(1.0) if weight == 0.0 else 1.0 / weight
    if level.last:
        _, head = rows.place_of(min(own, unit.rows - 1), unit)
        whole, share = weights_of(whole, sinks, head, config)
        factor *= share
    weights, column = (factor, whole), column0 + column + (strand >> chunks) * (FEW * WIDE)
    for j in range_constexpr(SUMS if few else 1):
        row = row0 + j
        if const_expr(few):
            factor, whole = (arch.shuffle_sync(x, j * FEW) for x in weights)
        if row < unit.rows and column < dim and strand & ((Int32(1) << chunks) - 1) == 0:
            if level.last:
                store_sum(total[None, j], factor, whole, tensors, unit, row, column)
            else:
                for i in range_constexpr(WIDE):
                    total[i, j] *= factor
                cute.autovec_copy(total[None, j], wide(work.sums, slot0, row, column))
                if column == 0:
                    work.lse[1, slot0, row] = whole


@cute.jit
def gather(total: cute.Tensor, chunks: Int32):
    """Sums of chunks and of strands; the i-th strand of lanes ends with the i-th of its sums, as the first."""
    if chunks >= 1:
        for i in range_constexpr(WIDE):
            total[i, 0] += total[i, 1]
            total[i, 2] += total[i, 3]
    if chunks == 2:
        for i in range_constexpr(WIDE):
            total[i, 0] += total[i, 2]
    low, even = arch.lane_idx() >> 4 == 0, arch.lane_idx() >> 3 & 1 == 0
    for i in range_constexpr(WIDE):
        pair = [exchanged(total[i, c], total[i, c + 1], low, 16) for c in (0, 2)]
        total[i, 0] = exchanged(*pair, even, 8)


@cute.jit
def exchanged(x: Float32, y: Float32, first: Boolean, distance: Constexpr[int]) -> Float32:
    """Of this lane and the other one: where this is the first of both x, added up, else y."""
    kept, given = x if first else y, y if first else x
    return kept + arch.shuffle_sync_bfly(given, distance)


@cute.jit
def over_row(x: Float32, few: Constexpr[bool], combine: Constexpr[Callable]) -> Float32:
    """Of one value of each lane, combined over the lanes that weigh a row, in the same order for every lane."""
    for i in range_constexpr(3 if few else 5):
        x = combine(x, arch.shuffle_sync_bfly(x, 1 << i))
    return x


@cute.jit
def store_sum(total: cute.Tensor, factor: Float32, lse: Float32, tensors: Tensors, unit: Unit, row: Int32, column: Int32):
    """WIDE columns of a unit's row, times `factor`."""
    token, head = rows.place_of(row, unit)
    numbers = cute.make_rmem_tensor(WIDE, tensors.O.element_type)
    for c in range_constexpr(WIDE):
        numbers[c] = (total[c] * factor).to(tensors.O.element_type)
    cute.autovec_copy(numbers, vector(tensors.O, unit, token, head, column, WIDE))
    if column == 0:
        tensors.L[unit.entry, head, unit.first_query + token] = lse


@cute.jit
def wide(sums: cute.Tensor, slot: Int32, row: Int32, column: Int32) -> cute.Tensor:
    return cute.make_tensor(known(sums[slot, row, None].iterator + column, 16), cute.make_layout(WIDE))


@cute.jit
def vector(mX: cute.Tensor, unit: Unit, token: Int32, head: Int32, column: Int32, n: Constexpr[int]) -> cute.Tensor:
    """n elements of a row of O, or of what is shaped like it, from `column` on."""
    first = mX[unit.entry, unit.first_query + token, head, None].iterator + column
    return cute.make_tensor(known(first, n * mX.element_type.width // 8), cute.make_layout(n))


@cute.jit
def weights_of(lse: Float32, sinks: cute.Tensor | None, head: Int32, config: Constexpr[Config]) -> tuple[Float32, Float32]:
    """A row's log-sum-exp in the end, and what its O is multiplied with. sinks: (heads_q,) fp32; each joins a unit, no piece of it."""
    if const_expr(not config.sinks):
        return lse, Float32(1.0)
    sink = sinks[head]
    top = arch.fmax(lse, sink)
    base = Float32(0.0) if top == -Float32.inf else top
    own, other = (cute.math.exp2((x - base) * LOG2_E, fastmath=True) for x in (lse, sink))
    total = own + other
    whole = -Float32.inf if total == 0.0 else base + cute.math.log2(total) * LN2
    return whole, own * (Float32(1.0) if total == 0.0 else 1.0 / total)


@cute.jit
def store(
    acc_O: cute.Tensor, lse: cute.Tensor, tensors: Tensors, sinks: cute.Tensor | None, unit: Unit, config: Constexpr[Config],
    column0: Constexpr[int] = 0,
):  # fmt: skip
    """A unit that is this block's alone, or the columns of it from column0 on."""
    O, pair = fragments.by_rows(acc_O), cute.make_rmem_tensor(2, tensors.O.element_type)
    for r in range_constexpr(fragments.ROWS):
        row, column = rows.row_of(r, config), column0 + arch.lane_idx() % fragments.QUAD * 2
        if row < unit.rows:
            token, head = rows.place_of(row, unit)
            whole, own = weights_of(lse[r], sinks, head, config)
            for c in range_constexpr(0, cute.size(O, mode=[1]), 2):
                at = column + const_expr(fragments.column(c))
                if column0 + fragments.column(c) < tensors.O.shape[3]:
                    for i in range_constexpr(2):
                        pair[i] = (O[r, c + i] * own).to(tensors.O.element_type)
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
