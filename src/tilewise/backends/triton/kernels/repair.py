"""Sums again that a hidden NaN has reached, pair by pair.

A product of tiles multiplies hidden values by probabilities of 0, which a NaN or an infinity does not forgive. These kernels read what the
others wrote, and return at once where no NaN is; else they compute the program's rows again from the visible pairs, and put them in place of NaN.
What the formula itself makes NaN stays so.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.kernels import eight_bits
from tilewise.backends.triton.kernels.backward import probability
from tilewise.backends.triton.kernels.products import load_rows, store_rows
from tilewise.backends.triton.kernels.scores import LOG2E, distance, kept, modify
from tilewise.backends.triton.kernels.visible import by_table, interval, walk

# Beyond it half an ulp of a score in base 2 is 128, and exp(score - LSE) may overflow: what such a row has, NaN and all, is what it keeps.
LARGEST_LSE = tl.constexpr(2.0**31 * 0.6931471805599453)


@triton.jit
def _kept_of(rows, key, pair, draw, ROWS: tl.constexpr):
    """Whether dropout keeps one key of each row, (ROWS,)."""
    block = kept(rows, tl.zeros([1], tl.int32) + key // 4, pair, draw, ROWS, 1)
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == key % 4, block.to(tl.int32), 0), 1) > 0


@triton.jit
def _added(acc, lost, term, FP32: tl.constexpr):
    """acc + term and, where FP32 is the result, what sums rounded off so far: pair by pair that is more than a product of tiles does."""
    new = acc + term
    if not FP32:
        return new, lost
    return new, lost + tl.where(tl.abs(acc) >= tl.abs(term), (acc - new) + term, (term - new) + acc)


@triton.jit
def _whole(acc, lost):
    return acc + tl.where(lost == lost, lost, 0.0)  # NaN: of an infinity


@triton.jit
def _weights(
    q, k, v, d_o, lse, delta, queries, keys, seqlen_q, seqlen_k, scale, softcap, slope, diagonal, bias, bias_row, bias_column, kept,
    keep_scale, scales,
    GRADIENT: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    EIGHT: tl.constexpr, K_TOKENS: tl.constexpr,
):  # fmt: skip
    """P, P after dropout and, with GRADIENT, dS, of pairs of rows of q and k, of which one is a single row."""
    x = tl.sum(q * k, 1)
    if EIGHT:
        factor, shift = scales[0], scales[1]
        k_scale, _, k_lost = scales[2]
        of_key = tl.load(k_lost + keys)
        x = x * factor * of_key if K_TOKENS else x * (factor * tl.load(k_scale + keys // eight_bits.TILE)) + of_key
        if SOFTCAP:
            x += shift
        else:
            lse = tl.where(lse == float("-inf"), lse, lse - shift)
    bend = 1.0
    if MODIFIED:
        x, bend = modify(x, scale, softcap, SOFTCAP)
        if BIAS:
            exists = (queries < seqlen_q) & (keys < seqlen_k)
            x += tl.load(bias + queries * bias_row + keys * bias_column, mask=exists, other=0.0).to(tl.float32)
        if ALIBI:
            x -= slope * distance(queries, keys, diagonal)
    p = probability(x, lse, scale, MODIFIED)
    dropped, d_s = p, p
    if DROPOUT:
        dropped = p * tl.where(kept, keep_scale, 0.0)
    if GRADIENT:
        d_p = tl.sum(d_o * v, 1)
        if DROPOUT:
            d_p = d_p * tl.where(kept, keep_scale, 0.0)
        d_s = p * (d_p - delta)
        if SOFTCAP:
            d_s *= bend
    return p, dropped, d_s


@triton.jit
def repair_rows(
    q, k, v, d_o, x, lse, delta, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_o_batch, d_o_head, d_o_row,
    x_batch, x_head, x_row, seqlen_q, seqlen_k, heads, m_tiles, row0, row1, column0, column1, low, high,
    ends, spans, runs, bands, bitmaps, planes, scale, softcap, slopes, slopes_batch, diagonals, shift,
    bias, bias_batch, bias_head, bias_row, bias_column, sink, seed, offset, threshold, drawn, every, first_head, keep_scale,
    row_factor, row_shift, k_scale, k_whole, k_lost, v_scale, v_centre, v_weights, v_units,
    GRADIENT: tl.constexpr, SINK: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ALIBI: tl.constexpr, DIAGONALS: tl.constexpr, DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, EMULATED: tl.constexpr,
    EIGHT: tl.constexpr, V_EIGHT: tl.constexpr, K_TOKENS: tl.constexpr, V_TOKENS: tl.constexpr,
):  # fmt: skip
    """x is O or, with GRADIENT, dQ. WIDTH: a power of two that holds head_dim, COLUMNS: head_dim, if it is none. Grid: m_tiles * batch * heads."""
    draw = (seed, offset, threshold, drawn, every, first_head, heads) if PARTED else (seed, offset, threshold)
    pair, m = tl.program_id(0) // m_tiles, tl.program_id(0) % m_tiles
    b, h = pair // heads, pair % heads
    row = tl.arange(0, TILE_M)
    rows, limit, at_m = m * TILE_M + row, seqlen_q - m * TILE_M, (m * TILE_M).to(tl.int64)
    dims, v_dims = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    own = dims if GRADIENT else v_dims
    own_columns: tl.constexpr = COLUMNS if GRADIENT else V_COLUMNS
    x += b.to(tl.int64) * x_batch + h.to(tl.int64) * x_head + at_m * x_row
    at = pair.to(tl.int64) * seqlen_q + rows
    lse_rows = tl.load(lse + at, mask=rows < seqlen_q, other=float("-inf"))
    old = load_rows(x, row, x_row, own, limit, own_columns, True).to(tl.float32)
    spoiled = (old != old) & ((tl.abs(lse_rows) < LARGEST_LSE) | (lse_rows == float("-inf")))[:, None]
    if GRADIENT:  # a NaN of delta, too, is the formula's own
        of_delta = tl.load(delta + at, mask=rows < seqlen_q, other=0.0)
        spoiled = spoiled & ((of_delta == of_delta) | (lse_rows == float("-inf")))[:, None]
    if tl.max(spoiled.to(tl.int32)) > 0:
        q += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + at_m * q_row
        k += b.to(tl.int64) * k_batch + (h // GROUP).to(tl.int64) * k_head
        v += b.to(tl.int64) * v_batch + (h // GROUP).to(tl.int64) * v_head
        q_tile = load_rows(q, row, q_row, dims, limit, COLUMNS, True).to(tl.float32)
        d_o_tile, delta_rows = q_tile, lse_rows
        if GRADIENT:
            d_o += b.to(tl.int64) * d_o_batch + h.to(tl.int64) * d_o_head + at_m * d_o_row
            d_o_tile = load_rows(d_o, row, d_o_row, v_dims, limit, V_COLUMNS, True).to(tl.float32)
            delta_rows = tl.load(delta + at, mask=rows < seqlen_q, other=0.0)
        scales, pair_k = (), b.to(tl.int64) * (heads // GROUP) + h // GROUP
        if EIGHT:
            own_rows = pair.to(tl.int64) * seqlen_q
            scales = eight_bits.scales_of(
                own_rows, pair_k, rows, seqlen_q, seqlen_k, row_factor, row_shift, k_scale, k_whole, k_lost, v_weights, v_units, V_TOKENS,
                TILE_N,
            )  # fmt: skip
        slope = tl.load(slopes + b * slopes_batch + h) if ALIBI else 0.0
        diagonal = shift
        if DIAGONALS:
            diagonal = tl.load(diagonals + rows, mask=rows < seqlen_q, other=0)
        if BIAS:
            bias += b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
        begin, end, r_first, r_last, r_free = rows, rows, 0, 1, 1
        if MASK == "tiles":
            span = spans + (tl.load(planes + pair) * m_tiles + m) * 3
            r_first, r_free, r_last = tl.load(span), tl.load(span + 1), tl.load(span + 2)
        else:
            begin, end = interval(rows, seqlen_q, ends, row0, row1, column0, column1, low, high, MASK)
        acc, lost, total = tl.zeros_like(old), tl.zeros_like(old), tl.zeros([TILE_M], tl.float32)
        for r in range(r_first, r_last):
            if MASK == "tiles":
                j_first, j_last = tl.load(runs + r * 4) * TILE_N, tl.minimum(tl.load(runs + r * 4 + 1) * TILE_N, seqlen_k)
                ref = tl.where(r < r_free, tl.load(runs + r * 4 + 2), -1)
            else:
                first, last, _free, _stop = walk(begin, end, rows, seqlen_q, TILE_N)
                j_first, j_last = first * TILE_N, tl.minimum(last * TILE_N, seqlen_k)
            for j in range(j_first, j_last):
                key = tl.zeros([1], tl.int32) + j
                if MASK == "tiles":
                    sees = tl.sum(by_table(ref, bands, bitmaps, rows, key, row, key % TILE_N, TILE_M, TILE_N).to(tl.int32), 1) > 0
                else:
                    sees = (j >= begin) & (j < end)
                k_tile = load_rows(k + tl.cast(j, tl.int64) * k_row, key - j, k_row, dims, 1, COLUMNS, False).to(tl.float32)
                v_tile = load_rows(v + tl.cast(j, tl.int64) * v_row, key - j, v_row, v_dims, 1, V_COLUMNS, False).to(tl.float32)
                keep = _kept_of(rows, j, pair, draw, TILE_M) if DROPOUT else sees
                p, dropped, d_s = _weights(
                    q_tile, k_tile, v_tile, d_o_tile, lse_rows, delta_rows, rows, key, seqlen_q, seqlen_k, scale, softcap, slope, diagonal,
                    bias, bias_row, bias_column, keep, keep_scale, scales, GRADIENT, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, EIGHT,
                    K_TOKENS,
                )  # fmt: skip
                if V_TOKENS:
                    dropped = dropped * (tl.load(scales[3] + key) * tl.load(scales[4] + key // eight_bits.TILE))
                term = d_s[:, None] * k_tile if GRADIENT else dropped[:, None] * v_tile
                acc, lost = _added(acc, lost, tl.where(sees[:, None], term, 0.0), x.dtype.element_ty == tl.float32)
                total += tl.where(sees, p, 0.0)
        of_keys = total
        if SINK:
            total += tl.math.exp2((tl.load(sink + h).to(tl.float32) - lse_rows) * LOG2E)
        acc = _whole(acc, lost) / tl.where(total == 0.0, 1.0, total)[:, None]  # 1, but for LSE's rounding
        if V_EIGHT:
            of_keys = of_keys / tl.where(total == 0.0, 1.0, total)
            acc = eight_bits.placed(acc, tl.where(total == total, 1.0, total), of_keys, v_scale, v_centre, pair_k * V_WIDTH + v_dims)
        acc = tl.where((lse_rows == float("-inf"))[:, None], 0.0, acc)  # a row that a bias of -inf leaves nothing
        new = tl.where(spoiled, acc * (scale if GRADIENT else 1.0), old)
        store_rows(x, new, row, x_row, own, limit, own_columns, EMULATED)


@triton.jit
def _own_nan(
    lse, delta, rows, begin, end, seqlen_q, seqlen_k, pair, n_tiles, n, spans, runs, bands, bitmaps, planes,
    MASK: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Of which keys dK, and dV, are NaN by the formula, as a query that sees them has a NaN for delta or LSE: 0 or 1, two of (TILE_N,)."""
    of_k, of_v, row, column = tl.zeros([TILE_N], tl.int32), tl.zeros([TILE_N], tl.int32), tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    for head in range(0, GROUP):
        r_first, r_last, r_free = 0, 1, 1
        if MASK == "tiles":
            span = spans + (tl.load(planes + pair + head) * n_tiles + n) * 3
            r_first, r_free, r_last = tl.load(span), tl.load(span + 1), tl.load(span + 2)
        for r in range(r_first, r_last):
            ref = -1
            if MASK == "tiles":
                first, last = tl.load(runs + r * 4), tl.load(runs + r * 4 + 1)
                ref = tl.where(r < r_free, tl.load(runs + r * 4 + 2), -1)
            else:
                first, last, _free, _stop = walk(begin, end, rows, seqlen_k, TILE_M)
            for m in range(first, last):
                queries = m * TILE_M + column
                if MASK == "tiles":
                    sees = by_table(ref, bands, bitmaps, rows, queries, row, column, TILE_N, TILE_M)
                else:
                    sees = (queries[None, :] >= begin[:, None]) & (queries[None, :] < end[:, None])
                at = tl.cast(pair + head, tl.int64) * seqlen_q + queries
                of_lse = tl.load(lse + at, mask=queries < seqlen_q, other=0.0)
                of_delta = tl.load(delta + at, mask=queries < seqlen_q, other=0.0)
                of_delta = tl.where(of_lse == float("-inf"), 0.0, of_delta)  # hidden by a bias of -inf
                nan = of_lse != of_lse
                of_v = tl.maximum(of_v, tl.max((sees & nan[None, :]).to(tl.int32), 1))
                of_k = tl.maximum(of_k, tl.max((sees & (nan | (of_delta != of_delta))[None, :]).to(tl.int32), 1))
    return of_k, of_v


