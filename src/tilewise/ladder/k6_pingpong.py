"""K6: warpgroups take turns, and inside each the next scores are computed under this tile's softmax.

K6.1 hides a warpgroup's softmax under the products of another. Here also under its own: S of the next tile is issued before O += P V of
this one, so the tensor cores have work of this warpgroup while its exponentials run. `pingpong=False` leaves the turns out.

Predicted bottleneck: the tensor cores, at the power limit (head_dim 128); their contention with the exponentials (head_dim 64).
Equations: those of FlashAttention-2's forward in docs/algorithm.md, as in every rung since K2.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tilewise.sm90 import fragments, tma, walk, wgmma
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


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a problem is cut and scheduled."""

    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int
    kv_stages: int = 2
    pingpong: bool = True

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and a consumer's thread; a multiprocessor has 64 K."""
        return (24, 240) if self.consumers == 2 else (32, 160)


def configure(head_dim: int, causal: bool, **choice) -> Config:
    tile_m, tile_n = {64: (192, 128), 128: (128, 128)}[head_dim]
    return Config(**{"head_dim": head_dim, "causal": causal, "tile_m": tile_m, "tile_n": tile_n, **choice})


class Barrier(IntEnum):
    """Named barriers; 0 is the whole block's."""

    TURN = 1  # and the following: one a consumer


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim, 1)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (head_dim, tile_n, kv_stages)


