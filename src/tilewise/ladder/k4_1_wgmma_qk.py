"""K4.1: S = Q K^T on the tensor cores; everything else as in K3.

One warpgroup of 128 threads issues the product of a 64 x 64 tile to the tensor cores (WGMMA), which read Q and K straight from shared
memory, in a swizzled layout free of bank conflicts. They leave S spread over the threads' registers. Each thread asks an identity tensor,
partitioned in the same way, where its elements belong, and writes them to shared memory; from there K3's softmax and K3's P V go on, two
threads a row instead of four.

Predicted bottleneck: P V on the CUDA cores, which is now nearly all of the time: at most twice K3's speed.
Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tilewise.ladder import cuda_cores
from tilewise.sm90 import fragments, tma, walk, wgmma
from tilewise.sm90.dsl import (
    BFloat16,
    Constexpr,
    CUstream,
    Float32,
    Int32,
    SmemAllocator,
    arch,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
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

    @property
    def threads_per_row(self) -> int:
        return THREADS // self.tile_m


def configure(head_dim: int, causal: bool, **choice) -> Config:
    return Config(**{"head_dim": head_dim, "causal": causal, "tile_m": 64, "tile_n": 64, **choice})


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim, 1)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (tile_n, head_dim, kv_stages)
    S: cute.Tensor  # (tile_m, tile_n) fp32: S, then P


class Pipes(NamedTuple):
    q: pipeline.PipelineTmaAsync
    kv: pipeline.PipelineTmaAsync  # a stage is full when both of its tiles are there


class Loads(NamedTuple):
    Q: tma.Tma
    K: tma.Tma
    V: tma.Tma


def layout_V(config: Config) -> cute.Layout:
    return cute.make_ordered_layout((config.tile_n, config.head_dim, config.kv_stages), order=(1, 0, 2))


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor,
    scale_log2: Float32, config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """mQ, mK, mV, mO: (heads, seqlen, head_dim) bf16; mL: (heads, seqlen) fp32. Scores are multiplied by `scale_log2` ln 2."""
    mQ, mK, mV = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 2, 0])) for x in (mQ, mK, mV))  # (seqlen, head_dim, heads)
    layouts = wgmma.layout_Q(config), wgmma.layout_K(config), layout_V(config)
    shapes = (config.tile_m, config.head_dim), (config.tile_n, config.head_dim), (config.tile_n, config.head_dim)
    loads = Loads(*(tma.describe(*each) for each in zip((mQ, mK, mV), layouts, shapes, strict=True)))
    kernel(loads, mO, mL, scale_log2, wgmma.products(config).qk, *layouts[:2], config).launch(
        grid=(cute.ceil_div(mO.shape[1], config.tile_m), mO.shape[0], 1),
        block=(THREADS, 1, 1),
        stream=stream,
    )


@cute.kernel
def kernel(
    loads: Loads, mO: cute.Tensor, mL: cute.Tensor, scale_log2: Float32, mma: cute.TiledMma,
    layout_Q: cute.ComposedLayout, layout_K: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = Smem(
        *(storage.allocate_tensor(BFloat16, x.outer, 1024, swizzle=x.inner) for x in (layout_Q, layout_K)),
        storage.allocate_tensor(BFloat16, layout_V(config), 128),
        storage.allocate_tensor(Float32, cuda_cores.layout_S(config.tile_m, config.tile_n), 128),
    )
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


@cute.jit
def attend(
    loads: Loads, gO: cute.Tensor, gL: cute.Tensor, sm: Smem, pipes: Pipes, mma: cute.TiledMma,
    m_block: Int32, head: Int32, scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """64 rows: the whole walk over the keys, the last first, then O and its log-sum-exp. gO: (seqlen, head_dim), gL: (seqlen,)."""
    seqlen = gO.shape[0]
    n_blocks, _ = walk.key_blocks(m_block, seqlen, config)
    of = config.threads_per_row
    part = cuda_cores.part_of(of, config.head_dim)
    row = m_block * config.tile_m + part.row
    loader = arch.make_warp_uniform(arch.warp_idx()) == 0
    ahead, state = tma.at_first_empty(config.kv_stages), tma.at_first(config.kv_stages)
    if loader:
        pipes.q.producer_acquire(tma.at_first_empty(1))
        tma.load(loads.Q, sm.Q, pipes.q, tma.at_first_empty(1), (config.tile_m, config.head_dim), (m_block, 0, head))
        for i in cutlass.range(min(config.kv_stages, n_blocks), unroll=1):
            ahead = load_kv(loads, sm, pipes, ahead, n_blocks - 1 - i, head, config)
    pipes.q.consumer_wait(tma.at_first(1))
    for i in cutlass.range(n_blocks, unroll=1):
        n_block = n_blocks - 1 - i
        pipes.kv.consumer_wait(state)
        scores(mma, sm, state.index, m_block * config.tile_m, n_block * config.tile_n, seqlen, config)
        cuda_cores.softmax(part, sm.S, scale_log2, of)
        cuda_cores.accumulate(part, sm.S, sm.V[None, None, state.index], of)
        arch.sync_warp()  # all of the warp have read the stage that one of it now gives back
        pipes.kv.consumer_release(state)
        state.advance()
        if loader and n_block >= config.kv_stages:
            ahead = load_kv(loads, sm, pipes, ahead, n_block - config.kv_stages, head, config)
    cuda_cores.store(part, gO, gL, row, of)


@cute.jit
def scores(mma: cute.TiledMma, sm: Smem, stage: Int32, m0: Int32, n0: Int32, seqlen: Int32, config: Constexpr[Config]):
    """S = Q K^T of one tile, masked, by way of the tensor cores and this thread's registers into shared memory."""
    qk = mma.get_slice(arch.thread_idx()[0])
    tSrQ, tSrK = qk.make_fragment_A(qk.partition_A(sm.Q)), qk.make_fragment_B(qk.partition_B(sm.K))
    tScS = qk.partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n)))
    acc_S = fragments.scores(mma, (config.tile_m, config.tile_n), tSrQ[None, None, None, 0], tSrK[None, None, None, stage])
    warpgroup.wait_group(0)
    fragments.hide(acc_S, tScS, m0, n0, seqlen, config.causal)
    for i in range_constexpr(cute.size(acc_S)):
        sm.S[tScS[i]] = acc_S[i]
    arch.sync_warp()  # a warp's 16 rows of S are the rows its own threads read


@cute.jit
def load_kv(loads: Loads, sm: Smem, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, head: Int32, config: Constexpr[Config]):
    """Ask for K and V of a tile, as soon as its stage is empty."""
    pipes.kv.producer_acquire(state)
    tma.load(loads.K, sm.K, pipes.kv, state, (config.tile_n, config.head_dim), (n_block, 0, head))
    tma.load(loads.V, sm.V, pipes.kv, state, (config.tile_n, config.head_dim), (n_block, 0, head))
    state.advance()
    return state