@triton.jit
def repair_columns(
    q, k, v, d_o, d_k, d_v, lse, delta, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_o_batch, d_o_head,
    d_o_row, d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row, seqlen_q, seqlen_k, heads, n_tiles,
    row0, row1, column0, column1, low, high, ends, spans, runs, bands, bitmaps, planes,
    scale, softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head, bias_row, bias_column,
    seed, offset, threshold, drawn, every, first_head, keep_scale,
    MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr,
    DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """dK and dV, with the mask's interval and tables as dkdv has them. Grid: n_tiles * batch * heads / GROUP."""
    draw = (seed, offset, threshold, drawn, every, first_head, heads) if PARTED else (seed, offset, threshold)
    pair_k, n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    heads_k = heads // GROUP
    b, head_k = pair_k // heads_k, pair_k % heads_k
    row = tl.arange(0, TILE_N)
    rows, limit, at_n = n * TILE_N + row, seqlen_k - n * TILE_N, (n * TILE_N).to(tl.int64)
    dims, v_dims = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    d_k += b.to(tl.int64) * d_k_batch + head_k.to(tl.int64) * d_k_head + at_n * d_k_row
    d_v += b.to(tl.int64) * d_v_batch + head_k.to(tl.int64) * d_v_head + at_n * d_v_row
    old_k = load_rows(d_k, row, d_k_row, dims, limit, COLUMNS, True).to(tl.float32)
    old_v = load_rows(d_v, row, d_v_row, v_dims, limit, V_COLUMNS, True).to(tl.float32)
    begin, end = rows, rows
    if MASK != "tiles":
        begin, end = interval(rows, seqlen_k, ends, row0, row1, column0, column1, low, high, MASK)
    spoiled_k, spoiled_v = tl.max((old_k != old_k).to(tl.int32), 1), tl.max((old_v != old_v).to(tl.int32), 1)
    if tl.max(spoiled_k | spoiled_v) > 0:
        own_k, own_v = _own_nan(
            lse, delta, rows, begin, end, seqlen_q, seqlen_k, (b * heads + head_k * GROUP), n_tiles, n, spans, runs, bands, bitmaps, planes,
            MASK, GROUP, TILE_M, TILE_N,
        )  # fmt: skip
        spoiled_k, spoiled_v = spoiled_k & (1 - own_k), spoiled_v & (1 - own_v)
    if tl.max(spoiled_k | spoiled_v) > 0:
        k += b.to(tl.int64) * k_batch + head_k.to(tl.int64) * k_head + at_n * k_row
        v += b.to(tl.int64) * v_batch + head_k.to(tl.int64) * v_head + at_n * v_row
        k_tile = load_rows(k, row, k_row, dims, limit, COLUMNS, True).to(tl.float32)
        v_tile = load_rows(v, row, v_row, v_dims, limit, V_COLUMNS, True).to(tl.float32)
        acc_k, acc_v = tl.zeros([TILE_N, WIDTH], tl.float32), tl.zeros([TILE_N, V_WIDTH], tl.float32)
        lost_k, lost_v = acc_k, acc_v
        for head in range(0, GROUP):
            h = head_k * GROUP + head
            pair = b * heads + h
            q_at = q + b.to(tl.int64) * q_batch + tl.cast(h, tl.int64) * q_head
            d_o_at = d_o + b.to(tl.int64) * d_o_batch + tl.cast(h, tl.int64) * d_o_head
            slope = tl.load(slopes + b * slopes_batch + h) if ALIBI else 0.0
            here = bias
            if BIAS:
                here = bias + b.to(tl.int64) * bias_batch + tl.cast(h, tl.int64) * bias_head
            r_first, r_last, r_free = 0, 1, 1
            if MASK == "tiles":
                span = spans + (tl.load(planes + pair) * n_tiles + n) * 3
                r_first, r_free, r_last = tl.load(span), tl.load(span + 1), tl.load(span + 2)
            for r in range(r_first, r_last):
                if MASK == "tiles":
                    i_first, i_last = tl.load(runs + r * 4) * TILE_M, tl.minimum(tl.load(runs + r * 4 + 1) * TILE_M, seqlen_q)
                    ref = tl.where(r < r_free, tl.load(runs + r * 4 + 2), -1)
                else:
                    first, last, _free, _stop = walk(begin, end, rows, seqlen_k, TILE_M)
                    i_first, i_last = first * TILE_M, tl.minimum(last * TILE_M, seqlen_q)
                for i in range(i_first, i_last):
                    query = tl.zeros([1], tl.int32) + i
                    if MASK == "tiles":
                        sees = tl.sum(by_table(ref, bands, bitmaps, rows, query, row, query % TILE_M, TILE_N, TILE_M).to(tl.int32), 1) > 0
                    else:
                        sees = (i >= begin) & (i < end)
                    q_tile = load_rows(q_at + tl.cast(i, tl.int64) * q_row, query - i, q_row, dims, 1, COLUMNS, False).to(tl.float32)
                    d_o_tile = load_rows(d_o_at + tl.cast(i, tl.int64) * d_o_row, query - i, d_o_row, v_dims, 1, V_COLUMNS, False)
                    d_o_tile = d_o_tile.to(tl.float32)
                    at = tl.cast(pair, tl.int64) * seqlen_q + i
                    diagonal = shift
                    if DIAGONALS:
                        diagonal = tl.load(diagonals + i)
                    keep = sees
                    if DROPOUT:
                        blocks = tl.min(rows, 0) // 4 + tl.arange(0, TILE_N // 4)
                        words = kept(query, blocks, tl.cast(pair, tl.int32), draw, 1, TILE_N // 4)
                        keep = tl.sum(words.to(tl.int32), 0) > 0
                    _p, dropped, d_s = _weights(
                        k_tile, q_tile, d_o_tile, v_tile, tl.load(lse + at), tl.load(delta + at), query, rows, seqlen_q, seqlen_k, scale,
                        softcap, slope, diagonal, here, bias_row, bias_column, keep, keep_scale, (), True, MODIFIED, SOFTCAP, BIAS, ALIBI,
                        DROPOUT, False, False,
                    )  # fmt: skip
                    blind = tl.load(lse + at) == float("-inf")  # by a bias of -inf alone
                    d_k_term, d_v_term = tl.where(blind, 0.0, d_s[:, None] * q_tile), tl.where(blind, 0.0, dropped[:, None] * d_o_tile)
                    acc_k, lost_k = _added(acc_k, lost_k, tl.where(sees[:, None], d_k_term, 0.0), d_k.dtype.element_ty == tl.float32)
                    acc_v, lost_v = _added(acc_v, lost_v, tl.where(sees[:, None], d_v_term, 0.0), d_v.dtype.element_ty == tl.float32)
        store_rows(d_k, tl.where(old_k != old_k, _whole(acc_k, lost_k) * scale, old_k), row, d_k_row, dims, limit, COLUMNS, EMULATED)
        store_rows(d_v, tl.where(old_v != old_v, _whole(acc_v, lost_v), old_v), row, d_v_row, v_dims, limit, V_COLUMNS, EMULATED)
