"""Attention of a few new tokens against a key/value cache, plain or paged: in place where the backend can, else a call a sequence."""

import torch
from torch import Tensor

from tilewise.api import INDEX_DTYPES, attention, combine, operands
from tilewise.dispatch import choose
from tilewise.errors import (
    ShapeError,
    UnsupportedError,
    check_flag,
    check_head_dim,
    check_heads,
    check_like,
    check_no_grad,
    check_size,
    check_tensor,
)
from tilewise.masks import Dense, Mask
from tilewise.ops import Operands, call_of


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens against a cache that already holds their keys and values.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); its rows are the last seqlen_q positions of each sequence.
        k_cache: (batch, capacity, heads_k, head_dim), or with a page table (pages, page_size, heads_k, head_dim).
        v_cache: likewise, with head_dim_v.
        cache_seqlens: tokens in the cache, (batch,) int32 or int64 or one int for all; None where every sequence fills its capacity.
            What lies beyond is never read.
        page_table: (batch, max_pages) int32 or int64: page p of sequence b holds its tokens p * page_size onwards. Entries that
            cache_seqlens does not reach may hold anything.
        causal: query i sees the cache up to its own position (bottom right).
        mask: as in `attention`, aligned to each sequence's own length; a Dense mask stands alone and spans the capacity,
            (batch or 1, heads or 1, seqlen_q or 1, capacity).

    The other arguments are those of `attention`.

    Returns:
        O (batch, seqlen_q, heads_q, head_dim_v), and with `return_lse` LSE (batch, heads_q, seqlen_q).

    Raises:
        ShapeError, ValueError, UnsupportedError: as `attention`; lengths outside the cache, pages that do not exist, tensors that require grad.
    """
    check_tensor("q", q, ("batch", "seqlen_q", "heads_q", "head_dim"))
    lead = ("batch", "capacity") if page_table is None else ("pages", "page_size")
    for name, x, dim in (("k_cache", k_cache, "head_dim"), ("v_cache", v_cache, "head_dim_v")):
        check_tensor(name, x, (*lead, "heads_k", dim))
        check_like(name, x, q)
        check_no_grad(name, x, "decode is for inference and has no gradient")
    for name, x in (("q", q), ("sink", sink)):
        if isinstance(x, Tensor):
            check_no_grad(name, x, "decode is for inference and has no gradient")
    check_flag("return_lse", return_lse)
    check_size("k_cache", "head_dim", k_cache.shape[3], q.shape[3], "q")
    for axis, got, expected in zip((*lead, "heads_k"), v_cache.shape, k_cache.shape[:3], strict=False):
        check_size("v_cache", axis, got, expected, "k_cache")
    check_heads(q.shape[2], k_cache.shape[2])
    check_head_dim(q.shape[3], v_cache.shape[3])
    batch = q.shape[0]
    capacity = _capacity(k_cache, page_table, batch)
    lengths = _lengths(cache_seqlens, batch, capacity)
    pages = None if page_table is None else _pages(page_table, lengths, k_cache.shape[0], k_cache.shape[1])
    given = operands(
        q,
        k_cache,
        v_cache,
        combine(causal, mask),
        dropout=(0.0, None, 0),
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        deterministic=False,
        backend=backend,
    )
    call = call_of(given)
    in_place = getattr(choose(call.problem, backend), "decode", None)
    if in_place is not None and batch and call.mask.kind != "bitmap" and call.mask.extent == (1, 1):
        options = {"mask": call.mask, "scale": call.scale, "softcap": call.softcap, "alibi_slopes": call.alibi_slopes, "sink": sink}
        o, lse = in_place(call.q, call.k, call.v, lengths, page_table, **options)
    else:
        o, lse = _one_by_one(given, lengths, pages, causal, _masks(mask, lengths, capacity))
    return (o, lse) if return_lse else o


def _one_by_one(given: Operands, lengths: list[int], pages: list[Tensor] | None, causal: bool, masks: list) -> tuple[Tensor, Tensor]:
    """The plain path: a call of `attention` for each sequence."""
    q, k_cache, v_cache = given.q, given.k, given.v

    def sequence(cache: Tensor, b: int) -> Tensor:
        rows = cache[b] if pages is None else cache[pages[b].to(cache.device)].flatten(0, 1)
        return rows[None, : lengths[b]]

    options = {
        "causal": causal,
        "scale": given.scale,
        "softcap": given.softcap,
        "sink": given.sink,
        "backend": given.backend,
        "return_lse": True,
    }
    if not lengths:
        return attention(q, k_cache[:0, :0], v_cache[:0, :0], **options)
    slopes, parts = given.alibi_slopes, []
    for b in range(len(lengths)):
        options |= {"mask": masks[b], "alibi_slopes": None if slopes is None else slopes[min(b, slopes.shape[0] - 1)]}
        parts.append(attention(q[b : b + 1], sequence(k_cache, b), sequence(v_cache, b), **options))
    o, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return o, lse


def _masks(mask: Mask | None, lengths: list[int], capacity: int) -> list[Mask | None]:
    """The mask of each sequence. A Dense one spans the cache's capacity and may differ by sequence; it is cut to what is there."""
    if not isinstance(mask, Mask) or mask.kind != "bitmap":
        return [mask] * len(lengths)
    if not isinstance(mask, Dense):
        raise UnsupportedError(
            "decode takes a Dense mask alone, or a mask without one; write the whole mask as one Dense (causal= still applies)"
        )
    shown = mask.tensor if mask.tensor.dim() == 4 else mask.tensor[None, None]
    if shown.shape[0] not in (1, len(lengths)) or shown.shape[3] != capacity:
        raise ShapeError(
            f"mask has batch {shown.shape[0]} and {shown.shape[3]} keys, but q has batch {len(lengths)} and the cache holds {capacity} tokens "
            "a sequence; a Dense mask needs batch 1 or q's, and the whole capacity"
        )
    return [Dense(row[None, ..., :length]) for row, length in zip(shown.expand(len(lengths), -1, -1, -1), lengths, strict=True)]


