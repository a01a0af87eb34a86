"""Pieces of a unit that several thread blocks have computed: the last to arrive adds them up, in the order of their keys.

A piece is O divided by its own sum, fp32, and the rows' log-sum-exp. Sums are weighted by exp(lse_i - lse) and taken in one fixed order, so the bits
are the same whichever block comes last. Of many pieces, groups are added up first.
"""

import operator
from typing import NamedTuple

from tilewise.backends.hopper.decode import rows, scheduler
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import Prior, Tensors, Work
from tilewise.backends.hopper.decode.rows import Unit
from tilewise.backends.hopper.decode.scheduler import Piece, Shape
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr
from tilewise.sm90.fragments import LN2, LOG2_E
from tilewise.sm90.pointers import known

WARP, HALF = 32, 16
WIDE = 4  # numbers that a thread reads or writes at a time
PAIR = 2  # rows that a warp adds up at a time, each weighed by half of it
ABREAST = 12  # pieces of a row that are read at a time; at most HALF
ARRIVED = 2  # a named barrier


class Ending(NamedTuple):
    """What joins a unit when all of its pieces are together."""

    sinks: cute.Tensor | None  # (heads_q,) fp32
    prior: Prior | None


class Level(NamedTuple):
    """Pieces number first, first + step, ... of a unit, `count` of them, which count themselves at `counter`."""

    first: Int32
    step: Int32
    count: Int32
    counter: Int32
    plane: Int32  # of the log-sum-exps that are read
    last: Boolean  # the sum is the unit's


@cute.jit
def together(acc_O: cute.Tensor, lse: cute.Tensor, tensors: Tensors, work: Work, ending: Ending, told: cute.Tensor, piece: Piece, unit: Unit,
             shape: Shape, config: Constexpr[Config], column0: Constexpr[int] = 0):  # fmt: skip
    """Keep this block's piece; the block that is last stores the unit. told: (1,) int32 in shared memory. column0: the first of O that this
    warpgroup has.
    """
    keep(acc_O, lse, work, scheduler.slot_of(piece.number, piece, shape, config), unit, tensors.O.shape[3], column0, config)
    grouped = piece.most > config.most_pieces
    group = piece.number // config.group * config.group if grouped else Int32(0)
    count = min(Int32(config.group), piece.count - group) if grouped else piece.count
    level = Level(group, Int32(1), count, scheduler.counter_of(group, grouped, piece, shape, config), Int32(0), not grouped)
    going = Boolean(True)
    while going:
        going = arrive(work.arrivals.iterator + level.counter, level.count, told, config)
        if going:
            add_up(level, tensors, work, ending, piece, unit, shape, config)
            going = not level.last
            counter, groups = scheduler.counter_of(Int32(0), Boolean(False), piece, shape, config), cute.ceil_div(piece.count, config.group)
            level = Level(Int32(0), Int32(config.group), groups, counter, Int32(1), Boolean(True))


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
def arrive(counter: cute.Pointer, count: Int32, told: cute.Tensor, config: Constexpr[Config]) -> Boolean:
    """Whether this block is the last of `count`; what the others have written, it may then read.

    One thread's atomic operation releases what all threads wrote before the barrier, and acquires for all that come behind the next.
    """
    arch.barrier(barrier_id=ARRIVED, number_of_threads=config.threads)
    if arch.thread_idx()[0] == 0:
        before = arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        if before == count - 1:
            counter.store(Int32(0))
        told[0] = before
    arch.barrier(barrier_id=ARRIVED, number_of_threads=config.threads)
    return told[0] == count - 1


