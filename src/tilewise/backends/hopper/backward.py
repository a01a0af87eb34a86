"""The backward pass on Hopper: dQ, dK and dV from Q, K, V, O, the log-sum-exp and dO. One thread block a tile of keys.

A block keeps its K and V in shared memory and dK and dV in registers, and walks over the tiles of queries that see its keys (those of every
query head of its group). Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T lie in the registers from which
dV += P^T dO and dK += dS^T Q take their left operand. Only dS goes through shared memory, for dQ = dS K, which all warpgroups share and which
is summed up over the blocks in fp32, in global memory.

Equations: 20 to 28 of docs/algorithm.md. What comes before and after this kernel: backward_parts.py.
Predicted bottleneck: shared memory; with its operands, dS and dQ it moves 1.1 times what it can under five products (head_dim 128).
"""

from enum import IntEnum
from typing import NamedTuple

from tilewise.backends.hopper import backward_parts as parts
from tilewise.backends.hopper.backward_config import Config
from tilewise.backends.hopper.backward_order import Band, Block, Order, Walk, block_of, next_tile, queries_seeing, turn_of, walk_of
from tilewise.backends.hopper.backward_parts import Tensors
from tilewise.hopper import fragments, tma
from tilewise.hopper.dsl import (
    Boolean,
    Constexpr,
    CUstream,
    Float32,
    Int32,
    Int64,
    LayoutEnum,
    OperandMajorMode,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    sm90,
    warp,
    warpgroup,
)

THREADS = 128  # of a warpgroup
WARP = 32
FAR = 1 << 30  # beyond every row


class Barrier(IntEnum):
    """Named barriers; 0 is the whole block's."""

    DS = 1  # dS of all warpgroups is in shared memory
    DQ_EMPTY = 2  # and the following, one a warpgroup: its part of dQ may be written to shared memory; `direct`: may be added
    DQ_FULL = 5  # likewise: it is written, or added


class Smem(NamedTuple):
    K: cute.Tensor  # (tile_n, head_dim, 1)
    V: cute.Tensor  # (tile_n, head_dim_v, 1)
    Q: cute.Tensor  # (tile_m, head_dim, stages)
    dO: cute.Tensor  # (tile_m, head_dim_v, stages)
    dS: cute.Tensor  # (tile_m, tile_n, ds_stages)
    dQ: cute.Tensor | None  # (4, THREADS, dq_numbers / 4, dq_consumers) fp32; None if it goes from registers
    first: cute.Tensor  # (dq_consumers,) int32: whether this block is the first to add to a tile of dQ
    lse: cute.Tensor  # (tile_m, stages) fp32
    minus_delta: cute.Tensor  # (tile_m, stages) fp32


class Layouts(NamedTuple):
    """Of the tiles that products read."""

    K: cute.ComposedLayout
    V: cute.ComposedLayout
    Q: cute.ComposedLayout
    dO: cute.ComposedLayout
    dS: cute.ComposedLayout


class Pipes(NamedTuple):
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync  # with the tile's log-sum-exp
    do: pipeline.PipelineTmaAsync  # with its -delta


class Loads(NamedTuple):
    K: tma.Tma
    V: tma.Tma
    Q: tma.Tma
    dO: tma.Tma


class Mma(NamedTuple):
    """The products; the second word says where the left operand lies."""

    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T, shared memory
    dv: cute.TiledMma  # dV += P^T dO, registers
    dk: cute.TiledMma  # dK += dS^T Q, registers
    dq: cute.TiledMma  # dQ = dS K, shared memory


def products(config, dtype) -> Mma:
    smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    k, mn = OperandMajorMode.K, OperandMajorMode.MN
    keys = (config.consumers, 1, 1)
    over_rows, over_columns = config.dq_grid
    return Mma(
        sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, keys, (64, config.tile_m), smem),
        sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, keys, (64, config.head_dim_v), rmem),
        sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, keys, (64, config.head_dim), rmem),
        sm90.make_trivial_tiled_mma(
            dtype, dtype, k, mn, Float32, (over_rows, over_columns, 1), (64, config.head_dim // over_columns), smem
        ),
    )


