"""Decoding from a cache of which each rank holds a share of every sequence: partial results, merged by their LSE after one collective."""

from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.api import combine
from tilewise.backends.tables.window import FAR, window_of
from tilewise.decoding import decode as decode_here
from tilewise.distributed.exchange import told
from tilewise.distributed.planning import place_of
from tilewise.errors import ShapeError, UnsupportedError, check_flag, check_tensor
from tilewise.keywords import ShardedDecodeOptions
from tilewise.masks import Mask
from tilewise.masks.arguments import check_count
from tilewise.merge import merge


def held(tokens: Tensor, rank: int, world: int, interleave: int) -> Tensor:
    """How many of the first `tokens` tokens of a sequence rank holds: token p is on rank p // interleave % world. On the device, nothing is read."""
    turn = interleave * world
    return tokens // turn * interleave + (tokens % turn - rank * interleave).clamp(0, interleave)


@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mesh: Any,
    *,
    cache_seqlens: Tensor,
    return_lse: Literal[False] = False,
    **options: Unpack[ShardedDecodeOptions],
) -> Tensor: ...
@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mesh: Any,
    *,
    cache_seqlens: Tensor,
    return_lse: Literal[True],
    **options: Unpack[ShardedDecodeOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mesh: Any,
    *,
    cache_seqlens: Tensor,
    return_lse: bool = False,
    **options: Unpack[ShardedDecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mesh: Any,
    *,
    cache_seqlens: Tensor,
    interleave: int = 1,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    causal: bool = True,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewise.decode` where each rank's caches hold a share of every sequence's tokens: token p is on rank `p // interleave % world`, there one
    behind another.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), the same on all ranks: the last seqlen_q positions of each sequence. Several new tokens are as many
            reads of the cache.
        k_cache, v_cache, page_table, cache_batch_idx, k_scale, v_scale: as in `tilewise.decode`, of this rank's tokens. New tokens have been
            written, each where it is held (`held` says how many a rank has).
        mesh: a DeviceMesh of one dimension or a process group; or (rank, world), for this rank's partial result, which `tilewise.merge` puts
            together.
        cache_seqlens: (batch,) int32 or int64, tokens of the whole sequences, new ones included. Nothing is read on the host.
        interleave: tokens in a row on one rank; the capacity of a rank's cache for shares that are not interleaved.
        mask: a mask of one band on the bottom right diagonal (`SlidingWindow`), by positions in the whole sequence; the same for all heads.
        sink: (heads_q,), counted once.

    Returns:
        O as q with head_dim_v, the same bits on all ranks, and with `return_lse` LSE (batch, heads_q, seqlen_q). Partial results are rounded to q's
        dtype before they are merged in fp32.

    Raises:
        ShapeError, ValueError, UnsupportedError: as `tilewise.decode`; another mask.
        RuntimeError: another rank has ended.
    """
    check_tensor("q", q, ("batch", "seqlen_q", "heads_q", "head_dim"))
    check_flag("return_lse", return_lse)
    place, step = place_of(mesh), check_count("interleave", interleave, 1)
    batch, new = q.shape[:2]
    if not isinstance(cache_seqlens, Tensor) or cache_seqlens.shape != (batch,):
        raise ShapeError(
            f"cache_seqlens must be a tensor (batch,) of the whole sequences' tokens, batch {batch}, got {cache_seqlens!r:.100}"
        )
    found = combine(causal, mask)
    window = window_of(found)
    if window is None:
        raise UnsupportedError(
            f"mask must be of one band on the bottom right diagonal, the same for all heads, got {found!r:.100}; use SlidingWindow"
        )
    position = cache_seqlens[:, None] - new + torch.arange(new, dtype=cache_seqlens.dtype, device=q.device)  # (batch, new)
    last = torch.minimum(position + window.hi + 1, cache_seqlens[:, None]).clamp(min=0).flatten()
    first = (position + window.lo).clamp(min=0).flatten()
    ends, starts = (held(x, place.rank, place.world, step) for x in (last, first))
    if new > 1:  # a sequence for each query, which sees as many of this rank's tokens as come before it
        if page_table is not None:
            page_table = page_table.repeat_interleave(new, 0)
        else:
            entries = torch.arange(batch, dtype=torch.int32, device=q.device) if cache_batch_idx is None else cache_batch_idx
            cache_batch_idx = entries.repeat_interleave(new)
        k_scale, v_scale = (x.repeat_interleave(new, 0) if x is not None and x.dim() == 2 else x for x in (k_scale, v_scale))
    o, lse = decode_here(
        q.reshape(batch * new, 1, *q.shape[2:]),
        k_cache,
        v_cache,
        cache_seqlens=ends,
        leftpad=None if window.lo <= -FAR else torch.minimum(starts, ends),
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        causal=False,
        scale=scale,
        softcap=softcap,
        sink=sink if place.rank == 0 else None,
        k_scale=k_scale,
        v_scale=v_scale,
        backend=backend,
        return_lse=True,
    )
    o, lse = o.reshape(batch, new, *o.shape[2:]), lse.reshape(batch, new, -1).transpose(1, 2)
    if place.world > 1 and place.group is not None:
        wide = lse.dtype
        mine = torch.cat((o.to(wide), lse.transpose(1, 2)[..., None]), dim=3).contiguous()
        every = mine.new_empty((place.world, *mine.shape))
        with told("a merge of partial results"):
            dist.all_gather_into_tensor(every.view(-1, *mine.shape[1:]), mine, group=place.group)
        merged, lse = merge(list(every[..., :-1]), list(every[..., -1].transpose(2, 3)))
        o = merged.to(q.dtype)
    return (o, lse) if return_lse else o
