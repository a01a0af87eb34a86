"""B3: the same bits in every run. The blocks of keys add to dQ in one order.

A sum in fp32 depends on the order of its terms, and in B2 that is whoever comes first. Here each tile of dQ has a counter of the blocks that have
added to it, and a block waits until the counter is its turn. What this costs is waiting, so the order is the one in which blocks come anyway.
Without a mask all start at the first tile of queries, and one after another in the order of their keys: each is a tile behind the one before it.
Under the causal mask the last keys come first: the block with a tile on its diagonal is the first to visit it, the block before it comes a tile
later, and so on. A block waits for blocks that started earlier only, so none waits for ever.

Predicted bottleneck: as B2's, and the first tiles without a mask, where blocks that start together fall behind one another.
Equations: 20 to 27 of docs/algorithm.md, as in B1.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tilewise.ladder import gradients
from tilewise.sm90 import fragments, tma, wgmma
from tilewise.sm90.dsl import (
    BFloat16,
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
    warpgroup,
)

THREADS = 128  # of a warpgroup
DS, TURN = 1, 2  # named barriers: of the consumers, and one a consumer (2 and 3); 0 is the whole block's
ORDERED = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a problem is cut and scheduled."""

    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int
    stages: int = 2

    @property
    def consumers(self) -> int:
        return self.tile_n // 64

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and a consumer's thread; a multiprocessor has 64 K."""
        return 24, 240


def configure(head_dim: int, causal: bool, **choice) -> Config:
    return Config(**{"head_dim": head_dim, "causal": causal, "tile_m": 64, "tile_n": 128, **choice})


class Smem(NamedTuple):
    K: cute.Tensor  # (tile_n, head_dim, 1)
    V: cute.Tensor
    Q: cute.Tensor  # (tile_m, head_dim, stages)
    dO: cute.Tensor
    dS: cute.Tensor  # (tile_m, tile_n, stages)
    lse: cute.Tensor  # (tile_m, stages) fp32
    minus_delta: cute.Tensor


class Pipes(NamedTuple):
    kv: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync  # with the rows' log-sum-exp
    do: pipeline.PipelineTmaAsync  # with their -delta


class Loads(NamedTuple):
    K: tma.Tma
    V: tma.Tma
    Q: tma.Tma
    dO: tma.Tma


class Results(NamedTuple):
    dQ: cute.Tensor  # (heads, seqlen, head_dim) fp32: the sum, zeros before; without the scale
    dK: cute.Tensor  # (heads, seqlen, head_dim) bf16
    dV: cute.Tensor
    turns: cute.Tensor  # (heads, m_blocks, consumers) int32: how many blocks have added to a consumer's part of a tile of dQ; zeros before


