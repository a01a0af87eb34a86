"""What computes a call of decode; a prefix that all sequences have is read once, for the rows of all of them, as one more part of their keys."""

from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends import BoundDecode
from tilewise.backends.tables.window import FAR, window_of
from tilewise.backends.triton.decode import Decoder, Shares, why_not
from tilewise.masks import Full
from tilewise.problem import DecodeCall

LEAST_SAVED = 64 << 20  # bytes that need not be read again: about what the launches of this way take; predicted, not measured


def bind(call: DecodeCall) -> BoundDecode | None:
    """As `Backend.bind_decode`."""
    if why_not(call):
        return None
    return Prefixed(call) if pays(call) else Decoder(call).begin()


def pays(call: DecodeCall) -> bool:
    """Whether the prefix is worth a launch of its own: where every query sees all of it, and positions in it do not matter."""
    window = window_of(call.mask)
    if (
        call.shared_prefix < 1
        or call.share is not None
        or call.split is not None
        or call.leftpad is not None
        or call.alibi_slopes is not None
        or call.rotary is not None
    ):
        return False
    if window is None or window.lo > -FAR or any(x is not None and x.dim() == 2 for x in (call.k_scale, call.v_scale)):  # of each sequence
        return False
    of_token = sum(x.shape[2] * x.shape[3] * x.element_size() for x in (call.k_cache, call.v_cache))
    return (call.seqlens.shape[0] - 1) * call.shared_prefix * of_token >= LEAST_SAVED


class Prefixed:
    """Calls of three launches: of the prefix, of what sequences have behind it, and of `merge`. As `Backend.bind_decode` has them."""

    def __init__(self, call: DecodeCall) -> None:
        self.like, self.shares = call.like, Shares(call)
        first = self._first(call, self._owner(call)) if call.q.numel() else None
        self.rest = Decoder(call, shares=self.shares, prefix=first is not None)
        self.first = None if first is None else Decoder(first, shares=Shares(first, most=call.shared_prefix), parts=True)

    def __call__(self, given: tuple, seqlens: Tensor, out: Tensor | None = None, with_lse: bool = True) -> tuple[Tensor, Tensor]:
        call = self.like.again(given, seqlens)
        if self.first is None:
            return self.rest(given, seqlens, out, with_lse)
        parts = self.first.shares.splits
        partial_o, partial_lse = self.rest.partials(parts + self.shares.splits, self.shares.rows)
        first = self._first(call, self._owner(call))
        self.first.attend(first.tensors, first.seqlens, partial_o[:parts], partial_lse[:parts])
        partial_lse[:parts].masked_fill_(~self._joined(call), -torch.inf)
        return self.rest(given, seqlens, out, with_lse, (partial_o, partial_lse, parts))

    def _first(self, call: DecodeCall, owner: Tensor) -> DecodeCall:
        """The prefix alone: all queries as those of one sequence, with the keys where `owner` has them, (1,) int64."""
        q = call.q.reshape(1, -1, *call.q.shape[-2:])
        fields: dict = {
            "q": q,
            "max_seqlen_q": q.shape[1],
            "cu_seqlens_q": None,
            "mask": Full(),
            "tree": None,
            "sink": None,
            "shared_prefix": 0,
        }
        if call.page_table is not None:
            pages = -(-call.shared_prefix // call.k_cache.shape[1])
            fields["page_table"] = call.page_table[:, :pages].index_select(0, owner)
        else:
            fields["cache_batch_idx"] = owner if call.cache_batch_idx is None else call.cache_batch_idx.index_select(0, owner)
        return replace(call, seqlens=owner.new_full((1,), call.shared_prefix), **fields)

    def _owner(self, call: DecodeCall) -> Tensor:
        """(1,): the longest sequence of those with queries, for others may have ended."""
        lengths = call.seqlens.long().clamp(0, self.shares.capacity)
        if call.cu_seqlens_q is not None:
            lengths = lengths.masked_fill(call.cu_seqlens_q.long().diff() < 1, -1)
        return lengths.argmax(0, keepdim=True)

    def _joined(self, call: DecodeCall) -> Tensor:
        """(rows,) bool: of (tokens, heads) as parts have them, those of sequences in which every query sees all of the prefix, as the kernel asks."""
        window, lengths = window_of(call.mask), call.seqlens.long().clamp(0, self.shares.capacity)
        assert window is not None  # or `pays` had said so
        queries = call.q.shape[1] if call.cu_seqlens_q is None else call.cu_seqlens_q.long().diff()
        seen = torch.minimum(lengths, lengths - queries + window.hi + 1)
        if call.tree is not None:
            seen = torch.minimum(seen, lengths - call.tree.shape[1])
        joins = seen >= call.shared_prefix
        if call.cu_seqlens_q is None:
            of_tokens = joins.repeat_interleave(call.q.shape[1])
        else:
            tokens = torch.arange(call.q.shape[0], dtype=call.cu_seqlens_q.dtype, device=call.q.device)
            of_tokens = torch.cat((joins, joins.new_zeros(1)))[torch.searchsorted(call.cu_seqlens_q[1:].contiguous(), tokens, right=True)]
        return of_tokens.repeat_interleave(self.shares.heads)
