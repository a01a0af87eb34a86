"""The general path of decode, for what a backend's own kernel does not cover: a call of attention for each sequence, on its keys alone.

It serves every mask and every backend, reads lengths on the host and gathers pages, so it is slow, and on a GPU it waits for it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.errors import check_capture
from tilewise.masks import Dense, Mask
from tilewise.masks.mask import Combined
from tilewise.problem import Call, DecodeCall

CAPTURE = (
    "a Hopper GPU's kernel reads none: it takes bf16 and fp16, rows of multiples of 16 bytes, and masks of one band at the end of the keys"
)


def one_by_one(forward: Callable[[Call], tuple[Tensor, ...]], call: DecodeCall) -> tuple[Tensor, Tensor]:
    """O and LSE as `Backend.decode` gives them, by the `forward` of a backend. Lengths and bounds that do not fit are clamped."""
    check_capture(call.q, "decode, sequence by sequence,", CAPTURE)
    capacity = capacity_of(call)
    lengths = call.seqlens.clamp(0, capacity if call.share is None else None).tolist()
    ends = call.cu_seqlens_q
    packed = ends is not None
    rows = call.q.flatten(0, 1) if not packed else call.q
    bounds = ends.clamp(0, rows.shape[0]).tolist() if packed else range(0, rows.shape[0] + 1, call.q.shape[1] or 1)
    if not packed and call.q.shape[1] == 0:
        bounds = [0] * (len(lengths) + 1)
    statistics = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    o = rows.new_zeros((*rows.shape[:2], call.v_cache.shape[3]))
    lse = torch.full((rows.shape[1], rows.shape[0]), -torch.inf, dtype=statistics, device=rows.device)
    for b, length in enumerate(lengths):
        start, end = bounds[b], max(bounds[b], bounds[b + 1])
        o[start:end], lse[:, start:end] = (x[0] for x in forward(sequence(call, b, rows[None, start:end], length))[:2])
    if packed:
        return o, lse
    return o.view(*call.q.shape[:3], o.shape[2]), lse.view(rows.shape[1], *call.q.shape[:2]).transpose(0, 1)


def sequence(call: DecodeCall, b: int, q: Tensor, length: int) -> Call:
    """Sequence b as a call of its own: q (1, queries, heads_q, head_dim). Of a share it has the keys that are there, each seen by the queries that
    see its position, and what ALiBi adds as a bias, for distances are between positions.
    """
    slopes, bias, positions, held = call.alibi_slopes, None, None, length
    slopes = slopes if slopes is None or slopes.shape[0] == 1 else slopes[b : b + 1]
    if call.share is not None:
        held = min(call.share.held(length), capacity_of(call))
        positions = call.share.positions(torch.arange(held, dtype=torch.int64, device=q.device))
        if slopes is not None:
            place = torch.arange(length - q.shape[1], length, dtype=torch.int64, device=q.device)
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            bias = -slopes.to(wide)[..., None, None] * (place[:, None] - positions).abs().to(wide)
            slopes = None
    return Call(
        q=q,
        k=_keys(call, call.k_cache, call.k_scale, b, held),
        v=_keys(call, call.v_cache, call.v_scale, b, held),
        mask=_mask(call, b, q.shape[1], length, positions),
        scale=call.scale,
        softcap=call.softcap,
        bias=bias,
        alibi_slopes=slopes,
        sink=call.sink,
    )


def capacity_of(call: DecodeCall) -> int:
    """Keys that the caches hold of a sequence, at most."""
    return call.k_cache.shape[1] * (1 if call.page_table is None else call.page_table.shape[1])


def _keys(call: DecodeCall, cache: Tensor, scale: Tensor | None, b: int, length: int) -> Tensor:
    """(1, length, heads_k, dim) in q's dtype: the tokens of sequence b."""
    found = _tokens(call, cache, b, length)
    if cache.dtype == call.q.dtype:
        return found
    wide = found.to(torch.float64 if call.q.dtype == torch.float64 else torch.float32)
    if scale is not None:
        by_token, by_sequence = scale.dim() == 3, scale.dim() == 2
        wide = wide * (_tokens(call, scale, b, length) if by_token else scale[b] if by_sequence else scale)[..., None]
    return wide.to(call.q.dtype)


def _tokens(call: DecodeCall, cache: Tensor, b: int, length: int) -> Tensor:
    """(1, length, ...) of a cache or its scales; pages and entries that do not exist are read as others."""
    if call.page_table is not None:
        numbers = call.page_table[b, : -(-length // max(cache.shape[1], 1))].long().clamp(0, max(cache.shape[0] - 1, 0))
        return cache[numbers].flatten(0, 1)[None, :length]
    entry = b if call.cache_batch_idx is None else min(max(int(call.cache_batch_idx[b]), 0), cache.shape[0] - 1)
    return cache[entry : entry + 1, :length]


def _mask(call: DecodeCall, b: int, queries: int, length: int, positions: Tensor | None) -> Mask:
    """The mask of one sequence, by the positions of the keys that are there; padding, a tree and a share make it dense."""
    mask = of_sequence(call.mask, b, length)
    if call.leftpad is None and call.tree is None and positions is None:
        return mask
    heads = 1 if mask.extent[1] == 1 else call.q.shape[-2]
    shown = torch.zeros((1, heads, queries, length), dtype=torch.bool, device="cpu")
    for plane in mask.planes(queries, length, 1, heads):
        shown[:, plane.heads.start : plane.heads.stop] = torch.from_numpy(plane.region.dense())
    if call.leftpad is not None:
        shown[..., : max(int(call.leftpad[b]), 0)] = False
    if call.tree is not None:
        tree = call.tree[min(b, call.tree.shape[0] - 1)].cpu()
        new = tree.shape[0]
        rows, keys = min(new, queries), min(new, length)  # of the newest tokens, those that are there
        shown[..., queries - rows :, length - keys :] &= tree[new - rows :, new - keys :]
    if positions is not None:
        shown = shown[..., positions.cpu()]
    return Dense(shown.to(call.q.device))


def of_sequence(mask: Mask, b: int, length: int) -> Mask:
    """The mask of one sequence; a dense one, alone or with Causal, spans the capacity and may differ by sequence; it is cut to what is there."""
    match mask:
        case Dense(tensor=shown):
            shown = shown if shown.dim() == 4 else shown[None, None]
            at = min(b, shown.shape[0] - 1)
            return Dense(shown[at : at + 1, ..., :length])
        case Combined(operation="&", left=Dense() as dense, right=right):
            return of_sequence(dense, b, length) & right
    return mask