@cute.jit
def launch(
    given: gradients.Given, rows: gradients.Rows, results: Results, scale: Float32, scale_log2: Float32,
    config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """Scores are multiplied by `scale`, which is `scale_log2` ln 2. `rows` are filled here."""
    heads, seqlen, _ = given.Q.shape
    gradients.prepare(given, rows, config).launch(
        grid=(cute.ceil_div(seqlen, config.tile_m), heads, 1),
        block=(gradients.WARPS * gradients.LANES, 1, 1),
        stream=stream,
    )
    tensors = (given.K, given.V, given.Q, given.dO)
    tensors = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 2, 0])) for x in tensors)  # (seqlen, head_dim, heads)
    layouts = gradients.layouts(config)
    shapes = *[(config.tile_n, config.head_dim)] * 2, *[(config.tile_m, config.head_dim)] * 2
    loads = Loads(*(tma.describe(*each) for each in zip(tensors, layouts[:4], shapes, strict=True)))
    kernel(loads, rows, results, scale, scale_log2, gradients.products(config), layouts, config).launch(
        grid=(cute.ceil_div(seqlen, config.tile_n), heads, 1),
        block=((1 + config.consumers) * THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


@cute.kernel
def kernel(
    loads: Loads, rows: gradients.Rows, results: Results, scale: Float32, scale_log2: Float32, mma: gradients.Mma,
    layouts: gradients.Layouts, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    tiles = (storage.allocate_tensor(BFloat16, x.outer, 1024, swizzle=x.inner) for x in layouts)
    sm = Smem(*tiles, *(storage.allocate_tensor(Float32, gradients.layout_of_rows(config), 128) for _ in rows))
    pipes = make_pipes(storage, config)
    n_block, head, _ = arch.block_idx()
    if const_expr(config.causal):
        n_block = arch.grid_dim()[0] - 1 - n_block
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp < THREADS // 32:
        arch.setmaxregister_decrease(config.registers[0])
        if warp == 0:
            produce(loads, rows, sm, pipes, n_block, head, results.dQ.shape[1], config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consume(results, sm, pipes, mma, n_block, head, scale, scale_log2, config)


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps, row = config.consumers * THREADS // 32, config.head_dim * BFloat16.width // 8
    pipes = Pipes(
        tma.make_pipe(storage, 1, 2 * config.tile_n * row, warps),
        tma.make_pipe(storage, config.stages, config.tile_m * (row + 4), warps),
        tma.make_pipe(storage, config.stages, config.tile_m * (row + 4), warps),
    )
    tma.barriers_ready()
    return pipes


@cute.jit
def walk_of(n_block: Int32, seqlen: Int32, config: Constexpr[Config]) -> tuple[Int32, Int32]:
    """Tiles of queries [first, last) that see any of the keys."""
    first = Int32(0)
    if const_expr(config.causal):
        first = n_block * config.tile_n // config.tile_m
    return first, cute.ceil_div(seqlen, config.tile_m)


@cute.jit
def produce(
    loads: Loads, rows: gradients.Rows, sm: Smem, pipes: Pipes, n_block: Int32, head: Int32, seqlen: Int32, config: Constexpr[Config]
):  # fmt: skip
    """One warp asks for K and V, then for Q and dO of every tile, the first ones first."""
    first, m_blocks = walk_of(n_block, seqlen, config)
    state = tma.at_first_empty(config.stages)
    pipes.kv.producer_acquire(tma.at_first_empty(1))
    tma.load(loads.K, sm.K, pipes.kv, tma.at_first_empty(1), (config.tile_n, config.head_dim), (n_block, 0, head))
    tma.load(loads.V, sm.V, pipes.kv, tma.at_first_empty(1), (config.tile_n, config.head_dim), (n_block, 0, head))
    for m_block in cutlass.range(first, m_blocks, unroll=1):
        pipes.q.producer_acquire(state)
        tma.load(loads.Q, sm.Q, pipes.q, state, (config.tile_m, config.head_dim), (m_block, 0, head))
        gradients.load_row(rows.lse[head, None], sm.lse, pipes.q, state, m_block)
        pipes.do.producer_acquire(state)
        tma.load(loads.dO, sm.dO, pipes.do, state, (config.tile_m, config.head_dim), (m_block, 0, head))
        gradients.load_row(rows.minus_delta[head, None], sm.minus_delta, pipes.do, state, m_block)
        state.advance()


class Tile(NamedTuple):
    """What a consumer's thread holds of its tile from beginning to end."""

    mma: gradients.Mma
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
    tScS: cute.Tensor  # (key, query) of each element of S^T
    tQcQ: cute.Tensor  # (query, column) of each element of dQ
    tKcK: cute.Tensor  # (key, column) of each element of dK and of dV
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    tlse: cute.Tensor  # (2, tile_m / 8, stages): of this thread's columns
    tdelta: cute.Tensor
    sum_dQ: cute.Tensor  # (seqlen, head_dim)
    turns: cute.Tensor  # (m_blocks,)
    consumer: Int32
    n0: Int32
    scale_log2: Float32


@cute.jit
def make_tile(
    results: Results, sm: Smem, mma: gradients.Mma, n_block: Int32, head: Int32, scale_log2: Float32,
    config: Constexpr[Config],
) -> Tile:  # fmt: skip
    thread = arch.thread_idx()[0] - THREADS
    consumer = arch.make_warp_uniform(thread // THREADS)
    s, dkv, dq = (wgmma.of_warpgroup(x, consumer) for x in mma)
    copy_dS = gradients.copy_of_dS(mma.s)
    tScS = mma.s.get_slice(thread).partition_C(cute.make_identity_tensor((config.tile_n, config.tile_m)))
    tile = Tile(
        mma=mma,
        tSrK=s.make_fragment_A(s.partition_A(sm.K))[None, None, None, 0],
        tSrQ=s.make_fragment_B(s.partition_B(sm.Q)),
        tPrV=s.make_fragment_A(s.partition_A(sm.V))[None, None, None, 0],
        tPrdO=s.make_fragment_B(s.partition_B(sm.dO)),
        tVrdO=dkv.make_fragment_B(dkv.partition_B(gradients.transposed(sm.dO))),
        tKrQ=dkv.make_fragment_B(dkv.partition_B(gradients.transposed(sm.Q))),
        tQrdS=dq.make_fragment_A(dq.partition_A(sm.dS)),
        tQrK=dq.make_fragment_B(dq.partition_B(gradients.transposed(sm.K)))[None, None, None, 0],
        copy_dS=copy_dS,
        tdSsdS=copy_dS.get_slice(thread).partition_D(gradients.transposed(sm.dS)),
        tScS=tScS,
        tQcQ=mma.dq.get_slice(thread).partition_C(cute.make_identity_tensor((config.tile_m, config.head_dim))),
        tKcK=mma.dkv.get_slice(thread).partition_C(cute.make_identity_tensor((config.tile_n, config.head_dim))),
        acc_dK=cute.make_rmem_tensor(dkv.partition_shape_C((config.tile_n, config.head_dim)), Float32),
        acc_dV=cute.make_rmem_tensor(dkv.partition_shape_C((config.tile_n, config.head_dim)), Float32),
        tlse=gradients.columns_of(sm.lse, tScS),
        tdelta=gradients.columns_of(sm.minus_delta, tScS),
        sum_dQ=results.dQ[head, None, None],
        turns=results.turns[head, None, consumer],
        consumer=consumer,
        n0=n_block * config.tile_n,
        scale_log2=scale_log2,
    )
    tile.acc_dK.fill(0.0)
    tile.acc_dV.fill(0.0)
    return tile


@cute.jit
def consume(
    results: Results, sm: Smem, pipes: Pipes, mma: gradients.Mma,
    n_block: Int32, head: Int32, scale: Float32, scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """64 keys a warpgroup: the whole walk over the queries that see them, then dK and dV."""
    tile = make_tile(results, sm, mma, n_block, head, scale_log2, config)
    first, m_blocks = walk_of(n_block, results.dQ.shape[1], config)
    state = tma.at_first(config.stages)
    pipes.kv.consumer_wait(tma.at_first(1))
    for m_block in cutlass.range(first, m_blocks, unroll=1):
        state = step(tile, pipes, state, m_block, config)
    gradients.store_rows(results.dV[head, None, None], tile.acc_dV, Float32(1.0), tile.tKcK, tile.n0)
    gradients.store_rows(results.dK[head, None, None], tile.acc_dK, scale, tile.tKcK, tile.n0)


@cute.jit
def step(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, m_block: Int32, config: Constexpr[Config]):
    """One tile of queries: S and dP, P and dS, and what they add to dV, dK and dQ."""
    m0, stage, shape = m_block * config.tile_m, state.index, (config.tile_n, config.tile_m)
    pipes.q.consumer_wait(state)
    pipes.do.consumer_wait(state)
    acc_dP = gradients.beginning_with(tile.tdelta[None, None, stage], tile.tScS)  # -delta, to which dP is added
    acc_S = fragments.scores(tile.mma.s, shape, tile.tSrK, tile.tSrQ[None, None, None, stage])
    fragments.product(tile.mma.s, acc_dP, tile.tPrV, tile.tPrdO[None, None, None, stage], True)
    warpgroup.wait_group(0)
    if is_masked(tile, m0, config):
        gradients.hide(acc_S, tile.tScS, tile.n0, m0, tile.sum_dQ.shape[0], config.causal)
    gradients.weigh(acc_S, tile.tlse[None, None, stage], tile.scale_log2)
    gradients.differentiate(acc_dP, acc_S)
    P = gradients.as_left_operand(tile.mma.dkv, acc_S, shape)
    dS = gradients.as_left_operand(tile.mma.dkv, acc_dP, shape)
    gradients.put_dS(tile.copy_dS, dS, acc_dP, tile.tdSsdS[None, None, None, stage])
    arch.barrier(barrier_id=DS, number_of_threads=config.consumers * THREADS)  # all of dS is there, of both consumers
    fragments.product(tile.mma.dkv, tile.acc_dV, P, tile.tVrdO[None, None, None, stage], True)
    acc_dQ = fragments.scores(tile.mma.dq, (config.tile_m, config.head_dim), tile.tQrdS[None, None, None, stage], tile.tQrK)
    fragments.product(tile.mma.dkv, tile.acc_dK, dS, tile.tKrQ[None, None, None, stage], True)
    warpgroup.wait_group(0)
    pipes.q.consumer_release(state)
    pipes.do.consumer_release(state)
    take_turn(tile, m_block, config)
    gradients.add_rows(tile.sum_dQ, acc_dQ, tile.tQcQ, m0)
    pass_turn(tile, m_block)
    state.advance()
    return state


@cute.jit
def take_turn(tile: Tile, m_block: Int32, config: Constexpr[Config]):
    """Until the blocks before this one have added this consumer's part of a tile of dQ."""
    if arch.thread_idx()[0] % THREADS == 0:
        gradients.wait_until(tile.turns, m_block, turn_of(tile, m_block, config))
    arch.barrier(barrier_id=TURN + tile.consumer, number_of_threads=THREADS)


@cute.jit
def pass_turn(tile: Tile, m_block: Int32):
    """To the next block, when all of the consumer's threads have added."""
    arch.barrier(barrier_id=TURN + tile.consumer, number_of_threads=THREADS)
    if arch.thread_idx()[0] % THREADS == 0:
        gradients.give_turn(tile.turns, m_block)


@cute.jit
def turn_of(tile: Tile, m_block: Int32, config: Constexpr[Config]) -> Int32:
    """How many blocks of keys add to a tile of dQ before this one does."""
    before = tile.n0 // config.tile_n
    if const_expr(config.causal):
        before = m_block * config.tile_m // config.tile_n - before  # the last that visits the tile comes first
    return before


@cute.jit
def is_masked(tile: Tile, m0: Int32, config: Constexpr[Config]):
    """Whether some pair of the tile is hidden: at the sequence's end, and where the diagonal crosses it."""
    end = tile.n0 + config.tile_n
    masked = end > tile.sum_dQ.shape[0]
    if const_expr(config.causal):
        masked = masked or m0 < end - 1
    return masked
