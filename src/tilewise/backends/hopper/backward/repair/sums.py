"""Sums of visible pairs: an entry's gradient computed again with mma.m16n8k16, by all warps of a thread block.

The warps divide the others, ROWS at a time. S and dP are products from registers; P and dS are set to 0 for hidden pairs. The gradient is another
product, with the finite elements of the others; for their elements that are not finite, products count the terms of either sign. The warps' sums are
added up in one order. For dK and dV the queries with a delta that is not finite come first: after them only finite terms follow.
"""

import torch

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.repair.elements import (
    EIGHT,
    QUAD,
    STEP,
    Matrix,
    address_of,
    bring,
    column_of,
    either_number,
    finite_part,
    is_finite,
    not_finite,
    of_word,
    row_of,
    sign_of,
    signed,
    words_at,
    words_of,
)
from tilewise.backends.hopper.backward.repair.entries import (
    OF_DQ,
    OF_DV,
    ROWS,
    WARPS,
    Entry,
    Operands,
    Others,
    heads_of,
    others_of,
    ranges_of,
)
from tilewise.backends.hopper.backward.repair.holes import bit, is_lost, is_settled, join, write
from tilewise.backends.hopper.backward.tiles import WARP
from tilewise.backends.hopper.operands import Band, RepairScalars
from tilewise.backends.hopper.scores import again as changed
from tilewise.backends.hopper.stand_ins import dsl
from tilewise.backends.hopper.visible.queries import shows_in, visit_of
from tilewise.sm90.dsl import BFloat16, Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr

OFTEN = 4  # groups of others from one check by `is_lost` to the next; the first check follows the first group


