"""The forward pass on Hopper: the ladder's K6 for every shape. Read ladder/k6_pingpong.py first; this file says what is added.

- queries, keys, heads and batch of their own; a query head reads the key head of its group, where it lies;
- a mask that is one band: each row sees the keys [max(k0, row + lo), min(k1, row + hi + 1)), which is full, causal, window, first keys;
- fp16; head_dim_v != head_dim; heads smaller than the tile, which the copy engine fills up with zeros;
- what the mask hides does not reach O, NaN and infinities included (`repair`).

Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from enum import IntEnum
from typing import NamedTuple

from tilewise.backends.hopper.config import Config
from tilewise.hopper import fragments, tma, wgmma
from tilewise.hopper.dsl import (
    Boolean,
    Constexpr,
    CUstream,
    Float32,
    Int32,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    warpgroup,
)

THREADS = 128  # of a warpgroup
WARP = 32


class Barrier(IntEnum):
    """Named barriers; 0 is the whole block's."""

    TURN = 1  # and the following: one a consumer


class Band(NamedTuple):
    """Row q of [q0, q1) sees the keys [max(k0, q + lo), min(k1, q + hi + 1)); other rows see none."""

    q0: Int32
    q1: Int32
    k0: Int32
    k1: Int32
    lo: Int32
    hi: Int32


class Walk(NamedTuple):
    """Tiles of keys [first, last) that a block of queries visits; those in [free_first, free_last) need no mask."""

    first: Int32
    last: Int32
    free_first: Int32
    free_last: Int32


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim, 1)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (head_dim_v, tile_n, kv_stages)


class Pipes(NamedTuple):
    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Loads(NamedTuple):
    Q: tma.Tma
    K: tma.Tma
    V: tma.Tma


class Tensors(NamedTuple):
    """As torch has them: (batch, seqlen, heads, head_dim); L (batch, heads, seqlen_q) fp32."""

    Q: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    O: cute.Tensor
    L: cute.Tensor


