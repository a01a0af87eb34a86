"""Append: new keys and values into their caches, keys rotated on the way. What is written has the bits of runtime/append_operator.py's torch."""

import triton
import triton.language as tl

from tilewise.backends.triton.kernels.documents import document_of
from tilewise.backends.triton.kernels.products import gather, narrow, scatter
from tilewise.backends.triton.kernels.rotation import turned
from tilewise.backends.triton.kernels.shares import held

FAR = tl.constexpr(2**31 - 1)
LENGTHS = tl.constexpr(128)  # that are written at a time


@triton.jit
def _store_ends(ends, lengths, starts, batch, new, PACKED: tl.constexpr):
    """Lengths behind the new tokens, in the range of int32."""
    for first in range(0, batch, LENGTHS):
        b = first + tl.arange(0, LENGTHS)
        exists = b < batch
        end = tl.load(lengths + b, mask=exists, other=0).to(tl.int64) + new
        if PACKED:
            end += tl.load(starts + b + 1, mask=exists, other=0).to(tl.int64) - tl.load(starts + b, mask=exists, other=0).to(tl.int64)
        tl.store(ends + b, tl.minimum(tl.maximum(end, -FAR), FAR).to(tl.int32), mask=exists)


@triton.jit
def append(
    k, v, k_cache, v_cache, k_batch, k_row, k_head, v_batch, v_row, v_head, k_cache_page, k_cache_row, k_cache_head, v_cache_page, v_cache_row,
    v_cache_head, lengths, starts, firsts, pages, pages_batch, entry_of, ends, cos, sin, cos_row, sin_row, pairs, positions,
    batch, new, heads, blocks, steps, capacity, page_size, entries,
    PACKED: tl.constexpr, PAGED: tl.constexpr, ENTRIES: tl.constexpr, FIRSTS: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr, EMULATED: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Grid: tokens * blocks of HEADS heads. new: tokens of each sequence, 0 with PACKED; COLUMNS: as of `load_rows`."""
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tl.program_id(0) == 0:
        _store_ends(ends, lengths, starts, batch, new, PACKED)
    if PACKED:
        b = document_of(starts, token, batch, steps)
        place = token - tl.load(starts + b).to(tl.int64)
        there = token < tl.load(starts + batch)
    else:
        b, place = token // new, (token % new).to(tl.int64)
        there = place >= 0
        k += b.to(tl.int64) * k_batch
        v += b.to(tl.int64) * v_batch
    length = tl.load(lengths + b).to(tl.int64)
    position = length + place
    if WORLD > 1:  # of a rank's own tokens their places in its cache
        there = there & (position >= 0) & (position // RUN % WORLD == RANK)
        position = held(tl.where(there, position, 0), RANK, WORLD, RUN)
    fits = there & (position >= 0) & (position < capacity)
    if PAGED:
        column = tl.where(fits, position // page_size, 0)
        entry = tl.load(pages + b.to(tl.int64) * pages_batch + column, mask=fits, other=-1).to(tl.int64)
        row = position % page_size
    else:
        entry = tl.load(entry_of + b).to(tl.int64) if ENTRIES else b.to(tl.int64)
        row = position
    fits = fits & (entry >= 0) & (entry < entries)
    entry, row = tl.where(fits, entry, 0), tl.where(fits, row, 0)
    source = token.to(tl.int64) if PACKED else place

    h = (block * HEADS + tl.arange(0, HEADS))[:, None]
    exists = h < tl.where(fits, heads, 0)
    dims, v_dims = tl.arange(0, DIM)[None, :], tl.arange(0, V_DIM)[None, :]
    at = k + source * k_row + h * k_head
    x = gather(at, 0, dims, exists, COLUMNS)
    if ROTARY != "":
        turn = tl.load(firsts + b).to(tl.int64) if FIRSTS else length
        y = turned(x.to(tl.float32), at, dims, exists, turn + place, cos, sin, cos_row, sin_row, pairs, positions, ROTARY == "interleaved")
        x = narrow(y, x.dtype, EMULATED)
    scatter(k_cache + entry * k_cache_page + row * k_cache_row, x, h * k_cache_head, dims, exists, COLUMNS, False)
    y = gather(v + source * v_row, h * v_head, v_dims, exists, V_COLUMNS)
    scatter(v_cache + entry * v_cache_page + row * v_cache_row, y, h * v_cache_head, v_dims, exists, V_COLUMNS, False)
