"""The end of a block of keys in the backward pass on Hopper: dK and dV from registers to global memory, each warp its 16 rows. Rounded, they go by
way of shared memory; in fp32 (Config.wide_keys), for which that is too small, directly.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward import parts
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.order import Block
from tilewise.backends.hopper.backward.parts import Tensors
from tilewise.backends.hopper.backward.repair.reports import report_keys
from tilewise.backends.hopper.backward.tiles import THREADS, WARP, Barrier, Mma, Smem, box_columns, layouts_of, shares_of, thread_of
from tilewise.sm90 import fragments, tma
from tilewise.sm90.dsl import Constexpr, Float32, Int32, Int64, arch, const_expr, cpasync, cute, range_constexpr, warp, warpgroup

ROWS = 16  # of a warp


class Stores(NamedTuple):
    """How the copy engine stores them."""

    dK: tma.Tma
    dV: tma.Tma


class WideStores(NamedTuple):
    """Where threads store them, in fp32."""

    dK: cute.Tensor  # (seqlen, dim, heads, batch)
    dV: cute.Tensor


@cute.jit
def write(
    tensors: Tensors, stores: Stores | WideStores, acc_dK: cute.Tensor, acc_dV: cute.Tensor, sm: Smem, mma: Mma, block: Block, scale: Float32,
    config: Constexpr[Config],
):  # fmt: skip
    """dK = scale * acc_dK, and dV, by way of K and V in shared memory."""
    write_through(tensors, stores, acc_dK, acc_dV, sm.K, sm.V, mma, block, scale, config)


@cute.jit
def places(sm: Smem, config: Constexpr[Config]) -> tuple[cute.Tensor, cute.Tensor]:
    """Where dK and dV go through shared memory if the next K is to arrive meanwhile: dK in the place of dS, dV behind it or in that of V."""
    dtype, layouts, dV = sm.K.element_type, layouts_of(config, sm.K.element_type), sm.V
    dK = cute.make_tensor(cute.recast_ptr(sm.dS.iterator, layouts.K.inner, dtype), layouts.K.outer)
    if const_expr(fit_in_dS(config)):
        behind = sm.dS.iterator + config.tile_n * config.head_dim
        dV = cute.make_tensor(cute.recast_ptr(behind, layouts.V.inner, dtype), layouts.V.outer)
    return dK, dV


def fit_in_dS(config: Config) -> bool:
    """Whether both dK and dV do, and V's place is free; in fp32 neither is taken."""
    return config.wide_keys or config.head_dim + config.head_dim_v <= config.tile_m * config.ds_stages


