"""Packed documents: which keys each query sees, and which queries see each key, found on the GPU from cu_seqlens."""

import triton
import triton.language as tl


@triton.jit
def document_of(at, place, documents, last, GROUP: tl.constexpr = 1, TILE: tl.constexpr = 0):
    """The document of each place: the largest d with cu_seqlens[d] <= place, of those below `documents`; bad cu_seqlens lead to no other memory.

    With TILE a place is a tile of TILE rows, of which a token has GROUP: document d's first is cu_seqlens[d] GROUP // TILE + d, so that it has
    as many as it needs.
    """
    low = place * 0
    high = low + documents
    for _ in range(0, last):
        middle = (low + high) // 2
        first = tl.load(at + middle)
        if TILE:
            first = first.to(tl.int64) * GROUP // TILE + middle
        before = first <= place
        low = tl.where(before & (middle < documents), middle, low)
        high = tl.where(before & (middle < documents), high, middle)
    return low


@triton.jit
def ends_of_documents(
    cu_q, cu_k, ends, documents, steps, seqlen_q, seqlen_k, low, high, low_left, high_left, KEYS: tl.constexpr, TILE: tl.constexpr
):
    """ends (2, rows): each query's keys begin <= j < end; with KEYS each key's queries. Grid: tiles of rows.

    A key is seen at key - query - diagonal in [low, high], for the diagonal through a document's bottom right corner, and in [low_left, high_left]
    for that through its top left one. steps: of the search, at least log2(documents) + 1.
    """
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    limit = seqlen_k if KEYS else seqlen_q
    others = seqlen_q if KEYS else seqlen_k
    own, other = (cu_k, cu_q) if KEYS else (cu_q, cu_k)
    document = document_of(own, rows, documents, steps)
    start, stop = tl.load(own + document), tl.load(own + document + 1)
    other_start, other_stop = tl.load(other + document), tl.load(other + document + 1)
    place = rows - start
    corner = (stop - start) - (other_stop - other_start) if KEYS else (other_stop - other_start) - (stop - start)
    if KEYS:  # key - query - corner in [low, high]: the query is key - corner - high at least
        begin = tl.maximum(place - corner - high, place - high_left)
        end = tl.minimum(place - corner - low, place - low_left) + 1
    else:
        begin = tl.maximum(place + corner + low, place + low_left)
        end = tl.minimum(place + corner + high, place + high_left) + 1
    begin = other_start + tl.maximum(begin, 0)
    end = tl.minimum(other_start + tl.maximum(end, 0), other_stop)
    sees = (rows >= start) & (rows < stop) & (begin < end)
    begin = tl.where(sees, tl.minimum(tl.maximum(begin, 0), others), 0)
    end = tl.where(sees, tl.minimum(tl.maximum(end, 0), others), 0)
    tl.store(ends + rows, begin, mask=rows < limit)
    tl.store(ends + limit + rows, end, mask=rows < limit)
