"""Rotary position embedding of elements in registers, to a position that is clamped to those of the tables.

The bits are those of tilewise/rotary.py: products and their sum are rounded to fp32 one by one, then to the elements' dtype.
"""

from tilewise.backends.hopper.decode.append_call import Appending
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import RotaryTables, Tables
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Constexpr, Float32, Int32, Int64, arch, const_expr, cute, range_constexpr


@cute.jit
def of_numbers(numbers: cute.Tensor, row: cute.Tensor, column: Int32, position: Int64, turn: RotaryTables, config: Constexpr[Appending]):
    """numbers: the elements of a row (dim,) from `column` on."""
    positions, half = turn.cos.shape
    at = Int32(min(max(position, Int64(0)), Int64(positions) - 1))
    for i in range_constexpr(cute.size(numbers)):
        d = column + i
        if d < 2 * half:
            second, pair, other = d >= half, d % half, (d + half) % (2 * half)
            if const_expr(config.interleaved):
                second, pair, other = d % 2 == 1, d // 2, d ^ 1
            c, s = (table[at, pair].to(Float32) for table in (turn.cos, turn.sin))
            turned = rounded_sum(numbers[i].to(Float32), c, row[other].to(Float32), s if second else -s)
            numbers[i] = turned.to(numbers.element_type)


@cute.jit
def of_row(fragment: cute.Tensor, r: Constexpr[int], position: Int32, tables: Tables, config: Constexpr[Config]):
    """This thread's r-th row of a fragment of Q, in the order of rows.load_queries."""
    half, interleaved, _ = config.rotary
    numbers = cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))
    at, lane = min(max(position, 0), tables.cos.shape[0] - 1), arch.lane_idx() % fragments.QUAD
    for c in range_constexpr(half // 4 if interleaved else half // 8):  # blocks of 8 columns, or of the first of pairs
        for i in range_constexpr(1 if interleaved else 2):
            first = 2 * (r + 2 * c) + i
            second = first + (1 if interleaved else half // 2)
            pair = 4 * c + lane if const_expr(interleaved) else 8 * c + 2 * lane + i
            cos, sin = (table[at, pair].to(Float32) for table in tables)
            a, b = (numbers[x].to(Float32) for x in (first, second))
            numbers[first] = rounded_sum(a, cos, b, -sin).to(numbers.element_type)
            numbers[second] = rounded_sum(a, sin, b, cos).to(numbers.element_type)


@cute.jit
def rounded_sum(a: Float32, c: Float32, b: Float32, s: Float32) -> Float32:
    """a c + b s, each product and the sum rounded: no fused operation, which rounds but once."""
    ptx = "{ .reg .f32 x, y; mul.rn.f32 x, {$r0}, {$r1}; mul.rn.f32 y, {$r2}, {$r3}; add.rn.f32 {$w0}, x, y; }"
    return arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[a, c, b, s])
