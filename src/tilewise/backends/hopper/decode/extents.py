"""How much a call of decode has: keys and rows of a sequence, in one memory or two, by which its configuration and its launch are chosen."""

from tilewise.backends.hopper.decode import config
from tilewise.backends.hopper.decode.config import (
    CHUNK,
    FEW_KEYS,
    LEAST_BOX,
    LONG,
    MANY_ROWS,
    OVERLAPPED_TILE,
    TILE_M,
    TILES,
    WIDE,
    tile_dims,
)
from tilewise.backends.tables.window import FAR, window_of
from tilewise.problem import DecodeCall


def latent(call: DecodeCall) -> bool:
    """Whether V is the first columns of K, in the same memory."""
    k, v = call.k_cache, call.v_cache
    if v.data_ptr() != k.data_ptr() or v.shape[3] > k.shape[3]:
        return False
    return all(ours == theirs or size == 1 for ours, theirs, size in zip(v.stride(), k.stride(), v.shape, strict=True))


def few_keys(call: DecodeCall) -> bool:
    """Whether there is room for few only. With a split tiles are the same in every batch, as bits would not be."""
    return call.split is None and call.seqlens.shape[0] * capacity_of(call) * call.k_cache.shape[2] <= FEW_KEYS


def capacity_of(call: DecodeCall) -> int:
    """Tokens of a sequence, at most."""
    return call.k_cache.shape[1] * (1 if call.page_table is None else call.page_table.shape[1])


def rows_of_unit(call: DecodeCall) -> int:
    """`config.rows_of_unit`, where that was measured; two products' otherwise, and where more rows have two warpgroups, of which one would idle."""
    q, k, ragged = call.q, call.k_cache, call.cu_seqlens_q is not None
    if call.split is not None or ragged or k.dtype != q.dtype or tile_dims(q.shape[-1], call.v_cache.shape[3]) is None or 0 in k.shape:
        return 2 * TILE_M
    if q.shape[1] * (q.shape[2] // k.shape[2]) > 2 * TILE_M:
        return 2 * TILE_M
    return config.rows_of_unit(call.seqlens.shape[0] * k.shape[2] * capacity_of(call))


def rows_of(call: DecodeCall) -> dict:
    """What `Config` has of the rows of a sequence: nothing where they are few.

    With two warpgroups a tile of keys serves twice as many rows. Of ragged queries the host knows the sum only: what may be one chunk among single
    tokens is slower where later rows see later keys, unless it is large. Bits do not depend on it.
    """
    dims, window = tile_dims(call.q.shape[-1], call.v_cache.shape[3]), window_of(call.mask)
    if dims is None or window is None or call.q.numel() == 0 or 0 in call.k_cache.shape:
        return {}
    group, ragged = call.q.shape[-2] // call.k_cache.shape[2], call.cu_seqlens_q is not None
    rows, batch, total = group * (call.max_seqlen_q if ragged else call.q.shape[1]), call.seqlens.shape[0], group * call.q.shape[0]
    if rows <= TILE_M or (ragged and max(total - batch * TILE_M, total - batch * group - MANY_ROWS + 1) <= 0):
        return {}
    gathers, found = call.page_table is not None and call.k_cache.shape[1] % LEAST_BOX, {}  # to gather takes registers
    if dims in WIDE and call.k_cache.dtype == call.q.dtype and not gathers:
        found = {"consumers": 2} | (CHUNK if rows > 2 * TILE_M else {})
        average = total // max(batch, 1) if ragged else rows
        if found.get("overlap") and call.split is None and average < LONG and TILES[dims] < OVERLAPPED_TILE:
            found["tile_n"] = TILES[dims]
    closed = window.lo > -FAR or window.hi < FAR
    if rows > TILE_M * found.get("consumers", 1) and closed and call.share is None:  # the keys of a share do not end a whole tile later
        found["causal_tiles"] = True
    return found
