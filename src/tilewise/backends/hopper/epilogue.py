"""The end of a tile of queries: O through shared memory to the copy engine, its log-sum-exp, and what the mask must keep out of O.

Each warp stores its own 16 rows, so no warp waits for another here, and the next tile may begin.
"""

from typing import NamedTuple

from tilewise.backends.hopper.schedule import Block
from tilewise.backends.hopper.visible import Band, interval
from tilewise.hopper import fragments
from tilewise.hopper.dsl import (
    Boolean,
    Constexpr,
    Float32,
    Int32,
    LayoutEnum,
    arch,
    cpasync,
    cute,
    cutlass,
    range_constexpr,
    sm90,
)
from tilewise.hopper.tma import Tma

WARP = 32
ROWS = 16  # of a tile that a warp holds
CHAINS = 4  # of additions that do not wait for each other


class Tensors(NamedTuple):
    """As torch has them: (batch, seqlen, heads, head_dim); L (batch, heads, seqlen_q) fp32."""

    Q: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    O: cute.Tensor
    L: cute.Tensor


def columns(config) -> int:
    """Of a swizzled block of O in shared memory: a TMA box is that wide."""
    return 64 if config.head_dim_v % 64 == 0 else 32


def describe(mO: cute.Tensor, config) -> Tma:
    """The descriptor for storing O, 16 rows and `columns` at a time. mO: (seqlen, head_dim_v, heads, batch)."""
    box = ROWS, columns(config)
    layout = sm90.make_smem_layout_epi(mO.element_type, LayoutEnum.ROW_MAJOR, box, 1)
    return Tma(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mO, cute.select(layout, mode=[0, 1]), box))


@cute.jit
def store(acc_O: cute.Tensor, sO: cute.Tensor, target: Tma, pv: cute.TiledMma, thread: Int32, block: Block, config: Constexpr):
    """O in its dtype to shared memory and on its way to global memory; rows and columns that do not exist are left out. sO: (tile_m, head_dim_v)."""
    r = cute.make_rmem_tensor_like(acc_O, sO.element_type)
    r.store(acc_O.load().to(sO.element_type))
    atom = sm90.get_smem_store_op(LayoutEnum.ROW_MAJOR, sO.element_type, Float32)
    copy = cute.make_tiled_copy_C(atom, pv).get_slice(thread)
    arch.cp_async_bulk_wait_group(0, read=True)  # the rows of the tile before have left
    arch.sync_warp()
    cute.copy(atom, copy.retile(r), copy.partition_D(sO))
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()
    warp = arch.make_warp_uniform(thread // WARP)
    box = ROWS, columns(config)
    gO = target.gmem[None, None, block.head, block.batch]
    if block.m0 + warp * ROWS < gO.shape[0]:
        for c in range_constexpr(config.head_dim_v // box[1]):
            piece = cute.local_tile(sO, box, (warp, c))
            place = cute.local_tile(gO, box, (block.m0 // ROWS + warp, c))
            s, g = cpasync.tma_partition(target.atom, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), cute.group_modes(place, 0, 2))
            cute.copy(target.atom, s, g)
    arch.cp_async_bulk_commit_group()


@cute.jit
def store_lse(gL: cute.Tensor, lse: cute.Tensor, tOcO: cute.Tensor, m0: Int32):
    """gL: (seqlen,) of this head; tOcO: coordinates of acc_O in its tile."""
    at = fragments.by_rows(tOcO)
    for r in range_constexpr(fragments.ROWS):
        row = m0 + at[r, 0][0]
        if row < gL.shape[0] and at[r, 0][1] == 0:
            gL[row] = lse[r]


@cute.jit
def all_finite(x: cute.Tensor) -> Boolean:
    """By the sum, which is not finite where a number is not (and may overflow where all are: then the repair is for nothing)."""
    sums = [x[i] for i in range(CHAINS)]
    for i in range_constexpr(CHAINS, cute.size(x)):
        sums[i % CHAINS] += x[i]
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return total < Float32.inf and total > -Float32.inf


@cute.jit
def repair(tensors: Tensors, block: Block, band: Band, scale_log2: Float32, warp: Int32, config: Constexpr):
    """O of this warp's 16 rows again, from the keys that each row sees and no others: a hidden value times P = 0 may be NaN.

    Rare, so it is short rather than fast: a lane a key for the scores, a lane a column for the sum. LSE is right as it is.
    """
    lane = arch.lane_idx()
    gQ, gO = (x[block.batch, None, block.head, None] for x in (tensors.Q, tensors.O))
    gK, gV = (x[block.batch, None, block.head_k, None] for x in (tensors.K, tensors.V))
    arch.cp_async_bulk_wait_group(0)  # the rows' first O is written
    arch.sync_warp()
    o = cute.make_rmem_tensor(config.head_dim_v // WARP, Float32)
    for i in cutlass.range(ROWS, unroll=1):
        row = block.m0 + warp * ROWS + i
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
                    for x in range_constexpr(config.head_dim_v // WARP):
                        if x * WARP + lane < gV.shape[1]:
                            o[x] += weight * gV[j0 + j, x * WARP + lane].to(Float32)
            for x in range_constexpr(config.head_dim_v // WARP):
                if x * WARP + lane < gO.shape[1]:
                    gO[row, x * WARP + lane] = o[x].to(gO.element_type)
