"""Gradients again where they are written NaN: from the visible pairs alone, by the last kernel of the backward pass on Hopper.

A hidden NaN or infinity meets P = 0 or dS = 0 in a product of tiles, and 0 * NaN is NaN. It makes NaN and no other number, so only what is written
NaN is a hole. The kernels before list what they have written that is not finite (`report_*`), 16 rows of a gradient and some of its columns an entry.

NaN by right is the usual case, as gradients overflow in training, so it is found out first, a warp an entry (`settle`): nothing hidden that may
have met the rows is large, or statistics are NaN, or infinities have both signs. What is left a thread block repairs, one entry after another. Its
warps divide the "other" rows, those that the entry's "own" ones see or are seen by, 16 at a time: S and dP by products of registers, P and dS = 0
for what is hidden, and the gradient likewise from the others' finite numbers; of those that are not, products count the terms of either sign. What
the warps have is added up in one order. Of the others of a key those queries come first whose delta is not finite: what follows them are numbers.

One code does it for dQ, dK and dV, which differ in what they multiply: it is compiled with every backward pass, and hardly ever runs.
"""

from typing import NamedTuple

import torch

from tilewise.backends.hopper.backward import scores as changed
from tilewise.backends.hopper.backward.config import PIECE, Config
from tilewise.backends.hopper.backward.seen import keys_of, queries_of, sees_any, shows, shows_in, visit_of
from tilewise.backends.hopper.backward.tiles import WARP
from tilewise.backends.hopper.changes import dsl
from tilewise.backends.hopper.operands import Band, Changes
from tilewise.sm90.dsl import (
    BFloat16,
    Boolean,
    Constexpr,
    Float32,
    Int32,
    Int64,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)

WARPS = 8  # of a thread block
TILE = 128  # rows of the largest tile of the kernels before
ROWS = 16  # of an entry, and others that a warp takes at a time
QUAD = 4  # lanes that share a row: lane l has rows l / QUAD and 8 more, of every STEP columns the eight from 8 (l % QUAD) on
STEP = 32
LINE = 64  # numbers in a line of the cache
EIGHT = 8
NONE = -1
UNKNOWN, SMALL, LARGE = range(3)
OFTEN = 4  # after the first others, and then every so many, it is looked whether more are needed
SIGNS = 16  # 16 rows at a time, in which infinities of both signs are looked for
OF_DQ, OF_DK, OF_DV = range(3)


class Matrix(NamedTuple):
    """Rows of one head."""

    address: Int64
    step: Int64  # bytes from row to row
    rows: Int32
    columns: Int32
    with_delta: Boolean  # it is dO, to whose rows deltas belong
    looked: Int64  # address of what is known of its pieces, an int32 each: UNKNOWN, SMALL or LARGE; 0 for a gradient


class Entry(NamedTuple):
    """What is repaired of one gradient."""

    of: Int32  # OF_DQ, OF_DK or OF_DV
    gX: Matrix
    head: Int32  # of queries for dQ, of keys for the others
    batch: Int32
    row0: Int32
    column0: Int32
    last: Int32  # column, exclusive
    begin: cute.Tensor  # of the others, for this lane's two rows; empty beyond the last row
    end: cute.Tensor


class Others(NamedTuple):
    """One query head of those that an entry's sums go over."""

    own_S: Matrix  # S = own_S other_S^T, dP likewise
    other_S: Matrix
    own_dP: Matrix
    other_dP: Matrix
    summed: Matrix  # what the weights are multiplied by
    lse: cute.Tensor  # (rows,), of the queries
    minus_delta: cute.Tensor
    changes: Changes
    which: changed.Head


# What is repaired


@cute.jit
def report_keys(tensors, n0: Int32, part: Int32, head_k: Int32, batch: Int32, config: Constexpr[Config]):
    """By a warp: a part of the columns of dK or dV, of the 16 keys from n0 on, is not finite. Entries from 0 up."""
    if n0 < tensors.K.shape[1]:
        report(tensors.spoiled, number_of(tensors.K, n0, part, head_k, batch, config.repaired_parts[1]))


@cute.jit
def report_queries(tensors, row0: Int32, part: Int32, head: Int32, batch: Int32, config: Constexpr[Config]):
    """Likewise of dQ. Entries from -1 down."""
    if row0 < tensors.Q.shape[1]:
        report(tensors.spoiled, -1 - number_of(tensors.Q, row0, part, head, batch, config.repaired_parts[0]))


@cute.jit
def report(spoiled: cute.Tensor, number: Int32):
    if arch.lane_idx() == 0:
        place = arch.inline_ptx(
            "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[spoiled.iterator.toint()]
        )
        spoiled[1 + place] = number


@cute.jit
def looked_at(tensors) -> Int64:
    """Address of what is known of the pieces of Q, dO, K and V: the end of the list."""
    known = 2 * (pieces_of(tensors.Q) + pieces_of(tensors.K))
    return (tensors.spoiled.iterator + tensors.spoiled.shape[0] - known).toint()