@cute.jit
def write_through(
    tensors: Tensors, stores: Stores | WideStores, acc_dK: cute.Tensor, acc_dV: cute.Tensor, sdK: cute.Tensor, sdV: cute.Tensor, mma: Mma,
    block: Block, scale: Float32, config: Constexpr[Config],
):  # fmt: skip
    """By way of sdK and sdV (tile_n, dim, 1), once its old content is not needed; where blocks are persistent, dV and then dK may still be on their
    way from there at the end. What is not finite is listed.
    """
    thread = thread_of(config)
    if const_expr(config.repairs):
        finite = parts.all_finite(acc_dK) and parts.all_finite(acc_dV)
        if arch.vote_any_sync(not finite):
            rows, share = place_of(arch.make_warp_uniform(thread // WARP) if const_expr(config.persistent) else thread // WARP, config)
            for part in range_constexpr(config.repaired_parts[1] // config.column_parts):
                report_keys(tensors, block.n0 + rows * ROWS, share + part, block.head_k, block.batch, config)
    if const_expr(config.wide_keys):
        store(stores.dV, acc_dV, scale_of_dV(tensors, config), mma.dv, block, config)
        store(stores.dK, acc_dK, scale, mma.dk, block, config)
        return
    arch.barrier(barrier_id=Barrier.END, number_of_threads=config.consumers * THREADS)  # the old content is not read any more
    of_K, of_V = shares_of(config)
    put(acc_dV, scale_of_dV(tensors, config), sdV[None, None, 0], mma.dv, config)
    put(acc_dK, scale, sdK[None, None, 0], mma.dk, config)
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()
    send(sdV[None, None, 0], stores.dV, block, box_columns(of_V), config)
    send(sdK[None, None, 0], stores.dK, block, box_columns(of_K), config)
    if const_expr(not config.persistent):
        arch.cp_async_bulk_wait_group(0, read=True)


def scale_of_dV(tensors: Tensors, config: Config) -> Float32:
    """From its sums."""
    scale = Float32(1.0 / config.enlarged)
    return scale * tensors.changes.draw.rescale if config.dropout else scale


def place_of(number: Int32, config: Config) -> tuple[Int32, Int32]:
    """Of a consumer's warp: which 16 of the block's keys, and which of the parts of the columns."""
    return number % (config.tile_n // ROWS), number // (config.tile_n // ROWS)


def describe_store(mX: cute.Tensor, share: int) -> tma.Tma:
    """For storing dK or dV, 16 rows of `box_columns(share)` at a time. mX: (seqlen, dim, heads, batch)."""
    box = ROWS, box_columns(share)
    kind = warpgroup.SmemLayoutAtomKind.K_SW64 if box[1] == 32 else warpgroup.SmemLayoutAtomKind.K_SW128
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, mX.element_type), box, order=(0, 1))
    return tma.Tma(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, layout, box))


@cute.jit
def store(mX: cute.Tensor, acc: cute.Tensor, scale: Float32, tiled_mma: cute.TiledMma, block: Block, config: Constexpr[Config]):
    """scale * acc, dK or dV of these warpgroups, where rows and columns exist. The four threads of a row have 32 bytes side by side."""
    gX = mX[None, None, block.head_k, block.batch]
    shape = const_expr((config.tile_n, cute.size(acc) * config.consumers * THREADS // config.tile_n))
    at = fragments.by_rows(tiled_mma.get_slice(thread_of(config)).partition_C(cute.make_identity_tensor(shape)))
    X = fragments.by_rows(acc)
    for r in range_constexpr(fragments.ROWS):
        row, column = block.n0 + at[r, 0][0], at[r, 0][1]
        if row < gX.shape[0]:
            address = (gX.iterator + gX.layout((row, column))).toint()
            for c in range_constexpr(0, cute.size(X, mode=[1]), 2):
                if column + fragments.column(c) < gX.shape[1]:
                    arch.inline_ptx(
                        "st.global.cs.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                        read_only_args=[address + 4 * fragments.column(c), *(scale * X[r, c + i] for i in range(2))],
                    )


@cute.jit
def put(acc: cute.Tensor, scale: Float32, sX: cute.Tensor, tiled_mma: cute.TiledMma, config: Constexpr[Config]):
    """scale * acc, dK or dV of these warpgroups, rounded, into sX (tile_n, dim): each warp its 16 rows."""
    r = cute.make_rmem_tensor_like(acc, sX.element_type)
    for i in range_constexpr(cute.size(acc)):
        acc[i] *= scale
    fragments.round_into(r, acc)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), sX.element_type), tiled_mma).get_slice(
        thread_of(config)
    )
    cute.copy(copy, copy.retile(r), copy.partition_D(sX))


@cute.jit
def send(sX: cute.Tensor, target: tma.Tma, block: Block, columns: Constexpr[int], config: Constexpr[Config]):
    """What this warp put there to global memory: `columns` at a time, as many as a swizzled block of sX has."""
    number = arch.make_warp_uniform(thread_of(config) // WARP)
    rows, share = place_of(number, config)
    width = const_expr(cute.size(sX, mode=[1]) // config.column_parts)
    box = const_expr((ROWS, columns))
    gX = target.gmem[None, None, block.head_k, block.batch]
    if block.n0 + rows * ROWS < gX.shape[0]:
        for c in range_constexpr(width // box[1]):
            column = share * (width // box[1]) + c
            piece = cute.local_tile(sX, box, (rows, column))
            place = cute.local_tile(gX, box, (block.n0 // ROWS + rows, column))
            s, g = cpasync.tma_partition(target.atom, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), cute.group_modes(place, 0, 2))
            cute.copy(target.atom, s, g, cache_policy=Int64(tma.FIRST))
    arch.cp_async_bulk_commit_group()
