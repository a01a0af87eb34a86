"""The gradients of Q, K and V: `prepare` has delta, `dkdv` owns tiles of keys, `dq` tiles of queries.

Two kernels make seven products of tiles where one makes five, but each sum has one owner and one order (FlashAttention-2, Dao, 2023,
section 3.1, has one kernel, which adds up dQ by atomics). dkdv computes scores transposed, so that P and dS are left operands as they come
out of a product.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.kernels.careful import lost, mended, not_finite, set_apart, spoiled, unexplained, walk_over_tiles
from tilewise.backends.triton.kernels.products import dot, load_columns, load_rows, narrow, store_rows
from tilewise.backends.triton.kernels.scores import LOG2E, bias_of, kept, scored
from tilewise.backends.triton.kernels.visible import by_table, existing, interval, keys_of, queries_of, walk


@triton.jit
def prepare(
    o, d_o, d_lse, lse, sink, delta, statistics, o_batch, o_head, o_row, d_o_batch, d_o_head, d_o_row, seqlen_q, heads, m_tiles,
    TILE_M: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, D_LSE: tl.constexpr, SINK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """delta (batch, heads, seqlen_q): the sum of dO O over a row, less dLSE. Of a row that is all its SINK's, dO counts for nothing, NaN or not.
    statistics (batch, heads, 2, `padded`): LSE as `probability` takes it, in base 2 but with a BIAS, and delta. Rows beyond the last see
    nothing, so that tiles are loaded whole. Grid: m_tiles * batch * heads, of all rows.
    """
    pair, m = tl.program_id(0) // m_tiles, tl.program_id(0) % m_tiles
    b, h = pair // heads, pair % heads
    row, dims = tl.arange(0, TILE_M), tl.arange(0, V_WIDTH)
    rows, limit = m * TILE_M + row, seqlen_q - m * TILE_M
    at = pair.to(tl.int64) * seqlen_q + rows
    o += b.to(tl.int64) * o_batch + h.to(tl.int64) * o_head + (m * TILE_M).to(tl.int64) * o_row
    d_o += b.to(tl.int64) * d_o_batch + h.to(tl.int64) * d_o_head + (m * TILE_M).to(tl.int64) * d_o_row
    x = load_rows(o, row, o_row, dims, limit, V_COLUMNS, True).to(tl.float32)
    y = load_rows(d_o, row, d_o_row, dims, limit, V_COLUMNS, True).to(tl.float32)
    found = tl.sum(x * y, 1)
    if SINK:  # noqa: SIM102
        if tl.max((found != found).to(tl.int32)) > 0:  # O is loaded again: registers do not hold it
            again = load_rows(o, row, o_row, dims, limit, V_COLUMNS, True).to(tl.float32)
            alone = tl.load(lse + at, mask=rows < seqlen_q, other=0.0) == tl.load(sink + h).to(tl.float32)
            found = tl.where(alone & (tl.max((again != 0.0).to(tl.int32), 1) == 0), 0.0, found)
    if D_LSE:
        found -= tl.load(d_lse + at, mask=rows < seqlen_q, other=0.0)
    tl.store(delta + at, found, mask=rows < seqlen_q)
    natural = tl.load(lse + at, mask=rows < seqlen_q, other=float("-inf"))
    statistics += pair.to(tl.int64) * (2 * padded(seqlen_q)) + rows
    tl.store(statistics, natural if BIAS else tl.where(natural == float("-inf"), float("inf"), natural * LOG2E))
    tl.store(statistics + padded(seqlen_q), found)


@triton.jit
def padded(seqlen_q):
    """Rows of `prepare`'s statistics, those of its programs: whole tiles of queries of any size, loaded without masks, 8 bytes at a time."""
    return (seqlen_q + 127) // 128 * 128


