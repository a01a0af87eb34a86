"""Attention of a few new tokens against a key/value cache, plain or paged: the contract and its checks; runtime/decode_operator.py does the work."""

import torch
from torch import Tensor

from tilewise.api import INDEX_DTYPES, autocast, combine, operands
from tilewise.errors import (
    ShapeError,
    UnsupportedError,
    check_flag,
    check_head_dim,
    check_heads,
    check_like,
    check_no_grad,
    check_no_tangent,
    check_size,
    check_tensor,
)
from tilewise.masks import Dense, Mask
from tilewise.runtime import decode_operator
from tilewise.runtime.decode_operator import NO_GRADIENT


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

    The other arguments are those of `attention`. What traces, exports or maps the call sees one operator, `tilewise::decode`, which reads lengths and
    pages when it runs; torch.vmap runs it entry by entry.

    Returns:
        O (batch, seqlen_q, heads_q, head_dim_v), and with `return_lse` LSE (batch, heads_q, seqlen_q).

    Raises:
        ShapeError, ValueError, UnsupportedError: as `attention`; lengths outside the cache, pages that do not exist, tensors that require grad.
    """
    q, k_cache, v_cache, _ = autocast(q, k_cache, v_cache)
    _check(q, k_cache, v_cache, alibi_slopes, sink, paged=page_table is not None)
    check_flag("return_lse", return_lse)
    capacity = _capacity(k_cache, page_table, q.shape[0])
    combined = combine(causal, mask)
    if combined.kind == "bitmap":
        _check_dense(mask, q.shape[0], capacity)
    given = operands(
        q,
        k_cache,
        v_cache,
        combined,
        dropout=(0.0, None, 0),
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        deterministic=False,
        backend=backend,
    )
    seqlens, length = _lengths(cache_seqlens, q.shape[0])
    o, lse = decode_operator.run(
        decode_operator.Operands(
            given.q,
            given.k,
            given.v,
            seqlens,
            page_table,
            given.alibi_slopes,
            sink,
            given.mask_tensors,
            given.mask,
            length,
            given.scale,
            given.softcap,
            backend,
        )
    )
    return (o, lse) if return_lse else o


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, alibi_slopes: Tensor | None, sink: Tensor | None, paged: bool) -> None:
    """The tensors that attention reads: their shapes and dtypes, and that nobody asks for a gradient."""
    check_tensor("q", q, ("batch", "seqlen_q", "heads_q", "head_dim"))
    lead = ("pages", "page_size") if paged else ("batch", "capacity")
    for name, x, dim in (("k_cache", k_cache, "head_dim"), ("v_cache", v_cache, "head_dim_v")):
        check_tensor(name, x, (*lead, "heads_k", dim))
        check_like(name, x, q)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("alibi_slopes", alibi_slopes), ("sink", sink)):
        if isinstance(x, Tensor):
            check_no_grad(name, x, NO_GRADIENT)
            check_no_tangent(name, x, NO_GRADIENT)
    check_size("k_cache", "head_dim", k_cache.shape[3], q.shape[3], "q")
    for axis, got, expected in zip((*lead, "heads_k"), v_cache.shape, k_cache.shape[:3], strict=False):
        check_size("v_cache", axis, got, expected, "k_cache")
    check_heads(q.shape[2], k_cache.shape[2])
    check_head_dim(q.shape[3], v_cache.shape[3])


def _check_dense(mask: Mask, batch: int, capacity: int) -> None:
    """A mask that holds a dense tensor: nothing else, and over the whole capacity."""
    if not isinstance(mask, Dense):
        raise UnsupportedError(
            "decode takes a Dense mask alone, or a mask without one; write the whole mask as one Dense (causal= still applies)"
        )
    entries, keys = mask.tensor.shape[0] if mask.tensor.dim() == 4 else 1, mask.tensor.shape[-1]
    if (entries != 1 and entries != batch) or keys != capacity:
        raise ShapeError(
            f"mask has batch {entries} and {keys} keys, but q has batch {batch} and the cache holds {capacity} tokens "
            "a sequence; a Dense mask needs batch 1 or q's, and the whole capacity"
        )


def _capacity(k_cache: Tensor, page_table: Tensor | None, batch: int) -> int:
    """Tokens that one sequence's cache can hold."""
    if page_table is None:
        check_size("k_cache", "batch", k_cache.shape[0], batch, "q")
        return k_cache.shape[1]
    check_tensor("page_table", page_table, ("batch", "max_pages"), INDEX_DTYPES)
    check_size("page_table", "batch", page_table.shape[0], batch, "q")
    return page_table.shape[1] * k_cache.shape[1]


def _lengths(cache_seqlens: Tensor | int | None, batch: int) -> tuple[Tensor | None, int | None]:
    """cache_seqlens as the operator takes it: as a tensor, or as one number for all."""
    if isinstance(cache_seqlens, Tensor):
        check_tensor("cache_seqlens", cache_seqlens, ("batch",), INDEX_DTYPES)
        check_size("cache_seqlens", "batch", cache_seqlens.shape[0], batch, "q")
        return cache_seqlens, None
    if cache_seqlens is not None and (isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int | torch.SymInt)):
        raise ShapeError(f"cache_seqlens must be an integer tensor (batch,), an int or None, got {type(cache_seqlens).__name__}")
    return None, cache_seqlens