class Block(NamedTuple):
    """What one thread block computes: 64 * consumers queries of one head."""

    m0: Int32
    head: Int32
    head_k: Int32
    batch: Int32


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor,
    q0: Int32, q1: Int32, k0: Int32, k1: Int32, lo: Int32, hi: Int32, scale_log2: Float32, config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """Tensors as in `Tensors`; scores are multiplied by `scale_log2` ln 2."""
    rows = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mQ, mK))  # (seqlen, head_dim, heads, batch)
    columns = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))  # (head_dim_v, seqlen_k, heads, batch)
    dtype = mQ.element_type
    layouts = wgmma.layout_Q(config, dtype), wgmma.layout_K(config, dtype), wgmma.layout_V(config, dtype)
    shapes = (config.tile_m, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim_v, config.tile_n)
    loads = Loads(*(tma.describe(*each) for each in zip((*rows, columns), layouts, shapes, strict=True)))
    tensors = Tensors(mQ, mK, mV, mO, mL)
    band = Band(q0, q1, k0, k1, lo, hi)
    kernel(loads, tensors, band, scale_log2, wgmma.products(config, dtype), *layouts, config).launch(
        grid=(cute.ceil_div(mO.shape[1], config.tile_m), mO.shape[2], mO.shape[0]),
        block=((1 + config.consumers) * THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


@cute.kernel
def kernel(
    loads: Loads, tensors: Tensors, band: Band, scale_log2: Float32, mma: wgmma.Mma,
    layout_Q: cute.ComposedLayout, layout_K: cute.ComposedLayout, layout_V: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    dtype = tensors.Q.element_type
    sm = Smem(*(storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in (layout_Q, layout_K, layout_V)))
    pipes = make_pipes(storage, config)
    block = block_of(tensors, config)
    walk = walk_of(block.m0, band, tensors.K.shape[1], config)
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp < THREADS // WARP:
        arch.setmaxregister_decrease(config.registers[0])
        if warp == 0:
            produce(loads, sm, pipes, block, walk, config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consume(tensors, sm, pipes, mma, block, band, walk, scale_log2, config)


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps = config.consumers * THREADS // WARP
    pipes = Pipes(
        tma.make_pipe(storage, 1, 2 * config.tile_m * config.head_dim, warps),
        tma.make_pipe(storage, config.kv_stages, 2 * config.tile_n * config.head_dim, warps),
        tma.make_pipe(storage, config.kv_stages, 2 * config.tile_n * config.head_dim_v, warps),
    )
    tma.barriers_ready()
    return pipes


@cute.jit
def block_of(tensors: Tensors, config: Constexpr[Config]) -> Block:
    """The last rows first: under a causal mask they have the most keys."""
    m_block, head, batch = arch.block_idx()
    m_block = arch.grid_dim()[0] - 1 - m_block
    return Block(m_block * config.tile_m, head, head // (tensors.O.shape[2] // tensors.K.shape[2]), batch)


@cute.jit
def walk_of(m0: Int32, band: Band, seqlen_k: Int32, config: Constexpr[Config]) -> Walk:
    """At least one tile, so that a block whose rows see nothing walks like the others."""
    tile_n = config.tile_n
    if const_expr(config.sees == "all"):
        last = cute.ceil_div(seqlen_k, tile_n)
        return Walk(Int32(0), last, Int32(0), seqlen_k // tile_n)
    top, bottom = max(m0, band.q0), min(m0 + config.tile_m, band.q1) - 1
    begin, end = max(band.k0, top + band.lo), min(band.k1, bottom + band.hi + 1)  # seen by some row
    first = min(max(begin, 0) // tile_n, cute.ceil_div(seqlen_k, tile_n) - 1)
    last = max(cute.ceil_div(max(end, 0), tile_n), first + 1)
    if top > bottom:
        last = first + 1
    begin, end = max(band.k0, bottom + band.lo), min(band.k1, top + band.hi + 1)  # seen by all
    if m0 < band.q0 or m0 + config.tile_m > band.q1:
        end = begin
    free_first = min(max(cute.ceil_div(max(begin, 0), tile_n), first), last)
    if const_expr(config.sees == "until"):
        first, free_first = Int32(0), Int32(0)
    free_last = min(max(max(end, 0) // tile_n, free_first), last)
    return Walk(first, last, free_first, free_last)


@cute.jit
def produce(loads: Loads, sm: Smem, pipes: Pipes, block: Block, walk: Walk, config: Constexpr[Config]):
    """One warp asks for Q, then for K and V of every tile, the last first."""
    state, once = tma.at_first_empty(config.kv_stages), tma.at_first_empty(1)
    pipes.q.producer_acquire(once)
    tma.load(loads.Q, sm.Q, pipes.q, once, (config.tile_m, config.head_dim), (block.m0 // config.tile_m, 0, block.head, block.batch))
    for i in cutlass.range(walk.last - walk.first, unroll=1):
        n_block = walk.last - 1 - i
        pipes.k.producer_acquire(state)
        tma.load(loads.K, sm.K, pipes.k, state, (config.tile_n, config.head_dim), (n_block, 0, block.head_k, block.batch))
        pipes.v.producer_acquire(state)
        tma.load(loads.V, sm.V, pipes.v, state, (config.head_dim_v, config.tile_n), (0, n_block, block.head_k, block.batch))
        state.advance()


class Tile(NamedTuple):
    """What a consumer's thread holds of its tile from beginning to end."""

    mma: wgmma.Mma
    tSrQ: cute.Tensor  # descriptors of the operands in shared memory
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    tScS: cute.Tensor  # (row, column) of each number of S
    P: cute.Tensor
    acc_O: cute.Tensor
    rows: fragments.Rows
    m0: Int32
    band: Band
    scale_log2: Float32
    consumer: Int32


@cute.jit
def consume(
    tensors: Tensors, sm: Smem, pipes: Pipes, mma: wgmma.Mma, block: Block, band: Band, walk: Walk,
    scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """64 rows a warpgroup: the whole walk over the keys, then O and its log-sum-exp."""
    thread = arch.thread_idx()[0] - THREADS
    qk, pv = mma.qk.get_slice(thread), mma.pv.get_slice(thread)
    tile = Tile(
        mma=mma,
        tSrQ=qk.make_fragment_A(qk.partition_A(sm.Q))[None, None, None, 0],
        tSrK=qk.make_fragment_B(qk.partition_B(sm.K)),
        tOrV=pv.make_fragment_B(pv.partition_B(sm.V)),
        tScS=qk.partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n))),
        P=pv.make_fragment_A(pv.partition_shape_A((config.tile_m, config.tile_n))),
        acc_O=cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.head_dim_v)), Float32),
        rows=fragments.fresh_rows(),
        m0=block.m0,
        band=band,
        scale_log2=scale_log2,
        consumer=arch.make_warp_uniform(thread // THREADS),
    )
    tile.acc_O.fill(0.0)
    state = tma.at_first(config.kv_stages)
    if tile.consumer == config.consumers - 1:
        pass_turn(tile.consumer, config)  # the first turn is the first warpgroup's
    pipes.q.consumer_wait(tma.at_first(1))
    first_scores(tile, pipes, state, walk.last - 1, config)
    unmasked = min(walk.free_last, walk.last - 1)  # the first tile is done
    for i in cutlass.range(walk.last - 1 - unmasked, unroll=1):
        state = step(tile, pipes, state, walk.last - 2 - i, True, config)
    for i in cutlass.range(unmasked - min(walk.free_first, unmasked), unroll=1):
        state = step(tile, pipes, state, unmasked - 1 - i, False, config)
    if const_expr(config.sees == "interval"):
        for i in cutlass.range(min(walk.free_first, unmasked) - walk.first, unroll=1):
            state = step(tile, pipes, state, min(walk.free_first, unmasked) - 1 - i, True, config)
    last_product(tile, pipes, state, config)
    lse = fragments.finish(tile.acc_O, tile.rows)
    gO, gL = tensors.O[block.batch, None, block.head, None], tensors.L[block.batch, block.head, None]
    tOcO = pv.partition_C(cute.make_identity_tensor((config.tile_m, config.head_dim_v)))
    fragments.store_rows(gO, gL, tile.acc_O, lse, tOcO, block.m0, gO.shape[0])
    if const_expr(config.sees != "all") and arch.vote_any_sync(not all_finite(tile.acc_O)):
        repair(tensors, block, band, scale_log2, config)


@cute.jit
def interval(row: Int32, band: Band):
    begin, end = max(band.k0, row + band.lo), min(band.k1, row + band.hi + 1)
    if row < band.q0 or row >= band.q1:
        end = begin
    return begin, end


@cute.jit
def hide(tile: Tile, acc_S: cute.Tensor, n0: Int32, config: Constexpr[Config]):
    """-inf for the keys that a row does not see, or that do not exist."""
    S, at = fragments.by_rows(acc_S), fragments.by_rows(tile.tScS)
    for r in range_constexpr(fragments.ROWS):
        begin, end = Int32(0), tile.band.k1
        if const_expr(config.sees != "all"):
            begin, end = interval(tile.m0 + at[r, 0][0], tile.band)
        for c in range_constexpr(cute.size(S, mode=[1])):
            seen = at[r, c][1] < end - n0
            if const_expr(config.sees == "interval"):
                seen = seen and at[r, c][1] >= begin - n0
            S[r, c] = S[r, c] if seen else -Float32.inf


@cute.jit
def first_scores(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, config: Constexpr[Config]):
    pipes.k.consumer_wait(state)
    acc_S = fragments.scores(tile.mma.qk, (config.tile_m, config.tile_n), tile.tSrQ, tile.tSrK[None, None, None, state.index])
    warpgroup.wait_group(0)
    pipes.k.consumer_release(state)
    hide(tile, acc_S, n_block * config.tile_n, config)
    fragments.online_softmax(acc_S, tile.rows, tile.scale_log2)
    fragments.round_into(tile.P, acc_S)


@cute.jit
def step(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, masked: Constexpr[bool], config: Constexpr[Config]):
    """S of tile n_block and O += P V of the tile before it, both in flight at once; softmax of the one under the other."""
    before = state.clone()
    state.advance()
    pipes.k.consumer_wait(state)
    take_turn(tile.consumer, config)
    acc_S = fragments.scores(tile.mma.qk, (config.tile_m, config.tile_n), tile.tSrQ, tile.tSrK[None, None, None, state.index])
    pipes.v.consumer_wait(before)
    fragments.product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, before.index], True)
    pass_turn(tile.consumer, config)
    warpgroup.wait_group(1)  # S is there, O is not
    pipes.k.consumer_release(state)
    if const_expr(masked):
        hide(tile, acc_S, n_block * config.tile_n, config)
    rescale = fragments.online_softmax(acc_S, tile.rows, tile.scale_log2)
    warpgroup.wait_group(0)
    pipes.v.consumer_release(before)
    fragments.round_into(tile.P, acc_S)
    fragments.scale_rows(tile.acc_O, rescale)
    return state


@cute.jit
def last_product(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, config: Constexpr[Config]):
    pipes.v.consumer_wait(state)
    fragments.product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, state.index], True)
    warpgroup.wait_group(0)
    pipes.v.consumer_release(state)


@cute.jit
def take_turn(consumer: Int32, config: Constexpr[Config]):
    if const_expr(config.pingpong):
        arch.barrier(barrier_id=Barrier.TURN + consumer, number_of_threads=2 * THREADS)


@cute.jit
def pass_turn(consumer: Int32, config: Constexpr[Config]):
    """To the next warpgroup: its barrier counts these threads and its own."""
    if const_expr(config.pingpong):
        arch.barrier_arrive(barrier_id=Barrier.TURN + (consumer + 1) % config.consumers, number_of_threads=2 * THREADS)


@cute.jit
def all_finite(x: cute.Tensor) -> Boolean:
    finite = Boolean(True)
    for i in range_constexpr(cute.size(x)):
        finite = finite and (x[i] < Float32.inf and x[i] > -Float32.inf)
    return finite


@cute.jit
def repair(tensors: Tensors, block: Block, band: Band, scale_log2: Float32, config: Constexpr[Config]):
    """O of this warp's 16 rows again, from the keys that each row sees and no others: a hidden value times P = 0 may be NaN.

    Rare, so it is short rather than fast: a lane a key for the scores, a lane a column for the sum. LSE is right as it is.
    """
    lane, warp = arch.lane_idx(), (arch.thread_idx()[0] - THREADS) // WARP
    gQ, gO = (x[block.batch, None, block.head, None] for x in (tensors.Q, tensors.O))
    gK, gV = (x[block.batch, None, block.head_k, None] for x in (tensors.K, tensors.V))
    arch.sync_warp()  # the rows' first O and LSE are written
    columns = config.head_dim_v // WARP
    o = cute.make_rmem_tensor(columns, Float32)
    for i in cutlass.range(16, unroll=1):
        row = block.m0 + warp * 16 + i
        if row < gO.shape[0]:
            begin, end = interval(row, band)
            base = tensors.L[block.batch, block.head, row] * fragments.LOG2_E
            o.fill(0.0)
            for j0 in cutlass.range(begin, end, WARP, unroll=1):
                s = Float32(0.0)
                if j0 + lane < end:
                    for c in cutlass.range(gQ.shape[1], unroll=8):
                        s += gQ[row, c].to(Float32) * gK[j0 + lane, c].to(Float32)
                p = cute.math.exp2(s * scale_log2 - base, fastmath=True)
                for j in cutlass.range(min(end - j0, WARP), unroll=1):
                    weight = arch.shuffle_sync(p, j)
                    for x in range_constexpr(columns):
                        if x * WARP + lane < gV.shape[1]:
                            o[x] += weight * gV[j0 + j, x * WARP + lane].to(Float32)
            for x in range_constexpr(columns):
                if x * WARP + lane < gO.shape[1]:
                    gO[row, x * WARP + lane] = o[x].to(gO.element_type)
