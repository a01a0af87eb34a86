"""Decoding from a cache of which each rank holds a share of every sequence: partial results, merged by their LSE after one collective."""

from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.decoding import decode as decode_here
from tilewise.distributed.exchange import Group, told
from tilewise.distributed.planning import place_of
from tilewise.errors import check_flag
from tilewise.keywords import ShardedDecodeOptions
from tilewise.masks import Mask
from tilewise.masks.arguments import check_count
from tilewise.merge import weights
from tilewise.problem import Share
from tilewise.runtime import dispatch

MULTIPLE = 16  # of elements, that a rank's part is, so that every other's begins where loads are wide


def held(tokens: Tensor, rank: int, world: int, interleave: int) -> Tensor:
    """How many of the first `tokens` tokens of a sequence rank holds: token p is on rank p // interleave % world. On the device, nothing is read."""
    return Share(rank, world, interleave).held(tokens)


@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mesh: Any,
    *,
    cache_seqlens: Tensor | int,
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
    cache_seqlens: Tensor | int,
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
    cache_seqlens: Tensor | int,
    return_lse: bool = False,
    **options: Unpack[ShardedDecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mesh: Any,
    *,
    cache_seqlens: Tensor | int,
    interleave: int = 1,
    page_table: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    tree: Tensor | None = None,
    split: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    interleaved: bool = False,
    causal: bool = True,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewise.decode` where each rank's caches hold a share of every sequence's tokens: token p is on rank `p // interleave % world`, there one
    behind another.

    Args:
        q: as in `tilewise.decode`, the same on all ranks.
        k_cache, v_cache, page_table, cache_batch_idx, k_scale, v_scale: as in `tilewise.decode`, of this rank's tokens (`held` says how many it has).
        mesh: a DeviceMesh of one dimension or a process group; or (rank, world), for this rank's partial result, which `tilewise.merge` puts
            together.
        cache_seqlens: (batch,) int32 or int64, or one int for all: tokens of the whole sequences. Nothing is read on the host.
        interleave: tokens in a row on one rank; the capacity of a rank's cache for shares that are not interleaved.
        k, v: new tokens, the same on all ranks, of which each rank writes those that it holds.
        sink: (heads_q,) or (tokens, heads_q), counted once.

    The other arguments are those of `tilewise.decode`, the same on all ranks; they speak of positions in whole sequences.

    Returns:
        O as q with head_dim_v, the same bits on all ranks, and with `return_lse` LSE (batch, heads_q, seqlen_q), packed (heads_q, total_q). Partial
        results are fp32, and rounded once they are merged; with (rank, world) they are of q's dtype.

    Raises:
        ShapeError, ValueError, UnsupportedError: as `tilewise.decode`.
        RuntimeError: another rank has ended.
    """
    check_flag("return_lse", return_lse)
    place, mine, out = place_of(mesh), None, None
    if place.world > 1 and place.group is not None and isinstance(q, Tensor) and isinstance(v_cache, Tensor) and v_cache.dim():
        mine, out = _part(q, v_cache.shape[-1])
    o, lse = decode_here(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cache_batch_idx=cache_batch_idx,
        leftpad=leftpad,
        tree=tree,
        split=split,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        interleaved=interleaved,
        causal=causal,
        mask=mask,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        backend=backend,
        cp_rank=place.rank,
        cp_world=place.world,
        cp_interleave=check_count("interleave", interleave, 1),
        return_lse=True,
    )
    if mine is not None:
        o, lse = _merged(mine, lse, o.shape, q.dtype, place.world, place.group)
    return (o, lse) if return_lse else o


def _part(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Memory for a rank's O in at least fp32, and behind it LSE, which cross together; and of it O's."""
    rows = q.shape[:-1].numel()
    mine = q.new_empty(-(-rows * (dim + 1) // MULTIPLE) * MULTIPLE, dtype=torch.promote_types(q.dtype, torch.float32))
    return mine, mine[: rows * dim].view(*q.shape[:-1], dim)


def _merged(mine: Tensor, lse: Tensor, shape: torch.Size, dtype: torch.dtype, world: int, group: Group) -> tuple[Tensor, Tensor]:
    """What the parts of all ranks give, as by `merge` in a few launches, for which a step of decoding waits."""
    numbers, rows = shape.numel(), lse.transpose(-1, -2)
    of_lse = slice(numbers, numbers + lse.numel())
    mine[of_lse].view(rows.shape).copy_(rows)
    every = mine.new_empty((world, len(mine)))
    with told("a merge of partial results"):
        dist.all_gather_into_tensor(every.view(-1), mine, group=group)
    outputs, lses = every[:, :numbers].view(world, *shape), every[:, of_lse].view(world, *rows.shape)
    for backend in dispatch.backends():
        if not backend.by_name and (found := backend.merge(outputs, lses, dtype)) is not None:
            return found
    weight, whole = weights(lses[..., None])
    merged = (outputs.masked_fill(weight == 0, 0.0) * weight).sum(0)
    return merged.to(dtype), whole[..., 0].transpose(-1, -2).to(lse.dtype)
