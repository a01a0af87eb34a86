"""Operands of the warpgroup products S = Q K^T and O = P V: which instructions, and the swizzled tiles they read. From K4 on."""

from typing import NamedTuple

from tilewise.sm90.dsl import BFloat16, Float32, LayoutEnum, OperandMajorMode, cute, sm90, warpgroup

K_MAJOR, MN_MAJOR = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR  # of an operand (M or N, K): which of the two lies contiguously


class Mma(NamedTuple):
    qk: cute.TiledMma  # Q and K from shared memory
    pv: cute.TiledMma  # P from registers, V from shared memory


def value_dim(config) -> int:
    """head_dim_v; the ladder's is head_dim."""
    return getattr(config, "head_dim_v", config.head_dim)


def products(config, dtype=BFloat16) -> Mma:
    """64 rows a warpgroup; all of tile_n, and of the values' head_dim, in one instruction."""
    warpgroups = (config.tile_m // 64, 1, 1)
    k, smem = OperandMajorMode.K, warpgroup.OperandSource.SMEM
    return Mma(
        sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, warpgroups, (64, config.tile_n), smem),
        product_of(config, value_dim(config), dtype),
    )


def of_warpgroup(tiled_mma: cute.TiledMma, index) -> cute.ThrMma:
    """The slice for the operands in shared memory, which are a whole warpgroup's: `index` is the same in all its threads.

    Their descriptors then stay in uniform registers. Sliced by thread, they are computed in vector registers and moved over (R2UR), between
    the barrier that begins a turn and its first product.
    """
    return tiled_mma.get_slice(index * 128)


def layout_Q(config, dtype=BFloat16) -> cute.ComposedLayout:
    """(tile_m, head_dim, q_stages)"""
    return sm90.make_smem_layout_a(K_MAJOR, (config.tile_m, config.tile_n, config.head_dim), dtype, getattr(config, "q_stages", 1))


def layout_K(config, dtype=BFloat16) -> cute.ComposedLayout:
    """(tile_n, head_dim, kv_stages)"""
    return sm90.make_smem_layout_b(K_MAJOR, (config.tile_m, config.tile_n, config.head_dim), dtype, config.kv_stages)


def layout_V(config, dtype=BFloat16) -> cute.ComposedLayout:
    """(head_dim, tile_n, kv_stages): the sum runs over the keys, so V's contiguous head_dim is the product's N."""
    return sm90.make_smem_layout_b(MN_MAJOR, (config.tile_m, value_dim(config), config.tile_n), dtype, config.kv_stages)


def layout_O(config, dtype=BFloat16) -> cute.ComposedLayout:
    """(tile_m, head_dim_v, 1), or a piece of the columns: as Q's, so that a warpgroup's rows of O fit over its rows of Q."""
    return sm90.make_smem_layout_a(K_MAJOR, (config.tile_m, config.tile_n, columns_of_O(config)), dtype, 1)


def columns_of_O(config) -> int:
    """How many of O's columns leave through shared memory at once."""
    return value_dim(config) // max(getattr(config, "pieces_of_O", 1), 1)


def product_of(config, columns: int, dtype=BFloat16) -> cute.TiledMma:
    """O = P V, for some of V's columns: which thread holds what of those columns of O."""
    k, mn = OperandMajorMode.K, OperandMajorMode.MN
    warpgroups = (config.tile_m // 64, 1, 1)
    return sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, warpgroups, (64, columns), warpgroup.OperandSource.RMEM)
