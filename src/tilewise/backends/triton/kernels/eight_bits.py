"""Q, K and V of 16 bits in 8, to the bit as backends/eight_bits.py has it, and what the forward pass does with elements of 8 bits.

Values of e4m3 are held in fp16, which has them all, so that every GPU multiplies them: the products are the same, and sums are fp32's. Q and K have
no NaN: a row of Q that is not finite has a factor of NaN, and of keys `k_lost` tells. V keeps its own, of which careful.py clears what is hidden.
"""

import triton
import triton.language as tl

from tilewise.backends import eight_bits

TILE = tl.constexpr(eight_bits.TILE)
SAMPLE = tl.constexpr(eight_bits.SAMPLE)
P_SCALE = tl.constexpr(eight_bits.P_SCALE)
LEAST = tl.constexpr(eight_bits.LEAST)
MOST = tl.constexpr(eight_bits.MOST[eight_bits.E4M3])
SIGNS = tl.constexpr(tuple(word - (word >> 31 << 32) for word in eight_bits.SIGNS))  # as int32
INTEGERS = tl.constexpr(1.5 * 2.0**23)  # around it fp32 has integers alone, 2^22 each way
INTEGERS_BITS = tl.constexpr(0x4B400000)


# Elements


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def e4m3(x):
    """fp32 up to 448 each way rounded to what e4m3 has: 3 bits behind the leading one, and multiples of 2^-9 below 2^-6. NaN stays NaN."""
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
    beside = (power + (20 << 23) | 0x400000).to(tl.float32, bitcast=True)  # 1.5 * 2^20 times the power of two
    return (x + beside) - beside


@triton.jit
def _rounded(x, inverse, dtype: tl.constexpr, MOST_OF: tl.constexpr):
    """x * inverse as int8, or as e4m3 in `dtype`; 0 for what is not finite."""
    y = tl.minimum(tl.maximum(tl.where(_finite(x), x * inverse, 0.0), -MOST_OF), MOST_OF)
    return (y + INTEGERS).to(tl.int32, bitcast=True).to(tl.int8) if dtype == tl.int8 else e4m3(y).to(dtype)


@triton.jit
def _scale(largest, MOST_OF: tl.constexpr):
    """The scale of elements up to `largest`, and what they are multiplied by before they are rounded."""
    some = largest >= LEAST
    inverse = tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), tl.where(some, largest, 1.0)) * MOST_OF
    return tl.where(some, largest * (1.0 / MOST_OF), 1.0), tl.where(some, inverse, 1.0)


