"""Products in 8 bits: their operands, and the way from S to P. From K7 on.

As in wgmma.py and fragments.py, but for what is different: an instruction sums over 32 elements instead of 16, both operands have the elements of a
sum side by side (so V lies transposed, keys contiguous, in the order of key_order.py), and P is rounded to e4m3, which knows 1 to 448 and
fractions down to 2^-9. So P is computed 2^8 times too large, as is its sum, by which O is divided: see `HEADROOM`.
"""

from tilewise.sm90 import fragments, wgmma
from tilewise.sm90.dsl import (
    Float8E4M3FN,
    Float32,
    Int8,
    Int32,
    OperandMajorMode,
    arch,
    const_expr,
    cute,
    range_constexpr,
    sm90,
    warpgroup,
)

HEADROOM = 8.0
"""P's largest number is 2^8: 448, e4m3's largest, is no power of two. Its smallest is then 2^-9, which stands for a weight of 2^-17."""


def sum_of(dtype) -> type:
    """In which products of `dtype` are added up."""
    return Int32 if dtype is Int8 else Float32


def products(config, dtype=Float8E4M3FN, dtype_p=Float8E4M3FN, columns: int | None = None) -> wgmma.Mma:
    """As `wgmma.products`. dtype: of Q and K, e4m3 or int8; dtype_p: of P and V; columns: of V, of one instruction, if not all."""
    warpgroups, k = (config.tile_m // 64, 1, 1), OperandMajorMode.K
    smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    return wgmma.Mma(
        sm90.make_trivial_tiled_mma(dtype, dtype, k, k, sum_of(dtype), warpgroups, (64, config.tile_n), smem),
        sm90.make_trivial_tiled_mma(
            dtype_p, dtype_p, k, k, sum_of(dtype_p), warpgroups, (64, columns or wgmma.value_dim(config)), registers
        ),
    )


def layout_V(config, dtype=Float8E4M3FN) -> cute.ComposedLayout:
    """(head_dim_v, tile_n, kv_stages), the keys contiguous."""
    return sm90.make_smem_layout_b(wgmma.K_MAJOR, (config.tile_m, wgmma.value_dim(config), config.tile_n), dtype, config.kv_stages)


@cute.jit
def round_into(P: cute.Tensor, acc_S: cute.Tensor):
    """P in e4m3, in the registers from which the second product reads it: words of four keys of a row, as the thread has them in S."""
    words = cute.recast_tensor(P, Int32)
    for word in range_constexpr(cute.size(words)):
        at = const_expr(word // 2 * 8 + word % 2 * 2)  # 16 columns, 2 rows
        words[word] = e4m3_of_four(acc_S[at], acc_S[at + 1], acc_S[at + 4], acc_S[at + 5])


def e4m3_of_four(a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
    """Rounded to the nearest, ties to even, what is beyond 448 (infinity, too) to 448; a comes first in memory."""
    return arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};"
        " mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
    )


@cute.jit
def add_scaled(acc_O: cute.Tensor, factors: cute.Tensor, acc_N: cute.Tensor):
    """O = O r + N, one fused multiply-add an element. factors: r of each of the thread's rows."""
    O, N = fragments.by_rows(acc_O), fragments.by_rows(acc_N)
    for r in range_constexpr(fragments.ROWS):
        O[r, None].store(O[r, None].load() * factors[r] + N[r, None].load())