@cute.jit
def pieces_of(mX: cute.Tensor) -> Int32:
    """mX: (batch, seqlen, heads, head_dim)."""
    return mX.shape[0] * mX.shape[2] * cute.ceil_div(mX.shape[1], PIECE)


@cute.jit
def number_of(mX: cute.Tensor, row0: Int32, part: Int32, head: Int32, batch: Int32, parts: Constexpr[int]) -> Int32:
    """mX: (batch, seqlen, heads, head_dim)."""
    return ((batch * mX.shape[2] + head) * cute.ceil_div(mX.shape[1], ROWS) + row0 // ROWS) * parts + part


@cute.kernel
def kernel(
    tensors, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, band: Band, scale: Float32, scale_log2: Float32, config: Constexpr[Config]
):  # fmt: skip
    """Any number of blocks. Each looks at WARPS entries at once."""
    storage = SmemAllocator()
    sums = storage.allocate_tensor(
        Float32, cute.make_layout((config.repaired_columns // 2, WARP, WARPS), stride=(WARP, 1, WARP * config.repaired_columns // 2)), 128
    )
    lost = storage.allocate_tensor(Int32, cute.make_layout((config.repaired_columns // STEP, WARP), stride=(WARP, 1)), 16)
    left = storage.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
    gradients, warp = (mdQ, mdK, mdV), arch.make_warp_uniform(arch.warp_idx())
    arch.griddepcontrol_wait()
    block, blocks, count = arch.block_idx()[0], arch.grid_dim()[0], tensors.spoiled[0]
    for first in cutlass.range(block, count, WARPS * blocks, unroll=1):
        if arch.lane_idx() == 0:
            left[warp] = Int32(0)
        for i in cutlass.range(2 + 2 * WARPS, unroll=1):  # each warp its own entry's gradients, then all warps what is left of everyone's
            own = i < 2
            which, turn = warp if own else i // 2 - 1, i % 2
            number = first + which * blocks
            if i == 2:
                arch.sync_threads()
            wanted = number < count
            if not own:
                wanted = (left[which] >> turn) & 1 != 0
            if wanted:
                entry = entry_of(tensors, gradients, tensors.spoiled[1 + number], turn, band, config)
                if entry.of >= 0:
                    holes = holes_in(entry, config)
                    if own:
                        settle(entry, holes, tensors, band, config)
                        remains = any_hole(holes)
                        if remains and arch.lane_idx() == 0:
                            left[warp] = left[warp] | 1 << turn
                    else:
                        factor = Float32(1.0 / config.enlarged) if entry.of == OF_DV else scale
                        repair(entry, holes, tensors, factor, sums, lost, warp, band, scale_log2, config)
        arch.sync_threads()


@cute.jit
def entry_of(tensors, gradients: tuple, number: Int32, turn: Int32, band: Band, config: Constexpr[Config]) -> Entry:
    """Of a number in the list the gradient whose turn it is: dQ and nothing (of < 0), or dK and dV."""
    mdQ, mdK, mdV = gradients
    by_keys = number >= 0
    seqlen_q, seqlen_k, heads_q, heads_k = tensors.Q.shape[1], tensors.K.shape[1], tensors.Q.shape[2], tensors.K.shape[2]
    number = number if by_keys else -1 - number
    of_queries, of_keys = config.repaired_parts
    parts = Int32(of_keys) if by_keys else Int32(of_queries)
    groups = cute.ceil_div(seqlen_k if by_keys else seqlen_q, ROWS)
    heads = heads_k if by_keys else heads_q
    group, part = number // parts, number % parts
    row0, head, batch = group % groups * ROWS, group // groups % heads, group // groups // heads
    of = (OF_DK + turn) if by_keys else (OF_DQ - turn)
    gX = matrix(mdQ, batch, head if not by_keys else 0)
    if by_keys:
        gX = either(turn == 0, matrix(mdK, batch, head), matrix(mdV, batch, head))
    width = Int32(config.head_dim // of_queries)
    if by_keys:
        width = Int32(config.head_dim // of_keys) if turn == 0 else Int32(config.head_dim_v // of_keys)
    begin, end = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
    for half in range_constexpr(2):
        row = row_of(row0, half)
        first, last = keys_of(row, band, config)
        if by_keys:
            first, last = queries_of(row, band, config)
        begin[half], end[half] = max(first, 0), min(last, seqlen_q if by_keys else seqlen_k)
        if row >= gX.rows:
            end[half] = begin[half]
    return Entry(of, gX, head, batch, row0, part * width, min((part + 1) * width, gX.columns), begin, end)


@cute.jit
def heads_of(entry: Entry, tensors) -> Int32:
    """How many query heads the sums of an entry go over."""
    return Int32(1) if entry.of == OF_DQ else tensors.Q.shape[2] // tensors.K.shape[2]


@cute.jit
def others_of(entry: Entry, g: Int32, tensors) -> Others:
    """The g-th of them."""
    group, by_keys, batch = tensors.Q.shape[2] // tensors.K.shape[2], entry.of != OF_DQ, entry.batch
    head = entry.head * group + g if by_keys else entry.head
    head_k = entry.head if by_keys else entry.head // group
    of_queries, of_keys = pieces_of(tensors.Q), pieces_of(tensors.K)
    looked = looked_at(tensors)
    Q = matrix(tensors.Q, batch, head, False, looked)
    dO = matrix(tensors.dO, batch, head, True, looked + 4 * of_queries)
    K = matrix(tensors.K, batch, head_k, False, looked + 8 * of_queries)
    V = matrix(tensors.V, batch, head_k, False, looked + 8 * of_queries + 4 * of_keys)
    summed = either(entry.of == OF_DV, dO, either(by_keys, Q, K))
    statistics = tensors.lse[batch, head, None], tensors.minus_delta[batch, head, None]
    products = either(by_keys, K, Q), either(by_keys, Q, K), either(by_keys, V, dO), either(by_keys, dO, V)
    return Others(*products, summed, *statistics, tensors.changes, changed.Head(batch, head))


@cute.jit
def repair(
    entry: Entry, holes: cute.Tensor, tensors, factor: Float32, sums: cute.Tensor, lost: cute.Tensor, warp: Int32, band: Band,
    scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """By all warps."""
    for i in cutlass.range(warp, cute.size(holes), WARPS, unroll=1):
        lost[i, arch.lane_idx()] = Int32(0)
    arch.sync_threads()
    total = cute.make_rmem_tensor(config.repaired_columns // 2, Float32)
    total.fill(0.0)
    turns, goes_on = Int32(1) if entry.of == OF_DQ else Int32(2), Boolean(True)
    for turn in cutlass.range(turns, unroll=1):
        if goes_on:
            for g in cutlass.range(heads_of(entry, tensors), unroll=1):
                add_others(total, entry, others_of(entry, g, tensors), holes, lost, warp, turn, band, scale_log2, config)
            add_up(total, sums, warp)
            goes_on = turn + 1 < turns and not is_settled(total, holes)
            if goes_on and warp != 0:
                total.fill(0.0)
    write(total, entry, holes, factor, warp, config)


# Which numbers are holes


@cute.jit
def holes_in(entry: Entry, config: Constexpr[Config]) -> cute.Tensor:
    """A bit for each number of this lane, eight a row; (columns / STEP,) int32."""
    bits = cute.make_rmem_tensor(config.repaired_columns // STEP, Int32)
    bits.fill(0)
    for step in range_constexpr(cute.size(bits)):
        for half in range_constexpr(2):
            row, column = row_of(entry.row0, half), column_of(entry.column0, step)
            if row < entry.gX.rows and column < entry.last:
                bits[step] |= nan_bits(entry.gX, row, column, config) << EIGHT * half
    return bits


@cute.jit
def nan_bits(gX: Matrix, row: Int32, column: Int32, config: Constexpr[Config]) -> Int32:
    """Which of eight numbers are NaN."""
    words, found = words_of(gX, row, column), Int32(0)
    numbers = cute.recast_tensor(words, dsl(config.dtype))
    for x in range_constexpr(EIGHT):
        if is_nan(numbers[x].to(Float32)):
            found |= 1 << x
    return found


@cute.jit
def row_of(row0: Int32, half: Constexpr[int]) -> Int32:
    return row0 + arch.lane_idx() // QUAD + EIGHT * half


@cute.jit
def column_of(column0: Int32, step: Constexpr[int]) -> Int32:
    return column0 + STEP * step + EIGHT * (arch.lane_idx() % QUAD)


@cute.jit
def any_hole(holes: cute.Tensor) -> Boolean:
    """Of any lane."""
    found = Int32(0)
    for i in range_constexpr(cute.size(holes)):
        found |= holes[i]
    return arch.vote_any_sync(found != 0)


@cute.jit
def close_row(holes: cute.Tensor, half: Constexpr[int]):
    """It is NaN by right."""
    for i in range_constexpr(cute.size(holes)):
        holes[i] &= 0xFF << EIGHT * (1 - half)


@cute.jit
def hides_nothing(entry: Entry, tensors, band: Band, config: Constexpr[Config]) -> Boolean:
    """Whether all hidden numbers that may have met the entry's rows in a product are small, so that what is NaN is so by right. Such numbers are in
    tiles that blocks of rows visit; tiles and blocks have at most TILE rows each.
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
        for i in cutlass.range(5, unroll=1):  # what is summed up and other factors of dP, on either side of what all see; own factors of dP
            X = either(i < 2, at.summed, either(i < 4, at.other_dP, at.own_dP))
            first, last = (begin, common_begin) if i % 2 == 0 else (common_end, end)
            if i == 4:
                first, last = entry.row0, entry.row0 + 1
            if small:
                small = all_small(X, first, last, at.minus_delta, config)
    return small


@cute.jit
def all_small(X: Matrix, begin: Int32, end: Int32, minus_delta: cute.Tensor, config: Constexpr[Config]) -> Boolean:
    """Whether all pieces with rows in [begin, end) are; those that are not known are looked through."""
    small, last = Boolean(True), cute.ceil_div(end, PIECE)
    piece0 = begin // PIECE
    while piece0 < last and begin < end and small:
        known, piece = Int32(SMALL), piece0 + arch.lane_idx()
        if piece < last:
            known = known_of(X, piece)[0]
        small = not arch.vote_any_sync(known == LARGE)
        unknown = Int32(arch.vote_ballot_sync(known == UNKNOWN))
        while unknown != 0 and small:
            i = Int32(WARP - 1 - arch.clz(unknown))
            unknown &= ~(1 << i)
            small = look(X, piece0 + i, minus_delta, config)
        piece0 += WARP
    return small


@cute.jit
def known_of(X: Matrix, piece: Int32) -> cute.Tensor:
    return cute.make_tensor(cute.make_ptr(Int32, X.looked + 4 * piece, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(1))


@cute.jit
def look(X: Matrix, piece: Int32, minus_delta: cute.Tensor, config: Constexpr[Config]) -> Boolean:
    """Whether a piece is such that a product of any two rows is finite, and for dO delta too. Warps that look at the same time find the same."""
    found = Int32(0)
    for step in cutlass.range(max(config.head_dim, config.head_dim_v) // STEP, unroll=2):
        for half in range_constexpr(PIECE // EIGHT):
            words = words_of(X, row_of(piece * PIECE, half), column_of(STEP * step, 0))
            for j in range_constexpr(4):
                found |= too_large(words[j], dsl(config.dtype))
    if X.with_delta:  # noqa: SIM102
        if not is_finite(minus_delta[min(piece * PIECE + arch.lane_idx(), X.rows - 1)]):
            found = Int32(1)
    small = arch.vote_all_sync(found == 0)
    if arch.lane_idx() == 0:
        known_of(X, piece)[0] = Int32(SMALL) if small else Int32(LARGE)
    return small


@cute.jit
def settle(entry: Entry, holes: cute.Tensor, tensors, band: Band, config: Constexpr[Config]):
    """Close what is NaN by right, as far as hidden numbers and statistics tell: dQ of a query that sees something and whose own are NaN; dK and dV by
    `settle_keys`.
    """
    if const_expr(config.looks):  # noqa: SIM102
        if any_hole(holes):  # noqa: SIM102
            if hides_nothing(entry, tensors, band, config):
                holes.fill(0)
    if any_hole(holes):
        for g in cutlass.range(heads_of(entry, tensors), unroll=1):
            at = others_of(entry, g, tensors)
            if entry.of == OF_DQ:
                for half in range_constexpr(2):
                    row = row_of(entry.row0, half)
                    if row < entry.gX.rows:
                        lost = is_nan(at.lse[row]) or is_nan(at.minus_delta[row])
                        if lost:  # noqa: SIM102
                            if sees_any(row, at.which.head, at.which.batch, band, config):
                                close_row(holes, half)
            else:
                settle_keys(entry, at, holes, band, config)


@cute.jit
def settle_keys(entry: Entry, at: Others, holes: cute.Tensor, band: Band, config: Constexpr[Config]):
    """dK of the keys that see a query of NaN statistics, and dV where its dO is NaN; where its log-sum-exp is, P is, and with it all of dV. Three
    queries are tried: the last one that all 16 keys see, and the last and first that any sees.
    """
    begin, end, common_begin, common_end = ranges_of(entry)
    for i in cutlass.range(3, unroll=1):
        query = Int32(NONE)
        if any_hole(holes):
            query = lost_query(at, common_begin if i == 0 else begin, common_end if i == 0 else end, i < 2)
        if query >= 0:
            everywhere = entry.of == OF_DK or is_nan(at.lse[query])
            for half in range_constexpr(2):
                sees = query >= entry.begin[half] and query < entry.end[half]
                if const_expr(config.sees == "runs"):  # noqa: SIM102
                    if sees:
                        sees = shows(query, row_of(entry.row0, half), at.which.head, at.which.batch, band, config)
                if const_expr(config.bias is not None):
                    sees = sees and at.lse[query] != Float32.inf
                if sees:
                    if everywhere:
                        close_row(holes, half)
                    else:
                        for step in range_constexpr(cute.size(holes)):
                            found = nan_bits(at.other_dP, query, column_of(entry.column0, step), config)
                            holes[step] &= ~(found << EIGHT * half)
    if const_expr(config.looks):  # noqa: SIM102
        if entry.of == OF_DV:
            settle_signs(entry, at, common_begin, common_end, holes, config)


@cute.jit
def settle_signs(entry: Entry, at: Others, begin: Int32, end: Int32, holes: cute.Tensor, config: Constexpr[Config]):
    """dV in columns where dO is NaN, or inf and -inf, at queries in [begin, end), which all keys see that see any: whatever P is, as it is not
    negative.
    """
    dtype, found = dsl(config.dtype), cute.make_rmem_tensor(cute.size(holes), Int32)  # eight bits for inf, eight for -inf
    found.fill(0)
    turns = Int32(SIGNS)
    while turns > 0 and begin < end and any_hole(holes):
        turns -= 1
        end -= ROWS
        for step in range_constexpr(cute.size(holes)):
            for half in range_constexpr(2):
                words = words_of(at.other_dP, max(row_of(end, half), begin), column_of(entry.column0, step))
                numbers = cute.recast_tensor(words, dtype)
                for x in range_constexpr(EIGHT):
                    number = numbers[x].to(Float32)
                    if not number < Float32.inf:
                        found[step] |= 1 << x
                    if not number > -Float32.inf:
                        found[step] |= 1 << (EIGHT + x)
            for apart in (4, 8, 16):
                found[step] |= arch.shuffle_sync_bfly(found[step], apart)
            both = found[step] & found[step] >> EIGHT & 0xFF
            for half in range_constexpr(2):
                if entry.begin[half] < entry.end[half]:
                    holes[step] &= ~(both << EIGHT * half)


@cute.jit
def lost_query(at: Others, begin: Int32, end: Int32, last: Boolean) -> Int32:
    """The last query in [begin, end) whose log-sum-exp or delta is NaN, or the first; NONE without one. A lane looks at four at a time."""
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
def ranges_of(entry: Entry) -> tuple[Int32, Int32, Int32, Int32]:
    """[begin, end) of the others that any of the rows sees, and of those that all see which see any."""
    begin, end, latest, earliest = Int32(1 << 30), Int32(0), Int32(0), Int32(1 << 30)
    for half in range_constexpr(2):
        if entry.begin[half] < entry.end[half]:
            begin, end = min(begin, entry.begin[half]), max(end, entry.end[half])
            latest, earliest = max(latest, entry.begin[half]), min(earliest, entry.end[half])
    begin, earliest = (-arch.warp_redux_sync(-x, "max") for x in (begin, earliest))
    end = arch.warp_redux_sync(end, "max")
    return begin, end, arch.warp_redux_sync(latest, "max"), min(earliest, end)  # none where no row sees anything


@cute.jit
def is_settled(total: cute.Tensor, holes: cute.Tensor) -> Boolean:
    """Whether the sum of visible pairs remains what it is wherever it is a hole, as what comes now is finite."""
    settled = Boolean(True)
    for step in range_constexpr(cute.size(holes)):
        found = infinities_in(total, step)
        settled = settled and holes[step] & ~(found | found >> 2 * EIGHT) == 0
    return arch.vote_all_sync(settled)


@cute.jit
def is_lost(total: cute.Tensor, holes: cute.Tensor, lost: cute.Tensor) -> Boolean:
    """Whether each hole is NaN by what all warps together have: a NaN, or infinities of both signs. lost: (columns / STEP,
    WARP), in shared memory.
    """
    settled = Boolean(True)
    for step in range_constexpr(cute.size(holes)):
        found = infinities_in(total, step)
        before = arch.inline_ptx(
            "atom.relaxed.cta.shared.or.b32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int32],
            read_only_args=[cute.domain_offset((step, arch.lane_idx()), lost).iterator.toint(), found],
        )
        found |= before
        settled = settled and holes[step] & ~(found & found >> 2 * EIGHT) == 0
    return arch.vote_all_sync(settled)


@cute.jit
def infinities_in(total: cute.Tensor, step: Constexpr[int]) -> Int32:
    """A bit for each number that is inf, as in `holes_in`, and from 16 on one for each that is -inf. NaN has both."""
    found = Int32(0)
    for half in range_constexpr(2):
        for x in range_constexpr(EIGHT):
            number, place = total[place_of(step, half, x)], const_expr(EIGHT * half + x)
            if not number < Float32.inf:
                found |= 1 << place
            if not number > -Float32.inf:
                found |= const_expr(signed(1 << (2 * EIGHT + place)))
    return found


def place_of(step: int, half: int, x: int) -> int:
    """Where a lane has the sum of column x of its eight: a product has two columns, of either row."""
    return 4 * (4 * step + x // 2) + 2 * half + x % 2


@cute.jit
def write(total: cute.Tensor, entry: Entry, holes: cute.Tensor, factor: Float32, warp: Int32, config: Constexpr[Config]):
    """factor * total into the holes."""
    dtype = dsl(config.dtype)
    for step in range_constexpr(cute.size(holes)):
        if warp == step % WARPS:
            for half in range_constexpr(2):
                if (holes[step] >> EIGHT * half) & 0xFF != 0:
                    row, column = row_of(entry.row0, half), column_of(entry.column0, step)
                    words = words_of(entry.gX, row, column)
                    numbers = cute.make_rmem_tensor(EIGHT, dtype)
                    cute.autovec_copy(cute.recast_tensor(words, dtype), numbers)
                    for x in range_constexpr(EIGHT):
                        if (holes[step] >> (EIGHT * half + x)) & 1 != 0:
                            numbers[x] = (total[place_of(step, half, x)] * factor).to(dtype)
                    cute.autovec_copy(cute.recast_tensor(numbers, Int32), four(entry.gX, row, column))


# Sums of visible pairs


@cute.jit
def add_others(
    total: cute.Tensor, entry: Entry, at: Others, holes: cute.Tensor, lost: cute.Tensor, warp: Int32, turn: Int32, band: Band,
    scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """This warp's share of the others: for dK and dV in turn 0 of 16 queries at a time those among which is one of a delta that is not finite, in
    turn 1 the rest. Ends as soon as all holes are NaN by what the warps have.
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
            weights, shown = pairs_of(entry, at, other0, band, scale_log2, config)
            if arch.vote_any_sync(shown != 0):
                add_rows(total, weights, shown, at.summed, other0, entry.column0, config)
                done += 1
                if turn == 0 and done % OFTEN == 1:
                    settled = is_lost(total, holes, lost)
        base += ROWS * WARP


@cute.jit
def all_finite_from(gX: cute.Tensor, row: Int32) -> Boolean:
    """Of 16 numbers, as far as there are."""
    finite, numbers = Boolean(True), cute.make_rmem_tensor((4, 4), Float32)
    for i in range_constexpr(4):
        cute.autovec_copy(cute.make_tensor((gX.iterator + row + 4 * i).align(16), cute.make_layout(4)), numbers[None, i])
    for i in range_constexpr(cute.size(numbers)):
        finite = finite and is_finite(numbers[i])
    return finite


@cute.jit
def pairs_of(
    entry: Entry, at: Others, other0: Int32, band: Band, scale_log2: Float32, config: Constexpr[Config]
) -> tuple[cute.Tensor, Int32]:  # fmt: skip
    """What the others from other0 on are multiplied by: P or dS of this lane's pairs, 0 for those that are hidden, and a bit for each that is seen.

    Pairs are in the order of a product: two others, for both rows; then those of the next eight.
    """
    lane, weights, shown = arch.lane_idx(), cute.make_rmem_tensor(EIGHT, Float32), Int32(0)
    weights.fill(0.0)
    by_keys, visited, ref = entry.of != OF_DQ, Boolean(True), Int32(0)
    if const_expr(config.sees == "runs"):
        query0, key0 = other0 if by_keys else entry.row0, entry.row0 if by_keys else other0
        plane = band.tables.planes[at.which.batch, at.which.head]
        visited, there = visit_of(query0 // config.tile_m, key0 // config.tile_n, plane, band.tables)
        ref = band.tables.visits[there, 1]
    if visited:
        dP = cute.make_rmem_tensor(EIGHT, Float32)
        dP.fill(0.0)
        S = scores(at.own_S, entry.row0, at.other_S, other0, config.head_dim, config)
        if entry.of != OF_DV:
            dP.store(scores(at.own_dP, entry.row0, at.other_dP, other0, config.head_dim_v, config).load())
        for i in range_constexpr(EIGHT):
            half, row, other = const_expr(i // 2 % 2), row_of(entry.row0, i // 2 % 2), other0 + i // 4 * EIGHT + lane % QUAD * 2 + i % 2
            query, key = other if by_keys else row, row if by_keys else other
            seen = other >= entry.begin[half] and other < entry.end[half]
            if const_expr(config.sees == "runs"):  # noqa: SIM102
                if seen:
                    seen = shows_in(ref, query, key, band.tables, config)
            if const_expr(config.bias is not None):  # noqa: SIM102
                if seen:
                    seen = at.lse[query] != Float32.inf
            if seen:
                p, factor = weight_of(at, S[i], query, key, scale_log2, config)
                weights[i] = p * config.enlarged if entry.of == OF_DV else factor * (dP[i] + at.minus_delta[query])
                shown |= 1 << i
    return weights, shown


@cute.jit
def weight_of(at: Others, s: Float32, query: Int32, key: Int32, scale_log2: Float32, config: Constexpr[Config]):
    """P of a pair that is seen, and the factor of dP - delta in dS."""
    if const_expr(config.modified):
        return changed.pair_weights(s, query, key, at.lse[query], at.changes, at.which, scale_log2, config)
    p = cute.math.exp2(s * scale_log2 - at.lse[query], fastmath=True)
    return p, p


@cute.jit
def scores(A: Matrix, a0: Int32, B: Matrix, b0: Int32, dim: Constexpr[int], config: Constexpr[Config]) -> cute.Tensor:
    """A B^T of 16 rows each. Which column is which number of a product does not matter, so a lane takes eight neighbours."""
    acc, dtype = cute.make_rmem_tensor(EIGHT, Float32), dsl(config.dtype)
    acc.fill(0.0)
    for step in cutlass.range(dim // STEP, unroll=1):
        a, b = ([words_of(X, row_of(row0, half), column_of(STEP * step, 0)) for half in range(2)] for X, row0 in ((A, a0), (B, b0)))
        for k in range_constexpr(0, 4, 2):
            left = [a[half][k + i] for i in range(2) for half in range(2)]
            for tile in range_constexpr(2):
                multiply(acc, 4 * tile, left, b[tile][k], b[tile][k + 1], dtype)
    return acc


@cute.jit
def add_rows(
    total: cute.Tensor, weights: cute.Tensor, shown: Int32, X: Matrix, other0: Int32, column0: Int32, config: Constexpr[Config]
):  # fmt: skip
    """total += weights times 16 rows of X from other0 on, as far as they are seen. Where all of them are, products say what is NaN by right;
    elsewhere `add_not_finite` does.
    """
    all_shown = arch.vote_all_sync(shown == 0xFF)
    dtype, kind = dsl(config.dtype), const_expr("bf16x2" if config.dtype == torch.bfloat16 else "f16x2")
    rounded = pairs_packed(weights, kind)
    for step in range_constexpr(config.repaired_columns // STEP):
        pair = [words_of(X, row_of(other0, half), column_of(column0, step)) for half in range(2)]
        found = Int32(0)
        for half in range_constexpr(2):
            for j in range_constexpr(4):
                found |= not_finite(pair[half][j], dtype)
        if arch.vote_any_sync(found != 0 and not all_shown):
            add_not_finite(total, weights, shown, pair, step, kind, dtype)
            for half in range_constexpr(2):
                for j in range_constexpr(4):
                    pair[half][j] = finite_part(pair[half][j], dtype)
        for j in range_constexpr(4):
            multiply(total, 4 * (4 * step + j), rounded, transpose(pair[0][j]), transpose(pair[1][j]), dtype)


@cute.jit
def add_not_finite(
    total: cute.Tensor, weights: cute.Tensor, shown: Int32, pair: list, step: Constexpr[int], kind: Constexpr[str], dtype: Constexpr
):  # fmt: skip
    """total += weights times the numbers of 16 rows that are not finite: an infinity or NaN, found out by counting. One product counts the terms,
    another the positive ones less the negative ones; a weight of 0, or NaN on either side, has no sign. pair: the rows' words.
    """
    signs, ones = (cute.make_rmem_tensor(EIGHT, Float32) for _ in range(2))
    for i in range_constexpr(EIGHT):
        seen = (shown >> i) & 1 != 0
        signs[i] = sign_of(weights[i]) if seen else Float32(0.0)
        ones[i] = Float32(1.0) if seen else Float32(0.0)
    signs, ones = pairs_packed(signs, kind), pairs_packed(ones, kind)
    count, balance = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
    for j in range_constexpr(4):
        number, infinite = [], []
        for half in range_constexpr(2):
            x = [of_word(pair[half][j], i, dtype) for i in range(2)]
            number.append(changed.packed(*(Float32(0.0) if is_finite(each) else Float32(1.0) for each in x), kind))
            infinite.append(changed.packed(*(Float32(0.0) if is_finite(each) else sign_of(each) for each in x), kind))
        count.fill(0.0)
        balance.fill(0.0)
        multiply(count, 0, ones, *(transpose(each) for each in number), dtype)
        multiply(balance, 0, signs, *(transpose(each) for each in infinite), dtype)
        for i in range_constexpr(4):
            if count[i] > 0.0:
                infinity = Float32.inf if balance[i] > 0.0 else -Float32.inf
                total[4 * (4 * step + j) + i] += infinity if count[i] == max(balance[i], -balance[i]) else Float32(float("nan"))


@cute.jit
def add_up(total: cute.Tensor, sums: cute.Tensor, warp: Int32):
    """The sum over the warps, in their order, for all of them. sums: (numbers, WARP, WARPS)."""
    lane, numbers = arch.lane_idx(), cute.size(total)
    arch.sync_threads()
    for i in range_constexpr(numbers):
        sums[i, lane, warp] = total[i]
    arch.sync_threads()
    for i in cutlass.range(warp, numbers, WARPS, unroll=1):
        one = Float32(0.0)
        for other in range_constexpr(WARPS):
            one += sums[i, lane, other]
        sums[i, lane, 0] = one
    arch.sync_threads()
    for i in range_constexpr(numbers):
        total[i] = sums[i, lane, 0]


# Numbers


@cute.jit
def matrix(mX: cute.Tensor, batch: Int32, head: Int32, with_delta: Constexpr[bool] = False, looked: Int64 | None = None) -> Matrix:
    """mX: (batch, seqlen, heads, head_dim). looked: of the whole tensor."""
    gX, address = mX[batch, None, head, None], Int64(0)
    if const_expr(looked is not None):
        address = looked + 4 * ((batch * mX.shape[2] + head) * cute.ceil_div(mX.shape[1], PIECE))
    step = Int64(gX.stride[0] * (mX.element_type.width // 8))
    return Matrix(gX.iterator.toint(), step, Int32(gX.shape[0]), Int32(gX.shape[1]), Boolean(with_delta), address)


@cute.jit
def either(first: Boolean, a: Matrix, b: Matrix) -> Matrix:
    return Matrix(*(x if first else y for x, y in zip(a, b, strict=True)))


@cute.jit
def four(X: Matrix, row: Int32, column: Int32) -> cute.Tensor:
    """Eight numbers of a row, as words."""
    pointer = cute.make_ptr(Int32, X.address + row * X.step + 2 * column, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(4))


@cute.jit
def words_of(X: Matrix, row: Int32, column: Int32) -> cute.Tensor:
    """The same, read; zeros beyond the last column, and beyond the last row what that has."""
    words = cute.make_rmem_tensor(4, Int32)
    words.fill(0)
    if column < X.columns:
        cute.autovec_copy(four(X, min(row, X.rows - 1), column), words)
    return words


@cute.jit
def bring(X: Matrix, row0: Int32, dim: Constexpr[int]):
    """16 rows into the L1 cache: what is read a few instructions before it is wanted would be waited for, and registers are few."""
    row = min(row0 + arch.lane_idx() // 2, X.rows - 1)
    for column0 in range_constexpr(0, dim, 2 * LINE):
        column = column0 + LINE * (arch.lane_idx() % 2)
        if column < X.columns:
            address = X.address + row * X.step + 2 * column
            arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def not_finite(word: Int32, dtype: Constexpr) -> Int32:
    """0 if both 16-bit numbers are finite."""
    return exponents_from(word, 0x7F80, 0x7F80) if dtype is BFloat16 else exponents_from(word, 0x7C00, 0x7C00)


def too_large(word: Int32, dtype: Constexpr) -> Int32:
    """0 if both 16-bit numbers are such that fp32 holds a sum of 256 products of two: below 2^59, or finite in fp16."""
    return exponents_from(word, 0x7F80, (127 + 59) << 7) if dtype is BFloat16 else not_finite(word, dtype)


def exponents_from(word: Int32, ones: int, least: int) -> Int32:
    """0 if both exponents are below one: the difference is added and carries over. A bit further right, as a sum of int32 may not overflow."""
    ones, more = ones >> 1, 0x4000 - (least >> 1)
    return ((word >> 1 & (ones << 16 | ones)) + (more << 16 | more)) & 0x40004000


def signed(bits: int) -> int:
    """A constant of 32 bits as an int32."""
    return bits - (1 << 32) if bits >> 31 else bits


def finite_part(word: Int32, dtype: Constexpr) -> Int32:
    """With 0 in place of a 16-bit number that is not finite."""
    last_bits = not_finite(word, dtype) >> 14
    return word & ~((last_bits << 16) - last_bits)


def transpose(word: Int32) -> Int32:
    return arch.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


@cute.jit
def multiply(acc: cute.Tensor, first: Constexpr[int], a: tuple, b0: Int32, b1: Int32, dtype: Constexpr):
    """Four numbers of acc from `first` on, += a product of 16 x 16 and 16 x 8 (PTX ISA, "mma.m16n8k16")."""
    kind = const_expr("bf16" if dtype is BFloat16 else "f16")
    found = arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b0, b1, *(acc[first + i] for i in range(4))],
    )
    for i in range_constexpr(4):
        acc[first + i] = found[i]


def pairs_packed(numbers: cute.Tensor, kind: str) -> list:
    """Eight numbers as a product takes them."""
    return [changed.packed(numbers[2 * i], numbers[2 * i + 1], kind) for i in range(4)]


@cute.jit
def of_word(word: Int32, i: Constexpr[int], dtype: Constexpr) -> Float32:
    """One of its two 16-bit numbers."""
    both = cute.make_rmem_tensor(2, Int32)  # of one it would be the first number twice
    both[0] = word
    return cute.recast_tensor(both, dtype)[i].to(Float32)


@cute.jit
def sign_of(x: Float32) -> Float32:
    """1, -1, or 0 for 0 and NaN."""
    return Float32(1.0) if x > 0.0 else Float32(-1.0) if x < 0.0 else Float32(0.0)


@cute.jit
def is_finite(x: Float32) -> Boolean:
    return x < Float32.inf and x > -Float32.inf


@cute.jit
def is_nan(x: Float32) -> Boolean:
    return x != x
