"""Which of the kernel's ways a forward takes, and what it looks at there: panels of queries; a few queries key by key; packed documents one by one.

A document is computed as if it were called alone, so that it has the bits of that, whatever it is packed with: the kernel shares large ones out among
all threads and gives the others to a thread each. Where dropout counts packed positions, a bias is laid out by them or ALiBi counts by the call's
lengths, documents are a mask like others.
"""

import ctypes
from typing import overload

import numpy as np
from numpy import ndarray

from tilewise.backends.cpu import abi
from tilewise.backends.cpu.planes import planes_of, planes_of_sequences
from tilewise.masks import Documents, Part
from tilewise.masks.arguments import check_fits
from tilewise.masks.constructors import DeviceDocuments
from tilewise.problem import Call

# Up to this many queries, by the lanes of a vector, every key is read once for all the rows of its head, and keys are split over threads: as soon as
# the elements of K and V that a head reads are NUMBERS_A_PAIR times the queries' square (measured: docs/cpu-notes.md).
FEW_QUERIES, FEW_QUERIES_NARROW, NUMBERS_A_PAIR = 8, 4, 64


def choose_forward(args: abi.Args, call: Call, most: int) -> list:
    """Give the arguments the forward's way, `most` queries being few; returns what must outlive them."""
    if (documents := documents_of(call)) is not None:
        return _one_by_one(args, call, documents, most)
    few = few_queries(whole_queries(call), call.seqlen_k, call.head_dim + call.head_dim_v, most)
    args.few = few and call.dropout is None and call.mask.kind != "bitmap"
    return choose_backward(args, call)


def choose_backward(args: abi.Args, call: Call) -> list:
    """Likewise the backward's one way, of any mask."""
    planes = planes_of(call.mask, call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
    args.planes, args.plane_of = planes.planes, planes.plane_of
    return [planes]


@overload
def few_queries(queries: int, keys: int, numbers: int, most: int) -> bool: ...
@overload
def few_queries(queries: ndarray, keys: ndarray, numbers: int, most: int) -> ndarray: ...
def few_queries(queries, keys, numbers: int, most: int):
    """Which calls leave lanes of a panel so empty that the rows of a head are better computed key by key; `numbers`: elements of K and V a key."""
    return (queries == 1) | ((queries <= most) & (keys * numbers >= NUMBERS_A_PAIR * queries**2))


def whole_queries(call: Call) -> int:
    """Queries of the call, or of that of which it is a part: ways that give other bits are chosen by these."""
    return call.mask.seqlen_q if isinstance(call.mask, Part) else call.seqlen_q


def documents_of(call: Call) -> Documents | None:
    """The call's mask where its documents are computed one by one; None for other calls. ShapeError where they do not fit."""
    mask = call.mask.read() if isinstance(call.mask, DeviceDocuments) else call.mask
    by_call = call.bias is not None or call.dropout is not None or (call.alibi_slopes is not None and call.diagonal is None)
    if not isinstance(mask, Documents) or call.batch != 1 or by_call:
        return None
    assert mask.cu_seqlens_k is not None  # since it was made
    for axis, ends, seqlen in (("q", mask.cu_seqlens_q, call.seqlen_q), ("k", mask.cu_seqlens_k, call.seqlen_k)):
        check_fits(f"Documents: cu_seqlens_{axis}", int(ends[-1]), f"seqlen_{axis}", np.array([seqlen]))
    return mask


def _one_by_one(args: abi.Args, call: Call, mask: Documents, most: int) -> list:
    """The way of packed documents; the queries behind the last are one more, which has no keys."""
    assert mask.cu_seqlens_k is not None and mask.inner is not None  # since it was made
    cu_q, cu_k = ((*ends, seqlen) for ends, seqlen in ((mask.cu_seqlens_q, call.seqlen_q), (mask.cu_seqlens_k, mask.cu_seqlens_k[-1])))
    starts_q, starts_k = np.array(cu_q, dtype=np.int64), np.array(cu_k, dtype=np.int64)
    bounds = np.stack([starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:]], axis=1)
    queries, keys = np.diff(starts_q), np.diff(starts_k)
    few = few_queries(queries, keys, call.head_dim + call.head_dim_v, most)
    keep = [bounds, few]
    planes = planes_of_sequences(mask.inner, queries, keys, keep)
    args.documents, args.bounds = len(bounds), bounds.ctypes.data
    args.document_planes, args.document_few = ctypes.addressof(planes), few.ctypes.data
    return keep