@triton.jit
def _turned(x, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """H D x. Each step adds and subtracts neighbours, and brings the last bit of a channel's number to its front, so that after all steps channels
    are where they were.
    """
    words = channels * 0
    for i in tl.static_range(8):
        words = tl.where(channels // 32 % 8 == i, SIGNS[i], words)
    x = tl.where(((words >> (31 - channels % 32)) & 1)[None, :] != 0, -x, x)
    width: tl.constexpr = WIDTH
    for _ in tl.static_range(width.bit_length() - 1):
        a, b = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [ROWS, WIDTH])
    return x


@triton.jit
def _counted(cu_k, documents, tokens, seqlen_k, ENDS: tl.constexpr):
    """Keys that are scaled and centred: `tokens`, or with ENDS as many as packed documents have; the others are 0."""
    if ENDS:
        tokens = tl.minimum(tl.maximum(tl.load(cu_k + documents), 0), seqlen_k)
    return tokens


@triton.jit
def _rows(x, first, row, x_row, channels, tokens, COLUMNS: tl.constexpr):
    """Rows from `first` on, in fp32, and which of their elements exist."""
    exists = (first + row < tokens)[:, None] & (channels < COLUMNS)[None, :]
    x += tl.cast(first, tl.int64) * x_row
    return tl.load(x + row[:, None] * x_row + channels[None, :], mask=exists, other=0.0).to(tl.float32), exists


# Kernels


@triton.jit
def centres(
    x, centre, x_batch, x_head, x_row, cu_k, documents, tokens, seqlen_k, heads,
    ENDS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The centre (batch, heads, WIDTH) of each channel of K or V, of which COLUMNS exist. Grid: batch * heads * WIDTH / BLOCK."""
    pair, block = tl.program_id(0) // (WIDTH // BLOCK), tl.program_id(0) % (WIDTH // BLOCK)
    tokens = _counted(cu_k, documents, tokens, seqlen_k, ENDS)
    i, channels = tl.arange(0, SAMPLE), block * BLOCK + tl.arange(0, BLOCK)
    x += (pair // heads).to(tl.int64) * x_batch + (pair % heads).to(tl.int64) * x_head
    at = tl.where(tokens > SAMPLE, i.to(tl.int64) * tokens // SAMPLE, i.to(tl.int64))
    exists = (i < tokens)[:, None] & (channels < COLUMNS)[None, :]
    terms = tl.load(x + at[:, None] * x_row + channels[None, :], mask=exists, other=0.0).to(tl.float32)
    terms = tl.where(_finite(terms), terms, 0.0)
    for level in tl.static_range(7):
        terms = tl.sum(tl.reshape(terms, [2, SAMPLE >> (level + 1), BLOCK]), 0)
    number = tl.zeros([BLOCK], tl.float32) + tl.minimum(tl.maximum(tokens, 1), SAMPLE).to(tl.float32)
    mean = tl.reshape(terms, [BLOCK]) * tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), number)
    tl.store(centre + pair.to(tl.int64) * WIDTH + channels, tl.where(_finite(mean), mean, 0.0))


@triton.jit
def quantise_q(
    q, q8, k_centre, row_factor, row_shift, q_batch, q_head, q_row, q8_row, seqlen_q, heads, m_tiles, scale, factor,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MOST_OF: tl.constexpr,
):  # fmt: skip
    """q8 (batch, heads, seqlen_q, WIDTH), each row's scale times `factor`, NaN for rows that are not finite, and what centring K takes from its
    scores. Grid: m_tiles * batch * heads.
    """
    pair, m = tl.program_id(0) // m_tiles, tl.program_id(0) % m_tiles
    b, h = pair // heads, pair % heads
    row, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    x, _ = _rows(q, m * ROWS, row, q_row, channels, seqlen_q, COLUMNS)
    pair_k = b * (heads // GROUP) + h // GROUP
    taken = tl.sum(x * tl.load(k_centre + pair_k.to(tl.int64) * WIDTH + channels)[None, :], 1) * scale
    x = _turned(x, channels, ROWS, WIDTH)
    finite = _finite(x)
    of_rows, inverse = _scale(tl.max(tl.where(finite, tl.abs(x), 0.0), 1), MOST_OF)
    spoiled = tl.max((~finite).to(tl.int32), 1) > 0
    rows = m * ROWS + row
    at = pair.to(tl.int64) * seqlen_q + rows
    tl.store(row_factor + at, tl.where(spoiled, float("nan"), of_rows * factor), mask=rows < seqlen_q)
    tl.store(row_shift + at, taken, mask=rows < seqlen_q)
    x = _rounded(x, inverse[:, None], q8.dtype.element_ty, MOST_OF)
    tl.store(q8 + at[:, None] * q8_row + channels[None, :], x, mask=(rows < seqlen_q)[:, None])


@triton.jit
def quantise_k(
    k, k8, k_centre, k_scale, k_whole, k_lost, k_batch, k_head, k_row, k8_row, cu_k, documents, tokens, seqlen_k, heads, n_tiles,
    ENDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MOST_OF: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """k8 (batch, heads, seqlen_k, WIDTH) and a scale for each TILE keys; `k_whole` for each TILE_N of these, NaN where one of them is not finite;
    `k_lost` for each key, NaN for those, else 0. Grid: n_tiles * batch * heads, of TILE keys.
    """
    pair, n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    tokens = _counted(cu_k, documents, tokens, seqlen_k, ENDS)
    row, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    k += (pair // heads).to(tl.int64) * k_batch + (pair % heads).to(tl.int64) * k_head
    at = pair.to(tl.int64) * seqlen_k
    centre = tl.load(k_centre + pair.to(tl.int64) * WIDTH + channels)[None, :]
    largest = tl.zeros([ROWS], tl.float32)
    for first in range(n * TILE, n * TILE + TILE, ROWS):
        x, exists = _rows(k, first, row, k_row, channels, tokens, COLUMNS)
        x = _turned(tl.where(exists, x - centre, 0.0), channels, ROWS, WIDTH)
        largest = tl.maximum(largest, tl.max(tl.where(_finite(x), tl.abs(x), 0.0), 1))
    scale, inverse = _scale(tl.zeros([1], tl.float32) + tl.max(largest, 0), MOST_OF)
    tl.store(k_scale + pair.to(tl.int64) * n_tiles + n + tl.arange(0, 1), scale)
    for part in range(0, TILE // TILE_N):
        spoiled = 0
        for first in range(n * TILE + part * TILE_N, n * TILE + (part + 1) * TILE_N, ROWS):
            x, exists = _rows(k, first, row, k_row, channels, tokens, COLUMNS)
            x = _turned(tl.where(exists, x - centre, 0.0), channels, ROWS, WIDTH)
            lost = tl.max((~_finite(x)).to(tl.int32), 1)
            rows = first + row
            x = _rounded(x, inverse[:, None], k8.dtype.element_ty, MOST_OF)
            tl.store(k8 + (at + rows)[:, None] * k8_row + channels[None, :], x, mask=(rows < seqlen_k)[:, None])
            tl.store(k_lost + at + rows, tl.where(lost > 0, float("nan"), 0.0), mask=rows < seqlen_k)
            spoiled = tl.maximum(spoiled, tl.max(lost, 0))
        of_part = (pair.to(tl.int64) * n_tiles + n) * (TILE // TILE_N) + part
        tl.store(k_whole + of_part + tl.arange(0, 1), tl.where(spoiled > 0, float("nan"), scale))


@triton.jit
def largest_values(
    v, v_centre, largest, v_batch, v_head, v_row, cu_k, documents, tokens, seqlen_k, heads,
    ENDS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """largest (batch, heads, SLICES, WIDTH): of each channel of V without its centre, in a slice of its tokens. Grid: batch * heads * SLICES."""
    pair, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    tokens = _counted(cu_k, documents, tokens, seqlen_k, ENDS)
    row, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    v += (pair // heads).to(tl.int64) * v_batch + (pair % heads).to(tl.int64) * v_head
    centre = tl.load(v_centre + pair.to(tl.int64) * WIDTH + channels)[None, :]
    most = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(part * ROWS, tokens, SLICES * ROWS):
        x, exists = _rows(v, first, row, v_row, channels, tokens, COLUMNS)
        x = tl.where(exists, x - centre, 0.0)
        most = tl.maximum(most, tl.where(_finite(x), tl.abs(x), 0.0))
    tl.store(largest + tl.program_id(0).to(tl.int64) * WIDTH + channels, tl.max(most, 0))


@triton.jit
def quantise_v(
    v, v8, v_centre, largest, v_scale, v_batch, v_head, v_row, v8_row, cu_k, documents, tokens, seqlen_k, heads, n_tiles,
    ENDS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """v8 (batch, heads, seqlen_k, COLUMNS or more), NaN for what is not finite, and the scale of each channel. Grid: n_tiles * batch * heads."""
    pair, n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    tokens = _counted(cu_k, documents, tokens, seqlen_k, ENDS)
    row, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    v += (pair // heads).to(tl.int64) * v_batch + (pair % heads).to(tl.int64) * v_head
    centre = tl.load(v_centre + pair.to(tl.int64) * WIDTH + channels)[None, :]
    slices = pair.to(tl.int64) * SLICES + tl.arange(0, SLICES)
    scale, inverse = _scale(tl.max(tl.load(largest + slices[:, None] * WIDTH + channels[None, :]), 0), MOST)
    tl.store(v_scale + pair.to(tl.int64) * WIDTH + channels, scale, mask=tl.zeros([WIDTH], tl.int32) + n == 0)
    x, exists = _rows(v, n * ROWS, row, v_row, channels, tokens, COLUMNS)
    x = tl.where(exists, x - centre, 0.0)
    y = tl.where(_finite(x), _rounded(x, inverse[None, :], v8.dtype.element_ty, MOST), float("nan"))
    rows = n * ROWS + row
    written = (rows < seqlen_k)[:, None] & (channels < COLUMNS)[None, :]
    tl.store(v8 + (pair.to(tl.int64) * seqlen_k + rows)[:, None] * v8_row + channels[None, :], y, mask=written)


# Within the forward pass


@triton.jit
def no_products(q, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr, EMULATED: tl.constexpr):
    """What products of a tile are added to. int8: sums of up to 256 products lie within 2^22, so fp32 has them all around INTEGERS."""
    if EMULATED or q.dtype != tl.int8:
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    else:
        acc = tl.full([TILE_M, TILE_N], 0 if PARTS > 1 else INTEGERS_BITS, tl.int32)
    return acc


@triton.jit
def dot(a, b, acc, EMULATED: tl.constexpr):
    """a b + acc, exact for int8."""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee") if EMULATED else tl.dot(a, b, acc, out_dtype=acc.dtype)


@triton.jit
def in_fp32(x, PARTS: tl.constexpr):
    """Sums that began as `no_products`."""
    if x.dtype == tl.int32:
        x = x.to(tl.float32) if PARTS > 1 else x.to(tl.float32, bitcast=True) - INTEGERS
    return x


@triton.jit
def scales_of(
    at, pair_k, rows, seqlen_q, seqlen_k, row_factor, row_shift, k_scale, k_whole, k_lost, v_weights, v_units,
    V_TOKENS: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """What a tile is scaled by: a factor and a shift for each row, and where a key head's scales are. at: of the head's first row."""
    exists, n_tiles = rows < seqlen_q, pair_k * ((seqlen_k + TILE - 1) // TILE)
    factor, shift = tl.load(row_factor + at + rows, mask=exists, other=0.0), tl.load(row_shift + at + rows, mask=exists, other=0.0)
    of_k = k_scale + n_tiles, k_whole + n_tiles * (TILE // TILE_N), k_lost + pair_k * seqlen_k
    if V_TOKENS:
        v_weights += pair_k * seqlen_k
        v_units += n_tiles
    return factor, shift, of_k, v_weights, v_units


@triton.jit
def scaled(x, n, keys, seqlen_k, scales, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, TILE_N: tl.constexpr, K_TOKENS: tl.constexpr):
    """Scores of sums x, of the tile of keys from n on; the shift is a term of theirs where there is a softcap. K_TOKENS: `k_lost` has each key's
    scale.
    """
    factor, shift = scales[0], scales[1]
    k_scale, k_whole, k_lost = scales[2]
    if K_TOKENS:
        x = x * factor[:, None] * tl.load(k_lost + keys, mask=keys < seqlen_k, other=0.0)[None, :]
    elif MASKED:
        x = x * (factor * tl.load(k_scale + n // TILE))[:, None]
        x += tl.load(k_lost + keys, mask=keys < seqlen_k, other=0.0)[None, :]
    else:
        x = x * (factor * tl.load(k_whole + n // TILE_N))[:, None]
    if SOFTCAP:
        x += shift[:, None]
    return x


@triton.jit
def weighed(p, keys, seqlen_k, v_weights, sees, MASKED: tl.constexpr):
    """P times each key's scale of V over the largest of its tile; hidden keys, which may have a scale of NaN, have 0."""
    p = p * tl.load(v_weights + keys, mask=keys < seqlen_k, other=0.0)[None, :]
    return tl.where(sees, p, 0.0) if MASKED else p


@triton.jit
def placed(acc, share, part, v_scale, v_centre, channels):
    """O of sums of V in 8 bits: `share` of them times its scale, and `part` of its centre."""
    scale, centre = tl.load(v_scale + channels), tl.load(v_centre + channels)
    return acc * share[:, None] * scale[None, :] + part[:, None] * centre[None, :]
