"""Rotary position embedding of tiles of rows, as tilewise/rotary.py has it: in fp32, to positions that are clamped to those of the tables."""

import triton
import triton.language as tl


@triton.jit
def turned(x, at, columns, exists, position, cos, sin, cos_row, sin_row, pairs, positions, INTERLEAVED: tl.constexpr):
    """x (rows, columns) in fp32, rotated: the elements at `at + columns` of the rows that exist. at: (rows, 1) pointers to the first column;
    position and exists: (rows, 1).
    """
    if INTERLEAVED:
        pair = columns // 2
        second = columns % 2 == 1
        other = columns ^ 1
    else:
        second = columns >= pairs
        pair = tl.where(second, columns - pairs, columns)
        other = tl.where(second, columns - pairs, columns + pairs)
    turns = exists & (columns < 2 * pairs)
    place = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)
    c = tl.load(cos + place * cos_row + pair, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + place * sin_row + pair, mask=turns, other=0.0).to(tl.float32)
    y = tl.load(at + other, mask=turns, other=0.0).to(tl.float32)
    return tl.where(turns, x * c + tl.where(second, y * s, -(y * s)), x)
