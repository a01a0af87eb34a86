"""dS = P (dP - delta) (Eq. 25) in the registers of a product, by way of dropout.

In as many ways as registers want it: P is at hand in fp32, or rounded, or another warpgroup's; and -delta is added ahead of that, or with it.
"""

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.operands import Draw
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import BFloat16, Constexpr, Float32, Int32, arch, const_expr, cute, range_constexpr


@cute.jit
def add_to_rows(acc: cute.Tensor, numbers: cute.Tensor):
    """numbers: one for each of this thread's columns."""
    rows = fragments.by_rows(acc)
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(cute.size(rows, mode=[1])):
            rows[r, c] += numbers[c]


@cute.jit
def subtract_delta(acc_dP: cute.Tensor, minus_delta: cute.Tensor, config: Constexpr):
    """dP becomes dP - delta, reduced as much as the factor by which it is then multiplied is enlarged: one instruction each."""
    if const_expr(config.enlarged != 1.0):
        rows, least = fragments.by_rows(acc_dP), 1.0 / config.enlarged
        for c in range_constexpr(cute.size(rows, mode=[1])):
            reduced = minus_delta[c] * least
            for r in range_constexpr(fragments.ROWS):
                rows[r, c] = rows[r, c] * least + reduced
    else:
        add_to_rows(acc_dP, minus_delta)


@cute.jit
def multiply_by_rounded(acc: cute.Tensor, rounded: cute.Tensor, config: Constexpr):
    """acc *= rounded, taken apart word by word: element by element, the DSL keeps a copy of every other one in a register of its own."""
    words = cute.recast_tensor(rounded, Int32)
    for i in range_constexpr(cute.size(words)):
        if const_expr(rounded.element_type is BFloat16):
            instructions = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
        else:
            instructions = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
        low, high = arch.inline_ptx(instructions, write_only_types=[Float32, Float32], read_only_args=[words[i]])
        if const_expr(config.enlarged != 1.0):
            low, high = low * (1.0 / config.enlarged), high * (1.0 / config.enlarged)
        acc[2 * i] *= low
        acc[2 * i + 1] *= high


@cute.jit
def differentiate(acc_dP: cute.Tensor, acc_P: cute.Tensor):
    """dP - delta becomes dS = P (dP - delta) (Eq. 25)."""
    for i in range_constexpr(cute.size(acc_dP)):
        acc_dP[i] = acc_P[i] * acc_dP[i]


@cute.jit
def differentiate_kept(
    acc_dP: cute.Tensor, acc_P: cute.Tensor, minus_delta: cute.Tensor, draw: Draw, bits: cute.Tensor, config: Constexpr
):  # fmt: skip
    """dP becomes dS = P (dropout(dP) - delta), but for Draw.rest. minus_delta: one for each of this thread's columns."""
    lift = dropout.lift_of(draw, config)
    for i in range_constexpr(cute.size(acc_dP)):
        acc_dP[i] = acc_P[i] * (acc_dP[i] * dropout.in_columns(bits, i, lift) + minus_delta[dropout.row_and_column(i)[1]])


@cute.jit
def differentiate_by(acc_dP: cute.Tensor, factor: cute.Tensor, minus_delta: cute.Tensor, draw: Draw | None, config: Constexpr):
    """dP, which is `subtract_delta`'s already unless there is dropout, becomes dS, but for Draw.rest. factor: as `weights` has left it."""
    for i in range_constexpr(cute.size(acc_dP)):
        p = factor[i].to(Float32)
        if const_expr(config.dropout):
            p, kept = dropout.from_sign(p, dropout.lift_of(draw, config))
            acc_dP[i] = acc_dP[i] * kept + minus_delta[dropout.row_and_column(i)[1]]
            p *= 1.0 / config.enlarged
        acc_dP[i] *= p


@cute.jit
def drop(dP: cute.Tensor, bits: cute.Tensor | None, draw: Draw | None, config: Constexpr):
    """dP = 0 where P was dropped, and lifted elsewhere; NaN stays NaN. dP: (ROWS, columns)."""
    if const_expr(bits is not None):
        columns = const_expr(cute.size(dP, mode=[1]))
        for r in range_constexpr(fragments.ROWS):
            for c in range_constexpr(columns):
                dP[r, c] *= dropout.in_rows(bits, r, c, columns, dropout.lift_of(draw, config))


@cute.jit
def differentiate_rows(dS: cute.Tensor, P: cute.Tensor, dP: cute.Tensor, minus_delta: cute.Tensor):
    """dS = P (dP - delta) (Eq. 25), where rows are queries. (ROWS, columns) each, and dS is one of the others; minus_delta: (ROWS,)."""
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(cute.size(P, mode=[1])):
            dS[r, c] = P[r, c] * (dP[r, c] + minus_delta[r])
