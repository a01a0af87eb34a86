"""Decoding: the newest queries of each sequence against its cached keys and values, plain or paged, read where they lie.

The keys of a split are 1,024 whatever else is in the batch, so that a sequence's bits are its own; `DecodeCall.split` and `shared_prefix` ask for
nothing more here.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tilewise.backends import BoundDecode
from tilewise.backends.cpu.arguments import CPU, add_per_head, add_workspace, in_order, plain, rows, set_tensor
from tilewise.backends.cpu.native import Library, run
from tilewise.backends.cpu.planes import planes_of_sequences, planes_of_shares
from tilewise.backends.sequences import one_by_one, sequence
from tilewise.problem import Call, DecodeCall

MANY_QUERIES = (
    16  # with more, panels of queries are faster than rows against keys: of 64, 1.5 times in fp32, 5 in bf16 (one thread, 2,048 keys)
)


def bind(library: Library, isa: int, call: DecodeCall, forward: Callable[[Call], tuple[Tensor, ...]]) -> BoundDecode | None:
    """As `Backend.bind_decode`; None where the mask holds a dense tensor, or differs by head, for caches of 8 bits, and where queries are yet to be
    rotated; of a share also with ALiBi or a tree, for the kernel knows keys by their number alone.
    """
    if call.share is not None and (call.alibi_slopes is not None or call.tree is not None):
        return None
    if call.mask.kind == "bitmap" or not call.mask.alike or call.k_cache.dtype != call.q.dtype or call.rotary is not None:
        return None
    like = call.like
    return lambda given, seqlens, out=None, with_lse=True: _decode(library, isa, like.again(given, seqlens), forward)


def _decode(library: Library, isa: int, call: DecodeCall, forward: Callable[[Call], tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """O and LSE as `Backend.decode` gives them.

    Sequences of many queries, such as pieces of prompts, are calls of `forward`, and their pages are gathered. The caller has checked all values:
    what lies beyond a sequence's length, or on a page that it does not reach, is never read.
    """
    call = call.in_int32()
    q, k_cache, v_cache = rows(call.q), rows(call.k_cache), rows(call.v_cache)
    packed = call.cu_seqlens_q is not None
    if call.tree is None and not packed and q.shape[1] > MANY_QUERIES:
        o, lse = one_by_one(forward, call)
        return o, lse.contiguous()
    wide = q[None] if packed else q
    batch, (seqlen_q, heads_q) = call.seqlens.shape[0], wide.shape[1:3]
    o = torch.empty((*q.shape[:-1], v_cache.shape[3]), dtype=call.out_dtype or q.dtype, device=CPU)
    lse = torch.empty((heads_q, seqlen_q) if packed else (batch, heads_q, seqlen_q), dtype=torch.float32, device=CPU)
    if lse.numel() == 0:
        return o, lse
    args = plain(wide, k_cache, v_cache, call.scale, call.softcap, isa)
    args.wide = o.dtype == torch.float32
    share, keep = call.share, []
    lengths = in_order(call.seqlens if share is None else share.held(call.seqlens))
    queries, apart = np.full(batch, seqlen_q), {}
    if call.cu_seqlens_q is not None:
        bounds = call.cu_seqlens_q.tolist()
        queries = np.diff(bounds)
        o[bounds[-1] :], lse[:, bounds[-1] :] = 0.0, -torch.inf
        args.cu_seqlens_q = _address(call.cu_seqlens_q, keep)
        if call.tree is None and (queries > MANY_QUERIES).any():
            apart = {b: (slice(bounds[b], bounds[b + 1]), int(call.seqlens[b])) for b in (queries > MANY_QUERIES).nonzero()[0].tolist()}
            lengths = lengths.masked_fill(torch.from_numpy(queries > MANY_QUERIES), 0)
    keep += [q, k_cache, v_cache, lengths]
    args.batch, args.seqlens_k, args.seqlen_k = batch, lengths.data_ptr(), int(lengths.max())
    planes = planes_of_shares(call, queries, keep) if share else planes_of_sequences(call.mask, queries, lengths.numpy(), keep)
    index = np.repeat(np.arange(batch, dtype=np.int32), heads_q)
    args.planes, args.plane_of = ctypes.addressof(planes), index.ctypes.data
    keep.append(index)
    add_per_head(args, call.alibi_slopes, call.sink, keep)
    if call.page_table is not None:
        args.page_table, args.page_size = _address(call.page_table, keep), k_cache.shape[1]
        args.page_table_stride = call.page_table.shape[1]
    if call.cache_batch_idx is not None:
        args.cache_batch_idx = _address(call.cache_batch_idx, keep)
    if call.leftpad is not None:
        args.leftpad = _address(call.leftpad if share is None else share.held(call.leftpad), keep)
    if call.tree is not None:
        args.tree, args.tree_new = _address(call.tree, keep), call.tree.shape[1]
        args.tree_batch = 0 if call.tree.shape[0] == 1 else call.tree[0].numel()
    set_tensor(args.o, o[None] if packed else o)
    if packed:
        args.q.batch = args.o.batch = 0
    args.lse = lse.data_ptr()
    keep.append(add_workspace(args, library.functions.tw_decode_workspace))
    run(library.functions.tw_decode, args)
    del keep
    for b, (rows_of_b, length) in apart.items():
        o[rows_of_b], lse[:, rows_of_b] = (x[0] for x in forward(sequence(call, b, q[None, rows_of_b], length))[:2])
    return o, lse


def _address(x: Tensor, keep: list) -> int:
    x = in_order(x)
    keep.append(x)
    return x.data_ptr()