@triton.jit
def probability(x, factor, lse, NATURAL: tl.constexpr, BASE_2: tl.constexpr):
    """exp(score - LSE) of x and factor as `scored` has them, at most 1, as an LSE may be rounded down by much; rows that see nothing have an LSE of
    -inf, and probabilities of 0. BASE_2: lse is in base 2, as `prepare` has it.
    """
    if not BASE_2:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    y = (x - lse) * LOG2E if NATURAL else x * factor - (lse if BASE_2 else lse * LOG2E)
    return tl.math.exp2(tl.minimum(y, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def statistics_of(lse, delta, statistics, pair, queries, seqlen_q, CAREFUL: tl.constexpr):
    """LSE, as `probability` takes it, and delta of a head's queries. CAREFUL: LSE itself."""
    if CAREFUL:
        at = tl.cast(pair, tl.int64) * seqlen_q + queries
        there = queries < seqlen_q
        return tl.load(lse + at, mask=there, other=float("-inf")), tl.load(delta + at, mask=there, other=0.0)
    statistics += tl.cast(pair, tl.int64) * (2 * padded(seqlen_q)) + queries
    return tl.load(statistics), tl.load(statistics + padded(seqlen_q))


@triton.jit
def d_scores(
    x, d_p, lse, delta, sees, rows, keys, scale, softcap, slope, diagonal, b_tile, pair, draw, keep_scale,
    MASKED: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CAPPED: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """dS of a tile (queries, keys) from the products q.k and dO.v, with BIAS and its tile of the bias: P (dP - delta), 0 where hidden. CAPPED: before
    the softcap, without scale.
    """
    x, factor, bend = scored(x, scale, softcap, b_tile, slope, rows[:, None], keys[None, :], diagonal, MODIFIED, SOFTCAP, BIAS, ALIBI)
    p = probability(x, factor, lse[:, None], BIAS, BASE_2)
    if DROPOUT:
        blocks = tl.min(keys, 0) // 4 + tl.arange(0, TILE_N // 4)
        keep = kept(rows, blocks, pair, draw, TILE_M, TILE_N // 4)
        d_p = d_p * tl.where(keep, keep_scale, 0.0)  # NaN stays NaN, as in the formula
    d_s = p * (d_p - delta[:, None])
    if SOFTCAP and CAPPED:
        d_s *= bend
    if BIAS:  # of -inf alone, which leaves a row nothing to see
        d_s = tl.where(lse[:, None] == float("-inf"), 0.0, d_s)
    return tl.where(sees, d_s, 0.0) if MASKED else d_s


@triton.jit
def _visit_keys(
    acc, acc_b, q, q_b, d_o, d_o_b, lse, delta, k, v, k_row, v_row, rows, seqlen_q, seqlen_k, begin, end, ref, bands, bitmaps,
    first, count, left, skip, scale, softcap, slope, diagonal, bias, bias_row, bias_column, pair, draw, keep_scale,
    MASKED: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr, STAGES: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """dQ / scale with `count` more tiles of keys, as forward.py visits them."""
    columns, dims, v_dims = tl.arange(0, TILE_N), tl.arange(0, DIM), tl.arange(0, V_DIM)
    there = existing(seqlen_k, end, MASKED, MASK)
    for i in tl.range(0, count, num_stages=STAGES):
        n = (first + i + tl.where(i >= left, skip, 0)) * TILE_N
        keys, limit = n + columns, there - n
        k_at, v_at = k + n.to(tl.int64) * k_row, v + n.to(tl.int64) * v_row
        b_tile = bias_of(bias, rows[:, None], keys[None, :], seqlen_q, seqlen_k, bias_row, bias_column) if BIAS else 0.0
        k_tile = load_rows(k_at, columns, k_row, dims, limit, 0 if DIM_B else CUT, MASKED)
        x = dot(q, tl.trans(k_tile), tl.zeros([TILE_M, TILE_N], tl.float32), BF16_PARTS, EMULATED)
        v_tile = load_columns(v_at, columns, v_row, v_dims, limit, 0 if V_DIM_B else V_CUT, MASKED)
        d_p = dot(d_o, v_tile, tl.zeros([TILE_M, TILE_N], tl.float32), BF16_PARTS, EMULATED)
        if DIM_B:
            k_tile_b = load_rows(k_at + DIM, columns, k_row, tl.arange(0, DIM_B), limit, CUT, MASKED)
            x = dot(q_b, tl.trans(k_tile_b), x, BF16_PARTS, EMULATED)
        if V_DIM_B:
            v_tile_b = load_columns(v_at + V_DIM, columns, v_row, tl.arange(0, V_DIM_B), limit, V_CUT, MASKED)
            d_p = dot(d_o_b, v_tile_b, d_p, BF16_PARTS, EMULATED)
        if MASK == "tiles" and MASKED:
            sees = by_table(ref, bands, bitmaps, rows, keys, tl.arange(0, TILE_M), columns, TILE_M, TILE_N)
        else:
            sees = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
        if CAREFUL:  # a bias of -inf hides, where it hides all
            sees = sees & (lse != float("-inf"))[:, None]
        d_s = d_scores(
            x, d_p, lse, delta, sees, rows, keys, scale, softcap, slope, diagonal, b_tile, pair, draw, keep_scale,
            MASKED, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N, True, not (BIAS or CAREFUL),
        )  # fmt: skip
        if CAREFUL:
            acc, k_tile = set_apart(acc, d_s, sees, k_tile, EMULATED)
            if DIM_B:
                acc_b, k_tile_b = set_apart(acc_b, d_s, sees, k_tile_b, EMULATED)
        d_s = narrow(d_s, k.dtype.element_ty, EMULATED)
        acc = dot(d_s, k_tile, acc, BF16_PARTS, EMULATED)
        if DIM_B:
            acc_b = dot(d_s, k_tile_b, acc_b, BF16_PARTS, EMULATED)
    return acc, acc_b


@triton.jit
def _wrong_queries(
    program, d_q, lse, delta, d_q_batch, d_q_head, d_q_row, seqlen_q, heads, m_tiles, order,
    MASK: tl.constexpr, TILE_M: tl.constexpr, DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Whether a tile of dQ holds a NaN of a query that is not lost."""
    pair, b, h, m = queries_of(program, heads, m_tiles, order, MASK)
    row = tl.arange(0, TILE_M)
    d_q += b.to(tl.int64) * d_q_batch + h.to(tl.int64) * d_q_head + (m * TILE_M).to(tl.int64) * d_q_row
    lse_rows, delta_rows = statistics_of(lse, delta, lse, pair, m * TILE_M + row, seqlen_q, True)
    of_ds, _ = lost(lse_rows, delta_rows)
    return tl.max(tl.where(of_ds > 0, 0, spoiled(d_q, row, d_q_row, seqlen_q - m * TILE_M, DIM, DIM_B, CUT))) > 0


@triton.jit
def _tile_of_queries(
    program, q, k, v, d_o, d_q, lse, delta, statistics, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_o_batch, d_o_head, d_o_row, d_q_batch, d_q_head, d_q_row, seqlen_q, seqlen_k, heads, m_tiles, row0, row1, column0, column1, low, high,
    ends, order, spans, runs, bands, bitmaps, planes, scale, softcap, slopes, slopes_batch, diagonals, shift,
    bias, bias_batch, bias_head, bias_row, bias_column, seed, offset, threshold, drawn, every, first_head, keep_scale,
    MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr,
    DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr,
    DIM_B: tl.constexpr,
    CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What `dq` does for one tile."""
    draw = (seed, offset, threshold, drawn, every, first_head, heads) if PARTED else (seed, offset, threshold)
    pair, b, h, m = queries_of(program, heads, m_tiles, order, MASK)
    row = tl.arange(0, TILE_M)
    rows, limit = m * TILE_M + row, seqlen_q - m * TILE_M
    q += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + (m * TILE_M).to(tl.int64) * q_row
    d_o += b.to(tl.int64) * d_o_batch + h.to(tl.int64) * d_o_head + (m * TILE_M).to(tl.int64) * d_o_row
    k += b.to(tl.int64) * k_batch + (h // GROUP).to(tl.int64) * k_head
    v += b.to(tl.int64) * v_batch + (h // GROUP).to(tl.int64) * v_head
    dims, v_dims = tl.arange(0, DIM), tl.arange(0, V_DIM)
    q_tile = load_rows(q, row, q_row, dims, limit, 0 if DIM_B else CUT, True)
    q_tile_b = load_rows(q + DIM, row, q_row, tl.arange(0, DIM_B), limit, CUT, True) if DIM_B else q_tile
    d_o_tile = load_rows(d_o, row, d_o_row, v_dims, limit, 0 if V_DIM_B else V_CUT, True)
    d_o_tile_b = load_rows(d_o + V_DIM, row, d_o_row, tl.arange(0, V_DIM_B), limit, V_CUT, True) if V_DIM_B else d_o_tile
    lse_rows, delta_rows = statistics_of(lse, delta, statistics, pair, rows, seqlen_q, CAREFUL)
    acc = tl.zeros([TILE_M, DIM], tl.float32)
    acc_b = tl.zeros([TILE_M, DIM_B if DIM_B else 16], tl.float32)
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
            acc, acc_b = _visit_keys(
                acc, acc_b, q_tile, q_tile_b, d_o_tile, d_o_tile_b, lse_rows, delta_rows, k, v, k_row, v_row, rows, seqlen_q, seqlen_k,
                rows, rows, ref, bands, bitmaps, first, count, count, 0, scale, softcap, slope, diagonal, bias, bias_row, bias_column,
                pair, draw, keep_scale, True, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N,
                DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, CAREFUL,
            )  # fmt: skip
        for r in range(tl.load(span + (2 if CAREFUL else 1)), tl.load(span + 2)):
            first, count = tl.load(runs + r * 4), tl.load(runs + r * 4 + 1) - tl.load(runs + r * 4)
            acc, acc_b = _visit_keys(
                acc, acc_b, q_tile, q_tile_b, d_o_tile, d_o_tile_b, lse_rows, delta_rows, k, v, k_row, v_row, rows, seqlen_q, seqlen_k,
                rows, rows, 0, bands, bitmaps, first, count, count, 0, scale, softcap, slope, diagonal, bias, bias_row, bias_column,
                pair, draw, keep_scale, False, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N,
                DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, False,
            )  # fmt: skip
    else:
        begin, end = interval(rows, seqlen_q, ends, row0, row1, column0, column1, low, high, MASK)
        first, last, free, stop = walk(begin, end, rows, seqlen_q, TILE_N)
        if CAREFUL:
            free, stop = last, last
        acc, acc_b = _visit_keys(
            acc, acc_b, q_tile, q_tile_b, d_o_tile, d_o_tile_b, lse_rows, delta_rows, k, v, k_row, v_row, rows, seqlen_q, seqlen_k,
            begin, end, 0, bands, bitmaps, first, last - stop + free - first, free - first, stop - free, scale, softcap, slope, diagonal,
            bias, bias_row, bias_column, pair, draw, keep_scale, True, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT,
            TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, CAREFUL,
        )  # fmt: skip
        if not CAREFUL:
            acc, acc_b = _visit_keys(
                acc, acc_b, q_tile, q_tile_b, d_o_tile, d_o_tile_b, lse_rows, delta_rows, k, v, k_row, v_row, rows, seqlen_q, seqlen_k,
                begin, end, 0, bands, bitmaps, free, stop - free, stop - free, 0, scale, softcap, slope, diagonal,
                bias, bias_row, bias_column, pair, draw, keep_scale, False, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT,
                TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, False,
            )  # fmt: skip
    d_q += b.to(tl.int64) * d_q_batch + h.to(tl.int64) * d_q_head + (m * TILE_M).to(tl.int64) * d_q_row
    acc, acc_b = acc * scale, acc_b * scale
    if CAREFUL:
        acc = mended(d_q, acc, row, d_q_row, dims, limit, 0 if DIM_B else CUT)
        if DIM_B:
            acc_b = mended(d_q + DIM, acc_b, row, d_q_row, tl.arange(0, DIM_B), limit, CUT)
    else:
        tl.store(spoils + program, tl.max(not_finite(acc, acc_b, DIM_B > 0)))
    store_rows(d_q, acc, row, d_q_row, dims, limit, 0 if DIM_B else CUT, EMULATED)
    if DIM_B:
        store_rows(d_q + DIM, acc_b, row, d_q_row, tl.arange(0, DIM_B), limit, CUT, EMULATED)


@triton.jit
def dq(
    q, k, v, d_o, d_q, lse, delta, statistics, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_o_batch, d_o_head,
    d_o_row, d_q_batch, d_q_head, d_q_row, seqlen_q, seqlen_k, heads, m_tiles, row0, row1, column0, column1, low, high,
    ends, order, spans, runs, bands, bitmaps, planes, scale, softcap, slopes, slopes_batch, diagonals, shift,
    bias, bias_batch, bias_head, bias_row, bias_column, seed, offset, threshold, drawn, every, first_head, keep_scale, tiles,
    MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr,
    DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr,
    DIM_B: tl.constexpr,
    CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """dQ (batch, seqlen_q, heads, head_dim). CAREFUL: where it is NaN, alone (careful.py). Grid: as of `forward`."""
    walk_over_tiles(
        _tile_of_queries, _wrong_queries,
        (q, k, v, d_o, d_q, lse, delta, statistics, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_o_batch,
        d_o_head, d_o_row, d_q_batch, d_q_head, d_q_row, seqlen_q, seqlen_k, heads, m_tiles, row0, row1, column0, column1, low, high, ends,
        order, spans, runs, bands, bitmaps, planes, scale, softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head,
        bias_row, bias_column, seed, offset, threshold, drawn, every, first_head, keep_scale, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DIAGONALS,
        DROPOUT, PARTED, GROUP, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, CAREFUL),
        (d_q, lse, delta, d_q_batch, d_q_head, d_q_row, seqlen_q, heads, m_tiles, order, MASK, TILE_M, DIM, DIM_B, CUT),
        spoils, tiles, CAREFUL,
    )  # fmt: skip


@triton.jit
def _visit_queries(
    d_k, d_k_b, d_v, d_v_b, k, k_b, v, v_b, q, d_o, lse, delta, statistics, q_head, q_row, d_o_head, d_o_row, rows, seqlen_q, seqlen_k, begin, end,
    ref, bands, bitmaps, first, count, left, skip, HEADS: tl.constexpr, scale, softcap, slopes, diagonals, shift, bias, bias_head, bias_row,
    bias_column, pair, draw, keep_scale,
    MASKED: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    DIAGONALS: tl.constexpr, DROPOUT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, DIM_B: tl.constexpr,
    CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV / keep_scale with `count` more tiles of queries of each of HEADS query heads, which share the keys."""
    columns, dims, v_dims = tl.arange(0, TILE_M), tl.arange(0, DIM), tl.arange(0, V_DIM)
    there = existing(seqlen_q, end, MASKED, MASK)
    for step in tl.range(0, count * HEADS, num_stages=STAGES):
        head = step // count if HEADS > 1 else 0
        i = step - head * count if HEADS > 1 else step
        m = (first + i + tl.where(i >= left, skip, 0)) * TILE_M
        queries = m + columns
        wide = queries.to(tl.int64)  # so that no thread keeps an address for each row that it loads
        q_at, d_o_at = q + tl.cast(head, tl.int64) * q_head, d_o + tl.cast(head, tl.int64) * d_o_head
        b_tile = 0.0
        if BIAS:
            of_head = bias + tl.cast(head, tl.int64) * bias_head
            b_tile = bias_of(of_head, queries[None, :], rows[:, None], seqlen_q, seqlen_k, bias_row, bias_column)
        lse_columns, delta_columns = statistics_of(lse, delta, statistics, pair + head, queries, seqlen_q, CAREFUL)
        q_tile = load_rows(q_at, wide, q_row, dims, there, 0 if DIM_B else CUT, MASKED)
        x = dot(k, tl.trans(q_tile), tl.zeros([TILE_N, TILE_M], tl.float32), BF16_PARTS, EMULATED)
        d_o_tile = load_rows(d_o_at, wide, d_o_row, v_dims, there, 0 if V_DIM_B else V_CUT, MASKED)
        d_o_tile_b = d_o_tile
        if V_DIM_B:
            d_o_tile_b = load_rows(d_o_at + V_DIM, wide, d_o_row, tl.arange(0, V_DIM_B), there, V_CUT, MASKED)
        if not BIAS:
            d_p = _of_values(v, v_b, d_o_tile, d_o_tile_b, TILE_N, TILE_M, V_DIM_B, BF16_PARTS, EMULATED)
        if DIM_B:
            q_tile_b = load_rows(q_at + DIM, wide, q_row, tl.arange(0, DIM_B), there, CUT, MASKED)
            x = dot(k_b, tl.trans(q_tile_b), x, BF16_PARTS, EMULATED)
        slope, diagonal = tl.load(slopes + head) if ALIBI else 0.0, shift
        if DIAGONALS:
            diagonal = tl.load(diagonals + queries, mask=queries < seqlen_q, other=0)[None, :]
        x, factor, bend = scored(
            x, scale, softcap, b_tile, slope, queries[None, :], rows[:, None], diagonal, MODIFIED, SOFTCAP, BIAS, ALIBI
        )
        p = probability(x, factor, lse_columns[None, :], BIAS, not (BIAS or CAREFUL))
        if MASKED:
            if MASK == "tiles":
                sees = by_table(ref, bands, bitmaps, rows, queries, tl.arange(0, TILE_N), columns, TILE_N, TILE_M)
            else:
                sees = (queries[None, :] >= begin[:, None]) & (queries[None, :] < end[:, None])
            if CAREFUL:  # a bias of -inf hides, where it hides all
                sees = sees & (lse_columns != float("-inf"))[None, :]
            p = tl.where(sees, p, 0.0)
        dropped = p
        if DROPOUT:
            blocks = tl.min(rows, 0) // 4 + tl.arange(0, TILE_N // 4)
            keep = tl.trans(kept(queries, blocks, pair + head, draw, TILE_M, TILE_N // 4))
            dropped = p * tl.where(keep, 1.0, 0.0)
        if CAREFUL:
            d_v, d_o_tile = set_apart(d_v, dropped, sees, d_o_tile, EMULATED)
            if V_DIM_B:
                d_v_b, d_o_tile_b = set_apart(d_v_b, dropped, sees, d_o_tile_b, EMULATED)
        dropped = narrow(dropped, q.dtype.element_ty, EMULATED)
        d_v = dot(dropped, d_o_tile, d_v, BF16_PARTS, EMULATED)
        if V_DIM_B:
            d_v_b = dot(dropped, d_o_tile_b, d_v_b, BF16_PARTS, EMULATED)
        if BIAS:  # whose tile takes the registers that its products would meanwhile
            d_p = _of_values(v, v_b, d_o_tile, d_o_tile_b, TILE_N, TILE_M, V_DIM_B, BF16_PARTS, EMULATED)
        if DROPOUT:
            d_p = d_p * tl.where(keep, keep_scale, 0.0)
        d_s = p * (d_p - delta_columns[None, :])
        if SOFTCAP:
            d_s *= bend
        if BIAS:
            d_s = tl.where(lse_columns[None, :] == float("-inf"), 0.0, d_s)
        if MASKED:
            d_s = tl.where(sees, d_s, 0.0)
        if CAREFUL:
            d_k, q_tile = set_apart(d_k, d_s, sees, q_tile, EMULATED)
            if DIM_B:
                d_k_b, q_tile_b = set_apart(d_k_b, d_s, sees, q_tile_b, EMULATED)
        d_s = narrow(d_s, q.dtype.element_ty, EMULATED)
        d_k = dot(d_s, q_tile, d_k, BF16_PARTS, EMULATED)
        if DIM_B:
            d_k_b = dot(d_s, q_tile_b, d_k_b, BF16_PARTS, EMULATED)
    return d_k, d_k_b, d_v, d_v_b


@triton.jit
def _of_values(
    v, v_b, d_o, d_o_b, TILE_N: tl.constexpr, TILE_M: tl.constexpr, V_DIM_B: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr
):
    """V dO^T of a tile (keys, queries)."""
    found = dot(v, tl.trans(d_o), tl.zeros([TILE_N, TILE_M], tl.float32), BF16_PARTS, EMULATED)
    return dot(v_b, tl.trans(d_o_b), found, BF16_PARTS, EMULATED) if V_DIM_B else found


@triton.jit
def _wrong_keys(
    program, d_k, d_v, lse, delta, d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row, seqlen_q, seqlen_k, heads, n_tiles,
    row0, row1, column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes,
    MASK: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, DIM_B: tl.constexpr,
    CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr,
):  # fmt: skip
    """Whether a tile of dK or dV holds a NaN that is of no lost query (`unexplained`)."""
    pair, b, head_k, n = keys_of(program, heads, n_tiles, order, MASK, GROUP)
    row = tl.arange(0, TILE_N)
    rows, limit = n * TILE_N + row, seqlen_k - n * TILE_N
    d_k += b.to(tl.int64) * d_k_batch + head_k.to(tl.int64) * d_k_head + (n * TILE_N).to(tl.int64) * d_k_row
    d_v += b.to(tl.int64) * d_v_batch + head_k.to(tl.int64) * d_v_head + (n * TILE_N).to(tl.int64) * d_v_row
    begin, end = rows, rows
    if MASK != "tiles":
        begin, end = interval(rows, seqlen_k, ends, row0, row1, column0, column1, low, high, MASK)
    of_k, of_v = spoiled(d_k, row, d_k_row, limit, DIM, DIM_B, CUT), spoiled(d_v, row, d_v_row, limit, V_DIM, V_DIM_B, V_CUT)
    return unexplained(
        of_k, of_v, lse, delta, rows, begin, end, seqlen_q, seqlen_k, pair, n_tiles, n, spans, runs, bands, bitmaps, planes, MASK, GROUP,
        TILE_M, TILE_N,
    )  # fmt: skip


@triton.jit
def _tile_of_keys(
    program, q, k, v, d_o, d_k, d_v, lse, delta, statistics, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_o_batch, d_o_head, d_o_row, d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row, seqlen_q, seqlen_k, heads, n_tiles,
    row0, row1, column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes,
    scale, softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head, bias_row, bias_column,
    seed, offset, threshold, drawn, every, first_head, keep_scale,
    MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr,
    DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr,
    DIM_B: tl.constexpr,
    CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What `dkdv` does for one tile of keys."""
    draw = (seed, offset, threshold, drawn, every, first_head, heads) if PARTED else (seed, offset, threshold)
    pair, b, head_k, n = keys_of(program, heads, n_tiles, order, MASK, GROUP)
    row = tl.arange(0, TILE_N)
    rows, limit = n * TILE_N + row, seqlen_k - n * TILE_N
    k += b.to(tl.int64) * k_batch + head_k.to(tl.int64) * k_head + (n * TILE_N).to(tl.int64) * k_row
    v += b.to(tl.int64) * v_batch + head_k.to(tl.int64) * v_head + (n * TILE_N).to(tl.int64) * v_row
    q += b.to(tl.int64) * q_batch + (head_k * GROUP).to(tl.int64) * q_head
    d_o += b.to(tl.int64) * d_o_batch + (head_k * GROUP).to(tl.int64) * d_o_head
    d_k += b.to(tl.int64) * d_k_batch + head_k.to(tl.int64) * d_k_head + (n * TILE_N).to(tl.int64) * d_k_row
    d_v += b.to(tl.int64) * d_v_batch + head_k.to(tl.int64) * d_v_head + (n * TILE_N).to(tl.int64) * d_v_row
    dims, v_dims = tl.arange(0, DIM), tl.arange(0, V_DIM)
    begin, end = rows, rows
    if MASK != "tiles":
        begin, end = interval(rows, seqlen_k, ends, row0, row1, column0, column1, low, high, MASK)
    k_tile = load_rows(k, row, k_row, dims, limit, 0 if DIM_B else CUT, True)
    k_tile_b = load_rows(k + DIM, row, k_row, tl.arange(0, DIM_B), limit, CUT, True) if DIM_B else k_tile
    v_tile = load_rows(v, row, v_row, v_dims, limit, 0 if V_DIM_B else V_CUT, True)
    v_tile_b = load_rows(v + V_DIM, row, v_row, tl.arange(0, V_DIM_B), limit, V_CUT, True) if V_DIM_B else v_tile
    d_k_acc, d_v_acc = tl.zeros([TILE_N, DIM], tl.float32), tl.zeros([TILE_N, V_DIM], tl.float32)
    d_k_acc_b = tl.zeros([TILE_N, DIM_B if DIM_B else 16], tl.float32)
    d_v_acc_b = tl.zeros([TILE_N, V_DIM_B if V_DIM_B else 16], tl.float32)
    if ALIBI:
        slopes += b * slopes_batch + head_k * GROUP
    if BIAS:
        bias += b.to(tl.int64) * bias_batch + (head_k * GROUP).to(tl.int64) * bias_head
    if MASK == "tiles":
        for head in range(0, GROUP):
            span = spans + (tl.load(planes + pair + head) * n_tiles + n) * 3
            for r in range(tl.load(span), tl.load(span + 2)):
                first, count, ref = tl.load(runs + r * 4), tl.load(runs + r * 4 + 1) - tl.load(runs + r * 4), tl.load(runs + r * 4 + 2)
                d_k_acc, d_k_acc_b, d_v_acc, d_v_acc_b = _visit_queries(
                    d_k_acc, d_k_acc_b, d_v_acc, d_v_acc_b, k_tile, k_tile_b, v_tile, v_tile_b, q + tl.cast(head, tl.int64) * q_head,
                    d_o + tl.cast(head, tl.int64) * d_o_head, lse, delta, statistics, q_head, q_row, d_o_head, d_o_row, rows, seqlen_q, seqlen_k,
                    rows, rows, ref, bands, bitmaps, first, count, count, 0, 1, scale, softcap, slopes + head if ALIBI else slopes,
                    diagonals, shift,
                    bias + tl.cast(head, tl.int64) * bias_head if BIAS else bias, bias_head, bias_row, bias_column, pair + head,
                    draw, keep_scale, True, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DIAGONALS, DROPOUT, TILE_M,
                    TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, CAREFUL,
                )  # fmt: skip
    else:
        first, last, free, stop = walk(begin, end, rows, seqlen_k, TILE_M)
        if CAREFUL:
            free, stop = last, last
        d_k_acc, d_k_acc_b, d_v_acc, d_v_acc_b = _visit_queries(
            d_k_acc, d_k_acc_b, d_v_acc, d_v_acc_b, k_tile, k_tile_b, v_tile, v_tile_b, q, d_o, lse, delta, statistics, q_head, q_row, d_o_head,
            d_o_row, rows, seqlen_q, seqlen_k, begin, end, 0, bands, bitmaps, first, last - stop + free - first, free - first,
            stop - free, GROUP, scale, softcap, slopes, diagonals, shift, bias, bias_head, bias_row, bias_column, pair, draw, keep_scale,
            True, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DIAGONALS, DROPOUT, TILE_M, TILE_N, DIM, DIM_B, CUT,
            V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED, STAGES, CAREFUL,
        )  # fmt: skip
        if not CAREFUL:
            d_k_acc, d_k_acc_b, d_v_acc, d_v_acc_b = _visit_queries(
                d_k_acc, d_k_acc_b, d_v_acc, d_v_acc_b, k_tile, k_tile_b, v_tile, v_tile_b, q, d_o, lse, delta, statistics, q_head, q_row, d_o_head,
                d_o_row, rows, seqlen_q, seqlen_k, begin, end, 0, bands, bitmaps, free, stop - free, stop - free, 0, GROUP, scale, softcap,
                slopes, diagonals, shift, bias, bias_head, bias_row, bias_column, pair, draw, keep_scale,
                False, MASK, MODIFIED, SOFTCAP, BIAS, ALIBI, DIAGONALS, DROPOUT, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT,
                BF16_PARTS, EMULATED, STAGES, False,
            )  # fmt: skip
    d_k_acc, d_k_acc_b = d_k_acc * scale, d_k_acc_b * scale
    d_v_acc, d_v_acc_b = d_v_acc * keep_scale, d_v_acc_b * keep_scale
    if CAREFUL:
        d_k_acc = mended(d_k, d_k_acc, row, d_k_row, dims, limit, 0 if DIM_B else CUT)
        d_v_acc = mended(d_v, d_v_acc, row, d_v_row, v_dims, limit, 0 if V_DIM_B else V_CUT)
        if DIM_B:
            d_k_acc_b = mended(d_k + DIM, d_k_acc_b, row, d_k_row, tl.arange(0, DIM_B), limit, CUT)
        if V_DIM_B:
            d_v_acc_b = mended(d_v + V_DIM, d_v_acc_b, row, d_v_row, tl.arange(0, V_DIM_B), limit, V_CUT)
    else:
        of_both = tl.maximum(not_finite(d_k_acc, d_k_acc_b, DIM_B > 0), not_finite(d_v_acc, d_v_acc_b, V_DIM_B > 0))
        tl.store(spoils + program, tl.max(of_both))
    store_rows(d_k, d_k_acc, row, d_k_row, dims, limit, 0 if DIM_B else CUT, EMULATED)
    store_rows(d_v, d_v_acc, row, d_v_row, v_dims, limit, 0 if V_DIM_B else V_CUT, EMULATED)
    if DIM_B:
        store_rows(d_k + DIM, d_k_acc_b, row, d_k_row, tl.arange(0, DIM_B), limit, CUT, EMULATED)
    if V_DIM_B:
        store_rows(d_v + V_DIM, d_v_acc_b, row, d_v_row, tl.arange(0, V_DIM_B), limit, V_CUT, EMULATED)


@triton.jit
def dkdv(
    q, k, v, d_o, d_k, d_v, lse, delta, statistics, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_o_batch,
    d_o_head, d_o_row, d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row, seqlen_q, seqlen_k, heads, n_tiles,
    row0, row1, column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes,
    scale, softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head, bias_row, bias_column,
    seed, offset, threshold, drawn, every, first_head, keep_scale, tiles,
    MASK: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr,
    DROPOUT: tl.constexpr, PARTED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr,
    DIM_B: tl.constexpr,
    CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """dK (batch, seqlen_k, heads / GROUP, head_dim) and dV. Keys are the rows of the mask's interval and tables, queries its columns.

    CAREFUL: where they are NaN, alone (careful.py). Grid: the `tiles`, n_tiles * batch * heads / GROUP; CAREFUL any, as of `forward`.
    """
    walk_over_tiles(
        _tile_of_keys, _wrong_keys,
        (q, k, v, d_o, d_k, d_v, lse, delta, statistics, spoils, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
        d_o_batch, d_o_head, d_o_row, d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row, seqlen_q, seqlen_k, heads, n_tiles, row0, row1,
        column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes, scale, softcap, slopes, slopes_batch, diagonals, shift,
        bias, bias_batch, bias_head, bias_row, bias_column, seed, offset, threshold, drawn, every, first_head, keep_scale, MASK, MODIFIED,
        SOFTCAP, BIAS, ALIBI, DIAGONALS, DROPOUT, PARTED, GROUP, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, BF16_PARTS, EMULATED,
        STAGES, CAREFUL),
        (d_k, d_v, lse, delta, d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row, seqlen_q, seqlen_k, heads, n_tiles, row0, row1,
        column0, column1, low, high, ends, order, spans, runs, bands, bitmaps, planes, MASK, GROUP, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM,
        V_DIM_B, V_CUT),
        spoils, tiles, CAREFUL,
    )  # fmt: skip
