"""Packed documents, each computed as if it were called alone, so that it has the bits of that, whatever it is packed with.

The kernel shares large documents out among all threads and gives the others to a thread each. Dropout counts packed positions and biases are laid out
by them, so calls with those take the way of other masks.
"""

import numpy as np
from numpy import ndarray

from tilewise.masks import Documents
from tilewise.masks.arguments import check_fits
from tilewise.masks.constructors import Unread
from tilewise.problem import Call


def documents_of(call: Call) -> Documents | None:
    """The call's mask where its documents can be computed one by one; None for other calls. ShapeError where they do not fit."""
    mask = call.mask.read() if isinstance(call.mask, Unread) else call.mask
    if not isinstance(mask, Documents) or call.batch != 1 or call.bias is not None or call.dropout is not None:
        return None
    for axis, ends, seqlen in (("q", mask.cu_seqlens_q, call.seqlen_q), ("k", mask.cu_seqlens_k or mask.cu_seqlens_q, call.seqlen_k)):
        check_fits(f"Documents: cu_seqlens_{axis}", ends[-1], f"seqlen_{axis}", np.array([seqlen]))
    return mask


def bounds_of(mask: Documents) -> ndarray:
    """(documents, 4) int64: the first query of each and the end of its queries, and of its keys."""
    starts_q, starts_k = (np.asarray(x, dtype=np.int64) for x in (mask.cu_seqlens_q, mask.cu_seqlens_k or mask.cu_seqlens_q))
    return np.stack([starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:]], axis=1)
