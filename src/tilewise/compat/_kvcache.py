"""Key/value caches as the peers' functions describe them, in the words of `decode` and `append`: rows, pages, padding, rotary positions."""

from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise import decoding
from tilewise.compat import _translate as translate
from tilewise.errors import DTYPES, EIGHT_BITS, ShapeError, UnsupportedError, check_heads, check_like, check_sink, check_size, check_tensor
from tilewise.masks import SlidingWindow
from tilewise.problem import Share
from tilewise.rotary import rotated
from tilewise.runtime import cache_values as values
from tilewise.runtime.cache_values import sequence_of

INDEX_DTYPES = (torch.int32, torch.int64)


class Places(TypedDict, total=False):
    """Where the tokens of a cache lie, in the words of `decode` and `append`."""

    cache_seqlens: Tensor
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cp_rank: int
    cp_world: int
    cp_interleave: int


class Turn(TypedDict, total=False):
    """How new keys are rotated, in the words of `append`."""

    rotary_cos: Tensor
    rotary_sin: Tensor
    rotary_first: Tensor | None
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class Cache:
    """k (rows, capacity, heads_k, head_dim) and v likewise, or pages of them where there is a page table.

    lengths (batch,): the tokens that each sequence has, counted from its row's begin; those before leftpad (batch,) are none.
    batch_idx (batch,): the row of each sequence. page_table (batch, max_pages): the pages of each sequence. k_scale, v_scale: as `decode` has them.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    share: Share | None = None  # the tokens that are in the cache, of all that there are; then nothing is written

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        batch: int,
        cache_seqlens: int | Tensor | None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        *,
        page_table: Tensor | None = None,
        batch_idx: Tensor | None = None,
        leftpad: Tensor | None = None,
    ) -> "Cache":
        """The cache, its tensors checked; cache_seqlens None is its whole capacity, an int the same for all.

        batch_idx of pages chooses the table's rows. Scales are checked by `decode`.
        """
        for name, x in (("k_cache", k), ("v_cache", v)):
            check_tensor(name, x, ("pages or batch", "page_size or capacity", "heads_k", "head_dim"), (*DTYPES, *EIGHT_BITS))
        check_size("v_cache", "shape before head_dim", v.shape[:3], k.shape[:3], "k_cache")
        for name, x in (("page_table", page_table), ("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
            if x is not None:
                check_tensor(name, x, ("batch", "max_pages") if name == "page_table" else ("batch",), INDEX_DTYPES)
                if name != "page_table" or batch_idx is None:
                    check_size(name, "batch", x.shape[0], batch, "q")
        if page_table is None and batch_idx is None:
            check_size("k_cache", "batch", k.shape[0], batch, "q")
        if page_table is not None and batch_idx is not None:
            if not is_compiling() and values.wanted(batch_idx.device, False):
                values.check_rows(batch_idx, page_table.shape[0])
            page_table, batch_idx = page_table[batch_idx.long()], None
        capacity = values.capacity_of(k, page_table)
        if cache_seqlens is None or isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((batch,), capacity if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=k.device)
        check_tensor("cache_seqlens", cache_seqlens, ("batch",), INDEX_DTYPES)
        check_size("cache_seqlens", "batch", cache_seqlens.shape[0], batch, "q")
        return cls(
            k=k,
            v=v,
            lengths=cache_seqlens,
            page_table=page_table,
            batch_idx=batch_idx,
            leftpad=leftpad,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def of_rank(self, rank: int, world: int, tokens: Tensor | None) -> "Cache":
        """Of a rank that holds every world-th token from its own on. `tokens` (batch,) are those of the whole sequences, `lengths` those here."""
        share = decoding.share_of(rank, world, 1)
        if share is None:
            return self
        if tokens is None:
            raise ShapeError("cp_tot_seqused_k must be given with cp_world_size: how many tokens the whole sequences have")
        check_tensor("cp_tot_seqused_k", tokens, ("batch",), INDEX_DTYPES)
        check_size("cp_tot_seqused_k", "batch", tokens.shape[0], self.lengths.shape[0], "q")
        check_like("cp_tot_seqused_k", tokens, self.k, same_dtype=False, other="k_cache")
        if not is_compiling() and values.wanted(tokens.device, False) and not torch.equal(share.held(tokens.long()), self.lengths.long()):
            raise ShapeError(
                f"cache_seqlens are {self.lengths.tolist()}, but of cp_tot_seqused_k {tokens.tolist()} tokens rank {rank} of {world} holds "
                f"{share.held(tokens).tolist()}"
            )
        return replace(self, lengths=tokens, share=share)

    def places(self) -> Places:
        found: Places = {"cache_seqlens": self.lengths, "page_table": self.page_table, "cache_batch_idx": self.batch_idx}
        if self.share is not None:
            found["cp_rank"], found["cp_world"], found["cp_interleave"] = self.share
        return found

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the tokens that are there, k and v (total, heads_k, head_dim), and their cu_seqlens. Reads lengths, pages and rows."""
        if not is_compiling():
            lengths = self.lengths.tolist()
            values.check_lengths(lengths, self.k, self.page_table)
            if self.page_table is not None:
                values.check_pages(self.page_table, lengths, self.k.shape[0], self.k.shape[1])
            if self.batch_idx is not None:
                values.check_rows(self.batch_idx, self.k.shape[0])
            if self.leftpad is not None:
                values.check_padding(self.leftpad, lengths)
        first = torch.zeros_like(self.lengths) if self.leftpad is None else self.leftpad
        cu_seqlens = torch.nn.functional.pad((self.lengths - first).cumsum(0, dtype=torch.int32), (1, 0))
        owner = sequence_of(cu_seqlens, int(cu_seqlens[-1]))
        positions = torch.arange(owner.shape[0], dtype=torch.int64, device=owner.device) - cu_seqlens[owner] + first[owner]
        if self.page_table is None:
            slots = owner if self.batch_idx is None else self.batch_idx[owner].long(), positions
        else:
            slots = self.page_table[owner, positions // self.k.shape[1]].long(), positions % self.k.shape[1]
        return self.k[slots], self.v[slots], cu_seqlens


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The tables of a rotary embedding, and the position of each sequence's first new token (None: its length in the cache)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    first: Tensor | None = None

    @classmethod
    def of(
        cls, cos: Tensor | None, sin: Tensor | None, interleaved: bool, k: Tensor | None, first: Tensor | None = None
    ) -> "Rotary | None":
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            raise ShapeError("rotary_cos and rotary_sin must both be given, or neither")
        if k is None:
            raise ShapeError("rotary_cos needs new keys k and v, which it rotates with q; without them rotate q by tilewise.compat.rotary")
        check_tensor("rotary_cos", cos, ("seqlen_rotary", "rotary_dim / 2"))
        if cos.shape[1] % 8:
            raise ShapeError(f"rotary_cos has rotary_dim / 2 = {cos.shape[1]}; rotary_dim must be a multiple of 16")
        return cls(cos=cos, sin=sin, interleaved=bool(interleaved), first=first)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotated(x, self.cos, self.sin, positions, interleaved=self.interleaved)

    def of_keys(self) -> Turn:
        return {"rotary_cos": self.cos, "rotary_sin": self.sin, "rotary_first": self.first, "interleaved": self.interleaved}


@torch.no_grad()
def attend(
    q: Tensor,
    cache: Cache,
    k: Tensor | None,
    v: Tensor | None,
    given: translate.Options,
    *,
    rotary: Rotary | None = None,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append k and v, rotated, and attend with q, rotated: (batch, seqlen_q, heads_q, head_dim), or packed by cu_seqlens_q. No gradients.

    Returns O as q and LSE (batch, heads_q, seqlen_q), packed (heads_q, total_q), with -inf for empty rows.
    """
    axes = ("batch", "seqlen_q", "heads_q", "head_dim") if cu_seqlens_q is None else ("total_q", "heads_q", "head_dim")
    check_tensor("q", q, axes)
    if cu_seqlens_q is not None and values.wanted(q.device, False):
        first = translate.first_tokens(cu_seqlens_q)[0]
        if first and int(cu_seqlens_q[-1]) <= q.shape[0]:
            q, qv, ends = q[first:], qv if qv is None else qv[first:], cu_seqlens_q - first
            ends_new = cu_seqlens_k_new
            o, lse = attend(q, cache, k, v, given, rotary=rotary, qv=qv, cu_seqlens_q=ends, cu_seqlens_k_new=ends_new)
            return translate.with_front(o, lse, first)
    check_like("k_cache", cache.k, q, same_dtype=cache.k.dtype not in EIGHT_BITS)
    if (k is None) != (v is None):
        raise ShapeError(f"{'v' if v is None else 'k'} is missing: k and v are appended together, or neither")
    from_padding = (
        cache.leftpad is not None and given.mask is not None and not isinstance(given.mask, SlidingWindow)
    )  # chunks count from there
    if cache.share is not None and (k is not None or qv is not None or from_padding):
        what = "k" if k is not None else "qv" if qv is not None else "attention_chunk with cache_leftpad"
        raise UnsupportedError(f"{what} is not supported with cp_world_size; tilewise.decode and append take new tokens with cp_world=")
    if cache.k.dtype in EIGHT_BITS and (qv is not None or from_padding):
        what = "qv" if qv is not None else "attention_chunk with cache_leftpad"
        raise UnsupportedError(f"{what} is not supported with a k_cache of {cache.k.dtype}; pass caches in bf16")
    batch = cache.lengths.shape[0]  # what decode checks is checked before anything is appended
    if cu_seqlens_q is not None and not is_compiling() and values.wanted(q.device, False):
        values.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_heads(q.shape[-2], cache.k.shape[2])
    check_size("k_cache", "head_dim", cache.k.shape[3], q.shape[-1], "q")
    decoding.slopes_of(given.alibi_slopes, q, batch, "q")
    if given.sink is not None:
        check_sink(given.sink, q, q.shape[-2])
    if type(cache.leftpad) is Tensor and not is_compiling() and values.wanted(q.device, False):  # a fake tensor has no values
        values.check_padding(cache.leftpad, (cache.lengths + _new(k, cu_seqlens_k_new)).tolist())
    for name, x, scale in (("k", cache.k, cache.k_scale), ("v", cache.v, cache.v_scale)):
        if scale is not None:
            decoding.scale_of(name, scale, x, batch, "q")
    if qv is not None:
        check_tensor("qv", qv, axes)
        translate.check_second_part(q, cache.v, qv, "v_cache")
    if rotary is not None:
        decoding.check_rotary(rotary.cos, rotary.sin, q, "")
        if rotary.first is not None:
            check_tensor("rotary_first", rotary.first, ("batch",), INDEX_DTYPES)
            check_size("rotary_first", "batch", rotary.first.shape[0], batch, "q")
            check_like("rotary_first", rotary.first, q, same_dtype=False)
        first = (cache.lengths if rotary.first is None else rotary.first).to(torch.int64)
        owner, place = _tokens(q, cu_seqlens_q)
        q = rotary.turn(q, first[owner] + (place if given.local else 0))
    if k is not None and v is not None:
        turn: Turn = {} if rotary is None else rotary.of_keys()
        decoding.append(cache.k, cache.v, k, v, **cache.places(), cu_seqlens=cu_seqlens_k_new, **turn)
        cache = replace(cache, lengths=cache.lengths + _new(k, cu_seqlens_k_new))
    if qv is not None or from_padding:
        return _attend_packed(q, cache, given, qv, cu_seqlens_q)
    given = translate.with_scale(given, q)
    one, two, three = map(translate.padded, (q, cache.k, cache.v))
    o, lse = decoding.decode(
        one,
        two,
        three,
        **cache.places(),
        **given.keywords(),
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        leftpad=cache.leftpad,
        cu_seqlens_q=cu_seqlens_q,
        return_lse=True,
    )
    return o[..., : cache.v.shape[-1]], lse


def _new(k: Tensor | None, cu_seqlens: Tensor | None) -> int | Tensor:
    """How many tokens are appended to each sequence."""
    return 0 if k is None else k.shape[1] if cu_seqlens is None else cu_seqlens.diff()


def _tokens(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sequence that each token of x is in, and its place there: (batch, seqlen), or (total,) of packed sequences."""
    if cu_seqlens is None:
        owner, places = (torch.arange(n, dtype=torch.int64, device=x.device) for n in x.shape[:2])
        return owner[:, None].expand(x.shape[:2]), places.expand(x.shape[:2])
    owner = sequence_of(cu_seqlens, x.shape[0])
    return owner, torch.arange(x.shape[0], dtype=torch.int64, device=x.device) - cu_seqlens.long()[owner]


def _attend_packed(
    q: Tensor, cache: Cache, given: translate.Options, qv: Tensor | None, cu_seqlens_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries of any lengths, or of two parts, against copies of what the cache holds."""
    k, v, cu_seqlens_k = cache.packed()
    of_k = translate.Packed(cu_seqlens_k)
    if cu_seqlens_q is not None:
        return translate.attend_packed(q, k, v, translate.Packed(cu_seqlens_q), of_k, given, qv=qv)
    shape, flat_qv = q.shape[:2], qv if qv is None else qv.flatten(0, 1)
    o, lse = translate.attend_packed(q.flatten(0, 1), k, v, translate.Packed.of_batch(q), of_k, given, qv=flat_qv)
    return o.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
