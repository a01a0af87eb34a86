"""Decode: the newest queries of each sequence against its cache, in parts (split-KV), and `merge`, which puts the parts of a row together.

A tile's rows are a sequence's new tokens times the query heads of a group (row = token * GROUP + head of the group), for these read the same keys.
Every program finds its sequence's length, and so its part of the keys, on the device; with SEQUENCES all lengths, so that long sequences have more
parts than short ones. The softmax is the forward pass's.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.kernels.careful import set_apart
from tilewise.backends.triton.kernels.documents import document_of
from tilewise.backends.triton.kernels.products import dot, gather, narrow, scatter, widened
from tilewise.backends.triton.kernels.rotation import turned
from tilewise.backends.triton.kernels.scores import LN2, LOG2E, joined, online, scored, settled
from tilewise.backends.triton.kernels.shares import FARTHEST, held, place_of


@triton.jit
def _clamped(x, most):
    """An index of 32 or 64 bits in [0, most], in 32."""
    return tl.minimum(tl.maximum(x.to(tl.int64), 0), most).to(tl.int32)


@triton.jit
def _by_length(
    unit, lengths, leftpad, batch, queries, most, low, high, splits, piece, LEFTPAD: tl.constexpr, TILE_N: tl.constexpr, SEQUENCES: tl.constexpr
):  # fmt: skip
    """The keys of all sequences in parts of one size, `splits` a sequence on average and one more for what is left over: the sequence of the
    `unit`-th part (`batch` beyond the last), where its keys begin, the number of its first part and of its parts, and the keys of a part.
    SEQUENCES: `batch` at least.
    """
    each = tl.arange(0, SEQUENCES)
    exists = each < batch
    length = _clamped(tl.load(lengths + each, mask=exists, other=0), most)
    begin = tl.maximum(length - queries + low, 0)
    if LEFTPAD:
        begin = tl.maximum(begin, _clamped(tl.load(leftpad + each, mask=exists, other=0), most))
    begin = begin // TILE_N * TILE_N
    keys = tl.maximum(tl.minimum(length + high, length) - begin, 0)
    mean = tl.cdiv(tl.sum(tl.where(exists, keys, 0).to(tl.int64), 0), splits * batch).to(tl.int32)
    step = tl.maximum(piece, (mean + TILE_N - 1) // TILE_N * TILE_N)
    parts = tl.where(exists, tl.maximum((keys + step - 1) // step, 1), 0)
    ends = tl.cumsum(parts, 0)
    before = exists & (ends <= unit)
    b = tl.sum(before.to(tl.int32), 0)
    base, own = tl.sum(tl.where(each == b, begin, 0), 0), tl.sum(tl.where(each == b, parts, 0), 0)
    return b, base, tl.max(tl.where(before, ends, 0), 0), own, step


@triton.jit
def _slots(keys, n, exists, entry, pages, page_size, entries, PAGES: tl.constexpr):
    """Entry or page of a tile of keys from n on, and their places there. PAGES: "tile" where a page holds whole tiles, "row", or "" for none."""
    if PAGES == "tile":
        page, place = tl.load(pages + n // page_size), n % page_size + keys - n
    elif PAGES == "row":
        page, place = tl.load(pages + keys // page_size, mask=exists, other=0), keys % page_size
    else:
        page, place = entry, keys
    return tl.minimum(tl.maximum(page.to(tl.int64), 0), entries - 1), place.to(tl.int64)


@triton.jit
def _scales(at, offsets, exists, SCALE: tl.constexpr):
    """The scale of each key, or the one of all. SCALE: "token", "head", or "" for none."""
    if SCALE == "token":
        scale = tl.load(at + offsets, mask=exists, other=0.0)
    elif SCALE == "head":
        scale = tl.load(at)
    else:
        scale = 1.0
    return scale


@triton.jit
def _visit(
    acc, acc_b, total, top, q, q_b, k_cache, v_cache, k_cache_page, k_cache_row, v_cache_page, v_cache_row, pages, page_size, entries, entry,
    k_scale, v_scale, scale_k_page, scale_k_row, scale_v_page, scale_v_row, first, count, low, high, begin, end, position,
    tree, new, oldest, scale, softcap, slope,
    CAREFUL: tl.constexpr, PAGES: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    TREE: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr, V_DIM: tl.constexpr, V_DIM_B: tl.constexpr, V_CUT: tl.constexpr,
    LATENT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, RUN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The softmax's state after `count` more tiles of keys from `first` on, of which some row sees low <= key < high."""
    columns, dims, v_dims = tl.arange(0, TILE_N), tl.arange(0, DIM), tl.arange(0, V_DIM)
    for i in tl.range(0, count, num_stages=STAGES):
        n = (first + i) * TILE_N
        keys = n + columns
        exists = (keys >= low) & (keys < high)
        page, place = _slots(keys, n, exists, entry, pages, page_size, entries, PAGES)
        k_rows, v_rows = page * k_cache_page + place * k_cache_row, page * v_cache_page + place * v_cache_row
        k_tile = gather(k_cache, k_rows[None, :], dims[:, None], exists[None, :], 0 if DIM_B else CUT)
        if K_BITS != "":
            of_k = _scales(k_scale, (page * scale_k_page + place * scale_k_row)[None, :], exists[None, :], K_SCALE)
            k_tile = widened(k_tile, of_k, q.dtype, K_BITS == "e4m3", EMULATED)
        x = dot(q, k_tile, tl.zeros([TILE_M, TILE_N], tl.float32), BF16_PARTS, EMULATED)
        if DIM_B:
            k_tile_b = gather(k_cache + DIM, k_rows[None, :], tl.arange(0, DIM_B)[:, None], exists[None, :], CUT)
            if K_BITS != "":
                k_tile_b = widened(k_tile_b, of_k, q.dtype, K_BITS == "e4m3", EMULATED)
            x = dot(q_b, k_tile_b, x, BF16_PARTS, EMULATED)
        places = place_of(keys, RANK, WORLD, RUN)
        x, factor, _ = scored(x, scale, softcap, 0.0, slope, position[:, None], places[None, :], 0, MODIFIED, SOFTCAP, False, ALIBI)
        sees = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
        if TREE:
            row, column = position - oldest, places - oldest
            known = sees & (row >= 0)[:, None] & (column >= 0)[None, :]
            sees = sees & (tl.load(tree + row[:, None] * new + column[None, :], mask=known, other=1) != 0)
        p, fading, total, top = online(tl.where(sees, x, float("-inf")), factor, top, total, False)
        if LATENT:  # noqa: SIM108 - one of them is compiled
            v_tile = tl.trans(k_tile)
        else:
            v_tile = gather(v_cache, v_rows[:, None], v_dims[None, :], exists[:, None], 0 if V_DIM_B else V_CUT)
        if V_BITS != "":
            of_v = _scales(v_scale, (page * scale_v_page + place * scale_v_row)[:, None], exists[:, None], V_SCALE)
            v_tile = widened(v_tile, of_v, q.dtype, V_BITS == "e4m3", EMULATED)
        acc = acc * fading[:, None]
        if CAREFUL:
            acc, v_tile = set_apart(acc, p, sees, v_tile, EMULATED)
        acc = dot(narrow(p, q.dtype, EMULATED), v_tile, acc, BF16_PARTS, EMULATED)
        if V_DIM_B:
            v_tile_b = gather(v_cache + V_DIM, v_rows[:, None], tl.arange(0, V_DIM_B)[None, :], exists[:, None], V_CUT)
            if V_BITS != "":
                v_tile_b = widened(v_tile_b, of_v, q.dtype, V_BITS == "e4m3", EMULATED)
            acc_b = acc_b * fading[:, None]
            if CAREFUL:
                acc_b, v_tile_b = set_apart(acc_b, p, sees, v_tile_b, EMULATED)
            acc_b = dot(narrow(p, q.dtype, EMULATED), v_tile_b, acc_b, BF16_PARTS, EMULATED)
    return acc, acc_b, total, top


