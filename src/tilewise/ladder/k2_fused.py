"""K2: FlashAttention-2 on CUDA cores. One fused kernel; the score matrix never leaves the chip.

K1 wrote S to global memory, read it three times and wrote it twice more. Here a thread block owns 64 queries and walks over the keys in
tiles of 64: S of a tile lives in shared memory, becomes P in place, and is spent on O, which stays in registers; the softmax of a row is
corrected as its maximum grows (online softmax) and divided by its sum once, at the end. K and V take turns in one buffer. Four threads
share a row and reduce by shuffles; tiles that the causal mask hides are not visited.

Predicted bottleneck: the CUDA cores' multiply-adds and the shared-memory reads that feed them; a hundredth of the tensor cores' rate.
Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tilewise.ladder import cuda_cores
from tilewise.sm90 import walk
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
    range_constexpr,
)

THREADS = 256


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a problem is cut."""

    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int

    @property
    def threads_per_row(self) -> int:
        return THREADS // self.tile_m


def configure(head_dim: int, causal: bool, **choice) -> Config:
    return Config(**{"head_dim": head_dim, "causal": causal, "tile_m": 64, "tile_n": 64, **choice})


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim)
    KV: cute.Tensor  # (tile_n, head_dim): K, then V
    S: cute.Tensor  # (tile_m, tile_n) fp32: S, then P


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor,
    scale_log2: Float32, config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """mQ, mK, mV, mO: (heads, seqlen, head_dim) bf16; mL: (heads, seqlen) fp32. Scores are multiplied by `scale_log2` ln 2."""
    kernel(mQ, mK, mV, mO, mL, scale_log2, config).launch(
        grid=(cute.ceil_div(mO.shape[1], config.tile_m), mO.shape[0], 1),
        block=(THREADS, 1, 1),
        stream=stream,
    )


@cute.kernel
def kernel(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor,
    scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    sm = make_smem(config)
    m_block, head = walk.block_of(config)
    attend(*(x[head, None, None] for x in (mQ, mK, mV, mO)), mL[head, None], sm, m_block, scale_log2, config)


@cute.jit
def make_smem(config: Constexpr[Config]) -> Smem:
    storage = SmemAllocator()
    tiles = ((config.tile_m, config.head_dim), (config.tile_n, config.head_dim))
    return Smem(
        *(storage.allocate_tensor(BFloat16, cute.make_ordered_layout(tile, order=(1, 0)), 128) for tile in tiles),
        storage.allocate_tensor(Float32, cuda_cores.layout_S(config.tile_m, config.tile_n), 128),
    )


@cute.jit
def attend(
    gQ: cute.Tensor, gK: cute.Tensor, gV: cute.Tensor, gO: cute.Tensor, gL: cute.Tensor, sm: Smem,
    m_block: Int32, scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """64 rows: the whole walk over the keys, the last first, then O and its log-sum-exp. gQ .. gO: (seqlen, head_dim), gL: (seqlen,)."""
    seqlen = gO.shape[0]
    n_blocks, _ = walk.key_blocks(m_block, seqlen, config)
    of = config.threads_per_row
    part = cuda_cores.part_of(of, config.head_dim)
    row = m_block * config.tile_m + part.row
    load(gQ, sm.Q, m_block * config.tile_m)
    for i in cutlass.range(n_blocks, unroll=1):
        n0 = (n_blocks - 1 - i) * config.tile_n
        load(gK, sm.KV, n0)
        arch.sync_threads()  # Q and K are there
        cuda_cores.scores(part, sm.Q, sm.KV, sm.S, cuda_cores.keys_seen(row, n0, seqlen, config.causal), of)
        arch.sync_threads()  # nobody reads K any more
        load(gV, sm.KV, n0)
        cuda_cores.softmax(part, sm.S, scale_log2, of)
        arch.sync_threads()  # V is there
        cuda_cores.accumulate(part, sm.S, sm.KV, of)
        arch.sync_threads()  # nobody reads V any more
    cuda_cores.store(part, gO, gL, row, of)


@cute.jit
def load(gX: cute.Tensor, sX: cute.Tensor, first: Int32):
    """A tile, 16 bytes a thread at a time; rows beyond the last are zero. gX: (seqlen, head_dim), sX: (tile, head_dim)."""
    thread, _, _ = arch.thread_idx()
    wide = cuda_cores.WIDE
    chunks = cute.size(sX, mode=[1]) // wide  # of a row
    held = cute.make_rmem_tensor(wide, BFloat16)
    for i in range_constexpr(cute.size(sX) // (wide * THREADS)):
        row, column = (thread + i * THREADS) // chunks, (thread + i * THREADS) % chunks
        held.fill(0.0)
        if first + row < gX.shape[0]:
            cute.autovec_copy(cute.local_tile(gX[first + row, None], (wide,), (column,)), held)
        cute.autovec_copy(held, cute.local_tile(sX[row, None], (wide,), (column,)))
