"""Decoding: a few new queries of each sequence against its cached keys and values, plain or paged, read where they lie."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.cpu import abi
from tilewise.backends.cpu.arguments import CPU, add_per_head, add_workspace, plain, rows, set_tensor
from tilewise.backends.cpu.native import Library, run
from tilewise.backends.cpu.planes import table_of
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full, Mask, SlidingWindow
from tilewise.masks.band_tables import INF


def decode(
    library: Library,
    isa: int,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Sequence[int],
    page_table: Tensor | None = None,
    *,
    mask: Mask | None = None,
    scale: float,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim): the newest positions of each sequence.
        k_cache, v_cache: (batch, capacity, heads_k, dim), or with a page table (pages, page_size, heads_k, dim). Checked by the caller.
        lengths: valid keys of each sequence, no more than its cache holds; nothing beyond is read.
        page_table: (batch, max_pages) integers; page p of sequence b holds its keys p * page_size onwards.
        mask: resolved for (seqlen_q, length) of each sequence; None is causal, aligned bottom right.

    Raises:
        UnsupportedError: the mask holds a dense tensor, or differs by head.
    """
    q, k_cache, v_cache = rows(q), rows(k_cache), rows(v_cache)
    batch, seqlen_q, heads_q, _ = q.shape
    o = torch.empty((batch, seqlen_q, heads_q, v_cache.shape[3]), dtype=q.dtype, device=CPU)
    lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=CPU)
    if lse.numel() == 0:
        return o, lse
    args = plain(q, k_cache, v_cache, scale, softcap, isa)
    args.seqlen_k = max(lengths)
    keep: list = [q, k_cache, v_cache]
    _add_planes(args, Causal() if mask is None else mask, lengths, keep)
    add_per_head(args, alibi_slopes, sink, keep)
    valid = torch.tensor(lengths, dtype=torch.int32, device=CPU)
    args.seqlens_k = valid.data_ptr()
    if page_table is not None:
        table = page_table.int().contiguous()
        args.page_table, args.page_size, args.page_table_stride = table.data_ptr(), k_cache.shape[1], table.stride(0)
        keep.append(table)
    set_tensor(args.o, o)
    args.lse = lse.data_ptr()
    keep += [valid, add_workspace(args, library.functions.tw_decode_workspace)]
    run(library.functions.tw_decode, args)
    del keep
    return o, lse


def _add_planes(args: abi.Args, mask: Mask, lengths: Sequence[int], keep: list) -> None:
    """One plane a sequence. Causal and window masks are written down directly: their lengths change with every token."""
    batch, seqlen_q, heads_q = args.batch, args.seqlen_q, args.heads_q
    window = _window(mask)
    planes = (abi.PlaneArg * batch)()
    if window is not None:
        ends = np.asarray(lengths, dtype=np.int64)
        table = np.zeros((batch, 6), dtype=np.int64)
        table[:, 1], table[:, 3] = seqlen_q, ends
        table[:, 4] = -INF if window[0] is None else ends - seqlen_q - min(window[0], INF // 2)
        table[:, 5] = INF if window[1] is None else ends - seqlen_q + min(window[1], INF // 2)
        for b in range(batch):
            planes[b].bands, planes[b].n_bands = table[b].ctypes.data, 1
        keep.append(table)
    else:
        if mask.kind == "bitmap" or mask.extent != (1, 1):
            raise UnsupportedError(f"the CPU kernel decodes with masks made of bands that are the same for every head, not {mask}")
        for b, length in enumerate(lengths):
            planes[b] = table_of(mask.resolve(seqlen_q, length), keep)
    index = np.repeat(np.arange(batch, dtype=np.int32), heads_q)
    args.planes, args.plane_of = ctypes.addressof(planes), index.ctypes.data
    keep += [planes, index]


def _window(mask: Mask) -> tuple[int | None, int | None] | None:
    """(left, right) of a mask that is a bottom-right window, causal and full included; None for others."""
    if isinstance(mask, Full):
        return None, None
    if isinstance(mask, Causal | SlidingWindow) and mask.align == "bottom_right" and mask.offset == 0:
        return (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
    return None
