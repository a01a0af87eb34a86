"""Products of tiles, and elements in 16 bits."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr):
    """a b + acc, in fp32. EMULATED: in Triton's interpreter, which multiplies the bits of bf16 as integers.

    BF16_PARTS: fp32 on NVIDIA's tensor cores, which round sums towards zero. Three bf16 hold what one fp32 holds. The largest product and the five
    that follow have sums of their own, of this tile alone, and are added as fp32 is: `tf32x3`, one sum of all tiles, was 12 units off on an H100.
    """
    if EMULATED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    if BF16_PARTS:
        a_high, a_mid, a_low = _bf16_parts(a)
        b_high, b_mid, b_low = _bf16_parts(b)
        small = tl.dot(a_low, b_high, tl.zeros([acc.shape[0], acc.shape[1]], tl.float32))
        small = tl.dot(a_high, b_low, small)
        small = tl.dot(a_mid, b_mid, small)
        small = tl.dot(a_mid, b_high, small)
        small = tl.dot(a_high, b_mid, small)
        acc += tl.where(small == small, small, 0.0)  # an infinity times a part of 0; what is NaN by right is so in the largest
        large = tl.dot(a_high, b_high, tl.zeros([acc.shape[0], acc.shape[1]], tl.float32))
        return tl.fma(large, tl.full([acc.shape[0], acc.shape[1]], 1.0, tl.float32), acc)  # a sum would become the product's accumulator
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _bf16_parts(x):
    """The first, second and last 8 bits of an fp32's 24, each as a bf16; of an infinity itself, 0 and 0."""
    high = tl.where(x == x, _cut(x), x)  # NaN may have all its bits in those that are cut off
    rest = tl.where(tl.abs(x) == float("inf"), 0.0, x - high)
    mid = _cut(rest)
    return high.to(tl.bfloat16), mid.to(tl.bfloat16), (rest - mid).to(tl.bfloat16)


@triton.jit
def _cut(x):
    """fp32 with the last 16 bits set to 0."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x, dtype: tl.constexpr, EMULATED: tl.constexpr):
    """fp32 in another dtype, rounded to nearest even; the interpreter cuts bf16's bits off, and is given values that lose nothing."""
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def load_rows(at, rows, stride, columns, limit, COLUMNS: tl.constexpr, TAIL: tl.constexpr):
    """A tile (rows, columns) of a matrix with rows `stride` elements apart: those below `limit`, where TAIL says that some may not be.

    COLUMNS: how many columns exist, if fewer than the tile's; 0 where all do.
    """
    where = at + rows[:, None] * stride + columns[None, :]
    if TAIL and COLUMNS:
        return tl.load(where, mask=(rows[:, None] < limit) & (columns[None, :] < COLUMNS), other=0.0)
    if TAIL:
        return tl.load(where, mask=rows[:, None] < limit, other=0.0)
    if COLUMNS:
        return tl.load(where, mask=columns[None, :] < COLUMNS, other=0.0)
    return tl.load(where)


@triton.jit
def load_columns(at, rows, stride, columns, limit, COLUMNS: tl.constexpr, TAIL: tl.constexpr):
    """The same tile transposed, (columns, rows)."""
    where = at + rows[None, :] * stride + columns[:, None]
    if TAIL and COLUMNS:
        return tl.load(where, mask=(rows[None, :] < limit) & (columns[:, None] < COLUMNS), other=0.0)
    if TAIL:
        return tl.load(where, mask=rows[None, :] < limit, other=0.0)
    if COLUMNS:
        return tl.load(where, mask=columns[:, None] < COLUMNS, other=0.0)
    return tl.load(where)


@triton.jit
def store_rows(at, x, rows, stride, columns, limit, COLUMNS: tl.constexpr, EMULATED: tl.constexpr):
    """Write a tile in the matrix's dtype, without rows from `limit` on and columns from COLUMNS on (0: all columns exist)."""
    exists = rows[:, None] < limit
    if COLUMNS:
        exists = exists & (columns[None, :] < COLUMNS)
    tl.store(at + rows[:, None] * stride + columns[None, :], narrow(x, at.dtype.element_ty, EMULATED), mask=exists)


@triton.jit
def gather(at, offsets, columns, exists, COLUMNS: tl.constexpr):
    """A tile of rows that begin at these offsets, those that exist, and 0 elsewhere: (rows, columns), or transposed where its operands are.

    COLUMNS: as of `load_rows`.
    """
    if COLUMNS:
        exists = exists & (columns < COLUMNS)
    return tl.load(at + offsets + columns, mask=exists, other=0.0)


@triton.jit
def scatter(at, x, offsets, columns, exists, COLUMNS: tl.constexpr, EMULATED: tl.constexpr):
    """Write such a tile in the memory's dtype."""
    if COLUMNS:
        exists = exists & (columns < COLUMNS)
    tl.store(at + offsets + columns, narrow(x, at.dtype.element_ty, EMULATED), mask=exists)


@triton.jit
def widened(x, scale, dtype: tl.constexpr, E4M3: tl.constexpr, EMULATED: tl.constexpr):
    """Elements of 8 bits times their scale, rounded once. E4M3: int8 has the bits of e4m3, for GPUs that do not know it."""
    if E4M3:
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # as fp16, which has 8 powers of 2 more below
        y = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        y = tl.where((bits & 0x7F) == 0x7F, float("nan"), y)
    else:
        y = x.to(tl.float32)
    return narrow(y * scale, dtype, EMULATED)
