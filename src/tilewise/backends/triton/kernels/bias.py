"""The gradient of a bias: a program owns a tile of it, and adds up dS of the batch entries, heads and queries that share it, in order."""

import triton
import triton.language as tl

from tilewise.backends.triton.kernels.backward import d_scores
from tilewise.backends.triton.kernels.products import dot, load_columns, load_rows, narrow
from tilewise.backends.triton.kernels.scores import bias_of
from tilewise.backends.triton.kernels.visible import by_table, interval


@triton.jit
def dbias(
    q, k, v, d_o, d_bias, lse, delta, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_o_batch, d_o_head, d_o_row,
    seqlen_q, seqlen_k, batch, heads, m_tiles, n_tiles, row0, row1, column0, column1, low, high, ends, spans, runs, bands, bitmaps, planes,
    scale, softcap, slopes, slopes_batch, diagonals, shift, bias, bias_batch, bias_head, bias_row, bias_column, seed, offset, threshold,
    drawn, every, first_head,
    keep_scale,
    EACH_BATCH: tl.constexpr, EACH_HEAD: tl.constexpr, EACH_ROW: tl.constexpr, MASK: tl.constexpr, MODIFIED: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DIAGONALS: tl.constexpr, DROPOUT: tl.constexpr, PARTED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr, V_DIM: tl.constexpr,
    V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """d_bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), contiguous; EACH_*: which of these it does not broadcast over.

    Grid: n_tiles * (m_tiles or 1) * (heads or 1) * (batch or 1).
    """
    draw = (seed, offset, threshold, drawn, every, first_head, heads) if PARTED else (seed, offset, threshold)
    n, rest = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    m_first, m_last = 0, m_tiles
    if EACH_ROW:
        m_first = rest % m_tiles
        m_last = m_first + 1
        rest = rest // m_tiles
    own_heads = heads if EACH_HEAD else 1
    own_head, own_batch = rest % own_heads, rest // own_heads
    head_first, head_last = (own_head, own_head + 1) if EACH_HEAD else (0, heads)
    batch_first, batch_last = (own_batch, own_batch + 1) if EACH_BATCH else (0, batch)
    column, row = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    dims, v_dims, keys, limit = tl.arange(0, DIM), tl.arange(0, V_DIM), n * TILE_N + column, seqlen_k - n * TILE_N
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for b in range(batch_first, batch_last):
        for h in range(head_first, head_last):
            pair = b * heads + h
            k_at = k + tl.cast(b, tl.int64) * k_batch + tl.cast(h // GROUP, tl.int64) * k_head + (n * TILE_N).to(tl.int64) * k_row
            v_at = v + tl.cast(b, tl.int64) * v_batch + tl.cast(h // GROUP, tl.int64) * v_head + (n * TILE_N).to(tl.int64) * v_row
            k_tile = load_columns(k_at, column, k_row, dims, limit, 0 if DIM_B else CUT, True)
            v_tile = load_columns(v_at, column, v_row, v_dims, limit, 0 if V_DIM_B else V_CUT, True)
            slope = tl.load(slopes + b * slopes_batch + h) if ALIBI else 0.0
            for m in range(m_first, m_last):
                rows, q_limit, at_m = m * TILE_M + row, seqlen_q - m * TILE_M, tl.cast(m * TILE_M, tl.int64)
                listed, ref = True, 0
                if MASK == "tiles":
                    listed, masked = False, True
                    span = spans + (tl.load(planes + pair) * m_tiles + m) * 3
                    for r in range(tl.load(span), tl.load(span + 2)):
                        if (tl.load(runs + r * 4) <= n) & (n < tl.load(runs + r * 4 + 1)):
                            listed, masked, ref = True, r < tl.load(span + 1), tl.load(runs + r * 4 + 2)
                    sees = by_table(tl.where(masked, ref, -1), bands, bitmaps, rows, keys, row, column, TILE_M, TILE_N)
                else:
                    begin, end = interval(rows, seqlen_q, ends, row0, row1, column0, column1, low, high, MASK)
                    sees = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
                    listed = tl.max(sees.to(tl.int32)) > 0
                if listed:
                    q_at = q + tl.cast(b, tl.int64) * q_batch + tl.cast(h, tl.int64) * q_head + at_m * q_row
                    d_o_at = d_o + tl.cast(b, tl.int64) * d_o_batch + tl.cast(h, tl.int64) * d_o_head + at_m * d_o_row
                    q_tile = load_rows(q_at, row, q_row, dims, q_limit, 0 if DIM_B else CUT, True)
                    d_o_tile = load_rows(d_o_at, row, d_o_row, v_dims, q_limit, 0 if V_DIM_B else V_CUT, True)
                    here = bias + tl.cast(b, tl.int64) * bias_batch + tl.cast(h, tl.int64) * bias_head
                    b_tile = bias_of(here, rows[:, None], keys[None, :], seqlen_q, seqlen_k, bias_row, bias_column)
                    x = dot(q_tile, k_tile, tl.zeros([TILE_M, TILE_N], tl.float32), BF16_PARTS, EMULATED)
                    d_p = dot(d_o_tile, v_tile, tl.zeros([TILE_M, TILE_N], tl.float32), BF16_PARTS, EMULATED)
                    if DIM_B:
                        q_tile_b = load_rows(q_at + DIM, row, q_row, tl.arange(0, DIM_B), q_limit, CUT, True)
                        k_tile_b = load_columns(k_at + DIM, column, k_row, tl.arange(0, DIM_B), limit, CUT, True)
                        x = dot(q_tile_b, k_tile_b, x, BF16_PARTS, EMULATED)
                    if V_DIM_B:
                        d_o_tile_b = load_rows(d_o_at + V_DIM, row, d_o_row, tl.arange(0, V_DIM_B), q_limit, V_CUT, True)
                        v_tile_b = load_columns(v_at + V_DIM, column, v_row, tl.arange(0, V_DIM_B), limit, V_CUT, True)
                        d_p = dot(d_o_tile_b, v_tile_b, d_p, BF16_PARTS, EMULATED)
                    at = tl.cast(pair, tl.int64) * seqlen_q + rows
                    lse_rows = tl.load(lse + at, mask=rows < seqlen_q, other=float("-inf"))
                    delta_rows = tl.load(delta + at, mask=rows < seqlen_q, other=0.0)
                    diagonal = shift
                    if DIAGONALS:
                        diagonal = tl.load(diagonals + rows, mask=rows < seqlen_q, other=0)[:, None]
                    exist = sees & (rows[:, None] < seqlen_q)
                    acc += d_scores(
                        x, d_p, lse_rows, delta_rows, exist, rows, keys, scale, softcap, slope, diagonal, b_tile, tl.cast(pair, tl.int32), draw,
                        keep_scale, True, MODIFIED, SOFTCAP, BIAS, ALIBI, DROPOUT, TILE_M, TILE_N, False, False,
                    )  # fmt: skip
    at = d_bias + (own_batch * own_heads + own_head).to(tl.int64) * seqlen_k * (seqlen_q if EACH_ROW else 1)
    if EACH_ROW:
        rows = m_first * TILE_M + row
        where = at + rows[:, None].to(tl.int64) * seqlen_k + keys[None, :]
        tl.store(where, narrow(acc, d_bias.dtype.element_ty, EMULATED), mask=(rows[:, None] < seqlen_q) & (keys[None, :] < seqlen_k))
    else:
        tl.store(at + keys, narrow(tl.sum(acc, 0), d_bias.dtype.element_ty, EMULATED), mask=keys < seqlen_k)
