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
        sink: (heads_q,), counted once.

    The other arguments are those of `tilewise.decode`, the same on all ranks; they speak of positions in whole sequences.

    Returns:
        O as q with head_dim_v, the same bits on all ranks, and with `return_lse` LSE (batch, heads_q, seqlen_q), packed (heads_q, total_q). Partial
        results are fp32, and rounded once they are merged; with (rank, world) they are of q's dtype.

    Raises:
        ShapeError, ValueError, UnsupportedError: as `tilewise.decode`.
        RuntimeError: another rank has ended.
    """
    check_flag("return_lse", return_lse)
    place, out = place_of(mesh), None
    merges = place.world > 1 and place.group is not None
    if merges and isinstance(q, Tensor) and q.dtype.itemsize == 2 and isinstance(v_cache, Tensor):
        out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]), dtype=torch.float32)
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
    if merges:
        o, lse = _merged(o, lse, place.world, place.group)
        o = o.to(q.dtype)
    return (o, lse) if return_lse else o


def _merged(o: Tensor, lse: Tensor, world: int, group: Group) -> tuple[Tensor, Tensor]:
    """What the parts of all ranks give, as by `merge` in fewer launches, for which a step of decoding waits. O and LSE cross together, the LSE's
    bits as so many more columns of O's dtype.
    """
    columns = lse.transpose(-1, -2)[..., None]
    columns = columns if lse.dtype == o.dtype else columns.contiguous().view(o.dtype)
    mine = torch.cat((o, columns), dim=-1)
    every = mine.new_empty((world, *mine.shape))
    with told("a merge of partial results"):
        dist.all_gather_into_tensor(every.view(-1, *mine.shape[1:]), mine, group=group)
    of_o, of_lse = every.split([o.shape[-1], columns.shape[-1]], dim=-1)
    of_lse = of_lse if lse.dtype == o.dtype else of_lse.contiguous().view(lse.dtype)
    weight, whole = weights(of_lse)  # (world, ..., 1)
    merged = (of_o.masked_fill(weight == 0, 0.0) * weight).sum(0)
    return merged.to(o.dtype), whole[..., 0].transpose(-1, -2)
