"""The forward pass: a program owns a tile of queries, and walks over the tiles of keys that it sees.

O and LSE by the online softmax of FlashAttention-2 (Dao, 2023, Algorithm 1), with exponentials of 2. Tiles that need a mask come first.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.kernels import eight_bits
from tilewise.backends.triton.kernels.careful import mended, not_finite, set_apart, spoiled, walk_over_tiles
from tilewise.backends.triton.kernels.products import dot, load_columns, load_rows, narrow, store_rows
from tilewise.backends.triton.kernels.scores import LN2, bias_of, joined, kept, online, scored, settled
from tilewise.backends.triton.kernels.visible import by_table, existing, interval, queries_of, walk


@triton.jit
def _added(acc, p, v, unit, APART: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr):
    """acc + P V, which with APART is in units of its own."""
    if APART:
        acc += dot(p, v, tl.zeros([acc.shape[0], acc.shape[1]], tl.float32), BF16_PARTS, EMULATED) * unit
    else:
        acc = dot(p, v, acc, BF16_PARTS, EMULATED)
    return acc


@triton.jit
def _visit(
    acc, acc_b, total, top, q, q_b, k, v, k_row, v_row, rows, seqlen_q, seqlen_k, begin, end, ref, bands, bitmaps, first, count, left, skip,
    scale, softcap, slope, diagonal, bias, bias_row, bias_column, pair, draw, scales,
    MASKED: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr, STAGES: tl.constexpr,
    EIGHT: tl.constexpr, V_EIGHT: tl.constexpr, K_TOKENS: tl.constexpr, V_TOKENS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The softmax's state after `count` more tiles of keys, from `first` on; `skip` tiles are left out behind the first `left` ones."""
    columns = tl.arange(0, TILE_N)
    dims, v_dims = tl.arange(0, DIM), tl.arange(0, V_DIM)
    there = existing(seqlen_k, end, MASKED, MASK)
    for i in tl.range(0, count, num_stages=STAGES):
        n = (first + i + tl.where(i >= left, skip, 0)) * TILE_N
        keys, limit = n + columns, there - n
        k_at, v_at = k + n.to(tl.int64) * k_row, v + n.to(tl.int64) * v_row
        b_tile = bias_of(bias, rows[:, None], keys[None, :], seqlen_q, seqlen_k, bias_row, bias_column) if BIAS else 0.0
        k_tile = load_columns(k_at, columns, k_row, dims, limit, 0 if DIM_B else CUT, MASKED)
        if EIGHT:
            parts: tl.constexpr = 2 if DIM_B else 1
            x = eight_bits.dot(q, k_tile, eight_bits.no_products(q, TILE_M, TILE_N, parts, EMULATED), EMULATED)
            if DIM_B:
                x = eight_bits.dot(q_b, load_columns(k_at + DIM, columns, k_row, tl.arange(0, DIM_B), limit, CUT, MASKED), x, EMULATED)
            x = eight_bits.in_fp32(x, parts)
            x = eight_bits.scaled(x, n, keys, seqlen_k, scales, MASKED, SOFTCAP, TILE_N, K_TOKENS)
        else:
            x = dot(q, k_tile, tl.zeros([TILE_M, TILE_N], tl.float32), BF16_PARTS, EMULATED)
            if DIM_B:
                x = dot(q_b, load_columns(k_at + DIM, columns, k_row, tl.arange(0, DIM_B), limit, CUT, MASKED), x, BF16_PARTS, EMULATED)
        x, factor, _ = scored(x, scale, softcap, b_tile, slope, rows[:, None], keys[None, :], diagonal, MODIFIED, SOFTCAP, BIAS, ALIBI)
        if MASKED:
            if MASK == "tiles":
                sees = by_table(ref, bands, bitmaps, rows, keys, tl.arange(0, TILE_M), columns, TILE_M, TILE_N)
            else:
                sees = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
            x = tl.where(sees, x, float("-inf"))
        p, fading, total, top = online(x, factor, top, total, BIAS)
        if DROPOUT:
            blocks = n // 4 + tl.arange(0, TILE_N // 4)
            p = tl.where(kept(rows, blocks, pair, draw, TILE_M, TILE_N // 4), p, 0.0)
        unit = 1.0
        if V_TOKENS:
            p = eight_bits.weighed(p, keys, seqlen_k, scales[3], sees if MASKED else p, MASKED)
            unit = tl.load(scales[4] + n // eight_bits.TILE)
        weights = p
        if V_EIGHT:
            p = eight_bits.e4m3(p * eight_bits.P_SCALE)
        p = narrow(p, v.dtype.element_ty, EMULATED)
        acc = acc * fading[:, None]
        v_tile = load_rows(v_at, columns, v_row, v_dims, limit, 0 if V_DIM_B else V_CUT, MASKED)
        if CAREFUL:
            acc, v_tile = set_apart(acc, weights, sees, v_tile, EMULATED)
        acc = _added(acc, p, v_tile, unit, V_TOKENS, BF16_PARTS, EMULATED)
        if V_DIM_B:
            acc_b = acc_b * fading[:, None]
            v_tile_b = load_rows(v_at + V_DIM, columns, v_row, tl.arange(0, V_DIM_B), limit, V_CUT, MASKED)
            if CAREFUL:
                acc_b, v_tile_b = set_apart(acc_b, weights, sees, v_tile_b, EMULATED)
            acc_b = _added(acc_b, p, v_tile_b, unit, V_TOKENS, BF16_PARTS, EMULATED)
    return acc, acc_b, total, top


@triton.jit
def _wrong(
    program, o, lse, o_batch, o_head, o_row, seqlen_q, heads, m_tiles, order,
    MASK: tl.constexpr, TILE_M: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr,
):  # fmt: skip
    """Whether a tile of O holds a NaN that no LSE explains."""
    pair, b, h, m = queries_of(program, heads, m_tiles, order, MASK)
    row = tl.arange(0, TILE_M)
    rows = m * TILE_M + row
    o += b.to(tl.int64) * o_batch + h.to(tl.int64) * o_head + (m * TILE_M).to(tl.int64) * o_row
    had = tl.load(lse + pair.to(tl.int64) * seqlen_q + rows, mask=rows < seqlen_q, other=float("inf"))
    return tl.max(tl.where(had < float("inf"), spoiled(o, row, o_row, seqlen_q - m * TILE_M, V_DIM, V_DIM_B, V_CUT), 0)) > 0


@triton.jit
def _tile(
    program, q, k, v, o, lse, row_max, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    seqlen_q, seqlen_k, heads, m_tiles, row0, row1, column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes,
    scale, softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head, bias_row, bias_column, sink,
    seed, offset, threshold, drawn, every, first_head, keep_scale, row_factor, row_shift, k_scale, k_whole, k_lost, v_scale, v_centre,
    v_weights, v_units,
    MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr,
    BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr, STAGES: tl.constexpr, ROW_MAX: tl.constexpr, EIGHT: tl.constexpr, V_EIGHT: tl.constexpr,
    K_TOKENS: tl.constexpr, V_TOKENS: tl.constexpr, V_WIDTH: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What `forward` does for one tile of queries."""
    draw = (seed, offset, threshold, drawn, every, first_head, heads) if PARTED else (seed, offset, threshold)
    pair, b, h, m = queries_of(program, heads, m_tiles, order, MASK)
    row = tl.arange(0, TILE_M)
    rows = m * TILE_M + row
    q += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + (m * TILE_M).to(tl.int64) * q_row
    k += b.to(tl.int64) * k_batch + (h // GROUP).to(tl.int64) * k_head
    v += b.to(tl.int64) * v_batch + (h // GROUP).to(tl.int64) * v_head
    dims, v_dims, limit = tl.arange(0, DIM), tl.arange(0, V_DIM), seqlen_q - m * TILE_M
    q_tile = load_rows(q, row, q_row, dims, limit, 0 if DIM_B else CUT, True)
    q_tile_b = load_rows(q + DIM, row, q_row, tl.arange(0, DIM_B), limit, CUT, True) if DIM_B else q_tile
    acc = tl.zeros([TILE_M, V_DIM], tl.float32)
    acc_b = tl.zeros([TILE_M, V_DIM_B if V_DIM_B else 16], tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    scales = ()
    if EIGHT:
        pair_k = b.to(tl.int64) * (heads // GROUP) + h // GROUP
        scales = eight_bits.scales_of(
            pair.to(tl.int64) * seqlen_q, pair_k, rows, seqlen_q, seqlen_k, row_factor, row_shift, k_scale, k_whole, k_lost,
            v_weights, v_units, V_TOKENS, TILE_N,
        )  # fmt: skip
    slope = tl.load(slopes + b * slopes_batch + h) if ALIBI else 0.0
    diagonal = shift
    if DIAGONALS:
        diagonal = tl.load(diagonals + rows, mask=rows < seqlen_q, other=0)[:, None]
    if BIAS:
        bias += b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
    if MASK == "tiles":
        span = spans + (tl.load(planes + pair) * m_tiles + m) * 3
        for r in range(tl.load(span), tl.load(span + (2 if CAREFUL else 1))):
            first, count, ref = tl.load(runs + r * 4), tl.load(runs + r * 4 + 1) - tl.load(runs + r * 4), tl.load(runs + r * 4 + 2)
            acc, acc_b, total, top = _visit(
                acc, acc_b, total, top, q_tile, q_tile_b, k, v, k_row, v_row, rows, seqlen_q, seqlen_k, rows, rows, ref, bands, bitmaps,
                first, count, count, 0, scale, softcap, slope, diagonal, bias, bias_row, bias_column, pair, draw, scales,
                True, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS,
                EMULATED, STAGES, EIGHT, V_EIGHT, K_TOKENS, V_TOKENS, CAREFUL,
            )  # fmt: skip
        for r in range(tl.load(span + (2 if CAREFUL else 1)), tl.load(span + 2)):
            first, count = tl.load(runs + r * 4), tl.load(runs + r * 4 + 1) - tl.load(runs + r * 4)
            acc, acc_b, total, top = _visit(
                acc, acc_b, total, top, q_tile, q_tile_b, k, v, k_row, v_row, rows, seqlen_q, seqlen_k, rows, rows, 0, bands, bitmaps,
                first, count, count, 0, scale, softcap, slope, diagonal, bias, bias_row, bias_column, pair, draw, scales,
                False, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS,
                EMULATED, STAGES, EIGHT, V_EIGHT, K_TOKENS, V_TOKENS, False,
            )  # fmt: skip
    else:
        begin, end = interval(rows, seqlen_q, ends, row0, row1, column0, column1, low, high, MASK)
        first, last, free, stop = walk(begin, end, rows, seqlen_q, TILE_N)
        if CAREFUL:
            free, stop = last, last
        acc, acc_b, total, top = _visit(
            acc, acc_b, total, top, q_tile, q_tile_b, k, v, k_row, v_row, rows, seqlen_q, seqlen_k, begin, end, 0, bands, bitmaps,
            first, last - stop + free - first, free - first, stop - free, scale, softcap, slope, diagonal, bias, bias_row, bias_column,
            pair, draw, scales, True, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N, DIM, DIM_B, CUT,
            V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, EIGHT, V_EIGHT, K_TOKENS, V_TOKENS, CAREFUL,
        )  # fmt: skip
        if not CAREFUL:
            acc, acc_b, total, top = _visit(
                acc, acc_b, total, top, q_tile, q_tile_b, k, v, k_row, v_row, rows, seqlen_q, seqlen_k, begin, end, 0, bands, bitmaps,
                free, stop - free, stop - free, 0, scale, softcap, slope, diagonal, bias, bias_row, bias_column,
                pair, draw, scales, False, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N, DIM, DIM_B, CUT,
                V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, EIGHT, V_EIGHT, K_TOKENS, V_TOKENS, False,
            )  # fmt: skip
    if not CAREFUL:
        tl.store(spoils + program, tl.max(not_finite(acc, acc_b, V_DIM_B > 0)))
    dead = (top == float("-inf")) & (total == 0.0)  # all scores are -inf, and none is NaN
    if not BIAS:
        top = top * LN2
    if EIGHT and not SOFTCAP:
        top = tl.where(total == 0.0, top, top + scales[1])
    if ROW_MAX and not CAREFUL:
        tl.store(row_max + pair.to(tl.int64) * seqlen_q + rows, tl.where(total == total, top, total), mask=rows < seqlen_q)
    of_keys = total
    if SINK:
        more = tl.load(sink + h).to(tl.float32)
        fading, total, top = joined(more, top, total)
        acc = acc * fading[:, None]
        acc_b = acc_b * fading[:, None]
        of_keys = of_keys * fading
    share, natural = settled(top, total)
    share = share * keep_scale
    if V_EIGHT:
        of_keys = tl.div_rn(of_keys, tl.where(total != 0.0, total, 1.0))
        share = share * (1.0 / eight_bits.P_SCALE)
        acc = eight_bits.placed(acc, share, of_keys, v_scale, v_centre, pair_k * V_WIDTH + v_dims)
        if V_DIM_B:
            acc_b = eight_bits.placed(acc_b, share, of_keys, v_scale, v_centre, pair_k * V_WIDTH + V_DIM + tl.arange(0, V_DIM_B))
    else:
        acc = acc * share[:, None]
        acc_b = acc_b * share[:, None]
    if not CAREFUL:
        tl.store(lse + pair.to(tl.int64) * seqlen_q + rows, natural, mask=rows < seqlen_q)
    o += b.to(tl.int64) * o_batch + h.to(tl.int64) * o_head + (m * TILE_M).to(tl.int64) * o_row
    if CAREFUL:
        acc = mended(o, tl.where(dead[:, None], 0.0, acc), row, o_row, v_dims, limit, 0 if V_DIM_B else V_CUT)
        if V_DIM_B:
            acc_b = tl.where(dead[:, None], 0.0, acc_b)
            acc_b = mended(o + V_DIM, acc_b, row, o_row, tl.arange(0, V_DIM_B), limit, V_CUT)
    store_rows(o, acc, row, o_row, v_dims, limit, 0 if V_DIM_B else V_CUT, EMULATED)
    if V_DIM_B:
        store_rows(o + V_DIM, acc_b, row, o_row, tl.arange(0, V_DIM_B), limit, V_CUT, EMULATED)


@triton.jit
def forward(
    q, k, v, o, lse, row_max, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    seqlen_q, seqlen_k, heads, m_tiles, row0, row1, column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes,
    scale, softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head, bias_row, bias_column, sink,
    seed, offset, threshold, drawn, every, first_head, keep_scale, row_factor, row_shift, k_scale, k_whole, k_lost, v_scale, v_centre,
    v_weights, v_units, tiles,
    MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr,
    BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr, STAGES: tl.constexpr, ROW_MAX: tl.constexpr, EIGHT: tl.constexpr, V_EIGHT: tl.constexpr,
    K_TOKENS: tl.constexpr, V_TOKENS: tl.constexpr, V_WIDTH: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """O (batch, seqlen_q, heads, head_dim_v), LSE (batch, heads, seqlen_q) and, with ROW_MAX, each row's largest score in the same shape.

    EIGHT: q and k are of 8 bits, with V_EIGHT v as well, from the kernels of eight_bits.py; V_WIDTH: elements of `v_scale` and `v_centre` for a head.
    CAREFUL: O alone, where it is NaN (careful.py). Grid: the `tiles`, m_tiles * batch * heads; CAREFUL any, and its programs share them.
    """
    walk_over_tiles(
        _tile, _wrong,
        (q, k, v, o, lse, row_max, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
        seqlen_q, seqlen_k, heads, m_tiles, row0, row1, column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes, scale,
        softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head, bias_row, bias_column, sink, seed, offset, threshold,
        drawn, every, first_head, keep_scale, row_factor, row_shift, k_scale, k_whole, k_lost, v_scale, v_centre, v_weights, v_units, MASK,
        MODIFIED, SOFTCAP, BIAS, ALIBI, DIAGONALS, SINK, DROPOUT, PARTED, GROUP, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT,
        BF16_PARTS, EMULATED, STAGES, ROW_MAX, EIGHT, V_EIGHT, K_TOKENS, V_TOKENS, V_WIDTH, CAREFUL),
        (o, lse, o_batch, o_head, o_row, seqlen_q, heads, m_tiles, order, MASK, TILE_M, V_DIM, V_DIM_B, V_CUT),
        spoils, tiles, CAREFUL,
    )  # fmt: skip