class Pipes(NamedTuple):
    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Loads(NamedTuple):
    Q: tma.Tma
    K: tma.Tma
    V: tma.Tma


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor,
    scale_log2: Float32, config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """mQ, mK, mV, mO: (heads, seqlen, head_dim) bf16; mL: (heads, seqlen) fp32. Scores are multiplied by `scale_log2` ln 2."""
    mQ, mK = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 2, 0])) for x in (mQ, mK))  # (seqlen, head_dim, heads)
    mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[2, 1, 0]))  # (head_dim, seqlen, heads)
    layouts = wgmma.layout_Q(config), wgmma.layout_K(config), wgmma.layout_V(config)
    shapes = (config.tile_m, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim, config.tile_n)
    loads = Loads(*(tma.describe(*each) for each in zip((mQ, mK, mV), layouts, shapes, strict=True)))
    kernel(loads, mO, mL, scale_log2, wgmma.products(config), *layouts, config).launch(
        grid=(cute.ceil_div(mO.shape[1], config.tile_m), mO.shape[0], 1),
        block=((1 + config.consumers) * THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


@cute.kernel
def kernel(
    loads: Loads, mO: cute.Tensor, mL: cute.Tensor, scale_log2: Float32, mma: wgmma.Mma,
    layout_Q: cute.ComposedLayout, layout_K: cute.ComposedLayout, layout_V: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = Smem(*(storage.allocate_tensor(BFloat16, x.outer, 1024, swizzle=x.inner) for x in (layout_Q, layout_K, layout_V)))
    pipes = make_pipes(storage, config)
    m_block, head = walk.block_of(config)
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp < THREADS // 32:
        arch.setmaxregister_decrease(config.registers[0])
        if warp == 0:
            produce(loads, sm, pipes, m_block, head, mO.shape[1], config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consume(mO[head, None, None], mL[head, None], sm, pipes, mma, m_block, scale_log2, config)


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps, row = config.consumers * THREADS // 32, config.head_dim * BFloat16.width // 8
    pipes = Pipes(
        tma.make_pipe(storage, 1, config.tile_m * row, warps),
        tma.make_pipe(storage, config.kv_stages, config.tile_n * row, warps),
        tma.make_pipe(storage, config.kv_stages, config.tile_n * row, warps),
    )
    tma.barriers_ready()
    return pipes


@cute.jit
def produce(loads: Loads, sm: Smem, pipes: Pipes, m_block: Int32, head: Int32, seqlen: Int32, config: Constexpr[Config]):
    """One warp asks for Q, then for K and V of every tile, the last first."""
    n_blocks, _ = walk.key_blocks(m_block, seqlen, config)
    state = tma.at_first_empty(config.kv_stages)
    pipes.q.producer_acquire(tma.at_first_empty(1))
    tma.load(loads.Q, sm.Q, pipes.q, tma.at_first_empty(1), (config.tile_m, config.head_dim), (m_block, 0, head))
    for i in cutlass.range(n_blocks, unroll=1):
        n_block = n_blocks - 1 - i
        pipes.k.producer_acquire(state)
        tma.load(loads.K, sm.K, pipes.k, state, (config.tile_n, config.head_dim), (n_block, 0, head))
        pipes.v.producer_acquire(state)
        tma.load(loads.V, sm.V, pipes.v, state, (config.head_dim, config.tile_n), (0, n_block, head))
        state.advance()


class Tile(NamedTuple):
    """What a consumer's thread holds of its tile from beginning to end."""

    mma: wgmma.Mma
    tSrQ: cute.Tensor  # descriptors of the operands in shared memory
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    tScS: cute.Tensor  # (row, column) of each element of S
    P: cute.Tensor
    acc_O: cute.Tensor
    rows: fragments.Rows
    m0: Int32
    seqlen: Int32
    scale_log2: Float32
    consumer: Int32


@cute.jit
def consume(
    gO: cute.Tensor, gL: cute.Tensor, sm: Smem, pipes: Pipes, mma: wgmma.Mma,
    m_block: Int32, scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """64 rows a warpgroup: the whole walk over the keys, then O and its log-sum-exp. gO: (seqlen, head_dim), gL: (seqlen,)."""
    thread = arch.thread_idx()[0] - THREADS
    qk, pv = mma.qk.get_slice(thread), mma.pv.get_slice(thread)
    consumer = arch.make_warp_uniform(thread // THREADS)
    all_qk, all_pv = wgmma.of_warpgroup(mma.qk, consumer), wgmma.of_warpgroup(mma.pv, consumer)
    seqlen = gO.shape[0]
    n_blocks, free = walk.key_blocks(m_block, seqlen, config)
    tile = Tile(
        mma=mma,
        tSrQ=all_qk.make_fragment_A(all_qk.partition_A(sm.Q))[None, None, None, 0],
        tSrK=all_qk.make_fragment_B(all_qk.partition_B(sm.K)),
        tOrV=all_pv.make_fragment_B(all_pv.partition_B(sm.V)),
        tScS=qk.partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n))),
        P=pv.make_fragment_A(pv.partition_shape_A((config.tile_m, config.tile_n))),
        acc_O=cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.head_dim)), Float32),
        rows=fragments.fresh_rows(),
        m0=m_block * config.tile_m,
        seqlen=seqlen,
        scale_log2=scale_log2,
        consumer=consumer,
    )
    tile.acc_O.fill(0.0)
    state = tma.at_first(config.kv_stages)
    masked = max(n_blocks - free, 1)
    if tile.consumer == config.consumers - 1:
        pass_turn(tile.consumer, config)  # the first turn is the first warpgroup's
    pipes.q.consumer_wait(tma.at_first(1))
    first_scores(tile, pipes, state, n_blocks - 1, config)
    for i in cutlass.range(1, masked, unroll=1):
        state = step(tile, pipes, state, n_blocks - 1 - i, True, config)
    for i in cutlass.range(masked, n_blocks, unroll=1):
        state = step(tile, pipes, state, n_blocks - 1 - i, False, config)
    last_product(tile, pipes, state, config)
    lse = fragments.finish(tile.acc_O, tile.rows)
    tOcO = pv.partition_C(cute.make_identity_tensor((config.tile_m, config.head_dim)))
    fragments.store_rows(gO, gL, tile.acc_O, lse, tOcO, tile.m0, seqlen)


@cute.jit
def first_scores(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, config: Constexpr[Config]):
    pipes.k.consumer_wait(state)
    acc_S = fragments.scores(tile.mma.qk, (config.tile_m, config.tile_n), tile.tSrQ, tile.tSrK[None, None, None, state.index])
    warpgroup.wait_group(0)
    pipes.k.consumer_release(state)
    fragments.hide(acc_S, tile.tScS, tile.m0, n_block * config.tile_n, tile.seqlen, config.causal)
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
        fragments.hide(acc_S, tile.tScS, tile.m0, n_block * config.tile_n, tile.seqlen, config.causal)
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
