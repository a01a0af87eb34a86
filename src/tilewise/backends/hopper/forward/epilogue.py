"""The end of a tile of queries: O through shared memory to the copy engine, and its log-sum-exp.

Each warp stores its own 16 rows, so no warp waits for another here, and the next tile may begin.
"""

from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.scheduler import Block
from tilewise.sm90 import fragments, wgmma
from tilewise.sm90.dsl import Constexpr, Float32, Int32, LayoutEnum, arch, cpasync, cute, range_constexpr, sm90
from tilewise.sm90.tma import Tma

WARP = 32
ROWS = 16  # of a tile that a warp holds


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
def store_statistic(gX: cute.Tensor, x: cute.Tensor, tOcO: cute.Tensor, m0: Int32):
    """A value of each row. gX: (seqlen,) of this head; tOcO: coordinates of acc_O in its tile."""
    at = fragments.by_rows(tOcO)
    for r in range_constexpr(fragments.ROWS):
        row = m0 + at[r, 0][0]
        if row < gX.shape[0] and at[r, 0][1] == 0:
            gX[row] = x[r]
