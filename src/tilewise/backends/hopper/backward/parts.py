"""What the kernels of the backward pass on Hopper share, and what comes after the main one.

`finish`: dQ = scale * the sum, in the inputs' dtype.
Elements of dQ, dK and dV that are NaN are examined afterwards (repair/).
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.order import is_visited
from tilewise.backends.hopper.backward.repair.elements import is_finite
from tilewise.backends.hopper.backward.repair.reports import report_queries
from tilewise.backends.hopper.backward.tiles import THREADS, WARP, Mma, Pipes, Smem, place_of_sum
from tilewise.backends.hopper.operands import Band, Changes
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, Int64, arch, const_expr, cute, cutlass, range_constexpr

QUAD = 4  # threads that share a row of an accumulator
LOOKING = 4  # thread blocks of `finish` a multiprocessor where most tiles are finished


class Tensors(NamedTuple):
    """As torch has them: (batch, seqlen, heads, head_dim), but for what says otherwise."""

    Q: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    dO: cute.Tensor
    lse: cute.Tensor  # (batch, heads_q, rows of whole tiles) fp32: in powers of two (`natural`: of e), +inf for a row that sees nothing
    minus_delta: cute.Tensor  # likewise: -delta
    sum_dQ: cute.Tensor  # (batch, heads_q, m_blocks, tile_m * head_dim) fp32, a tile in the order of its registers
    turns: cute.Tensor  # (batch, heads_q, m_blocks, counters) int32: how often a tile, or a warpgroup's part of it, has been added to;
    # `one_block`: how many warps have written finite elements of it
    dQ: cute.Tensor | None  # the gradient, where the consumers write it themselves (`one_block`)
    changes: Changes
    spoiled: cute.Tensor | None  # (1 + .,) int32: how many parts of gradients are not finite, and which (repair/entries.py)


class Scales(NamedTuple):
    """What scores are multiplied with: for gradients, and in the exponent of 2."""

    plain: Float32
    log2: Float32


class Shared(NamedTuple):
    """What the consumers of a thread block have in common from its beginning to its end."""

    tensors: Tensors
    sm: Smem
    pipes: Pipes
    mma: Mma
    band: Band
    scales: Scales


@cute.jit
def counter_of(tensors: Tensors, batch: Int32, head: Int32, m_block: Int32, part: Int32) -> Int64:
    """The address of how often a tile of dQ has been added to."""
    return (tensors.turns.iterator + cute.crd2idx((batch, head, m_block, part), tensors.turns.layout)).toint()


@cute.jit
def now_at(counter: Int64) -> Int32:
    """What others wrote before they counted is seen by what this thread reads from now on."""
    return arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[counter])


@cute.jit
def vector(gX: cute.Tensor, i: Int32, numbers: Constexpr[int]) -> cute.Tensor:
    """Number i of the aligned vectors of 16 bytes that a row consists of."""
    return cute.make_tensor((gX.iterator + numbers * i).align(16), cute.make_layout(numbers))


@cute.kernel
def finish(tensors: Tensors, mdQ: cute.Tensor, band: Band, scale: Float32, mma: cute.TiledMma, config: Constexpr[Config]):
    """A block a tile of queries, with the threads of the product that computed it: each has the elements that it had. Where most tiles are finished
    already (finish.py), fewer blocks look for those that are not.
    """
    thread, (m_block, head, batch) = arch.thread_idx()[0], arch.block_idx()
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    if const_expr(config.only_looks):
        m_blocks, heads = tensors.turns.shape[2], tensors.turns.shape[1]
        tiles, step = m_blocks * heads * tensors.turns.shape[0], arch.grid_dim()[0]
        for first in cutlass.range(m_block, tiles, WARP * step, unroll=1):  # a warp looks at as many at once as it has lanes
            tile, missing = first + arch.lane_idx() * step, Boolean(False)
            if tile < tiles:
                turns = tensors.turns[tile // (m_blocks * heads), tile // m_blocks % heads, tile % m_blocks, 0]
                missing = turns < writers_of(config) if const_expr(config.one_block) else turns >= 0
            left = Int32(arch.vote_ballot_sync(missing))
            while left != 0:
                last = Int32(WARP - 1 - arch.clz(left))
                left, tile = left & ~(1 << last), first + last * step
                m_block, head, batch = tile % m_blocks, tile // m_blocks % heads, tile // (m_blocks * heads)
                finish_tile(tensors, mdQ, thread, m_block, head, batch, band, scale, mma, config)
    else:
        finish_tile(tensors, mdQ, thread, m_block, head, batch, band, scale, mma, config)


@cute.jit
def finish_tile(
    tensors: Tensors, mdQ: cute.Tensor, thread: Int32, m_block: Int32, head: Int32, batch: Int32, band: Band,
    scale: Float32, mma: cute.TiledMma, config: Constexpr[Config],
):  # fmt: skip
    gSum, gdQ = tensors.sum_dQ[batch, head, m_block, None], mdQ[batch, None, head, None]
    shape = const_expr((config.head_dim, config.tile_m) if config.dq_transposed else (config.tile_m, config.head_dim))
    cdQ = mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
    acc = cute.make_rmem_tensor(cdQ.shape, Float32)
    finite = Boolean(True)
    if const_expr(config.one_block):
        finite = not is_visited(m_block, head, batch, band, tensors.K.shape[1], config)
        acc.fill(Float32(0.0) if finite else Float32.nan)  # which is repaired
    else:
        read_sum(gSum, acc, thread, config)
        if const_expr(config.ordered and config.mask_kind != "full"):
            written = is_visited(m_block, head, batch, band, tensors.K.shape[1], config)
            for i in range_constexpr(cute.size(acc)):
                acc[i] = acc[i] if written else Float32(0.0)
        if const_expr(config.repairs):
            finite = all_finite(acc)
    store(gdQ, acc, cdQ, m_block * config.tile_m, scale, config)
    if const_expr(config.repairs):  # noqa: SIM102
        if arch.vote_any_sync(not finite):
            warp, (over_rows, over_columns) = thread // WARP, config.dq_grid
            row0 = m_block * config.tile_m + warp % (4 * over_rows) * 16
            for piece in range_constexpr(config.dq_pieces):
                report_queries(tensors, row0, piece * over_columns + warp // (4 * over_rows), head, batch, config)


@cute.jit
def read_sum(gSum: cute.Tensor, acc: cute.Tensor, thread: Int32, config: Constexpr[Config]):
    """What this thread computed of a tile, and 0 beyond dQ's columns."""
    in_piece = const_expr(cute.size(acc) // (4 * config.dq_pieces))
    flat = cute.make_tensor(acc.iterator, cute.make_layout((4, in_piece, config.dq_pieces)))
    for piece in range_constexpr(config.dq_pieces):
        begin, vectors = place_of_sum(gSum, thread // THREADS, piece, config)
        for i in range_constexpr(in_piece):
            if i < vectors:
                cute.autovec_copy(vector(gSum, begin // 4 + thread % THREADS + i * THREADS, 4), flat[None, i, piece])
            else:
                flat[None, i, piece].fill(0.0)


def writers_of(config: Config) -> int:
    """Warps that write a part of a tile of dQ."""
    return config.dq_consumers * 128 // WARP


@cute.jit
def write_at_once(
    tensors: Tensors, acc: cute.Tensor, mma: cute.TiledMma, thread: Int32, batch: Int32, head: Int32, m_block: Int32, scale: Float32,
    config: Constexpr[Config],
):  # fmt: skip
    """dQ of a tile where one block has all keys, by the threads that computed it; what is not finite is left to `finish`."""
    shape = const_expr((config.head_dim, config.tile_m) if config.dq_transposed else (config.tile_m, config.head_dim))
    cdQ = mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
    finite = all_finite(acc) if const_expr(config.repairs) else Boolean(True)
    store(tensors.dQ[batch, None, head, None], acc, cdQ, m_block * config.tile_m, scale, config)
    if const_expr(config.repairs):  # noqa: SIM102
        if arch.vote_all_sync(finite) and arch.lane_idx() == 0:
            counter = counter_of(tensors, batch, head, m_block, 0)
            arch.inline_ptx("red.relaxed.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[counter])


@cute.jit
def store(gX: cute.Tensor, acc: cute.Tensor, at: cute.Tensor, row0: Int32, scale: Float32, config: Constexpr[Config]):
    """A tile of dQ, or of its transpose."""
    if const_expr(config.dq_transposed):
        store_transposed_tile(gX, acc, at, row0, scale)
    else:
        store_tile(gX, acc, at, row0, scale)


@cute.jit
def store_tile(gX: cute.Tensor, acc: cute.Tensor, at: cute.Tensor, row0: Int32, scale: Float32):
    """Write scale * acc where rows and columns exist. gX: (seqlen, head_dim); at: (row, column) of each element of acc.

    A thread has two neighbours of every eight columns, for two rows. The four threads that share a row exchange theirs, four times eight columns at
    a time, so that each stores 16 bytes.
    """
    member = arch.lane_idx() % QUAD
    words = cute.make_rmem_tensor(QUAD, Int32)
    pair = cute.recast_tensor(words, gX.element_type)
    for i in range_constexpr(0, cute.size(acc), 4 * QUAD):
        for r in range_constexpr(2):
            for c in range_constexpr(QUAD):
                for j in range_constexpr(2):
                    pair[2 * c + j] = (acc[i + 4 * c + 2 * r + j] * scale).to(gX.element_type)
            exchange(words, member)
            row, column = row0 + at[i + 2 * r][0], at[i][1] + 6 * member
            if row < gX.shape[0] and column < gX.shape[1]:
                cute.autovec_copy(pair, cute.make_tensor((gX[row, None].iterator + column).align(16), cute.make_layout(2 * QUAD)))


@cute.jit
def store_transposed_tile(gX: cute.Tensor, acc: cute.Tensor, at: cute.Tensor, row0: Int32, scale: Float32):
    """Likewise of a tile (head_dim, tile_m): blocks of 8 x 8 are transposed, and a thread's two times two of them exchanged."""
    lane = arch.lane_idx()
    member, behind = lane % QUAD, lane // QUAD
    words = cute.make_rmem_tensor(QUAD, Int32)
    pair = cute.recast_tensor(words, gX.element_type)
    for i in range_constexpr(0, cute.size(acc), 2 * QUAD):
        for b in range_constexpr(QUAD):
            for j in range_constexpr(2):
                pair[2 * b + j] = (acc[i + 2 * b + j] * scale).to(gX.element_type)
            words[b] = arch.inline_ptx(
                "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[words[b]]
            )
        exchange(words, member)
        column, row = at[i][0] - behind + 8 * (member % 2), row0 + at[i][1] - 2 * member + 8 * (member // 2) + behind
        if row < gX.shape[0] and column < gX.shape[1]:
            cute.autovec_copy(pair, cute.make_tensor((gX[row, None].iterator + column).align(16), cute.make_layout(2 * QUAD)))


@cute.jit
def exchange(words: cute.Tensor, member: Int32):
    """Between four neighbouring threads: thread i gets the others' words i, in the order of the threads; a 4 x 4 transposition in two steps."""
    for step in range_constexpr(2):
        distance = const_expr(2 >> step)
        upper = (member & distance) != 0
        for i in range_constexpr(QUAD):
            if const_expr(i & distance == 0):
                low, high = words[i], words[i + distance]
                other = arch.shuffle_sync_bfly(low if upper else high, distance)
                words[i] = other if upper else low
                words[i + distance] = high if upper else other


@cute.jit
def all_finite(x: cute.Tensor) -> Boolean:
    finite = Boolean(True)
    for i in range_constexpr(cute.size(x)):
        finite = finite & is_finite(x[i])
    return finite
