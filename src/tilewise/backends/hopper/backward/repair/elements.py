"""16-bit elements of a matrix in a lane's registers: addresses, loads, and tests for NaN, infinities and large magnitudes.

A warp holds rows by quads: lane l holds rows l / QUAD and l / QUAD + 8, and of every STEP columns the EIGHT from EIGHT (l % QUAD) on. These are 16
bytes, or four words of two elements.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import PIECE
from tilewise.sm90.dsl import BFloat16, Boolean, Constexpr, Float32, Int32, Int64, arch, const_expr, cute, cutlass, range_constexpr

QUAD = 4  # lanes that share a row
STEP = 32  # columns of a quad
EIGHT = 8  # columns of a lane in a step; rows from one half to the next
LINE = 64  # elements in a line of the cache


class Matrix(NamedTuple):
    """Rows of one head: (rows, columns) elements in global memory, of 16 bits but for dK and dV in fp32 (RepairConfig.wide_keys)."""

    address: Int64
    step: Int64  # bytes from row to row
    rows: Int32
    columns: Int32
    with_delta: Boolean  # the matrix is dO; its rows have deltas
    looked: Int64  # address of the states of its pieces, an int32 each (pieces.py); 0 for a gradient


@cute.jit
def matrix(mX: cute.Tensor, batch: Int32, head: Int32, with_delta: Constexpr[bool] = False, looked: Int64 | None = None) -> Matrix:
    """The rows of one head of a tensor. mX: (batch, seqlen, heads, head_dim); looked: address of the states of all pieces of mX (pieces.py), None
    for a gradient.
    """
    gX, address = mX[batch, None, head, None], Int64(0)
    if const_expr(looked is not None):
        address = looked + 4 * ((batch * mX.shape[2] + head) * cute.ceil_div(mX.shape[1], PIECE))
    step = Int64(gX.stride[0] * (mX.element_type.width // 8))
    return Matrix(gX.iterator.toint(), step, Int32(gX.shape[0]), Int32(gX.shape[1]), Boolean(with_delta), address)


def either(first: Boolean, a: Matrix, b: Matrix) -> Matrix:
    """a if `first`, else b."""
    return Matrix(*(type(x)(cutlass.select_(first, x, y)) for x, y in zip(a, b, strict=True)))


@cute.jit
def row_of(row0: Int32, half: Int32 | int) -> Int32:
    """Row row0 + lane / QUAD, and EIGHT rows more for each half."""
    return row0 + arch.lane_idx() // QUAD + EIGHT * half


@cute.jit
def column_of(column0: Int32, step: Int32 | int) -> Int32:
    """The first of this lane's EIGHT columns in a step of STEP columns, from column0 on."""
    return column0 + STEP * step + EIGHT * (arch.lane_idx() % QUAD)


def address_of(X: Matrix, row: Int32, column: Int32, size: int = 2) -> Int64:
    """Of an element of `size` bytes."""
    return X.address + row * X.step + size * column


def four(address: Int64) -> cute.Tensor:
    """EIGHT elements of 16 bits from an address on: (4,) words in global memory."""
    return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16), cute.make_layout(4))


@cute.jit
def words_at(address: Int64, there: Boolean) -> cute.Tensor:
    """The same elements in registers, (4,) words; zeros if they are not `there`."""
    words = cute.make_rmem_tensor(4, Int32)
    words.fill(0)
    if there:
        cute.autovec_copy(four(address), words)
    return words


@cute.jit
def words_of(X: Matrix, row: Int32, column: Int32) -> cute.Tensor:
    """EIGHT elements of a row, from a column on, in registers, (4,) words: zeros beyond the last column, and elements of the last row beyond it."""
    return words_at(address_of(X, min(row, X.rows - 1), column), column < X.columns)


@cute.jit
def bring(X: Matrix, row0: Int32, dim: Constexpr[int]):
    """Touch 16 rows of `dim` columns, so that they lie in the L1 cache. A load just before its use would stall, and registers are too few to load
    rows ahead.
    """
    row = min(row0 + arch.lane_idx() // 2, X.rows - 1)
    for column0 in range_constexpr(0, dim, 2 * LINE):
        column = column0 + LINE * (arch.lane_idx() % 2)
        if column < X.columns:
            arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address_of(X, row, column)])


def not_finite(word: Int32, dtype: Constexpr) -> Int32:
    """0 if both 16-bit elements of a word are finite."""
    return exponents_from(word, 0x7F80, 0x7F80) if dtype is BFloat16 else exponents_from(word, 0x7C00, 0x7C00)


def too_large(word: Int32, dtype: Constexpr) -> Int32:
    """0 if fp32 holds a sum of 256 products of two elements such as both of a word: magnitudes below 2^59, or finite in fp16."""
    return exponents_from(word, 0x7F80, (127 + 59) << 7) if dtype is BFloat16 else not_finite(word, dtype)


def exponents_from(word: Int32, ones: int, least: int) -> Int32:
    """0 if both exponent fields of a word are below `least`. ones: the field's bits. The sum of a field and the difference to `least` carries
    over. Fields are shifted one bit to the right, as a sum of int32 may not overflow.
    """
    ones, more = ones >> 1, 0x4000 - (least >> 1)
    return ((word >> 1 & (ones << 16 | ones)) + (more << 16 | more)) & 0x40004000


def signed(bits: int) -> int:
    """A constant of 32 bits as an int32."""
    return bits - (1 << 32) if bits >> 31 else bits


def finite_part(word: Int32, dtype: Constexpr) -> Int32:
    """The word with 0 in place of each 16-bit element that is not finite."""
    last_bits = not_finite(word, dtype) >> 14
    return word & ~((last_bits << 16) - last_bits)


@cute.jit
def of_word(word: Int32, i: Constexpr[int], dtype: Constexpr) -> Float32:
    """Element i of the two 16-bit elements of a word, in fp32."""
    both = cute.make_rmem_tensor(2, Int32)  # a view of one int32 gives its first element twice
    both[0] = word
    return cute.recast_tensor(both, dtype)[i].to(Float32)


def either_number(first: Boolean, a: float | Float32, b: float | Float32) -> Float32:
    """a if `first`, else b, both computed. A conditional expression of Python's takes the compiler ten times as long."""
    return Float32(cutlass.select_(first, Float32(a), Float32(b)))


def sign_of(x: Float32) -> Float32:
    """1 or -1; 0 for 0 and NaN."""
    return either_number(x > 0.0, 1.0, either_number(x < 0.0, -1.0, 0.0))


def is_finite(x: Float32) -> Boolean:
    return (x < Float32.inf) & (x > -Float32.inf)


def is_nan(x: Float32) -> Boolean:
    return x != x
