"""Query heads that share a key head as rows of one tile, where the queries alone would leave most of it empty: decoding with grouped heads.

A tile has 128 rows or more, and every tile of every query head reads all keys. With one query a sequence the heads of a group see the same
keys, so they can be the rows; the kernel is the same, on other strides.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.masks import Full
from tilewise.problem import Call
from tilewise.views import part

MOST_QUERIES = 64  # of a sequence; beyond half of a tile there is less to gain than the rows of a second tile cost


def pack(call: Call) -> Call | None:
    """The same attention with the heads of a group as rows, or None where that does not pay or is none of the kernel's business.

    One query: q (batch, 1, heads_q, head_dim) -> (batch, group, heads_k, head_dim), on the keys that it sees. Several: only under the full mask
    and for one key head, where queries and heads are one dimension of even steps, or of a copy of q.
    """
    if call.group == 1 or call.seqlen_q > MOST_QUERIES or call.mask.kind not in ("full", "band"):
        return None
    if any(x is not None for x in (call.bias, call.alibi_slopes, call.sink, call.dropout)):  # which differ by head
        return None
    if call.seqlen_q == 1:
        begin, end = _seen_by_the_first(call)
        q = call.q.unflatten(2, (call.heads_k, call.group))[:, 0].transpose(1, 2)
        return replace(call, q=q, k=call.k[:, begin:end], v=call.v[:, begin:end], mask=Full())
    if call.heads_k == 1 and call.mask.kind == "full":
        return replace(call, q=call.q.flatten(1, 2).unsqueeze(2))
    return None


def rows_of(call: Call, o: Tensor) -> Tensor:
    """The rows of the packed call in an O (batch, seqlen_q, heads_q, head_dim_v) that is contiguous: a view."""
    if call.seqlen_q == 1:
        return o.unflatten(2, (call.heads_k, call.group))[:, 0].transpose(1, 2)
    return o.flatten(1, 2).unsqueeze(2)


def put_statistic(call: Call, of_call: Tensor, packed: Tensor) -> None:
    """Write the packed call's LSE, or another value of each row, into that of the call, (batch, heads_q, seqlen_q)."""
    if call.seqlen_q == 1:
        of_call.copy_(packed.reshape(of_call.shape))
    else:
        of_call.copy_(packed.reshape(call.batch, call.seqlen_q, call.group).transpose(1, 2))


class Views:
    """Where the tensors of calls like `call` lie for `packed`, which is `pack(call)`: found once, since views of views take long to make."""

    def __init__(self, call: Call, packed: Call) -> None:
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.copies_q = seqlen_q > 1 and call.q.stride(1) != heads_q * call.q.stride(2)
        o = torch.empty((batch, seqlen_q, heads_q, call.head_dim_v), dtype=torch.uint8, device="meta")
        pairs = (packed.q if self.copies_q else call.q, packed.q), (call.k, packed.k), (call.v, packed.v), (o, rows_of(call, o))
        self.places = tuple((view.shape, view.stride(), view.storage_offset() - x.storage_offset()) for x, view in pairs)
        self.lse = packed.q.shape[0], packed.q.shape[2], packed.q.shape[1]
        self.place_of_lse = self.lse, short.strides(self.lse), 0
        # How LSE comes, where it has to be turned.
        self.turned = ((batch, call.group, seqlen_q), (seqlen_q * call.group, 1, call.group), 0) if seqlen_q > 1 else None

    def compute(self, kernel: Callable, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, with_lse: bool) -> None:
        """Write O and LSE of the call by `kernel(q, k, v, o, lse)`, which takes the packed call's."""
        of_q, of_k, of_v, of_o = self.places
        q = q.contiguous() if self.copies_q else q
        views = part(q, *of_q), part(k, *of_k), part(v, *of_v), part(o, *of_o)
        if self.turned is None or not with_lse:
            kernel(*views, part(lse, *self.place_of_lse))
            return
        found = torch.empty(self.lse, dtype=lse.dtype, device=lse.device)
        kernel(*views, found)
        lse.copy_(part(found, *self.turned))


def _seen_by_the_first(call: Call) -> tuple[int, int]:
    """The keys [begin, end) that query 0 sees."""
    (plane,) = call.mask.planes(call.seqlen_q, call.seqlen_k, 1, 1)
    for q0, q1, k0, k1, lo, hi in plane.region:
        if q0 <= 0 < q1:
            begin, end = max(k0, lo, 0), min(k1, hi + 1)
            return begin, max(begin, end)
    return 0, 0
