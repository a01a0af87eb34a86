"""Packed documents: each row sees an interval of keys, which the GPU works out from cu_seqlens, so that no call waits for the device.

Tiles of queries straddle documents, so documents shorter than a tile share one. For inner masks that are one band: a row of a document
sees `[max(k0, row + lo), min(k1, row + hi + 1))`, with the diagonals through the document's bottom right and top left corners.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper.keeping import kept
from tilewise.backends.hopper.tables import FAR
from tilewise.expression import Combined, Full, Mask
from tilewise.hopper import compile as hopper
from tilewise.masks import Causal, Documents, SlidingWindow, Unread


class Offsets(NamedTuple):
    """A key is seen at key - query - diagonal in [lo, hi], for the diagonals through the bottom right and the top left corner."""

    lo: int = -FAR
    hi: int = FAR
    lo_left: int = -FAR
    hi_left: int = FAR


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Of the kernel that finds the intervals: the tiles of the one that uses them."""

    tile_m: int
    tile_n: int
    least: int = 1  # tiles of keys that a tile of queries visits, whatever it sees
    cluster: int = 1  # tiles of queries that are computed together


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """Of the kernels that find what the backward pass reads: tiles of the kernel that walks over keys and, turned round, of the one over queries."""

    rows: RowsConfig
    columns: RowsConfig


class Rows(NamedTuple):
    """int32, as visible.py has them."""

    order: Tensor  # (ceil(m_blocks / cluster),) tiles of queries, or a cluster's, those that visit the most tiles of keys last
    ends: Tensor  # (2, seqlen_q): each row's keys
    walks: Tensor  # (m_blocks, 4)


def offsets(mask: Mask) -> Offsets | None:
    """Of a document's inner mask; None where it is no single band."""
    match mask:
        case Full():
            return Offsets()
        case Causal(align=align):
            return _aligned(align, -FAR, 0)
        case SlidingWindow(left=left, right=right, align=align):
            return _aligned(align, -FAR if left is None else -min(left, FAR), FAR if right is None else min(right, FAR))
        case Combined(operation="&", left=left, right=right):
            one, two = offsets(left), offsets(right)
            if one is not None and two is not None:
                return Offsets(max(one[0], two[0]), min(one[1], two[1]), max(one[2], two[2]), min(one[3], two[3]))
    return None


def _aligned(align: str, lo: int, hi: int) -> Offsets:
    return Offsets(lo, hi) if align == "bottom_right" else Offsets(lo_left=lo, hi_left=hi)


def longest(mask: Documents | Unread) -> int:
    """Queries of the longest document; 0 where only the device knows."""
    return max((end - start for start, end in itertools.pairwise(mask.cu_seqlens_q)), default=0) if isinstance(mask, Documents) else 0


def by_rows(mask: Mask) -> bool:
    """Whether `rows_of` can make tables for the mask."""
    return isinstance(mask, Documents | Unread) and offsets(mask.inner) is not None


def check(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    """Raise ShapeError for bad cu_seqlens that are on the device. They are read once; under CUDA graph capture they cannot be."""
    if isinstance(mask, Unread) and not torch.cuda.is_current_stream_capturing():
        mask.check(seqlen_q, seqlen_k)


def kernel(config) -> tuple:
    """What `compile.compiled` takes for the kernel that finds the rows for one of `config`."""
    return (
        "tilewise.backends.hopper.intervals:launch",
        arguments,
        RowsConfig(tile_m=config.tile_m, tile_n=config.tile_n, cluster=config.cluster),
    )


def rows_of(mask: Documents | Unread, seqlen_q: int, seqlen_k: int, config, device: torch.device) -> Rows:
    """The rows of packed documents, as `found` finds them. Where cu_seqlens are bad and nobody checked them, rows still see existing keys only."""
    return found(mask, seqlen_q, seqlen_k, "rows", config, device, _rows)


def found(mask: Documents | Unread, seqlen_q: int, seqlen_k: int, what: str, config, device: torch.device, find: Callable):
    """`find(cu_seqlens_q, cu_seqlens_k, offsets, seqlen_q, seqlen_k, config)`, on the current stream, of int32 tensors on the device; where
    cu_seqlens are there already, without waiting for it. `what` it finds of `Documents` for tiles like config's is found once, and kept.
    """

    def on_device(*cu_seqlens: Tensor):
        tensors = (ends.to(device, torch.int32).contiguous() for ends in cu_seqlens)
        return find(*tensors, offsets(mask.inner), seqlen_q, seqlen_k, config)

    if isinstance(mask, Unread):
        return on_device(mask.cu_seqlens_q, mask.cu_seqlens_k)
    (plane,) = mask.planes(seqlen_q, seqlen_k)

    def make():
        made = on_device(*(torch.tensor(ends, dtype=torch.int32, device="cpu") for ends in (mask.cu_seqlens_q, mask.cu_seqlens_k)))
        torch.cuda.current_stream(device).synchronize()  # other streams may use them next
        return made

    return kept(plane.region.memo, ("hopper", what, config.tile_m, config.tile_n, getattr(config, "cluster", 1), device), make)


def _rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, inner: Offsets, seqlen_q: int, seqlen_k: int, config) -> Rows:
    new = {"dtype": torch.int32, "device": cu_seqlens_q.device}
    ends = torch.empty((2, seqlen_q), **new)
    m_blocks = -(-seqlen_q // config.tile_m)
    order, walks = torch.empty(-(-m_blocks // config.cluster), **new), torch.empty((m_blocks, 4), **new)
    hopper.compiled(*kernel(config))(cu_seqlens_q, cu_seqlens_k, order, ends, walks, seqlen_k, *inner)
    return Rows(order, ends, walks)


def arguments(config: RowsConfig) -> list:
    """Stand-ins for `intervals.launch`'s tensors and numbers."""
    from tilewise.hopper.dsl import Int32

    documents, seqlen_q, m_blocks, units = (hopper.size() for _ in range(4))
    shapes = (documents,), (documents,), (units,), (2, seqlen_q), (m_blocks, 4)
    return [*(hopper.tensor(Int32, *shape, aligned=False) for shape in shapes), *(Int32(0) for _ in range(5))]
