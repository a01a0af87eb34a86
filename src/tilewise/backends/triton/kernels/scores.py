"""From products of queries and keys to what the softmax sees, and back: scale, softcap, bias, ALiBi, dropout."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(1e38)
STEEP = tl.constexpr(2)


@triton.jit
def tanh(x):
    """Of a tile, to a few units in the last place everywhere, which LSE needs. Where the whole tile is small the rest, 1 - 2 / (1 + exp(2 x)), is
    left out. It takes a reciprocal root, as a quotient is four operations more.
    """
    series = small_tanh(x)
    if not tl.max(tl.max(tl.abs(x), 1), 0) < 0.55:  # NaN counts as large
        root = tl.math.rsqrt(1.0 + tl.math.exp2(x * (2.0 * LOG2E)))
        series = tl.where(tl.abs(x) < 0.55, series, 1.0 - 2.0 * (root * root))
    return series


@triton.jit
def small_tanh(x):
    """For |x| < 0.55: 4e-8 (least squares, reweighted to the minimax, in fp64)."""
    z = x * x
    return x + x * (z * (-0.33332947 + z * (0.13320725 + z * (-0.05267181 + z * 0.01643758))))


@triton.jit
def tanh_and_slope(x):
    """tanh of a tile, to 2 units in the last place, and 1 - tanh^2 with a relative error of at most 4e-6. Where most scores are at the cap, gradients
    are of the few that are not, of which fp32's tanh leaves 6e-8. r (2 - r) with r = 1 - |tanh| = 2 / (1 + exp(2 |x|)) cancels nothing.
    """
    found = small_tanh(x)
    slope = 1.0 - found * found
    if not tl.max(tl.max(tl.abs(x), 1), 0) < 0.55:  # NaN counts as large
        rest = 2.0 / (1.0 + tl.math.exp2(tl.abs(x) * (2.0 * LOG2E)))
        found = tl.where(tl.abs(x) < 0.55, found, tl.where(x < 0.0, rest - 1.0, 1.0 - rest))
        slope = rest * (2.0 - rest)
    return found, slope


@triton.jit
def distance(rows, columns, diagonal):
    """|row + diagonal - column| in fp32; diagonal as `rows`, or one number."""
    return tl.abs(rows + diagonal - columns).to(tl.float32)


@triton.jit
def scored(
    s, scale, softcap, b_tile, slope, rows, columns, diagonal,
    MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Scores of products q.k, what they are yet to be multiplied by, and the softcap's derivative (1.0 without one). Multiplied they are in base 2;
    with a BIAS in natural units, as one may be as low as fp32 goes. rows, columns, diagonal: as of `distance`, with ALIBI. SOFTCAP: STEEP for fp32;
    16 bits need no better derivative, and the registers that it takes until dS.
    """
    x, factor, derivative = s, scale * LOG2E, 1.0
    if MODIFIED:
        unit: tl.constexpr = 1.0 if BIAS else LOG2E
        factor = (softcap if SOFTCAP else scale) * unit
        if SOFTCAP:
            x = s * tl.minimum(tl.maximum(scale / softcap, -LARGEST), LARGEST).to(tl.float32)  # 0 times infinity is no score
            if SOFTCAP == STEEP:
                x, derivative = tanh_and_slope(x)
            else:
                x = tanh(x)
                derivative = 1.0 - x * x
        if BIAS or ALIBI or not SOFTCAP:
            x, factor = x * factor, 1.0
        if BIAS:
            x += b_tile.to(tl.float32)
        if ALIBI:
            x -= slope * (distance(rows, columns, diagonal) * unit)
    return x, factor, derivative


@triton.jit
def bias_of(bias, rows, keys, seqlen_q, seqlen_k, bias_row, bias_column):
    """The bias of a tile of pairs, of rows and keys that broadcast to it. It is loaded ahead of the product that it is added to: behind it Triton may
    take what follows in the load's layout, and in the product's once more.
    """
    return tl.load(bias + rows * bias_row + keys * bias_column, mask=(rows < seqlen_q) & (keys < seqlen_k), other=0.0)


@triton.jit
def online(x, factor, top, total, NATURAL: tl.constexpr):
    """One step of the online softmax: the weights of scores, what sums so far fade by, and the next total and top, which is in the scores' units.
    x and factor: as `scored` has them.
    """
    unit: tl.constexpr = LOG2E if NATURAL else 1.0
    higher = tl.maximum(top, tl.max(x, 1) * factor)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.math.exp2((x * factor - safe[:, None]) * unit)
    fading = tl.math.exp2((top - safe) * unit)
    return p, fading, total * fading + tl.sum(p, 1), higher


@triton.jit
def joined(more, top, total):
    """The same in natural units, of one more score that has no value: a sink."""
    higher = tl.maximum(top, more)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    fading = tl.math.exp2((top - safe) * LOG2E)
    return fading, total * fading + tl.math.exp2((more - safe) * LOG2E), higher


@triton.jit
def settled(top, total):
    """What a row's sum of values is multiplied by, and its LSE, from the top in natural units: 0 and -inf for rows that see nothing."""
    seen = total != 0.0
    some = tl.where(seen, total, 1.0)
    return tl.where(seen, 1.0 / some, 0.0), tl.where(seen, top + log(some), float("-inf"))


@triton.jit
def log(x):
    """Of normal numbers, inf and NaN, to about a unit in the last place: the hardware's own has 8e-7 for the log of 30, and gradients take exp(-LSE).

    x = 2^n y with y within sqrt(1/2) and sqrt(2), log y = 2 atanh((y - 1) / (y + 1)). 0.693145751953125 n is exact: LN2 has 9 bits fewer there.
    """
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23
    y = (bits - (n << 23)).to(tl.float32, bitcast=True)
    z = (y - 1.0) / (y + 1.0)
    w = z * z
    of_y = 2.0 * z + 2.0 * z * w * (0.33333334 + w * (0.2 + w * (0.14285715 + w * 0.11111111)))
    whole = n.to(tl.float32)
    return tl.where(x < float("inf"), whole * 0.693145751953125 + (of_y + whole * 1.42860677e-6), x)


@triton.jit
def kept(rows, blocks, pair, draw, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Which pairs dropout keeps, bool (ROWS, 4 BLOCKS), of query rows and of blocks of four keys; pair: number of batch entry and head.

    draw: seed, offset and threshold; where rows and heads are those of a larger call also the rows' indices there, its heads, which of these is the
    call's first, and the call's own heads.
    """
    if len(draw) > 3:
        rows = tl.load(draw[3] + rows)
        pair = pair // draw[6] * draw[4] + draw[5] + pair % draw[6]
    zero = tl.zeros([ROWS, BLOCKS], tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        draw[0], blocks[None, :].to(tl.uint32) + zero, rows[:, None].to(tl.uint32) + zero, pair.to(tl.uint32) + zero, draw[1] + zero
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)) >= draw[2]
