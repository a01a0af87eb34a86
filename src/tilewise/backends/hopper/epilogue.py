"""The end of a tile of queries: O through shared memory to the copy engine, its log-sum-exp, and what the mask must keep out of O.

Each warp stores its own 16 rows, so no warp waits for another here, and the next tile may begin.
"""

from typing import NamedTuple

from tilewise.backends.hopper import scores, visible
from tilewise.backends.hopper.config import Config
from tilewise.backends.hopper.schedule import Block
from tilewise.backends.hopper.scores import Scores
from tilewise.backends.hopper.visible import Band
from tilewise.hopper import fragments, wgmma
from tilewise.hopper.dsl import (
    Boolean,
    Constexpr,
    Float32,
    Int32,
    LayoutEnum,
    arch,
    const_expr,
    cpasync,
    cute,
    cutlass,
    range_constexpr,
    sm90,
)
from tilewise.hopper.fragments import LN2, LOG2_E
from tilewise.hopper.tma import Tma

WARP = 32
ROWS = 16  # of a tile that a warp holds
LARGE = 16.0  # by which LSE is above the maximum where P was above 2^10 at least, or the keys are many
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
def store(acc_O: cute.Tensor, sO: cute.Tensor, target: Tma, thread: Int32, block: Block, config: Constexpr[Config]):
    """O in its dtype to shared memory and on its way to global memory; rows and columns that do not exist are left out.

    sO: (tile_m, columns), as many columns as there is room for at once.
    """
    r = cute.make_rmem_tensor_like(acc_O, sO.element_type)
    r.store(acc_O.load().to(sO.element_type))
    atom = sm90.get_smem_store_op(LayoutEnum.ROW_MAJOR, sO.element_type, Float32)
    width = wgmma.columns_of_O(config)
    part = wgmma.product_of(config, width, sO.element_type)
    copy = cute.make_tiled_copy_C(atom, part).get_slice(thread)
    held = part.get_slice(thread).make_fragment_C(part.partition_shape_C((config.tile_m, width)))
    for piece in range_constexpr(config.head_dim_v // width):
        arch.cp_async_bulk_wait_group(0, read=True)  # the rows of the tile, or the piece, before have left
        arch.sync_warp()
        numbers = cute.make_tensor(r.iterator + piece * cute.size(held), held.layout)
        cute.copy(atom, copy.retile(numbers), copy.partition_D(sO))
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        send(sO, target, piece * width, arch.make_warp_uniform(thread // WARP), block, config)


@cute.jit
def send(sO: cute.Tensor, target: Tma, column: Constexpr[int], warp: Int32, block: Block, config: Constexpr[Config]):
    """A warp's rows of sO to the columns of O from `column` on."""
    box = ROWS, columns(config)
    gO = target.gmem[None, None, block.head, block.batch]
    if block.m0 + warp * ROWS < gO.shape[0]:
        for c in range_constexpr(wgmma.columns_of_O(config) // box[1]):
            piece = cute.local_tile(sO, box, (warp, c))
            place = cute.local_tile(gO, box, (block.m0 // ROWS + warp, column // box[1] + c))
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
def needs_repair(acc_O: cute.Tensor, lse: cute.Tensor, m: cute.Tensor, config: Constexpr[Config]) -> Boolean:
    """Whether a thread's part of O may be wrong: it is not finite.

    Where all keys are seen nothing but an overflow of P spoils O, and NaN of the inputs stays for nothing: then the sum of a row's P is large, too.
    """
    spoiled = not all_finite(acc_O)
    if const_expr(config.sees == "all" and config.stale_max):
        large = lse[0] > m[0] * LN2 + LARGE or lse[1] > m[1] * LN2 + LARGE
        if const_expr(config.sink):  # which makes NaN of an infinite sum
            large = large or lse[0] != lse[0] or lse[1] != lse[1]
        spoiled = spoiled and large
    return spoiled


@cute.jit
def all_finite(x: cute.Tensor) -> Boolean:
    """By the sum, which is not finite where a number is not (and may overflow where all are: then the repair is for nothing)."""
    sums = [x[i] for i in range(CHAINS)]
    for i in range_constexpr(CHAINS, cute.size(x)):
        sums[i % CHAINS] += x[i]
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return total < Float32.inf and total > -Float32.inf


@cute.jit
def repair(tensors: Tensors, block: Block, band: Band, changes: Scores, warp: Int32, config: Constexpr):
    """O of this warp's 16 rows again, from the keys that each row sees and no others: a hidden value times P = 0 may be NaN.

    Rare, so it is short rather than fast: a lane a key for the scores, a lane a column for the sum. LSE is right as it is, unless P overflowed.
    `warp` has to be a number that ptxas knows to be the whole warp's: by one branch on another it gives up the uniform registers of all loops.
    """
    lane = arch.lane_idx()
    gO = tensors.O[block.batch, None, block.head, None]
    arch.cp_async_bulk_wait_group(0)  # the rows' first O is written
    arch.sync_warp()
    o = cute.make_rmem_tensor(config.head_dim_v // WARP, Float32)
    for i in cutlass.range(ROWS, unroll=1):
        row = block.m0 + warp * ROWS + i
        if row < gO.shape[0]:
            o.fill(0.0)
            if const_expr(config.sees == "runs"):
                walk = visible.walk_of(block, band, tensors.O.shape[1], tensors.K.shape[1], config)
                for r in cutlass.range(walk.first, walk.last, unroll=1):
                    run = visible.run_of(r, band)
                    begin, end = run.first * config.tile_n, min(run.last * config.tile_n, tensors.K.shape[1])
                    if r < walk.free_first and run.ref < 0:
                        low, high = visible.interval(row, visible.band_of(run.ref, band))
                        begin, end = max(begin, low), min(end, high)
                    add_keys(o, row, begin, end, run, tensors, block, band, changes, config)
            else:
                begin, end = visible.keys_of(row, band, config)
                add_keys(o, row, begin, end, None, tensors, block, band, changes, config)
            for x in range_constexpr(config.head_dim_v // WARP):
                if x * WARP + lane < gO.shape[1]:
                    gO[row, x * WARP + lane] = o[x].to(gO.element_type)


@cute.jit
def add_keys(
    o: cute.Tensor, row: Int32, begin: Int32, end: Int32, run: visible.Run | None,
    tensors: Tensors, block: Block, band: Band, changes: Scores, config: Constexpr,
):  # fmt: skip
    """o += P V over the keys [begin, end) of one row; those of them that the run's bitmap shows, where it has one."""
    lane = arch.lane_idx()
    gQ = tensors.Q[block.batch, None, block.head, None]
    gK, gV = (x[block.batch, None, block.head_k, None] for x in (tensors.K, tensors.V))
    lse = tensors.L[block.batch, block.head, row]
    if const_expr(config.stale_max) and arch.vote_any_sync(not lse < Float32.inf):  # as after an overflow of P
        lse = count_again(gQ, gK, row, begin, end, block.head, changes, config)
        if lane == 0:
            tensors.L[block.batch, block.head, row] = lse
    if const_expr(config.bias is not None) and lse == -Float32.inf:
        end = begin  # every logit is -inf: it sees nothing
    j0, goes_on = begin, begin < end
    while goes_on:
        s = dot(gQ, gK, row, j0 + lane, end)
        p = scores.weight(scores.logit_at(s, row, j0 + lane, changes, block, config), lse, changes, config)
        if const_expr(config.sees == "runs"):
            p = p if visible.shows(band, run, row - block.m0, j0 + lane, config) else Float32(-1.0)
        for j in cutlass.range(min(end - j0, WARP), unroll=1):
            weight = arch.shuffle_sync(p, j)
            if const_expr(config.sees == "runs"):
                if weight >= 0.0 or weight != weight:
                    add_value(o, weight, gV[j0 + j, None])
            else:
                add_value(o, weight, gV[j0 + j, None])
        j0 += WARP
        goes_on = j0 < end and not is_lost(o, gV.shape[1])


@cute.jit
def is_lost(o: cute.Tensor, columns: Int32) -> Boolean:
    """Whether all of a row is NaN, and so remains."""
    lane, lost = arch.lane_idx(), Boolean(True)
    for x in range_constexpr(cute.size(o)):
        lost = lost and (o[x] != o[x] or x * WARP + lane >= columns)
    return arch.vote_all_sync(lost)


@cute.jit
def dot(gQ: cute.Tensor, gK: cute.Tensor, row: Int32, key: Int32, end: Int32) -> Float32:
    """The product of a query and a key; 0 for a key that is not before `end`."""
    s = Float32(0.0)
    if key < end:
        for c in cutlass.range(gQ.shape[1], unroll=8):
            s += gQ[row, c].to(Float32) * gK[key, c].to(Float32)
    return s


@cute.jit
def count_again(
    gQ: cute.Tensor, gK: cute.Tensor, row: Int32, begin: Int32, end: Int32, head: Int32, changes: Scores, config: Constexpr
) -> Float32:  # fmt: skip
    """The log-sum-exp of a row over the keys [begin, end), a lane every 32nd of them with a maximum of its own."""
    lane = arch.lane_idx()
    m, l = -Float32.inf, Float32(0.0)
    if const_expr(config.sink):
        m, l = changes.sink[head] * LOG2_E, (Float32(1.0) if lane == 0 else Float32(0.0))
    for j0 in cutlass.range(begin, end, WARP, unroll=1):
        x = dot(gQ, gK, row, j0 + lane, end) * changes.scale_log2
        x = x if j0 + lane < end else -Float32.inf
        top = arch.fmax(m, x)
        base = 0.0 if top == -Float32.inf else top
        l = l * cute.math.exp2(m - base, fastmath=True) + cute.math.exp2(x - base, fastmath=True)
        m = top
    top = arch.warp_reduction_max(m)
    l = arch.warp_reduction_sum(l * cute.math.exp2(m - top, fastmath=True))
    return (top + cute.math.log2(l)) * LN2


@cute.jit
def add_value(o: cute.Tensor, weight: Float32, value: cute.Tensor):
    """value: (head_dim_v,); a lane has every 32nd number."""
    lane = arch.lane_idx()
    for x in range_constexpr(cute.size(o)):
        if x * WARP + lane < value.shape[0]:
            o[x] += weight * value[x * WARP + lane].to(Float32)
