"""Scores of 8-bit products, and P in e4m3, in the registers of a warpgroup's product.

A score is a dot product d of int8 or e4m3 elements times a factor, which is one for a row and a tile of keys. Integer products are added to MAGIC's
bits: what comes out, read as fp32, is 2^23 + 2^22 + d, exactly while |d| < 2^22. So no product is converted, MAGIC leaves by the same fused
multiply-add that subtracts the maximum, and, as all sums are positive, their maximum is that of integers, of which three are compared at once.

P in e4m3 is 2^HEADROOM times what it would be: e4m3 ends at 448 and has three bits of its own down to 2^-6.
"""

from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Constexpr, Float32, arch, const_expr, cute, range_constexpr
from tilewise.sm90.eight_bits import HEADROOM

MAGIC_BITS, MAGIC = 0x4B400000, float(3 << 22)
LEAST_FACTOR = 2.0**-100  # 0 times the infinity of a hidden score would be NaN


@cute.jit
def online_softmax(
    acc_S: cute.Tensor, rows: fragments.Rows, factors: cute.Tensor, masked: Constexpr[bool], config: Constexpr
) -> cute.Tensor:
    """As `fragments.online_softmax`, with a factor a row. factors: (ROWS,) fp32, positive; masked: whether a row may have seen no key yet."""
    S = fragments.by_rows(acc_S)
    rescale, base = (cute.make_rmem_tensor(fragments.ROWS, Float32) for _ in range(2))
    for r in range_constexpr(fragments.ROWS):
        values = [S[r, c] for c in range(cute.size(S, mode=[1]))]
        if const_expr(has_magic(config)):
            top = fragments.quad_max(fragments.largest_from_zero(values)) - MAGIC
        else:
            top = fragments.quad_max(fragments.largest(values))
        m = arch.fmax(top * factors[r], rows.m[r])
        above = m
        if const_expr(masked):
            above = 0.0 if m == -Float32.inf else m
        rescale[r] = cute.math.exp2(rows.m[r] - above, fastmath=True)
        rows.m[r] = m
        base[r] = above - headroom(config)
        if const_expr(has_magic(config)):
            base[r] = factors[r] * MAGIC + base[r]
    for r in range_constexpr(fragments.ROWS):
        p = cute.math.exp2(S[r, None].load() * factors[r] - base[r], fastmath=True)
        rows.l[r] = p.reduce(cute.ReductionOp.ADD, rows.l[r] * rescale[r], 0)
        S[r, None].store(p)
    return rescale


def is_integer(config) -> bool:
    """Whether scores are sums of integers."""
    return not config.dtype.is_floating_point


def has_magic(config) -> bool:
    """Whether MAGIC leaves the scores with their rows' factors; those of columns take it first."""
    return is_integer(config) and not config.tokens_k


@cute.jit
def scale_columns(acc_S: cute.Tensor, columns: cute.Tensor, config: Constexpr):
    """S in place, times a factor a key. columns: fp32, of the thread's."""
    S = fragments.by_rows(acc_S)
    for c in range_constexpr(cute.size(S, mode=[1])):
        for r in range_constexpr(fragments.ROWS):
            S[r, c] = (S[r, c] - MAGIC if const_expr(is_integer(config)) else S[r, c]) * columns[c]


@cute.jit
def weigh_columns(acc_S: cute.Tensor, columns: cute.Tensor, masked: Constexpr[bool]):
    """P in place, likewise; masked: what is hidden stays 0, where the factor may be NaN."""
    P = fragments.by_rows(acc_S)
    for c in range_constexpr(cute.size(P, mode=[1])):
        for r in range_constexpr(fragments.ROWS):
            p = P[r, c] * columns[c]
            if const_expr(masked):
                p = P[r, c] if P[r, c] == 0.0 else p
            P[r, c] = p


@cute.jit
def dequantise(acc_S: cute.Tensor, factors: cute.Tensor, shift: cute.Tensor | None, config: Constexpr):
    """S in place: the products that elements of more bits would have had. factors and shift: (ROWS,) fp32."""
    S = fragments.by_rows(acc_S)
    for r in range_constexpr(fragments.ROWS):
        start = Float32(0.0) if const_expr(shift is None) else shift[r]
        if const_expr(has_magic(config)):
            start -= factors[r] * MAGIC
        S[r, None].store(S[r, None].load() * factors[r] + start)


def headroom(config) -> float:
    """What P is computed too large by, in powers of two: nothing where it has 16 bits."""
    return 0.0 if config.wide_values else HEADROOM


@cute.jit
def give_headroom(acc_S: cute.Tensor, config: Constexpr):
    """P in place, times 2^headroom."""
    acc_S.store(acc_S.load() * 2.0 ** headroom(config))


@cute.jit
def take_headroom(x: cute.Tensor, config: Constexpr):
    """Likewise divided by it. x: (ROWS,) fp32."""
    for r in range_constexpr(fragments.ROWS):
        x[r] *= 2.0 ** -headroom(config)
