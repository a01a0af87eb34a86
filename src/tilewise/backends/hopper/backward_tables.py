"""What the backward pass reads to know what is visible, where that is no single band: the tensors of backward_visible.Tables."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper.backward_config import Config
from tilewise.backends.hopper.documents import Offsets, RowsConfig, offsets
from tilewise.hopper import compile as hopper
from tilewise.masks import Documents, Unread
from tilewise.problem import Call


class Columns(NamedTuple):
    """Packed documents, int32, as backward_visible.Tables has them."""

    keys: Tensor  # (2, seqlen_q)
    queries: Tensor  # (2, seqlen_k)
    walks: Tensor  # (n_blocks, 4)
    visitors: Tensor  # (m_blocks, 2)


def tables(call: Call, config: Config) -> tuple[Tensor | None, ...]:
    """The fields of backward_visible.Tables for a call, None where its kernel has none."""
    made = [None] * 4
    if config.sees == "rows":
        made = columns_of(call.mask, call.seqlen_q, call.seqlen_k, config, call.q.device)
    return tuple(made)


def arguments(config: Config, seqlen_q, seqlen_k, m_blocks) -> list:
    """Stand-ins for them."""
    from tilewise.hopper.dsl import Int32

    made = [None] * 4
    if config.sees == "rows":
        shapes = (2, seqlen_q), (2, seqlen_k), (hopper.size(), 4), (m_blocks, 2)
        made = [hopper.tensor(Int32, *shape, aligned=False) for shape in shapes]
    return made


def kernel(config: Config) -> tuple:
    """What `compile.compiled` takes for the kernels that find the columns for one of `config`."""
    transposed = RowsConfig(tile_m=config.tile_n, tile_n=config.tile_m, least=0)
    return "tilewise.backends.hopper.backward_intervals:launch", columns_arguments, transposed


def columns_arguments(config: RowsConfig) -> list:
    """Stand-ins for `backward_intervals.launch`'s tensors and numbers."""
    from tilewise.hopper.dsl import Int32

    documents, seqlen_q, seqlen_k, n_blocks, m_blocks = (hopper.size() for _ in range(5))
    shapes = (documents,), (documents,), (2, seqlen_q), (2, seqlen_k), (n_blocks, 4), (n_blocks, 4), (m_blocks, 2)
    return [*(hopper.tensor(Int32, *shape, aligned=False) for shape in shapes), *(Int32(0) for _ in range(4))]


def columns_of(mask: Documents | Unread, seqlen_q: int, seqlen_k: int, config: Config, device: torch.device) -> Columns:
    """The columns of packed documents, on the current stream; where cu_seqlens are on the device, without waiting for it.

    Bad cu_seqlens that nobody checked lead to nothing outside of the tensors, and no block waits for ever. Columns of `Documents` are made once,
    and kept.
    """
    if isinstance(mask, Unread):
        return _found(mask.cu_seqlens_q, mask.cu_seqlens_k, offsets(mask.inner), seqlen_q, seqlen_k, config, device)
    (plane,) = mask.planes(seqlen_q, seqlen_k)
    key = "hopper columns", config.tile_m, config.tile_n, device
    if key not in plane.region.memo:
        cu_seqlens = (torch.tensor(ends) for ends in (mask.cu_seqlens_q, mask.cu_seqlens_k))
        plane.region.memo[key] = _found(*cu_seqlens, offsets(mask.inner), seqlen_q, seqlen_k, config, device)
        torch.cuda.current_stream(device).synchronize()  # other streams may use them next
    return plane.region.memo[key]


def _found(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, inner: Offsets, seqlen_q: int, seqlen_k: int, config: Config, device: torch.device
) -> Columns:
    cu_seqlens = (ends.to(device, torch.int32).contiguous() for ends in (cu_seqlens_q, cu_seqlens_k))
    n_blocks, m_blocks = -(-seqlen_k // config.tile_n), -(-seqlen_q // config.tile_m)
    shapes = (2, seqlen_q), (2, seqlen_k), (n_blocks, 4), (n_blocks, 4), (m_blocks, 2)
    keys, queries, scratch, walks, visitors = (torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)
    hopper.compiled(*kernel(config))(*cu_seqlens, keys, queries, scratch, walks, visitors, *inner)
    return Columns(keys, queries, walks, visitors)
