"""Padded batches as packed documents: the entries of a batch end to end. The GPU knows which of their keys are there.

Each entry is three documents: the keys before its first, without queries; its queries and the keys that they may see; the keys behind. The kernels
for documents take where these begin and end from tensors on the GPU, so nothing is made on the CPU for lengths that are others in every call.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from tilewise.backends.tables import documents
from tilewise.masks import Causal, DeviceDocuments, Documents, Full, Mask, Padding, SlidingWindow
from tilewise.masks.mask import Combined
from tilewise.problem import Call, Gradients

FEWEST = 128  # queries of an entry: a tile of queries reads the keys of all its entries, one after another
FARTHEST = 1 << 29  # an offset of a mask


def fold(call: Call) -> Call | None:
    """The call as packed documents, batch 1; None where it is not one of padded entries, or they are better told apart by tables."""
    apart = call.bias is not None or call.dropout is not None or call.diagonal is not None
    if apart or call.seqlen_q < FEWEST or call.seqlen_k == 0 or (call.alibi_slopes is not None and call.alibi_slopes.shape[0] != 1):
        return None
    mask = _documents(call)
    if mask is None:
        return None
    diagonal = None
    if call.alibi_slopes is not None:
        step = call.seqlen_k - call.seqlen_q
        diagonal = (_counted(call.batch, call.q.device, torch.int64)[1:] * step).repeat_interleave(call.seqlen_q)
    q, k, v = (x.flatten(0, 1)[None] for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, mask=mask, diagonal=diagonal, out=None)


def check(mask: Mask, seqlen_k: int) -> None:
    """Raise ShapeError for keys of an entry that are not there; their tensors are read once, and under CUDA graph capture not at all."""
    found = _padding(mask)
    if found is not None and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        found[0].bounds(seqlen_k)


def unfold(call: Call, x: Tensor) -> Tensor:
    """(1, batch * seqlen, heads, dim) as `call` has it: a view."""
    return x[0].unflatten(0, (call.batch, -1))


def unfold_rows(call: Call, x: Tensor) -> Tensor:
    """What rows have one of each, (1, heads, batch * seqlen_q), as (batch, heads, seqlen_q): a view."""
    return x[0].unflatten(1, (call.batch, -1)).transpose(0, 1)


def fold_rows(x: Tensor | None) -> Tensor | None:
    """The way back of `unfold_rows`."""
    return None if x is None else x.transpose(0, 1).flatten(1, 2)[None]


def unfold_gradients(call: Call, found: Gradients) -> Gradients:
    return found._replace(q=unfold(call, found.q), k=unfold(call, found.k), v=unfold(call, found.v))


def _padding(mask: Mask) -> tuple[Padding, list[Mask]] | None:
    """The padding of a mask, and the masks with which it is intersected; None where it is something else."""
    if isinstance(mask, Padding):
        return mask, []
    if isinstance(mask, Combined) and mask.operation == "&":
        sides = _padding(mask.left), _padding(mask.right)
        for found, other in zip(sides, (mask.right, mask.left), strict=True):
            if found is not None:
                return None if sides[0] is not None and sides[1] is not None else (found[0], [*found[1], other])
    return None


def _documents(call: Call) -> Documents | DeviceDocuments | None:
    if call.mask.source is not None:
        return _listed(call.mask, call.batch, call.seqlen_q, call.seqlen_k)
    found = _padding(call.mask)
    inner = None if found is None else _inner(*found, call.seqlen_k - call.seqlen_q)
    if found is None or inner is None:
        return None
    return DeviceDocuments(*_ends(found[0], call.batch, call.seqlen_q, call.seqlen_k, call.q.device), inner)


@lru_cache(maxsize=256)
def _listed(mask: Mask, batch: int, seqlen_q: int, seqlen_k: int) -> Documents | None:
    """Of lengths that the CPU has: found once, as are the tables that the GPU makes of it."""
    found = _padding(mask)
    inner = None if found is None else _inner(*found, seqlen_k - seqlen_q)
    if found is None or inner is None:
        return None
    return Documents(*_ends(found[0], batch, seqlen_q, seqlen_k, torch.device("cpu")), inner)


def _ends(padding: Padding, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cu_seqlens of the documents, (3 batch + 1,) int32 each."""
    new = {"device": device, "dtype": torch.int32}
    start, lengths = (x if x is None else torch.as_tensor(x, **new) for x in (padding.start, padding.lengths))
    counted = _counted(batch, **new)
    queries, keys = counted * seqlen_q, counted * seqlen_k
    first = keys[:-1] if start is None else keys[:-1] + start
    last = keys[1:] if lengths is None else first + lengths
    of_queries = torch.stack((queries[:-1], queries[:-1], queries[1:]), dim=1).flatten()
    of_keys = torch.stack((keys[:-1], first, last), dim=1).flatten()
    return torch.cat((of_queries, queries[-1:])), torch.cat((of_keys, keys[-1:]))


def _inner(padding: Padding, others: list[Mask], corner: int) -> Mask | None:
    """What the padding and all others allow, as a mask of each entry's own keys; None where that is no single band."""
    inner = padding.inner
    for other in others:
        placed = _placed(other, padding, corner)
        if placed is None:
            return None
        inner = inner & placed
    return None if documents.offsets(inner) is None else inner


def _placed(mask: Mask, padding: Padding, corner: int) -> Mask | None:
    """A band of the whole batch, with the bottom right diagonal key - query = corner, as one of each entry's own keys: these begin at 0 or end at
    seqlen_k, or nothing on the CPU says where. None where it cannot be said.
    """
    if isinstance(mask, Full):
        return mask
    if isinstance(mask, Combined) and mask.operation == "&":
        left, right = _placed(mask.left, padding, corner), _placed(mask.right, padding, corner)
        return None if left is None or right is None else left & right
    if not isinstance(mask, Causal | SlidingWindow) or (padding.start is not None and padding.lengths is not None):
        return None
    diagonal = mask.offset + (corner if mask.align == "bottom_right" else 0)
    align, offset = ("top_left", diagonal) if padding.start is None else ("bottom_right", diagonal - corner)
    return None if abs(offset) > FARTHEST else replace(mask, align=align, offset=offset)


def _counted(number: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.arange(number + 1, device=device, dtype=dtype)