def layouts_of(config, dtype) -> Layouts:
    """Every operand has its sum's dimension contiguous in the product that it was loaded for; others read it transposed."""
    major = LayoutEnum.ROW_MAJOR

    def left(rows, columns, stages):
        return sm90.make_smem_layout_a(major, (rows, 64, columns), dtype, stages)

    def right(rows, columns, stages):
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, rows, columns), dtype, stages)

    return Layouts(
        left(config.tile_n, config.head_dim, 1),
        left(config.tile_n, config.head_dim_v, 1),
        right(config.tile_m, config.head_dim, config.stages),
        right(config.tile_m, config.head_dim_v, config.stages),
        left(config.tile_m, config.tile_n, config.ds_stages),
    )


def transposed(sX: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, 2]))


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor, mdO: cute.Tensor, mdL: cute.Tensor,
    mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, lse: cute.Tensor, minus_delta: cute.Tensor, sum_dQ: cute.Tensor,
    turns: cute.Tensor, slots: Int32, together: Int32, has_dL: Int32, q0: Int32, q1: Int32, k0: Int32, k1: Int32, lo: Int32, hi: Int32, scale: Float32, scale_log2: Float32,
    config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """(batch, seqlen, heads, head_dim); mL, mdL (batch, heads_q, seqlen_q) fp32; then the three of `Tensors` that `prepare` writes."""
    tensors = Tensors(mQ, mK, mV, mdO, lse, minus_delta, sum_dQ, turns)
    dtype = mQ.element_type
    layouts, mma = layouts_of(config, dtype), products(config, dtype)
    shapes = (config.tile_n, config.head_dim), (config.tile_n, config.head_dim_v), (config.tile_m, config.head_dim), (config.tile_m, config.head_dim_v)
    rows = [cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mK, mV, mQ, mdO)]  # (seqlen, dim, heads, batch)
    loads = Loads(*(tma.describe(*each) for each in zip(rows, layouts[:4], shapes, strict=True)))
    band = Band(q0, q1, k0, k1, lo, hi)
    queries = (sum_dQ.shape[2], mQ.shape[2], mQ.shape[0])
    parts.prepare(mO, mdO, mL, mdL, has_dL, lse, minus_delta, sum_dQ, turns, config).launch(grid=queries, block=(parts.THREADS, 1, 1), stream=stream)
    kernel(tensors, mdK, mdV, loads, band, Order(slots, together), scale, scale_log2, mma, *layouts, config).launch(
        grid=(cute.ceil_div(mK.shape[1], config.tile_n) * mK.shape[2] * mK.shape[0], 1, 1),
        block=((1 + config.consumers) * THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )
    parts.finish(tensors, mdQ, band, scale, scale_log2, mma.dq, config).launch(
        grid=queries, block=(config.dq_consumers * THREADS, 1, 1), stream=stream
    )


@cute.kernel
def kernel(
    tensors: Tensors, mdK: cute.Tensor, mdV: cute.Tensor, loads: Loads, band: Band, order: Order, scale: Float32, scale_log2: Float32, mma: Mma,
    layout_K: cute.ComposedLayout, layout_V: cute.ComposedLayout, layout_Q: cute.ComposedLayout, layout_dO: cute.ComposedLayout,
    layout_dS: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    dtype = tensors.Q.element_type
    sK, sV, sQ, sdO, sdS = (
        storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in (layout_K, layout_V, layout_Q, layout_dO, layout_dS)
    )
    sdQ = None
    if const_expr(not config.direct):
        sdQ = storage.allocate_tensor(Float32, cute.make_layout((4, THREADS, config.dq_numbers // 4, config.dq_consumers)), 1024)
    first = storage.allocate_tensor(Int32, cute.make_layout(config.dq_consumers), 16)
    statistics = cute.make_layout((config.tile_m, config.stages))
    sm = Smem(sK, sV, sQ, sdO, sdS, sdQ, first, storage.allocate_tensor(Float32, statistics, 128), storage.allocate_tensor(Float32, statistics, 128))
    pipes = make_pipes(storage, config)
    heads_k = tensors.K.shape[2]
    block = block_of(arch.block_idx()[0], cute.ceil_div(tensors.K.shape[1], config.tile_n), heads_k, heads_k * tensors.K.shape[0], order, config)
    walk = walk_of(block, band, tensors.Q.shape[1], tensors.K.shape[1], config)
    warp_idx = arch.make_warp_uniform(arch.warp_idx())
    if warp_idx < THREADS // WARP:
        arch.setmaxregister_decrease(config.registers[0])
        if warp_idx == 0:
            produce(tensors, loads, sm, pipes, block, walk, config)
        elif warp_idx <= config.dq_consumers:
            if const_expr(not config.direct):
                add_up_dQ(tensors, sm, block, band, walk, warp_idx - 1, config)
            elif const_expr(config.ordered):
                take_turns(tensors, sm, block, band, walk, warp_idx - 1, config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consumer = arch.make_warp_uniform(arch.thread_idx()[0] // THREADS - 1)
        if const_expr(config.dq_consumers == config.consumers):
            consume(tensors, mdK, mdV, sm, pipes, mma, block, band, walk, scale, scale_log2, consumer, True, config)
        elif consumer < config.dq_consumers:
            consume(tensors, mdK, mdV, sm, pipes, mma, block, band, walk, scale, scale_log2, consumer, True, config)
        else:
            consume(tensors, mdK, mdV, sm, pipes, mma, block, band, walk, scale, scale_log2, consumer, False, config)


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps = config.consumers * THREADS // WARP
    statistics = 4 * config.tile_m
    pipes = Pipes(
        tma.make_pipe(storage, 1, 2 * config.tile_n * config.head_dim, warps),
        tma.make_pipe(storage, 1, 2 * config.tile_n * config.head_dim_v, warps),
        tma.make_pipe(storage, config.stages, 2 * config.tile_m * config.head_dim + statistics, warps),
        tma.make_pipe(storage, config.stages, 2 * config.tile_m * config.head_dim_v + statistics, warps),
    )
    tma.barriers_ready()
    return pipes


@cute.jit
def produce(tensors: Tensors, loads: Loads, sm: Smem, pipes: Pipes, block: Block, walk: Walk, config: Constexpr[Config]):
    """One warp asks for K and V, then for Q and dO of every tile, with the statistics of their rows."""
    state, once = tma.at_first_empty(config.stages), tma.at_first_empty(1)
    n_block = block.n0 // config.tile_n
    pipes.k.producer_acquire(once)
    tma.load(loads.K, sm.K, pipes.k, once, (config.tile_n, config.head_dim), (n_block, 0, block.head_k, block.batch))
    pipes.v.producer_acquire(once)
    tma.load(loads.V, sm.V, pipes.v, once, (config.tile_n, config.head_dim_v), (n_block, 0, block.head_k, block.batch))
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    for g in cutlass.range(group, unroll=1):
        head = block.head_k * group + g
        lse, minus_delta = (x[block.batch, head, None] for x in (tensors.lse, tensors.minus_delta))
        m_block = walk.start
        for _i in cutlass.range(walk.last - walk.first, unroll=1):
            pipes.q.producer_acquire(state)
            tma.load(loads.Q, sm.Q, pipes.q, state, (config.tile_m, config.head_dim), (m_block, 0, head, block.batch))
            load_rows(lse, sm.lse, pipes.q, state, m_block, config)
            pipes.do.producer_acquire(state)
            tma.load(loads.dO, sm.dO, pipes.do, state, (config.tile_m, config.head_dim_v), (m_block, 0, head, block.batch))
            load_rows(minus_delta, sm.minus_delta, pipes.do, state, m_block, config)
            state.advance()
            m_block = next_tile(m_block, walk)


@cute.jit
def load_rows(
    gX: cute.Tensor, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, m_block: Int32,
    config: Constexpr[Config],
):  # fmt: skip
    """One number for each row of tile m_block."""
    with arch.elect_one():
        arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                sX[None, state.index].iterator.toint(),
                (gX.iterator + m_block * config.tile_m).toint(),
                Int32(4 * config.tile_m),
                pipe.producer_get_barrier(state).toint(),
            ],
        )


@cute.jit
def add_up_dQ(tensors: Tensors, sm: Smem, block: Block, band: Band, walk: Walk, consumer: Int32, config: Constexpr[Config]):
    """One warp a warpgroup of dQ: adds its part of every tile to the sum in global memory; `ordered`: when it is this block's turn.

    A block waits for its turn only where it is about to add, after it has given all others on: so the one whose turn it is never waits.
    The first writes instead of adding.
    """
    m_blocks = tensors.sum_dQ.shape[2]
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    for g in cutlass.range(group, unroll=1):
        head = block.head_k * group + g
        gTurns = tensors.turns[block.batch, head, None, consumer]
        m_block, before = walk.start, Int32(-1)
        for _i in cutlass.range(walk.last - walk.first, unroll=1):
            gSum = tensors.sum_dQ[block.batch, head, m_block, None]
            arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + consumer, number_of_threads=THREADS + WARP)
            turn = Int32(-1)
            if const_expr(config.ordered):
                turn = turn_of(m_block, m_blocks, block, band, tensors.K.shape[1], config)
                if arch.lane_idx() == 0:
                    now = turn_now(gTurns, m_block)
                    if before >= 0:
                        arch.cp_async_bulk_wait_group(0)
                        give_turn(gTurns, before)
                    while now != turn:
                        now = turn_now(gTurns, m_block)
                before = m_block
            arch.barrier(barrier_id=Barrier.DQ_FULL + consumer, number_of_threads=THREADS + WARP)
            if arch.lane_idx() == 0:
                if turn == 0:
                    bulk("cp.async.bulk.global.shared::cta.bulk_group", gSum, sm, consumer, config)
                else:
                    bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", gSum, sm, consumer, config)
                arch.cp_async_bulk_commit_group()
                arch.cp_async_bulk_wait_group(0, read=True)
            arch.sync_warp()
            m_block = next_tile(m_block, walk)
        if arch.lane_idx() == 0:
            arch.cp_async_bulk_wait_group(0)
            if const_expr(config.ordered):
                if before >= 0:
                    give_turn(gTurns, before)


@cute.jit
def take_turns(tensors: Tensors, sm: Smem, block: Block, band: Band, walk: Walk, consumer: Int32, config: Constexpr[Config]):
    """Where a warpgroup adds its part of dQ by itself: one warp waits for its turns, and passes them on."""
    m_blocks = tensors.sum_dQ.shape[2]
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    for g in cutlass.range(group, unroll=1):
        head = block.head_k * group + g
        gTurns = tensors.turns[block.batch, head, None, consumer]
        m_block, before = walk.start, Int32(-1)
        for _i in cutlass.range(walk.last - walk.first, unroll=1):
            turn = turn_of(m_block, m_blocks, block, band, tensors.K.shape[1], config)
            now = Int32(0)
            if arch.lane_idx() == 0:
                now = turn_now(gTurns, m_block)
            if before >= 0:
                arch.barrier(barrier_id=Barrier.DQ_FULL + consumer, number_of_threads=THREADS + WARP)
            if arch.lane_idx() == 0:
                if before >= 0:
                    give_turn(gTurns, before)
                while now != turn:
                    now = turn_now(gTurns, m_block)
                sm.first[consumer] = Int32(turn == 0)
            arch.sync_warp()
            arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + consumer, number_of_threads=THREADS + WARP)
            before = m_block
            m_block = next_tile(m_block, walk)
        if before >= 0:
            arch.barrier(barrier_id=Barrier.DQ_FULL + consumer, number_of_threads=THREADS + WARP)
            if arch.lane_idx() == 0:
                give_turn(gTurns, before)


@cute.jit
def bulk(instruction: Constexpr[str], gSum: cute.Tensor, sm: Smem, consumer: Int32, config: Constexpr[Config]):
    """A warpgroup's part of a tile of dQ from shared to global memory, by one thread."""
    numbers = const_expr(THREADS * config.dq_numbers)
    arch.inline_ptx(
        f"{instruction} [{{$r0}}], [{{$r1}}], {{$r2}};",
        read_only_args=[
            (gSum.iterator + consumer * numbers).toint(),
            sm.dQ[None, None, None, consumer].iterator.toint(),
            Int32(4 * numbers),
        ],
    )


@cute.jit
def turn_now(gTurns: cute.Tensor, m_block: Int32) -> Int32:
    return arch.inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[(gTurns.iterator + cute.crd2idx(m_block, gTurns.layout)).toint()]
    )


@cute.jit
def give_turn(gTurns: cute.Tensor, m_block: Int32):
    """What this thread added is there before the next one's turn is."""
    arch.inline_ptx(
        "red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[(gTurns.iterator + cute.crd2idx(m_block, gTurns.layout)).toint()]
    )


class Tile(NamedTuple):
    """What a consumer's thread holds of its tile from beginning to end."""

    mma: Mma
    tSrK: cute.Tensor  # descriptors of the operands in shared memory
    tSrQ: cute.Tensor
    tPrV: cute.Tensor
    tPrdO: cute.Tensor
    tVrdO: cute.Tensor
    tKrQ: cute.Tensor
    tQrdS: cute.Tensor
    tQrK: cute.Tensor
    copy_dS: cute.TiledCopy
    tdSsdS: cute.Tensor
    tdQsdQ: cute.Tensor | None  # (4, dq_numbers / 4)
    first: cute.Tensor
    tlse: cute.Tensor  # (2, tile_m / 8, stages)
    tdelta: cute.Tensor
    tScS: cute.Tensor  # (key, query) of each number of S^T
    begin: cute.Tensor  # (ROWS,): of the queries that see this thread's keys, the first
    end: cute.Tensor
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    scale_log2: Float32
    consumer: Int32


@cute.jit
def consume(
    tensors: Tensors, mdK: cute.Tensor, mdV: cute.Tensor, sm: Smem, pipes: Pipes, mma: Mma, block: Block, band: Band, walk: Walk,
    scale: Float32, scale_log2: Float32, consumer: Int32, has_dQ: Constexpr[bool], config: Constexpr[Config],
):  # fmt: skip
    """64 keys a warpgroup: the whole walk over the queries of the group, then dK and dV."""
    thread = arch.thread_idx()[0] - THREADS
    tile = make_tile(sm, mma, block, band, scale_log2, thread, consumer, has_dQ, config)
    tile.acc_dK.fill(0.0)
    tile.acc_dV.fill(0.0)
    pipes.k.consumer_wait(tma.at_first(1))
    pipes.v.consumer_wait(tma.at_first(1))
    state = tma.at_first(config.stages)
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    for g in cutlass.range(group, unroll=1):
        gSum = tensors.sum_dQ[block.batch, block.head_k * group + g, None, None]
        m_block = walk.start
        for _i in cutlass.range(walk.last - walk.first, unroll=1):
            masked = m_block < walk.free_first or m_block >= walk.free_last
            state = step(tile, pipes, state, gSum[m_block, None], m_block, masked, has_dQ, config)
            m_block = next_tile(m_block, walk)
    gdK, gdV = (x[block.batch, None, block.head_k, None] for x in (mdK, mdV))
    dk, dv = mma.dk.get_slice(thread), mma.dv.get_slice(thread)
    cdK = dk.partition_C(cute.make_identity_tensor((config.tile_n, config.head_dim)))
    cdV = dv.partition_C(cute.make_identity_tensor((config.tile_n, config.head_dim_v)))
    parts.store_tile(gdV, tile.acc_dV, cdV, block.n0, Float32(1.0))
    parts.store_tile(gdK, tile.acc_dK, cdK, block.n0, scale)
    if const_expr(config.sees != "all") and arch.vote_any_sync(not (parts.all_finite(tile.acc_dK) and parts.all_finite(tile.acc_dV))):
        n0 = block.n0 + thread // WARP * 16
        parts.repair_dKV(tensors, gdK, gdV, n0, block.head_k, block.batch, band, scale, scale_log2, config)


@cute.jit
def make_tile(
    sm: Smem, mma: Mma, block: Block, band: Band, scale_log2: Float32, thread: Int32, consumer: Int32, has_dQ: Constexpr[bool],
    config: Constexpr[Config],
) -> Tile:  # fmt: skip
    s, dv, dk, dq = (x.get_slice(consumer * THREADS) for x in mma)
    copy_dS = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), sm.dS.element_type), mma.s)
    tScS = mma.s.get_slice(thread).partition_C(cute.make_identity_tensor((config.tile_n, config.tile_m)))
    at = fragments.by_rows(tScS)
    begin, end = cute.make_rmem_tensor(fragments.ROWS, Int32), cute.make_rmem_tensor(fragments.ROWS, Int32)
    for r in range_constexpr(fragments.ROWS):
        begin[r], end[r] = queries_seeing(block.n0 + at[r, 0][0], band)
        if begin[r] >= end[r]:
            begin[r], end[r] = Int32(FAR), Int32(0)
    pairs = cute.make_layout((2, config.tile_m // 8, config.stages), stride=(1, 8, config.tile_m))
    tlse, tdelta = (cute.make_tensor(x.iterator + at[0, 0][1], pairs) for x in (sm.lse, sm.minus_delta))
    return Tile(
        mma=mma,
        tSrK=s.make_fragment_A(s.partition_A(sm.K))[None, None, None, 0],
        tSrQ=s.make_fragment_B(s.partition_B(sm.Q)),
        tPrV=s.make_fragment_A(s.partition_A(sm.V))[None, None, None, 0],
        tPrdO=s.make_fragment_B(s.partition_B(sm.dO)),
        tVrdO=dv.make_fragment_B(dv.partition_B(transposed(sm.dO))),
        tKrQ=dk.make_fragment_B(dk.partition_B(transposed(sm.Q))),
        tQrdS=dq.make_fragment_A(dq.partition_A(sm.dS)),
        tQrK=dq.make_fragment_B(dq.partition_B(transposed(sm.K)))[None, None, None, 0],
        copy_dS=copy_dS,
        tdSsdS=copy_dS.get_slice(thread).partition_D(transposed(sm.dS)),
        tdQsdQ=None if const_expr(config.direct) else sm.dQ[None, thread % THREADS, None, consumer if const_expr(has_dQ) else 0],
        first=sm.first,
        tlse=tlse,
        tdelta=tdelta,
        tScS=tScS,
        begin=begin,
        end=end,
        acc_dK=cute.make_rmem_tensor(mma.dk.get_slice(thread).partition_shape_C((config.tile_n, config.head_dim)), Float32),
        acc_dV=cute.make_rmem_tensor(mma.dv.get_slice(thread).partition_shape_C((config.tile_n, config.head_dim_v)), Float32),
        scale_log2=scale_log2,
        consumer=consumer,
    )


@cute.jit
def step(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, gSum: cute.Tensor, m_block: Int32, masked: Boolean, has_dQ: Constexpr[bool],
    config: Constexpr[Config],
):  # fmt: skip
    """One tile of queries: S and dP, P and dS, and what they add to dV, dQ and dK."""
    stage, shape = state.index, (config.tile_n, config.tile_m)
    pipes.q.consumer_wait(state)
    pipes.do.consumer_wait(state)
    acc_dP = beginning_with(tile.tdelta[None, None, stage], tile.tScS)
    acc_S = fragments.scores(tile.mma.s, shape, tile.tSrK, tile.tSrQ[None, None, None, stage])
    fragments.product(tile.mma.s, acc_dP, tile.tPrV, tile.tPrdO[None, None, None, stage], True)
    lse = per_query(tile.tlse, stage)
    warpgroup.wait_group(1)  # S is there, dP is not
    if masked:
        hide(tile, acc_S, m_block * config.tile_m, config)
    probabilities(acc_S, lse, tile.scale_log2)
    P = as_left_operand(tile.mma.dv, acc_S, config)
    warpgroup.wait_group(0)
    differentiate(acc_dP, acc_S)
    dS = as_left_operand(tile.mma.dk, acc_dP, config)
    ds_stage = stage if const_expr(config.ds_stages > 1) else 0
    if const_expr(config.ds_stages == 1):
        arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)  # all have read the dS before this one
    values = cute.make_tensor(dS.iterator, acc_dP.layout)
    cute.copy(tile.copy_dS, tile.copy_dS.get_slice(0).retile(values), tile.tdSsdS[None, None, None, ds_stage])
    fragments.product(tile.mma.dv, tile.acc_dV, P, tile.tVrdO[None, None, None, stage], True)
    arch.fence_proxy("async.shared", space="cta")
    arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)  # dS of all warpgroups is there
    if const_expr(has_dQ):
        acc_dQ = fragments.scores(tile.mma.dq, (config.tile_m, config.head_dim), tile.tQrdS[None, None, None, ds_stage], tile.tQrK)
    if const_expr(has_dQ):
        warpgroup.wait_group(1)  # dV is there, and dO read
        pipes.do.consumer_release(state)
    fragments.product(tile.mma.dk, tile.acc_dK, dS, tile.tKrQ[None, None, None, stage], True)
    warpgroup.wait_group(1)  # dQ is there; without it, dV
    if const_expr(has_dQ):
        hand_over(tile, acc_dQ, gSum, config)
    else:
        pipes.do.consumer_release(state)
    warpgroup.wait_group(0)
    pipes.q.consumer_release(state)
    state.advance()
    return state