def _capacity(k_cache: Tensor, page_table: Tensor | None, batch: int) -> int:
    """Tokens that one sequence's cache can hold."""
    if page_table is None:
        check_size("k_cache", "batch", k_cache.shape[0], batch, "q")
        return k_cache.shape[1]
    check_tensor("page_table", page_table, ("batch", "max_pages"), INDEX_DTYPES)
    check_size("page_table", "batch", page_table.shape[0], batch, "q")
    return page_table.shape[1] * k_cache.shape[1]


def _lengths(cache_seqlens: Tensor | int | None, batch: int, capacity: int) -> list[int]:
    if cache_seqlens is None:
        return [capacity] * batch
    if isinstance(cache_seqlens, Tensor):
        check_tensor("cache_seqlens", cache_seqlens, ("batch",), INDEX_DTYPES)
        check_size("cache_seqlens", "batch", cache_seqlens.shape[0], batch, "q")
        lengths = cache_seqlens.tolist()
    elif isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        lengths = [cache_seqlens] * batch
    else:
        raise ShapeError(f"cache_seqlens must be an integer tensor (batch,), an int or None, got {type(cache_seqlens).__name__}")
    for b, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ShapeError(f"cache_seqlens[{b}] is {length}, but the cache holds between 0 and {capacity} tokens a sequence")
    return lengths


def _pages(page_table: Tensor, lengths: list[int], n_pages: int, page_size: int) -> list[Tensor]:
    """The pages that each sequence really uses."""
    used = []
    for b, (row, length) in enumerate(zip(page_table.cpu().long(), lengths, strict=True)):
        row = row[: -(-length // page_size) if page_size else 0]
        if ((row < 0) | (row >= n_pages)).any():
            raise ShapeError(f"page_table[{b}] names pages {row.tolist()}, but k_cache has pages 0..{n_pages - 1}")
        used.append(row)
    return used