@triton.jit
def _not_finite(acc):
    return tl.max(tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), 1), 0)


@triton.jit
def _queries(
    q, rows, columns, exists, position, cos, sin, cos_row, sin_row, pairs, positions, FIRST: tl.constexpr, CUT: tl.constexpr,
    ROTARY: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The columns FIRST, FIRST + 1, ... of a tile of queries, rotated where they are yet to be."""
    x = gather(q + FIRST, rows[:, None], columns[None, :], exists[:, None], CUT)
    if ROTARY != "":
        shown, at = exists[:, None], q + rows[:, None]
        y = turned(
            x.to(tl.float32), at, FIRST + columns[None, :], shown, position[:, None], cos, sin, cos_row, sin_row, pairs, positions,
            ROTARY == "interleaved",
        )  # fmt: skip
        x = narrow(y, q.dtype.element_ty, EMULATED)
    return x


@triton.jit
def decode(
    q, k_cache, v_cache, o, lse, partial_o, partial_lse, parts_of, q_batch, q_row, q_head, k_cache_page, k_cache_row, k_cache_head, v_cache_page,
    v_cache_row, v_cache_head, o_row, lse_batch, lse_head, lengths, starts, pages, pages_batch, entry_of, leftpad, tree, tree_batch, new,
    k_scale, v_scale, scale_k_page, scale_k_row, scale_k_head, scale_v_page, scale_v_row, scale_v_head,
    slopes, slopes_batch, sink, cos, sin, cos_row, sin_row, pairs, positions,
    batch, seqlen_q, heads, heads_k, m_tiles, steps, capacity, page_size, entries, splits, piece, low, high, scale, softcap, rows_of_all,
    prefix, JOINS: tl.constexpr,
    RAGGED: tl.constexpr, SPLIT: tl.constexpr, FIXED: tl.constexpr, SEVERAL: tl.constexpr, PAGES: tl.constexpr, ENTRIES: tl.constexpr,
    LEFTPAD: tl.constexpr, TREE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    ROTARY: tl.constexpr, MODIFIED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr, GROUP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr, V_DIM: tl.constexpr,
    V_DIM_B: tl.constexpr, V_CUT: tl.constexpr, LATENT: tl.constexpr, BF16_PARTS: tl.constexpr, EMULATED: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, RUN: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """O (tokens, heads, head_dim_v) and LSE, or with SPLIT these of one of `splits` parts of the keys, in fp32. Grid: tiles * splits * heads_k.

    tiles: m_tiles * batch; RAGGED m_tiles, of all sequences and of the rows behind the last, which make one more that has no keys.
    low, high: a query at position p sees keys p + low to p + high. piece: keys of a part, with FIXED, or of one at least.
    RANK, WORLD, RUN: as `shares.held`; lengths and what a row sees are positions until they are made keys of the cache.
    LATENT: values are the first columns of keys, in the same memory.
    JOINS: another launch has the first `prefix` keys of sequences in which every query sees these.
    SEQUENCES: 0, or `_by_length`'s, with SPLIT and no JOINS, RAGGED, FIXED or WORLD. Then the grid is m_tiles * (splits + 1) * batch * heads_k, and
    parts lie in the order of sequences; parts_of (batch, 2) has each one's first, and how many they are.
    """
    h_k, rest = tl.program_id(0) % heads_k, tl.program_id(0) // heads_k
    most = FARTHEST if WORLD > 1 else capacity
    if SEQUENCES:
        unit, m = rest // m_tiles, rest % m_tiles
        b, base, first_unit, parts, step = _by_length(
            unit, lengths, leftpad, batch, seqlen_q, most, low, high, splits, piece, LEFTPAD, TILE_N, SEQUENCES
        )
        if b >= batch:
            return
        split, start, queries = unit - first_unit, 0, seqlen_q
        if (split == 0) & (m == 0) & (h_k == 0):
            tl.store(parts_of + 2 * b, first_unit)
            tl.store(parts_of + 2 * b + 1, parts)
    elif RAGGED:
        split, tile = rest % splits, rest // splits
        b = document_of(starts, tile, batch + 1, steps, GROUP, TILE_M)
        start = _clamped(tl.load(starts + b), seqlen_q)
        stop = tl.load(starts + b + 1, mask=b < batch, other=seqlen_q)
        queries = tl.maximum(_clamped(stop, seqlen_q) - start, 0)
        m = (tile - (tl.load(starts + b).to(tl.int64) * GROUP // TILE_M + b)).to(tl.int32)
    else:
        split, tile = rest % splits, rest // splits
        b, m = tile // m_tiles, tile % m_tiles
        start, queries = 0, seqlen_q
    rows = m * TILE_M + tl.arange(0, TILE_M)
    token, h = rows // GROUP, h_k * GROUP + rows % GROUP
    exists = (token < queries) & (rows >= 0)
    length = _clamped(tl.load(lengths + b, mask=b < batch, other=0), most)
    position = length - queries + token

    begin, end = tl.maximum(position + low, 0), tl.minimum(position + high + 1, length)
    if JOINS:
        seen = tl.minimum(length, length - queries + high + 1)
        if TREE:
            seen = tl.minimum(seen, length - new)
        begin = tl.maximum(begin, tl.where(seen >= prefix, prefix, 0))
    if LEFTPAD:
        begin = tl.maximum(begin, _clamped(tl.load(leftpad + b, mask=b < batch, other=0), most))
    if WORLD > 1:
        begin, end = held(begin, RANK, WORLD, RUN), tl.minimum(held(tl.maximum(end, 0), RANK, WORLD, RUN), capacity)
    shown = exists & (begin < end)
    begin, end = tl.where(shown, begin, 0), tl.where(shown, end, 0)
    last = tl.max(end, 0)
    first = tl.min(tl.where(shown, begin, last), 0)
    if not SEQUENCES:
        base, step = first // TILE_N * TILE_N, piece
        if not FIXED:
            step = tl.maximum(piece, ((last - base + splits - 1) // splits + TILE_N - 1) // TILE_N * TILE_N)
    part = base + split * step
    n_low, n_high = tl.maximum(part, first), tl.minimum(part + step, last)
    count = tl.where(n_low < n_high, (n_high - part + TILE_N - 1) // TILE_N, 0)
    begin, end = tl.maximum(begin, n_low), tl.minimum(end, n_high)

    q += h_k.to(tl.int64) * (GROUP * q_head)
    if not RAGGED:
        q += b.to(tl.int64) * q_batch
    q_rows = (start + token).to(tl.int64) * q_row + (rows % GROUP) * q_head
    k_cache += h_k.to(tl.int64) * k_cache_head
    v_cache += h_k.to(tl.int64) * v_cache_head
    entry = tl.load(entry_of + b, mask=b < batch, other=0) if ENTRIES else b
    if PAGES != "":
        pages += b.to(tl.int64) * pages_batch
    if K_SCALE != "":
        k_scale += h_k.to(tl.int64) * scale_k_head
        if K_SCALE == "head":
            k_scale += tl.minimum(b, batch - 1).to(tl.int64) * scale_k_page
    if V_SCALE != "":
        v_scale += h_k.to(tl.int64) * scale_v_head
        if V_SCALE == "head":
            v_scale += tl.minimum(b, batch - 1).to(tl.int64) * scale_v_page
    if TREE:
        tree += b.to(tl.int64) * tree_batch
    slope = tl.load(slopes + b * slopes_batch + h, mask=shown, other=0.0)[:, None] if ALIBI else scale

    dims, v_dims = tl.arange(0, DIM), tl.arange(0, V_DIM)
    q_tile = _queries(
        q, q_rows, dims, exists, position, cos, sin, cos_row, sin_row, pairs, positions, 0, 0 if DIM_B else CUT, ROTARY, EMULATED
    )
    q_tile_b = q_tile
    if DIM_B:
        q_tile_b = _queries(
            q, q_rows, tl.arange(0, DIM_B), exists, position, cos, sin, cos_row, sin_row, pairs, positions, DIM, CUT, ROTARY, EMULATED
        )
    none, none_b = tl.zeros([TILE_M, V_DIM], tl.float32), tl.zeros([TILE_M, V_DIM_B if V_DIM_B else 16], tl.float32)
    nothing, lowest = tl.zeros([TILE_M], tl.float32), tl.full([TILE_M], float("-inf"), tl.float32)
    first_tile, oldest = part // TILE_N, length - new
    acc, acc_b, total, top = _visit(
        none, none_b, nothing, lowest, q_tile, q_tile_b, k_cache, v_cache, k_cache_page, k_cache_row, v_cache_page, v_cache_row, pages,
        page_size, entries, entry, k_scale, v_scale, scale_k_page, scale_k_row, scale_v_page, scale_v_row, first_tile, count, n_low, n_high,
        begin, end, position, tree, new, oldest, scale, softcap, slope, False, PAGES, K_BITS, V_BITS, K_SCALE, V_SCALE, TREE, MODIFIED,
        SOFTCAP, ALIBI, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, LATENT,
        BF16_PARTS, EMULATED, RANK, WORLD, RUN, STAGES,
    )  # fmt: skip
    if SEVERAL:  # noqa: SIM102
        if _not_finite(acc) + _not_finite(acc_b) > 0:  # NaN among the values of a key must reach only those rows that see it
            acc, acc_b, total, top = _visit(
                none, none_b, nothing, lowest, q_tile, q_tile_b, k_cache, v_cache, k_cache_page, k_cache_row, v_cache_page,
                v_cache_row, pages, page_size, entries, entry, k_scale, v_scale, scale_k_page, scale_k_row, scale_v_page, scale_v_row,
                first_tile, count, n_low, n_high, begin, end, position, tree, new, oldest, scale, softcap, slope, True, PAGES, K_BITS, V_BITS,
                K_SCALE, V_SCALE, TREE, MODIFIED, SOFTCAP, ALIBI, TILE_M, TILE_N, DIM, DIM_B, CUT, V_DIM, V_DIM_B, V_CUT, LATENT,
                BF16_PARTS, EMULATED, RANK, WORLD, RUN, 1,
            )  # fmt: skip
    top = top * LN2
    if SINK:
        heirs = tl.where((b < batch) & (split == 0), queries, 0)  # one part has the sink
        more = tl.load(sink + h, mask=exists & (token < heirs), other=float("-inf"))
        fading, total, top = joined(more, top, total)
        acc = acc * fading[:, None]
        acc_b = acc_b * fading[:, None]
    share, natural = settled(top, total)
    at = (start + token).to(tl.int64)
    if not RAGGED:
        at += (unit if SEQUENCES else b).to(tl.int64) * seqlen_q
    at = at * heads + h
    if SPLIT:
        if not SEQUENCES:
            at += split.to(tl.int64) * rows_of_all
        tl.store(partial_lse + at, natural, mask=exists)
        target, written = partial_o, exists & (natural != float("-inf"))
    else:
        where = (start + token).to(tl.int64) + h.to(tl.int64) * lse_head
        if not RAGGED:
            where += b.to(tl.int64) * lse_batch
        tl.store(lse + where, natural, mask=exists)
        target, written = o, exists
    scatter(target, acc * share[:, None], at[:, None] * o_row, v_dims[None, :], written[:, None], 0 if V_DIM_B else V_CUT, EMULATED)
    if V_DIM_B:
        dims_b = tl.arange(0, V_DIM_B)[None, :]
        scatter(target + V_DIM, acc_b * share[:, None], at[:, None] * o_row, dims_b, written[:, None], V_CUT, EMULATED)


@triton.jit
def merge(
    o, lse, partial_o, partial_lse, parts_of, o_row, partial_o_part, partial_lse_part, lse_batch, lse_head, seqlen_q, heads, splits, rows_of_all,
    TILE_M: tl.constexpr, V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr, BY_LENGTH: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """O and LSE of rows from their parts, in order. Grid: tiles of rows (batch, token, head), of `rows_of_all`.

    BY_LENGTH: the rows of a sequence's parts are where `parts_of` says, as `decode` writes it, and not `splits` parts of all rows.
    """
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    exists, dims = rows < rows_of_all, tl.arange(0, V_DIM)
    first, count, most = rows.to(tl.int64), rows * 0 + splits, splits
    if BY_LENGTH:
        of_one = seqlen_q * heads
        of_sequence = parts_of + 2 * (rows // of_one)
        first += (tl.load(of_sequence, mask=exists, other=0) - rows // of_one).to(tl.int64) * of_one
        count = tl.load(of_sequence + 1, mask=exists, other=0)
        most = tl.max(count, 0)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    for part in range(0, most):
        at = partial_lse + first + part * partial_lse_part
        top = tl.maximum(top, tl.load(at, mask=exists & (part < count), other=float("-inf")))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, V_DIM], tl.float32)
    for part in range(0, most):
        at = partial_lse + first + part * partial_lse_part
        one = tl.load(at, mask=exists & (part < count), other=float("-inf"))
        weight = tl.math.exp2((one - safe) * LOG2E)
        there = exists & (one != float("-inf"))
        x = gather(partial_o, (first * o_row + part * partial_o_part)[:, None], dims[None, :], there[:, None], V_COLUMNS)
        total += weight
        acc += x * weight[:, None]
    share, natural = settled(safe, total)
    h, row = rows % heads, rows // heads
    where = (row // seqlen_q).to(tl.int64) * lse_batch + h.to(tl.int64) * lse_head + row % seqlen_q
    tl.store(lse + where, natural, mask=exists)
    scatter(o, acc * share[:, None], rows.to(tl.int64)[:, None] * o_row, dims[None, :], exists[:, None], V_COLUMNS, EMULATED)
