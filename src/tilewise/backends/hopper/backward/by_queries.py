"""dQ on its own, for heads beyond 128, and at 128 where all changes of scores come together: one thread block 128 queries, which walks over the tiles
of keys that they see.

With 64 keys a block, dQ's sums in global memory would be as large as all that `backward.kernel` reads, for half of the work between them. So S and dP
are computed a second time, here with a row a query: dS lies in the registers from which dQ += dS K takes its left operand, and dQ stays in registers
from beginning to end. Nothing is added up in memory, so there is no order to keep.

7 products instead of 5; predicted bottleneck: the matrix units.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward import parts
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.parts import Scales, Tensors
from tilewise.backends.hopper.backward.repair.reports import report_queries
from tilewise.backends.hopper.backward.tiles import THREADS, WARP, as_left_operand, load_row, swizzled, transposed
from tilewise.backends.hopper.operands import KEYS, QUERIES, Band
from tilewise.backends.hopper.scores import again as changed
from tilewise.backends.hopper.scores.derivative import differentiate_rows, drop
from tilewise.backends.hopper.visible.bands import all_of, tiles_seen
from tilewise.backends.hopper.visible.hiding import hide
from tilewise.backends.hopper.visible.queries import FIELDS, hide_unseen, keys_of, visit_in
from tilewise.sm90 import fragments, tma
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    Float32,
    Int32,
    OperandMajorMode,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    sm90,
    warpgroup,
)

CONSUMERS = 2
ROWS = QUERIES  # of a block, 64 a consumer; KEYS of a tile
REGISTERS = 24, 240


class Mma(NamedTuple):
    s: cute.TiledMma  # S = Q K^T and dP = dO V^T, shared memory
    dq: cute.TiledMma  # dQ += dS K, registers and shared memory


class Loads(NamedTuple):
    Q: tma.Tma
    dO: tma.Tma
    K: tma.Tma
    V: tma.Tma


class Pipes(NamedTuple):
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Smem(NamedTuple):
    Q: cute.Tensor  # (ROWS, head_dim, 1)
    dO: cute.Tensor  # (ROWS, head_dim_v, 1)
    K: cute.Tensor  # (KEYS, head_dim, 2)
    V: cute.Tensor  # (KEYS, head_dim_v, stages)
    visits: cute.Tensor | None  # (FIELDS, 2) int32, with K


class Block(NamedTuple):
    m0: Int32
    head: Int32
    batch: Int32


class Walk(NamedTuple):
    """Tiles of keys [first, last), from the last one down; those in [free_first, free_last) need no mask. For "tiles" these are visits."""

    first: Int32
    last: Int32
    free_first: Int32
    free_last: Int32


def stages_of_V(config: Config) -> int:
    """As many as 227 KB hold next to Q, dO and two stages of K."""
    taken = 2 * (ROWS + 2 * KEYS) * config.head_dim + 2 * ROWS * config.head_dim_v
    return 2 if taken + 2 * 2 * KEYS * config.head_dim_v < 225 << 10 else 1


def products(config: Config, dtype) -> Mma:
    smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    k, mn, grid = OperandMajorMode.K, OperandMajorMode.MN, (CONSUMERS, 1, 1)
    return Mma(
        sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, grid, (64, KEYS), smem),
        sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, grid, (64, config.head_dim), rmem),
    )


def layouts_of(config: Config, dtype) -> tuple:
    """Of Q, dO, K and V."""
    dim, dim_v = config.head_dim, config.head_dim_v
    tiles = (ROWS, dim, 1), (ROWS, dim_v, 1), (KEYS, dim, 2), (KEYS, dim_v, stages_of_V(config))
    return tuple(swizzled(dtype, *tile, 64) for tile in tiles)


@cute.jit
def block_of(number: Int32, m_blocks: Int32, heads_q: Int32, heads: Int32, together: Int32) -> Block:
    """`together` heads take turns, each with its last queries first: under a causal mask they have the longest walks."""
    first_head = number // (together * m_blocks) * together
    rest, share = number - first_head * m_blocks, min(together, heads - first_head)
    head = first_head + rest % share
    return Block((m_blocks - 1 - rest // share) * ROWS, head % heads_q, head // heads_q)


@cute.jit
def walk_of(block: Block, band: Band, config: Constexpr[Config]) -> Walk:
    """Empty where none of the rows sees a key."""
    if const_expr(config.mask_kind == "varlen"):
        first, last, free_first, free_last = (band.tables.query_walks[block.m0 // ROWS, i] for i in range(4))
        return Walk(first, last, free_first, free_last)
    if const_expr(config.mask_kind == "tiles"):
        plane, m_block = band.tables.planes[block.batch, block.head], block.m0 // ROWS
        first, last = band.tables.query_spans[plane, m_block, 0], band.tables.query_spans[plane, m_block, 1]
        return Walk(first, last, first, first)
    first, last = tiles_seen(block.m0, ROWS, KEYS, band)
    begin, end = all_of(block.m0, ROWS, band)
    free_first = min(max(cute.ceil_div(max(begin, 0), KEYS), first), last)
    free_last = min(max(max(end, 0) // KEYS, free_first), last)
    if block.m0 < band.q0 or block.m0 + ROWS > band.q1:
        free_last = free_first
    return Walk(first, last, free_first, free_last)


class Layouts(NamedTuple):
    """Of tiles in shared memory."""

    Q: cute.ComposedLayout
    dO: cute.ComposedLayout
    K: cute.ComposedLayout
    V: cute.ComposedLayout


@cute.kernel
def kernel(
    tensors: Tensors, mdQ: cute.Tensor, loads: Loads, band: Band, together: Int32, scales: Scales, mma: Mma, layouts: Layouts,
    config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    dtype = tensors.Q.element_type
    tiles = [storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in layouts]
    visits, visit_bytes = None, const_expr(4 * FIELDS if config.mask_kind == "tiles" else 0)
    if const_expr(config.mask_kind == "tiles"):
        visits = storage.allocate_tensor(Int32, cute.make_layout((FIELDS, 2)), 16)
    sm = Smem(*tiles, visits)
    warps = CONSUMERS * THREADS // WARP
    pipes = Pipes(
        tma.make_pipe(storage, 1, config.dtype.itemsize * ROWS * config.head_dim, warps),
        tma.make_pipe(storage, 1, config.dtype.itemsize * ROWS * config.head_dim_v, warps),
        tma.make_pipe(storage, 2, config.dtype.itemsize * KEYS * config.head_dim + visit_bytes, warps),
        tma.make_pipe(storage, stages_of_V(config), config.dtype.itemsize * KEYS * config.head_dim_v, warps),
    )
    tma.barriers_ready()
    heads_q = tensors.Q.shape[2]
    block = block_of(arch.block_idx()[0], cute.ceil_div(tensors.Q.shape[1], ROWS), heads_q, heads_q * tensors.Q.shape[0], together)
    walk = walk_of(block, band, config)
    warp_idx = arch.make_warp_uniform(arch.warp_idx())
    if warp_idx < THREADS // WARP:
        arch.setmaxregister_decrease(REGISTERS[0])
        if warp_idx == 0:
            produce(tensors, loads, sm, pipes, block, band, walk, config)
            arch.griddepcontrol_wait()  # the kernel before this one has come to its end before this one does
    else:
        arch.setmaxregister_increase(REGISTERS[1])
        consume(tensors, mdQ, sm, pipes, mma, block, band, walk, *scales, config)


@cute.jit
def produce(tensors: Tensors, loads: Loads, sm: Smem, pipes: Pipes, block: Block, band: Band, walk: Walk, config: Constexpr[Config]):
    once, at_k, at_v = tma.at_first_empty(1), tma.at_first_empty(2), tma.at_first_empty(stages_of_V(config))
    rows = block.m0 // ROWS, 0, block.head, block.batch
    head_k = block.head // (tensors.Q.shape[2] // tensors.K.shape[2])
    if walk.first < walk.last:  # nothing may be under way when the block ends
        pipes.q.producer_acquire(once)
        tma.load(loads.Q, sm.Q, pipes.q, once, (ROWS, config.head_dim), rows)
    for i in cutlass.range(walk.last - walk.first, unroll=1):
        n_block = walk.last - 1 - i
        if const_expr(config.mask_kind == "tiles"):
            visit = n_block
            n_block = band.tables.query_visits[visit, 0]
        keys = n_block, 0, head_k, block.batch
        pipes.k.producer_acquire(at_k)
        tma.load(loads.K, sm.K, pipes.k, at_k, (KEYS, config.head_dim), keys)
        if const_expr(config.mask_kind == "tiles"):
            load_row(band.tables.query_visits[visit, None], sm.visits, pipes.k, at_k, FIELDS)
        if i == 0:
            pipes.do.producer_acquire(once)
            tma.load(loads.dO, sm.dO, pipes.do, once, (ROWS, config.head_dim_v), rows)
        pipes.v.producer_acquire(at_v)
        tma.load(loads.V, sm.V, pipes.v, at_v, (KEYS, config.head_dim_v), keys)
        at_k.advance()
        at_v.advance()


class Rows(NamedTuple):
    """Of this thread, (ROWS of an accumulator,) each."""

    lse: cute.Tensor  # in powers of two (`natural`: of e), +inf where P is 0
    minus_delta: cute.Tensor
    begin: cute.Tensor  # of the keys that the row sees
    end: cute.Tensor


@cute.jit
def rows_of(tensors: Tensors, block: Block, band: Band, at: cute.Tensor, config: Constexpr[Config]) -> Rows:
    lse, minus_delta = (cute.make_rmem_tensor(fragments.ROWS, Float32) for _ in range(2))
    begin, end = (cute.make_rmem_tensor(fragments.ROWS, Int32) for _ in range(2))
    for r in range_constexpr(fragments.ROWS):
        row = block.m0 + at[r, 0][0]
        begin[r], end[r] = keys_of(row, band, config)
        lse[r], minus_delta[r] = Float32.inf, Float32(0.0)
        if row < tensors.lse.shape[2]:
            lse[r], minus_delta[r] = tensors.lse[block.batch, block.head, row], tensors.minus_delta[block.batch, block.head, row]
    return Rows(lse, minus_delta, begin, end)


@cute.jit
def consume(
    tensors: Tensors, mdQ: cute.Tensor, sm: Smem, pipes: Pipes, mma: Mma, block: Block, band: Band, walk: Walk,
    scale: Float32, scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """64 queries a warpgroup: all of the walk, then dQ."""
    thread = arch.thread_idx()[0] - THREADS
    consumer = arch.make_warp_uniform(thread // THREADS)
    s, dq = (x.get_slice(consumer * THREADS) for x in mma)
    tSrQ, tPrdO = (s.make_fragment_A(s.partition_A(x))[None, None, None, 0] for x in (sm.Q, sm.dO))
    tSrK, tPrV = (s.make_fragment_B(s.partition_B(x)) for x in (sm.K, sm.V))
    tQrK = dq.make_fragment_B(dq.partition_B(transposed(sm.K)))
    tScS = mma.s.get_slice(thread).partition_C(cute.make_identity_tensor((ROWS, KEYS)))
    cdQ = mma.dq.get_slice(thread).partition_C(cute.make_identity_tensor((ROWS, config.head_dim)))
    rows = rows_of(tensors, block, band, fragments.by_rows(tScS), config)
    acc_dQ = cute.make_rmem_tensor(cdQ.shape, Float32)
    acc_dQ.fill(0.0)
    if walk.last > walk.first:
        pipes.q.consumer_wait(tma.at_first(1))
        at_k, at_v = tma.at_first(2), tma.at_first(stages_of_V(config))
        for i in cutlass.range(walk.last - walk.first, unroll=1):
            n_block = walk.last - 1 - i
            pipes.k.consumer_wait(at_k)
            acc_S = fragments.scores(mma.s, (ROWS, KEYS), tSrQ, tSrK[None, None, None, at_k.index])
            if i == 0:
                pipes.do.consumer_wait(tma.at_first(1))
            pipes.v.consumer_wait(at_v)
            acc_dP = fragments.scores(mma.s, (ROWS, KEYS), tPrdO, tPrV[None, None, None, at_v.index])
            n0 = first_key(sm.visits, at_k.index, n_block, config) if const_expr(config.dropout) else None
            bits = changed.kept_of_rows(tScS, tensors.changes.draw, block, n0, KEYS, config)
            warpgroup.wait_group(1)  # S is there, dP is not
            if const_expr(config.modified):
                head, seqlen_k = changed.Head(block.batch, block.head), tensors.K.shape[1]
                n0 = first_key(sm.visits, at_k.index, n_block, config)
                changed.weigh_rows(acc_S, tScS, tensors.changes, head, block.m0, n0, seqlen_k, rows.lse, scale_log2, True, config)
            else:
                changed.probabilities_of_rows(acc_S, rows.lse, scale_log2)
            warpgroup.wait_group(0)
            pipes.v.consumer_release(at_v)
            dP, P = fragments.by_rows(acc_dP), fragments.by_rows(acc_S)
            drop(dP, bits, tensors.changes.draw, config)
            differentiate_rows(dP, P, dP, rows.minus_delta)
            if const_expr(config.mask_kind == "tiles"):
                hide_unseen(acc_dP, visit_in(sm.visits, at_k.index), block.m0, band.tables.query_bitmaps, band.tables.query_bands)
            elif n_block < walk.free_first or n_block >= walk.free_last:
                hide(rows, acc_dP, tScS, n_block * KEYS)
            dS = as_left_operand(mma.dq, acc_dP, (ROWS, KEYS))
            fragments.product(mma.dq, acc_dQ, dS, tQrK[None, None, None, at_k.index], True)
            warpgroup.wait_group(0)
            pipes.k.consumer_release(at_k)
            at_k.advance()
            at_v.advance()
    write(tensors, mdQ, acc_dQ, cdQ, block, scale, config)


@cute.jit
def first_key(sVisits: cute.Tensor | None, stage: Int32, n_block: Int32, config: Constexpr[Config]) -> Int32:
    """Of a tile; for "tiles" n_block is a visit."""
    return KEYS * (visit_in(sVisits, stage).tile if const_expr(config.mask_kind == "tiles") else n_block)


@cute.jit
def write(
    tensors: Tensors, mdQ: cute.Tensor, acc_dQ: cute.Tensor, cdQ: cute.Tensor, block: Block, scale: Float32, config: Constexpr[Config]
):  # fmt: skip
    gdQ = mdQ[block.batch, None, block.head, None]
    finite = parts.all_finite(acc_dQ) if const_expr(config.repairs) else Boolean(True)
    parts.store_tile(gdQ, acc_dQ, cdQ, block.m0, scale)
    if const_expr(config.repairs):  # noqa: SIM102
        if arch.vote_any_sync(not finite):
            row0 = block.m0 + (arch.thread_idx()[0] - THREADS) // WARP * 16
            for part in range_constexpr(config.repaired_parts[0]):
                report_queries(tensors, row0, Int32(part), block.head, block.batch, config)