@cute.jit
def repair(
    entry: Entry, holes: cute.Tensor, tensors: Operands, factor: Float32, sums: cute.Tensor, lost: cute.Tensor, warp: Int32, band: Band,
    scalars: RepairScalars, config: Constexpr[RepairConfig],
):  # fmt: skip
    """Compute the holes of one gradient again and write them, by all warps.

    factor: from the sums to the gradient; sums: (4, columns / EIGHT, WARP, WARPS) fp32, lost: (columns / STEP, WARP) int32, both in shared memory.
    """
    own, of_all, lost = sums[None, None, arch.lane_idx(), warp], sums[None, None, arch.lane_idx(), 0], lost[None, arch.lane_idx()]
    arch.sync_threads()  # the gradient before is written
    for i in cutlass.range(warp, cute.size(holes), WARPS, unroll=1):
        lost[i] = Int32(0)
    arch.sync_threads()
    total = cute.make_rmem_tensor((4, config.columns // EIGHT), Float32)
    total.fill(0.0)
    turns, goes_on = Int32(1) if entry.of == OF_DQ else Int32(2), Boolean(True)
    for turn in cutlass.range(turns, unroll=1):
        if goes_on:
            for g in cutlass.range(heads_of(entry, tensors), unroll=1):
                add_others(total, own, entry, others_of(entry, g, tensors), holes, lost, warp, turn, band, scalars, config)
            add_up(total, sums, warp)
            goes_on = turn + 1 < turns and not is_settled(of_all, lost, holes)
            if goes_on:
                total.fill(0.0)
                if warp == 0:
                    cute.autovec_copy(of_all, total)
                arch.sync_threads()  # all warps know that it goes on
    write(of_all, lost, entry, holes, factor, warp, config)


@cute.jit
def add_others(
    total: cute.Tensor, own: cute.Tensor, entry: Entry, at: Others, holes: cute.Tensor, lost: cute.Tensor, warp: Int32, turn: Int32, band: Band,
    scalars: RepairScalars, config: Constexpr[RepairConfig],
):  # fmt: skip
    """total += this warp's share of the others. For dK and dV, turn 0 takes the groups of ROWS queries with a delta that is not finite, and turn
    1 the other groups; dQ has all groups in turn 0. Turn 0 ends as soon as all holes are NaN by the sums of all warps. own: this lane's place for
    sums in shared memory.
    """
    begin, end, _, _ = ranges_of(entry)
    base, done, settled = begin // ROWS * ROWS, Int32(0), Boolean(False)
    pattern = const_expr(signed(sum(1 << i for i in range(0, WARP, WARPS))))
    while base < end and not settled:
        other = base + ROWS * arch.lane_idx()
        there = other < end
        if there and entry.of != OF_DQ:
            there = all_finite_from(at.minus_delta, other) == (turn == 1)
        left = Int32(arch.vote_ballot_sync(there)) & (pattern << warp)
        while left != 0 and not settled:
            i = Int32(WARP - 1 - arch.clz(left))
            left, other0 = left & ~(1 << i), base + ROWS * i
            if left != 0:
                following = base + ROWS * Int32(WARP - 1 - arch.clz(left))
                bring(at.other_S, following, config.head_dim)
                bring(at.other_dP, following, config.head_dim_v)
            weights, shown = pairs_of(entry, at, other0, band, scalars, config)
            if arch.vote_any_sync(shown != 0):
                add_rows(total, weights, shown, at.summed, other0, entry.column0, lost, config)
                done += 1
                if turn == 0 and done % OFTEN == 1:
                    cute.autovec_copy(total, own)
                    settled = is_lost(own, holes, lost)
        base += ROWS * WARP


@cute.jit
def all_finite_from(gX: cute.Tensor, row: Int32) -> Boolean:
    """Whether ROWS elements from a row on are finite. gX: (rows of whole tiles,) fp32."""
    finite, numbers = Boolean(True), cute.make_rmem_tensor((4, 4), Float32)
    for i in range_constexpr(4):
        cute.autovec_copy(cute.make_tensor((gX.iterator + row + 4 * i).align(16), cute.make_layout(4)), numbers[None, i])
    for i in range_constexpr(cute.size(numbers)):
        finite = finite & is_finite(numbers[i])
    return finite


@cute.jit
def pairs_of(
    entry: Entry, at: Others, other0: Int32, band: Band, scalars: RepairScalars, config: Constexpr[RepairConfig]
) -> tuple[cute.Tensor, Int32]:  # fmt: skip
    """Weights of the ROWS others from other0 on, (EIGHT,) fp32 for this lane's pairs: P or dS, 0 for hidden pairs; and a bit for each visible
    pair.

    Pairs are in the order of a product's left operand: two others for both rows, then two of the next EIGHT others.
    """
    lane, weights, shown = arch.lane_idx(), cute.make_rmem_tensor(EIGHT, Float32), Int32(0)
    weights.fill(0.0)
    by_keys, visited, ref = entry.of != OF_DQ, Boolean(True), Int32(0)
    if const_expr(config.mask_kind == "tiles"):
        query0, key0 = other0 if by_keys else entry.row0, entry.row0 if by_keys else other0
        plane = band.tables.planes[at.which.batch, at.which.head]
        visited, there = visit_of(query0 // config.tile_m, key0 // config.tile_n, plane, band.tables)
        ref = band.tables.visits[there, 1]
    if visited:
        dP = cute.make_rmem_tensor((4, 2), Float32)
        dP.fill(0.0)
        S = scores(at.own_S, entry.row0, at.other_S, other0, config.head_dim, config)
        if entry.of != OF_DV:
            dP.store(scores(at.own_dP, entry.row0, at.other_dP, other0, config.head_dim_v, config).load())
        for i in range_constexpr(EIGHT):
            half, row, other = const_expr(i // 2 % 2), row_of(entry.row0, i // 2 % 2), other0 + i // 4 * EIGHT + lane % QUAD * 2 + i % 2
            query, key = either_row(by_keys, other, row), either_row(by_keys, row, other)
            seen = (other >= entry.begin[half]) & (other < entry.end[half])
            if const_expr(config.mask_kind == "tiles"):  # noqa: SIM102
                if seen:
                    seen = shows_in(ref, query, key, band.tables, config)
            if const_expr(config.bias is not None):
                seen = seen & (at.lse[query] != Float32.inf)
            if const_expr(config.modified or config.dropout):
                if seen:
                    weights[i] = weight_of(entry, at, S[i], dP[i], query, key, scalars, config)
            else:  # of hidden pairs, too: all of them read statistics, which whole tiles have
                weights[i] = either_number(seen, weight_of(entry, at, S[i], dP[i], query, key, scalars, config), 0.0)
            shown |= bit(seen, i)
    return weights, shown


def either_row(first: Boolean, a: Int32, b: Int32) -> Int32:
    """a if `first`, else b."""
    return Int32(cutlass.select_(first, a, b))


@cute.jit
def weight_of(
    entry: Entry, at: Others, s: Float32, dP: Float32, query: Int32, key: Int32, scalars: RepairScalars, config: Constexpr[RepairConfig]
) -> Float32:  # fmt: skip
    """P or dS of a visible pair. s: the plain product of Q and K."""
    p = Float32(0.0)
    if const_expr(config.modified):
        p, factor = changed.pair_weights(s, query, key, at.lse[query], at.changes, at.which, scalars.scale_log2, config)
    else:
        p = cute.math.exp2(s * scalars.scale_log2 - at.lse[query], fastmath=True)
        factor = p
    if const_expr(config.dropout):
        draw = at.changes.draw
        kept = either_number(dropout.is_kept(draw, dropout.head_of(draw, at.which.batch, at.which.head), query, key), 1.0, 0.0)
        p, dP = p * kept, dP * (kept * dropout.lift_of(draw, config))
    return either_number(entry.of == OF_DV, p * scalars.enlarged, factor * (dP + at.minus_delta[query]))


@cute.jit
def scores(A: Matrix, a0: Int32, B: Matrix, b0: Int32, dim: Constexpr[int], config: Constexpr[RepairConfig]) -> cute.Tensor:
    """A B^T of 16 rows of each: (4, 2) fp32, this lane's part. A sum over columns may have any order, so a lane's elements are EIGHT
    neighbours. Addresses go from step to step: ptxas would work them out anew in each one.
    """
    acc, dtype = cute.make_rmem_tensor((4, 2), Float32), dsl(config.dtype)
    acc.fill(0.0)
    column = column_of(Int32(0), 0)
    at_a, at_a8, at_b, at_b8 = (
        address_of(X, min(row_of(row0, half), X.rows - 1), column) for X, row0 in ((A, a0), (B, b0)) for half in range(2)
    )
    for _step in cutlass.range(dim // STEP, unroll=1):
        a, b = ([words_at(x, column < X.columns) for x in rows] for X, rows in ((A, (at_a, at_a8)), (B, (at_b, at_b8))))
        for k in range_constexpr(0, 4, 2):
            left = [a[half][k + i] for i in range(2) for half in range(2)]
            for tile in range_constexpr(2):
                multiply(acc[None, tile], left, b[tile][k], b[tile][k + 1], dtype)
        column, at_a, at_a8, at_b, at_b8 = column + STEP, at_a + 2 * STEP, at_a8 + 2 * STEP, at_b + 2 * STEP, at_b8 + 2 * STEP
    return acc


@cute.jit
def add_rows(
    total: cute.Tensor, weights: cute.Tensor, shown: Int32, X: Matrix, other0: Int32, column0: Int32, lost: cute.Tensor,
    config: Constexpr[RepairConfig],
):  # fmt: skip
    """total += weights times ROWS rows of X from other0 on, over visible pairs. Where all pairs are visible, plain products give NaN by right;
    elsewhere `add_not_finite` does.
    """
    all_shown = arch.vote_all_sync(shown == 0xFF)
    dtype, kind = dsl(config.dtype), const_expr("bf16x2" if config.dtype == torch.bfloat16 else "f16x2")
    rounded, left = pairs_packed(weights, kind), Int32(0)  # left: a bit for each step of columns that has more than finite elements
    for step in range_constexpr(config.columns // STEP):
        pair = [words_of(X, row_of(other0, half), column_of(column0, step)) for half in range(2)]
        found = Int32(0)
        for half in range_constexpr(2):
            for j in range_constexpr(4):
                found |= not_finite(pair[half][j], dtype)
        if arch.vote_any_sync(found != 0 and not all_shown):
            left |= 1 << step
            for half in range_constexpr(2):
                for j in range_constexpr(4):
                    pair[half][j] = finite_part(pair[half][j], dtype)
        for j in range_constexpr(4):
            multiply(total[None, 4 * step + j], rounded, transpose(pair[0][j]), transpose(pair[1][j]), dtype)
    while left != 0:
        step = Int32(WARP - 1 - arch.clz(left))
        left &= ~(1 << step)
        pair = [words_of(X, row_of(other0, half), column_of(column0, step)) for half in range(2)]
        join(lost, step, not_finite_sums(weights, shown, pair, kind, dtype))


@cute.jit
def not_finite_sums(weights: cute.Tensor, shown: Int32, pair: list, kind: Constexpr[str], dtype: Constexpr) -> Int32:
    """Bits, as of `infinities_in`, of weights times the elements of ROWS rows that are not finite, in a step of columns. The sum is an infinity or
    NaN, found by counting: one product counts the terms, another one the positive terms less the negative ones. A weight of 0, or NaN on either side,
    has no sign. pair: words of two rows.
    """
    signs, ones = (cute.make_rmem_tensor(EIGHT, Float32) for _ in range(2))
    for i in range_constexpr(EIGHT):
        seen = (shown >> i) & 1 != 0
        sign = sign_of(weights[i])
        ones[i] = either_number(seen, 1.0, 0.0)
        signs[i] = either_number(seen, sign, 0.0)
    signs, ones = pairs_packed(signs, kind), pairs_packed(ones, kind)
    count, balance = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
    found = Int32(0)
    for j in range_constexpr(4):
        number, infinite = [], []
        for half in range_constexpr(2):
            x = [of_word(pair[half][j], i, dtype) for i in range(2)]
            number.append(changed.packed(*(either_number(is_finite(each), 0.0, 1.0) for each in x), kind))
            infinite.append(changed.packed(*(either_number(is_finite(each), 0.0, sign_of(each)) for each in x), kind))
        count.fill(0.0)
        balance.fill(0.0)
        multiply(count, ones, *(transpose(each) for each in number), dtype)
        multiply(balance, signs, *(transpose(each) for each in infinite), dtype)
        for i in range_constexpr(4):
            place, any_term = const_expr(EIGHT * (i // 2) + 2 * j + i % 2), count[i] > 0.0
            found |= bit(any_term & (balance[i] != -count[i]), place) | bit(any_term & (balance[i] != count[i]), 2 * EIGHT + place)
    return found


@cute.jit
def add_up(total: cute.Tensor, sums: cute.Tensor, warp: Int32):
    """The first warp's place in shared memory gets the sum over the warps, in their order. sums: (4, columns / EIGHT, WARP, WARPS) fp32."""
    lane = arch.lane_idx()
    arch.sync_threads()
    cute.autovec_copy(total, sums[None, None, lane, warp])
    arch.sync_threads()
    one, other = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
    for i in cutlass.range(warp, cute.size(total, mode=[1]), WARPS, unroll=1):
        one.fill(0.0)
        for each in cutlass.range(WARPS, unroll=1):
            cute.autovec_copy(sums[None, i, lane, each], other)
            for x in range_constexpr(4):
                one[x] += other[x]
        cute.autovec_copy(one, sums[None, i, lane, 0])
    arch.sync_threads()


def pairs_packed(numbers: cute.Tensor, kind: str) -> list:
    """EIGHT fp32 elements, rounded to the four words of a product's left operand."""
    return [changed.packed(numbers[2 * i], numbers[2 * i + 1], kind) for i in range(4)]


def transpose(word: Int32) -> Int32:
    """The transpose of a warp's 8 x 8 matrix of 16-bit elements, a word a lane."""
    return arch.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


@cute.jit
def multiply(acc: cute.Tensor, a: tuple, b0: Int32, b1: Int32, dtype: Constexpr):
    """acc (4,) += a product of 16 x 16 and 16 x 8 (PTX ISA, "mma.m16n8k16"). a: four words; b0, b1: words."""
    kind = const_expr("bf16" if dtype is BFloat16 else "f16")
    found = arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b0, b1, *(acc[i] for i in range(4))],
    )
    for i in range_constexpr(4):
        acc[i] = found[i]
