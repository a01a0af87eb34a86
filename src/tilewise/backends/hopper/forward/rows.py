"""The rows of packed documents for the forward kernel: each row's interval of keys, found on the GPU by the small kernel of intervals.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper.operands import Packed
from tilewise.backends.hopper.stand_ins import Ints, StandIns
from tilewise.backends.tables.documents import Offsets, found
from tilewise.masks import DeviceDocuments, Documents
from tilewise.sm90 import jit


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
    """As visible/keys.py has them."""

    order: Annotated[Tensor, Ints("clusters")]  # tiles of queries, or a cluster's, those that visit the most tiles of keys last
    ends: Annotated[Tensor, Ints("2 seqlen_q")]  # each row's keys
    walks: Annotated[Tensor, Ints("m_blocks 4")]


def kernel(config) -> jit.Kernel:
    """What finds the rows for one of `config`."""
    found = RowsConfig(tile_m=config.tile_m, tile_n=config.tile_n, cluster=config.cluster)
    return jit.Kernel("tilewise.backends.hopper.forward.intervals:launch", arguments, found)


def rows_of(mask: Documents | DeviceDocuments, seqlen_q: int, seqlen_k: int, config, device: torch.device) -> Rows:
    """The rows of packed documents, as `found` finds them. Where cu_seqlens are bad and were not checked, rows still see existing keys only."""
    return found(mask, seqlen_q, seqlen_k, "rows", config, device, _rows)


def shapes(seqlen_q: int, config) -> Rows:
    """Of the tensors."""
    m_blocks = -(-seqlen_q // config.tile_m)
    return Rows((-(-m_blocks // config.cluster),), (2, seqlen_q), (m_blocks, 4))


def finder(inner: Offsets, seqlen_k: int, config) -> Callable[[Tensor, Tensor, Rows], None]:
    """What writes the rows of one cu_seqlens_q and cu_seqlens_k after the other, (documents + 1,) int32 on the current device."""
    compute = jit.compiled(*kernel(config))

    def find(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, made: Rows) -> None:
        compute((cu_seqlens_q, cu_seqlens_k, seqlen_k, *inner), *made)

    return find


def _rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, inner: Offsets, seqlen_q: int, seqlen_k: int, config) -> Rows:
    made = Rows(*(torch.empty(shape, dtype=torch.int32, device=cu_seqlens_q.device) for shape in shapes(seqlen_q, config)))
    finder(inner, seqlen_k, config)(cu_seqlens_q, cu_seqlens_k, made)
    return made


def arguments(config: RowsConfig) -> list:
    """Stand-ins for `intervals.launch`'s operands."""
    made = StandIns(config)
    return [made(Packed), *made(Rows)]