@cute.jit
def per_query(pairs: cute.Tensor, stage: Int32) -> cute.Tensor:
    """The numbers of this thread's columns, (tile_m / 4,)."""
    found = cute.make_rmem_tensor(pairs[None, None, 0].shape, Float32)
    cute.autovec_copy(pairs[None, None, stage], found)
    return cute.make_tensor(found.iterator, cute.make_layout(cute.size(found)))


@cute.jit
def beginning_with(pairs: cute.Tensor, like: cute.Tensor) -> cute.Tensor:
    """-delta in every row of an accumulator, to which dP is then added: a subtraction less for each number of S.

    pairs: (2, tile_m / 8) in shared memory. Each register is read on its own: copies of one for the other row would come to lie between the
    products, and ptxas then waits for the first before it issues the second (C7517, DSL 4.8.1).
    """
    acc_dP = cute.make_rmem_tensor(like.shape, Float32)
    dP = fragments.by_rows(acc_dP)
    for c in range_constexpr(cute.size(pairs, mode=[1])):
        for r in range_constexpr(fragments.ROWS):
            dP[r, 2 * c], dP[r, 2 * c + 1] = arch.inline_ptx(
                "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                write_only_types=[Float32, Float32],
                read_only_args=[pairs[None, c].iterator.toint()],
            )
    return acc_dP


