"""What PTX computes that numpy has no name for; arrays of 32 lanes."""

import numpy as np
from numpy import absolute, fmax, fmin, isfinite, log2, maximum, minimum, tanh, where  # noqa: F401 - used by translated code

u1, u2, u4, u8, i1, i2, i4, i8, f2, f4 = (np.dtype(name) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4"))
zeros_u2 = np.zeros(32, u2)
SMALLEST = np.finfo(np.float32).tiny


def lanes_of(m):
    """The numbers of the lanes that take part; m is None where all 32 do."""
    return range(32) if m is None else np.flatnonzero(m).tolist()


def high(a, b):
    """The upper half of a product."""
    wide = {2: (np.uint32, np.int32), 4: (np.uint64, np.int64)}[a.dtype.itemsize][a.dtype.kind == "i"]
    return (a.astype(wide) * b.astype(wide) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)


def fma(a, b, c):
    """One rounding: a product of two fp32 numbers is exact in fp64. (The sum is rounded twice, which differs in one of 2^29 cases.)"""
    return (a.astype(np.float64) * b + c).astype(f4)


def fma_of_pairs(a, b, c, kind):
    return _of_pairs(fma, kind, a, b, c)


def extreme_of_pairs(a, b, extreme, kind):
    return _of_pairs(extreme, kind, a, b)


def _of_pairs(function, kind, *pairs):
    """On both halves of 32 bits, which are bf16 or f16."""
    widen = (lambda x: pair(zeros_u2, x).view(f4)) if kind == "bf16" else (lambda x: x.view(f2).astype(f4))
    low, high_ = (function(*(widen((x >> u4.type(shift)).astype(u2)) for x in pairs)) for shift in (0, 16))
    narrow = bf16 if kind == "bf16" else f16
    return pair(narrow(low), narrow(high_))


def quotient(a, b):
    """Towards zero."""
    q = np.abs(a.astype(i8)) // np.maximum(np.abs(b.astype(i8)), 1)
    return (q * np.sign(a.astype(i8)) * np.sign(b.astype(i8))).astype(a.dtype)


def remainder(a, b):
    return a - quotient(a, b) * b


def left(a, by):
    bits = 8 * a.dtype.itemsize
    if isinstance(by, int):
        return a << a.dtype.type(by)
    return where(by < bits, a << (by % bits).astype(a.dtype), a.dtype.type(0))


def right(a, by):
    bits = 8 * a.dtype.itemsize
    if isinstance(by, int):
        return a >> a.dtype.type(by)
    if a.dtype.kind == "i":
        return a >> minimum(by, bits - 1).astype(a.dtype)
    return where(by < bits, a >> (by % bits).astype(a.dtype), a.dtype.type(0))


def bits_from(first, n):
    """A mask of n bits from the first on; bmsk.clamp."""
    one = u4.type(1)
    return left(left(np.full(32, one), n) - one, first)


def leading_zeros(a):
    return (32 - np.ceil(np.log2(a.astype(np.float64) + 1))).astype(u4)


def ones(a):
    return np.bitwise_count(a).astype(u4) if hasattr(np, "bitwise_count") else np.array([int(x).bit_count() for x in a], u4)


def power_of_two(a):
    """ex2.approx.ftz: what is too small for a normal number becomes 0, on either side."""
    found = np.exp2(where(np.abs(a) < SMALLEST, f4.type(0), a))
    return where(found < SMALLEST, f4.type(0), found)


def bf16(a):
    """To the nearest, ties to even."""
    bits = a.view(u4)
    rounded = bits + u4.type(0x7FFF) + (bits >> u4.type(16) & u4.type(1)) >> u4.type(16)
    return where(np.isnan(a), u4.type(0x7FFF), rounded).astype(u2)


def tf32(a):
    """Bits of fp32, rounded to the 10 bits behind the point that a product reads; halves away from 0."""
    bits = a.view(u4)
    return where(isfinite(a), (bits + u4.type(0x1000)) & u4.type(0xFFFFE000), bits)


def f16(a):
    return where(np.isnan(a), u2.type(0x7FFF), a.astype(f2).view(u2))


def _numbers_of_e4m3():
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    size[code & 0x7F == 0x7F] = np.nan
    return np.where(code & 0x80, -size, size).astype(f4)


E4M3 = _numbers_of_e4m3()


def e4m3(a):
    """To the nearest, ties to even; what is too large, infinity among it, to 448."""
    size = np.minimum(np.abs(a.astype(np.float64)), 448)
    step = np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-6))) - 3)
    code = np.searchsorted(E4M3[:0x7F], (np.rint(size / step) * step).astype(f4))
    return where(np.isnan(a), u1.type(0x7F), code | np.signbit(a) * 0x80).astype(u1)


def pair(low, high):
    """Two halves of a wider number."""
    wide = np.dtype(f"u{2 * low.dtype.itemsize}")
    return low.astype(wide) | high.astype(wide) << wide.type(8 * low.dtype.itemsize)


def bytes_chosen(a, b, selector):
    """Of the eight of b and a those that the selector's low four nibbles name; none repeats a sign."""
    wide, found = pair(a, b), np.zeros(32, u4)
    for i in range(4):
        shift = (selector >> u4.type(4 * i) & u4.type(7)).astype(u8) * u8.type(8)
        found |= (wide >> shift & u8.type(0xFF)).astype(u4) << u4.type(8 * i)
    return found


def _ordered(compare):
    def compared(a, b):
        return compare(a, b) & ~nan(a, b) if a.dtype.kind == "f" else compare(a, b)

    return compared


def _or_unordered(compare):
    return lambda a, b: compare(a, b) | nan(a, b)


COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
eq, ne, lt, le, gt, ge = map(_ordered, COMPARISONS.values())
equ, neu, ltu, leu, gtu, geu = map(_or_unordered, COMPARISONS.values())
lo, ls, hi, hs = lt, le, gt, ge


def nan(a, b):
    """Whether either is."""
    return np.isnan(a) | np.isnan(b)


def num(a, b):
    """Whether neither is NaN."""
    return ~nan(a, b)
