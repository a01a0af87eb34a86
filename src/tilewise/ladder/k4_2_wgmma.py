"""K4.2: both products on the tensor cores, S and P in registers.

K4.1 wrote S to shared memory and multiplied P V element by element. Here softmax runs where the first product left S: in the accumulator, of
which a thread holds pieces of two rows, shared with the three threads next to it. P stays in those registers: rounded to bf16 they are, in
the same order, what the second product takes as its left operand (fragments.py). V is given to it transposed by a change of view, since the
sum now runs over the keys (wgmma.layout_V); no byte moves. Loads, ring and walk are K4.1's.

Predicted bottleneck: one warpgroup does everything in turn, so the tensor cores wait for every softmax and for every product's latency.
Equations: those of FlashAttention-2's forward in docs/algorithm.md, as in every rung since K2.
"""

from dataclasses import dataclass
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
    kv_stages: int = 5


def configure(head_dim: int, causal: bool, **choice) -> Config:
    return Config(**{"head_dim": head_dim, "causal": causal, "tile_m": 64, "tile_n": 64, **choice})


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim, 1)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (head_dim, tile_n, kv_stages)


class Pipes(NamedTuple):
    q: pipeline.PipelineTmaAsync
    kv: pipeline.PipelineTmaAsync  # a stage is full when both of its tiles are there


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
        block=(THREADS, 1, 1),
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
    attend(loads, mO[head, None, None], mL[head, None], sm, pipes, mma, m_block, head, scale_log2, config)


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps, row = THREADS // 32, config.head_dim * BFloat16.width // 8
    pipes = Pipes(
        tma.make_pipe(storage, 1, config.tile_m * row, warps),
        tma.make_pipe(storage, config.kv_stages, 2 * config.tile_n * row, warps),
    )
    tma.barriers_ready()
    return pipes


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


@cute.jit
def attend(
    loads: Loads, gO: cute.Tensor, gL: cute.Tensor, sm: Smem, pipes: Pipes, mma: wgmma.Mma,
    m_block: Int32, head: Int32, scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """64 rows: the whole walk over the keys, the last first, then O and its log-sum-exp. gO: (seqlen, head_dim), gL: (seqlen,)."""
    thread = arch.thread_idx()[0]
    loader = arch.make_warp_uniform(arch.warp_idx()) == 0
    qk, pv = mma.qk.get_slice(thread), mma.pv.get_slice(thread)
    all_qk, all_pv = wgmma.of_warpgroup(mma.qk, 0), wgmma.of_warpgroup(mma.pv, 0)
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
    )
    tile.acc_O.fill(0.0)
    ahead, state = tma.at_first_empty(config.kv_stages), tma.at_first(config.kv_stages)
    if loader:
        pipes.q.producer_acquire(tma.at_first_empty(1))
        tma.load(loads.Q, sm.Q, pipes.q, tma.at_first_empty(1), (config.tile_m, config.head_dim), (m_block, 0, head))
        for i in cutlass.range(min(config.kv_stages, n_blocks), unroll=1):
            ahead = load_kv(loads, sm, pipes, ahead, n_blocks - 1 - i, head, config)
    pipes.q.consumer_wait(tma.at_first(1))
    masked = max(n_blocks - free, 1)
    for i in cutlass.range(n_blocks, unroll=1):
        n_block = n_blocks - 1 - i
        pipes.kv.consumer_wait(state)
        if i < masked:
            step(tile, state, n_block, True, config)
        else:
            step(tile, state, n_block, False, config)
        pipes.kv.consumer_release(state)
        state.advance()
        if loader and n_block >= config.kv_stages:
            ahead = load_kv(loads, sm, pipes, ahead, n_block - config.kv_stages, head, config)
    lse = fragments.finish(tile.acc_O, tile.rows)
    tOcO = pv.partition_C(cute.make_identity_tensor((config.tile_m, config.head_dim)))
    fragments.store_rows(gO, gL, tile.acc_O, lse, tOcO, tile.m0, seqlen)


@cute.jit
def load_kv(loads: Loads, sm: Smem, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, head: Int32, config: Constexpr[Config]):
    """Ask for K and V of a tile, as soon as its stage is empty."""
    pipes.kv.producer_acquire(state)
    tma.load(loads.K, sm.K, pipes.kv, state, (config.tile_n, config.head_dim), (n_block, 0, head))
    tma.load(loads.V, sm.V, pipes.kv, state, (config.head_dim, config.tile_n), (0, n_block, head))
    state.advance()
    return state


@cute.jit
def step(tile: Tile, state: pipeline.PipelineState, n_block: Int32, masked: Constexpr[bool], config: Constexpr[Config]):
    """O += softmax(S) V for one tile of keys."""
    acc_S = fragments.scores(tile.mma.qk, (config.tile_m, config.tile_n), tile.tSrQ, tile.tSrK[None, None, None, state.index])
    warpgroup.wait_group(0)
    if const_expr(masked):
        fragments.hide(acc_S, tile.tScS, tile.m0, n_block * config.tile_n, tile.seqlen, config.causal)
    rescale = fragments.online_softmax(acc_S, tile.rows, tile.scale_log2)
    fragments.round_into(tile.P, acc_S)
    fragments.scale_rows(tile.acc_O, rescale)
    fragments.product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, state.index], True)
    warpgroup.wait_group(0)