@cute.jit
def seen(tile: Tile, r: Constexpr[int], column: Int32, m0: Int32, config: Constexpr[Config]):
    """Whether the query of a column sees the key of row r."""
    if const_expr(config.sees == "all"):
        return tile.end[r] > 0
    if const_expr(config.sees == "from"):
        return column >= tile.begin[r] - m0
    return column >= tile.begin[r] - m0 and column < tile.end[r] - m0


@cute.jit
def hide(tile: Tile, acc_S: cute.Tensor, m0: Int32, config: Constexpr[Config]):
    """-inf for the pairs that are hidden, or whose key does not exist: P = 0 there, and dS = 0 unless dP is NaN (`repair_dKV`)."""
    S, at = fragments.by_rows(acc_S), fragments.by_rows(tile.tScS)
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = S[r, c] if seen(tile, r, at[r, c][1], m0, config) else -Float32.inf


@cute.jit
def probabilities(acc_S: cute.Tensor, lse: cute.Tensor, scale_log2: Float32):
    """S becomes P = exp(S - LSE) (Eq. 24)."""
    S = fragments.by_rows(acc_S)
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = cute.math.exp2(S[r, c] * scale_log2 - lse[c], fastmath=True)


@cute.jit
def differentiate(acc_dP: cute.Tensor, acc_P: cute.Tensor):
    """dP - delta becomes dS = P (dP - delta) (Eq. 25)."""
    for i in range_constexpr(cute.size(acc_dP)):
        acc_dP[i] = acc_P[i] * acc_dP[i]