@cute.jit
def add_up(level: Level, tensors: Tensors, work: Work, ending: Ending, piece: Piece, unit: Unit, shape: Shape,
           config: Constexpr[Config]):  # fmt: skip
    """By all that compute: of the level's pieces the sum, into O and L or over the first of them.

    A warp has PAIR rows at a time, and a lane WIDE columns of both. What weighs a row's pieces is computed by the lanes of half a warp, one each, and
    handed to the others: a lane that computed all weights for itself would wait for one exponential after the other. Where a warp has one row,
    it has twice as many pieces of it at a time, in two sums, which are added up in the end.
    """
    warp, lane, warps = arch.make_warp_uniform(arch.warp_idx()), arch.lane_idx(), const_expr(config.threads // WARP)
    dim, slot0, slot1, slot2 = (
        tensors.O.shape[3],
        *(scheduler.slot_of(level.first + i * level.step, piece, shape, config) for i in range(3)),
    )
    size, row_size = Int32(work.sums.stride[0]), Int32(work.sums.stride[1])
    total, part = cute.make_rmem_tensor((WIDE, PAIR), Float32), cute.make_rmem_tensor((WIDE, ABREAST, PAIR), Float32)
    of_pair, of_piece, at_once = warps, Int32(0), Int32(ABREAST)  # how far the second sum's row and first piece are from the first's
    if const_expr(config.halves):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
        if unit.rows <= warps:
            of_pair, of_piece, at_once = Int32(0), Int32(ABREAST), Int32(PAIR * ABREAST)
    for row0 in cutlass.range(warp, unit.rows, PAIR * warps, unroll=1):
        # Whose weights this lane computes, and of which piece.
        own, number = row0 + lane // HALF * of_pair, lane % HALF + lane // HALF * of_piece
        for column0 in cutlass.range(0, dim, WARP * WIDE, unroll=1):
            column = column0 + lane * WIDE
            top, weight = -Float32.inf, Float32(0.0)
            total.fill(0.0)
            for first in cutlass.range(0, level.count, at_once, unroll=1):
                lse = -Float32.inf
                if lane % HALF < ABREAST and first + number < level.count and own < unit.rows:
                    slot = slot1 + (first + number - 1) * (slot2 - slot1)
                    lse = work.lse[level.plane, slot0 if first + number == 0 else slot, own]
                part.fill(0.0)
                for j in range_constexpr(PAIR):
                    row, begin = row0 + j * of_pair, first + j * of_piece
                    there = level.count - begin if row < unit.rows and column < dim else Int32(0)
                    source = work.sums.iterator + row * row_size + column
                    at = (slot1 + (begin - 1) * (slot2 - slot1)) * size  # of piece `begin`, but that the very first has a slot of its own
                    for i in range_constexpr(ABREAST):
                        if i < there:
                            own_place = slot0 * size if const_expr(i == 0) and begin == 0 else at
                            cute.autovec_copy(cute.make_tensor(known(source + own_place, 16), cute.make_layout(WIDE)), part[None, i, j])
                        at += (slot2 - slot1) * size
                higher = arch.fmax(top, over_half(lse, arch.fmax))
                base = Float32(0.0) if higher == -Float32.inf else higher
                before, mine = (cute.math.exp2((x - base) * LOG2_E, fastmath=True) for x in (top, lse))
                weight, top = weight * before + over_half(mine, operator.add), higher
                for j in range_constexpr(PAIR):
                    factor = arch.shuffle_sync(before, j * HALF)
                    for c in range_constexpr(WIDE):
                        total[c, j] *= factor
                    for i in range_constexpr(ABREAST):
                        factor = arch.shuffle_sync(mine, j * HALF + i)
                        for c in range_constexpr(WIDE):
                            total[c, j] += part[c, i, j] * factor
            if const_expr(config.halves):  # noqa: SIM102 - as above
                if of_piece > 0:
                    top, weight = sum_of_halves(total, top, weight)
            whole = top + cute.math.log2(weight) * LN2
            whole = -Float32.inf if weight == 0.0 else whole
            factor, earlier = Float32(1.0) if weight == 0.0 else 1.0 / weight, Float32(0.0)
            if level.last:
                token, head = rows.place_of(min(own, unit.rows - 1), unit)
                whole, share, earlier = weights_of(whole, ending, unit, token, head, config)
                factor *= share
            weights = factor, earlier, whole
            for j in range_constexpr(PAIR):
                row, (factor, earlier, of_row) = row0 + j * warps, (arch.shuffle_sync(x, j * HALF) for x in weights)
                if row < unit.rows and column < dim and (const_expr(j == 0) or of_piece == 0):
                    if level.last:
                        store_sum(total[None, j], factor, earlier, of_row, tensors, ending, unit, row, column, config)
                    else:
                        for c in range_constexpr(WIDE):
                            total[c, j] *= factor
                        cute.autovec_copy(total[None, j], wide(work.sums, slot0, row, column))
                        if column == 0:
                            work.lse[1, slot0, row] = of_row


@cute.jit
def sum_of_halves(total: cute.Tensor, top: Float32, weight: Float32) -> tuple[Float32, Float32]:
    """Of both sums of one row into the first; each half of a warp has the maximum and the weight of one, and gets those of both."""
    others = arch.shuffle_sync_bfly(top, HALF)
    higher = arch.fmax(top, others)
    base = Float32(0.0) if higher == -Float32.inf else higher
    mine = cute.math.exp2((top - base) * LOG2_E, fastmath=True)
    factors = [arch.shuffle_sync(mine, j * HALF) for j in range(PAIR)]
    for c in range_constexpr(WIDE):
        total[c, 0] = total[c, 0] * factors[0] + total[c, 1] * factors[1]
    weights = [arch.shuffle_sync(weight * mine, j * HALF) for j in range(PAIR)]
    return higher, weights[0] + weights[1]


def over_half(x: Float32, combine) -> Float32:
    """Of a number of each lane, combined over half a warp, in the same order for every lane."""
    distance = HALF // 2
    while distance:
        x = combine(x, arch.shuffle_sync_bfly(x, distance))
        distance //= 2
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
