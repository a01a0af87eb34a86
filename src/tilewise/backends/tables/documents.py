"""Packed documents: each row sees an interval of keys, which the GPU works out from cu_seqlens, so that no call waits for the device.

Tiles of queries straddle documents, so documents shorter than a tile share one. For inner masks that are one band: a row of a document
sees `[max(k0, row + lo), min(k1, row + hi + 1))`, with the diagonals through the document's bottom right and top left corners.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.tables.keeping import kept
from tilewise.backends.tables.runs import FAR
from tilewise.masks import Causal, DeviceDocuments, Documents, SlidingWindow
from tilewise.masks.constructors import longest_of
from tilewise.masks.mask import Combined, Full, Mask


class Offsets(NamedTuple):
    """A key is seen at key - query - diagonal in [lo, hi], for the diagonals through the bottom right and the top left corner."""

    lo: int = -FAR
    hi: int = FAR
    lo_left: int = -FAR
    hi_left: int = FAR


def offsets(mask: Mask | None) -> Offsets | None:
    """Of a document's inner mask; None where it is no single band."""
    match mask:
        case Full():
            return Offsets()
        case Causal(align=align, offset=offset):
            return _aligned(align, -FAR, offset)
        case SlidingWindow(left=left, right=right, align=align, offset=offset):
            return _aligned(align, -FAR if left is None else max(offset - left, -FAR), FAR if right is None else min(offset + right, FAR))
        case Combined(operation="&", left=left, right=right):
            one, two = offsets(left), offsets(right)
            if one is not None and two is not None:
                return Offsets(max(one[0], two[0]), min(one[1], two[1]), max(one[2], two[2]), min(one[3], two[3]))
    return None


def _aligned(align: str, lo: int, hi: int) -> Offsets:
    return Offsets(lo, hi) if align == "bottom_right" else Offsets(lo_left=lo, hi_left=hi)


def longest_walk(mask: Documents | DeviceDocuments) -> int:
    """Keys that a query sees at most, about: those of the longest document, or of its window; 0 where only the device knows."""
    inner = offsets(mask.inner)
    assert inner is not None  # or the mask is not `by_rows`
    if isinstance(mask, DeviceDocuments):
        return min(mask.longest(), inner.hi - inner.lo + 1)
    return min(longest_of(mask.cu_seqlens_q), inner.hi - inner.lo + 1)


def by_rows(mask: Mask) -> bool:
    """Whether `rows_of` can make tables for the mask."""
    return isinstance(mask, Documents | DeviceDocuments) and offsets(mask.inner) is not None


def check(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    """Raise ShapeError for bad cu_seqlens that are on the device. They are read once; under CUDA graph capture they cannot be."""
    if isinstance(mask, DeviceDocuments) and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        mask.check(seqlen_q, seqlen_k)


def on_device(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """As kernels read them."""
    here = cu_seqlens.dtype == torch.int32 and cu_seqlens.device == device and cu_seqlens.is_contiguous()
    return cu_seqlens if here else cu_seqlens.to(device, torch.int32).contiguous()


def found(mask: Documents | DeviceDocuments, seqlen_q: int, seqlen_k: int, what: str, config, device: torch.device, find: Callable):
    """`find(cu_seqlens_q, cu_seqlens_k, offsets, seqlen_q, seqlen_k, config)`, on the current stream, of int32 tensors on the device; where
    cu_seqlens are there already, without waiting for it. `what` it finds of `Documents` for tiles like config's is found once, and kept.
    """

    def look(*cu_seqlens: Tensor):
        return find(*(on_device(ends, device) for ends in cu_seqlens), offsets(mask.inner), seqlen_q, seqlen_k, config)

    if isinstance(mask, DeviceDocuments):
        return look(*mask.ends())
    (plane,) = mask.planes(seqlen_q, seqlen_k)

    def make():
        made = look(*(torch.tensor(ends, dtype=torch.int32, device="cpu") for ends in (mask.cu_seqlens_q, mask.cu_seqlens_k)))
        torch.cuda.current_stream(device).synchronize()  # other streams may use them next
        return made

    return kept(plane.region.memo, (what, config.tile_m, config.tile_n, getattr(config, "cluster", 1), device), make)