@cute.jit
def as_left_operand(tiled_mma: cute.TiledMma, acc: cute.Tensor, config: Constexpr[Config]) -> cute.Tensor:
    """The numbers of an accumulator, rounded, in the registers of a product's left operand: the same order."""
    mma = tiled_mma.get_slice(0)
    rounded = mma.make_fragment_A(mma.partition_shape_A((config.tile_n, config.tile_m)))
    fragments.round_into(rounded, acc)
    return rounded


@cute.jit
def hand_over(tile: Tile, acc_dQ: cute.Tensor, gSum: cute.Tensor, config: Constexpr[Config]):
    """dQ of this warpgroup to the warp that adds it up, or to global memory, while dK is being computed. gSum: of this tile."""
    flat = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, config.dq_numbers // 4)))
    if const_expr(config.direct):
        add_directly(tile, flat, gSum, config)
    else:
        arch.barrier(barrier_id=Barrier.DQ_EMPTY + tile.consumer, number_of_threads=THREADS + WARP)
        cute.autovec_copy(flat, tile.tdQsdQ)
        arch.fence_proxy("async.shared", space="cta")
        arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + tile.consumer, number_of_threads=THREADS + WARP)


@cute.jit
def add_directly(tile: Tile, flat: cute.Tensor, gSum: cute.Tensor, config: Constexpr[Config]):
    """flat: (4, dq_numbers / 4), vectors of 16 bytes; a warp's lie side by side."""
    address = (gSum.iterator + tile.consumer * THREADS * config.dq_numbers + arch.thread_idx()[0] % THREADS * 4).toint()
    first = Int32(0)
    if const_expr(config.ordered):
        arch.barrier(barrier_id=Barrier.DQ_EMPTY + tile.consumer, number_of_threads=THREADS + WARP)
        first = tile.first[tile.consumer]
    if first != 0:
        each_vector("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", flat, address)
    else:
        each_vector("red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", flat, address)
    if const_expr(config.ordered):
        arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + tile.consumer, number_of_threads=THREADS + WARP)


@cute.jit
def each_vector(instruction: Constexpr[str], flat: cute.Tensor, address: Int64):
    for i in range_constexpr(cute.size(flat, mode=[1])):
        arch.inline_ptx(instruction, read_only_args=[address + 16 * THREADS * i, *(flat[j, i] for j in range(4))])
