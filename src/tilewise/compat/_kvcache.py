"""Key/value caches as the peers' functions describe them: appending in place, rotary positions, and their slots as pages for `decode`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise import decoding
from tilewise.compat import _translate as translate
from tilewise.compat.rotary import rotated, sequence_of
from tilewise.errors import ShapeError, check_like, check_size, check_tensor

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """k (rows, capacity, heads_k, head_dim) and v likewise, or pages of them where there is a page table.

    lengths (batch,): the tokens that each sequence has, counted from its row's begin; those before leftpad (batch,) are none.
    batch_idx (batch,): the row of each sequence, of the page table where there is one. page_table (batch, max_pages): the pages of each sequence.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, batch: int, cache_seqlens: int | Tensor | None, **places: Tensor | None) -> "Cache":
        """The cache, its tensors checked; cache_seqlens None is its whole capacity, an int the same for all."""
        for name, x in (("k_cache", k), ("v_cache", v)):
            check_tensor(name, x, ("pages or batch", "page_size or capacity", "heads_k", "head_dim"))
        check_size("v_cache", "shape before head_dim", v.shape[:3], k.shape[:3], "k_cache")
        table, rows = places.get("page_table"), places.get("batch_idx")
        for name, x in places.items():
            if x is not None:
                label = name if name == "page_table" else f"cache_{name}"
                check_tensor(label, x, ("batch", "max_pages") if name == "page_table" else ("batch",), INDEX_DTYPES)
                if name != "page_table" or rows is None:
                    check_size(label, "batch", x.shape[0], batch, "q")
        if table is None and places.get("batch_idx") is None:
            check_size("k_cache", "batch", k.shape[0], batch, "q")
        capacity = k.shape[1] * (1 if table is None else table.shape[1])
        if cache_seqlens is None or isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((batch,), capacity if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=k.device)
        check_tensor("cache_seqlens", cache_seqlens, ("batch",), INDEX_DTYPES)
        check_size("cache_seqlens", "batch", cache_seqlens.shape[0], batch, "q")
        cache = cls(k=k, v=v, lengths=cache_seqlens, **places)
        cache.check()
        if table is not None and rows is not None:
            cache = replace(cache, page_table=table[rows.long()], batch_idx=None)
        return cache

    @property
    def capacity(self) -> int:
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    def check(self, more: int | Tensor = 0) -> None:
        """Refuse lengths (plus `more` new tokens) that the cache does not hold, and rows that it does not have; reads them."""
        if is_compiling():
            return
        for b, length in enumerate((self.lengths + more).tolist()):
            if not 0 <= length <= self.capacity:
                pages = (
                    ""
                    if self.page_table is None
                    else f", for page_table has {self.page_table.shape[1]} pages of {self.k.shape[1]} tokens a sequence"
                )
                new = " with the new tokens" if isinstance(more, Tensor) or more else ""
                raise ShapeError(
                    f"cache_seqlens[{b}] is {length}{new}, but the cache holds {self.capacity} tokens a sequence{pages}; make it larger"
                )
        rows = self.k.shape[0] if self.page_table is None else self.page_table.shape[0]
        for name, x, most in (("batch_idx", self.batch_idx, rows - 1), ("leftpad", self.leftpad, self.capacity)):
            if x is not None and bool(((x < 0) | (x > most)).any()):
                raise ShapeError(f"cache_{name} must be between 0 and {most}, got {x.tolist()}")
        if self.leftpad is not None and bool((self.leftpad > self.lengths + more).any()):
            raise ShapeError(
                f"cache_leftpad {self.leftpad.tolist()} is beyond the lengths of the sequences, {(self.lengths + more).tolist()}"
            )

    def _slots(self, owner: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.page_table is None:
            return owner if self.batch_idx is None else self.batch_idx[owner].long(), positions
        return self.page_table[owner, positions // self.k.shape[1]].long(), positions % self.k.shape[1]

    def slots(self, owner: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Row or page, and place in it, of the tokens at these positions of sequences `owner`; pages that do not exist are refused."""
        pages, places = self._slots(owner, positions)
        if self.page_table is not None and not is_compiling() and bool(((pages < 0) | (pages >= self.k.shape[0])).any()):
            raise ShapeError(f"page_table names pages {pages.unique().tolist()}, but k_cache has pages 0..{self.k.shape[0] - 1}")
        return pages, places

    def append(self, k: Tensor, v: Tensor, owner: Tensor, positions: Tensor) -> None:
        """Write k, v (tokens, heads_k, head_dim) where their sequences' positions are."""
        for name, new, cache in (("k", k, self.k), ("v", v, self.v)):
            check_like(name, new, cache, other=f"{name}_cache")
            check_size(name, "(heads_k, head_dim)", new.shape[-2:], cache.shape[-2:], f"{name}_cache")
        slots = self.slots(owner, positions)
        self.k.index_put_(slots, k)
        self.v.index_put_(slots, v)

    def grown(self, more: int | Tensor) -> "Cache":
        return replace(self, lengths=self.lengths + more)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the tokens that are there, k and v (total, heads_k, head_dim), and their cu_seqlens."""
        first = torch.zeros_like(self.lengths) if self.leftpad is None else self.leftpad
        cu_seqlens = torch.nn.functional.pad((self.lengths - first).cumsum(0, dtype=torch.int32), (1, 0))
        owner = sequence_of(cu_seqlens, int(cu_seqlens[-1]))
        positions = torch.arange(owner.shape[0], dtype=torch.int64, device=owner.device) - cu_seqlens[owner] + first[owner]
        slots = self.slots(owner, positions)
        return self.k[slots], self.v[slots], cu_seqlens

    def pages(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """k, v, lengths and page table for `decode`: rows are pages as long as the capacity, padded rows pages of one token."""
        if self.leftpad is None:
            table = self.page_table if self.batch_idx is None else self.batch_idx[:, None]
            return self.k, self.v, self.lengths, table
        owner = torch.arange(self.lengths.shape[0], dtype=torch.int64, device=self.k.device)[:, None]
        places = torch.arange(self.capacity, dtype=torch.int64, device=self.k.device) + self.leftpad[:, None]
        rows, places = self._slots(owner, places.clamp(max=self.capacity - 1))
        table = rows * self.k.shape[1] + places
        return self.k.flatten(0, 1)[:, None], self.v.flatten(0, 1)[:, None], self.lengths - self.leftpad, table


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
    check_tensor("q", q, ("batch", "seqlen_q", "heads_q", "head_dim") if cu_seqlens_q is None else ("total_q", "heads_q", "head_dim"))
    check_like("k_cache", cache.k, q)
    first = cache.lengths.to(torch.int64) if rotary is None or rotary.first is None else rotary.first.to(torch.int64)
    if rotary is not None:
        owner, places = _tokens(q, cu_seqlens_q)
        q = rotary.turn(q, first[owner] + (places if given.local else 0))
    if (k is None) != (v is None):
        raise ShapeError(f"{'v' if v is None else 'k'} is missing: k and v are appended together, or neither")
    if k is not None:
        for name, x in (("k", k), ("v", v)):
            check_tensor(
                name,
                x,
                ("batch", "seqlen_new", "heads_k", "head_dim") if cu_seqlens_k_new is None else ("total_new", "heads_k", "head_dim"),
            )
            if cu_seqlens_k_new is None:
                check_size(name, "batch", x.shape[0], cache.lengths.shape[0], "cache_seqlens")
        more = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        cache.check(more)
        owner, places = _tokens(k, cu_seqlens_k_new)
        new = k if rotary is None else rotary.turn(k, first[owner] + places)
        positions = cache.lengths[owner] + places
        if cu_seqlens_k_new is None:
            new, v, owner, positions = new.flatten(0, 1), v.flatten(0, 1), owner.flatten(), positions.flatten()
        cache.append(new, v, owner, positions)
        cache = cache.grown(more)
    if cu_seqlens_q is not None or qv is not None:
        return _attend_packed(q, cache, given, qv, cu_seqlens_q)
    given = translate.with_scale(given, q)
    keys, values, lengths, table = cache.pages()
    one, two, three = map(translate.padded, (q, keys, values))
    o, lse = decoding.decode(one, two, three, cache_seqlens=lengths, page_table=table, **given.keywords(), return_lse=True)
    return o[..., : values.shape[-1]], lse


def _tokens(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sequence that each token of x is in, and its place there: (batch, seqlen), or (total,) of packed sequences."""
    if cu_seqlens is None:
        owner, places = (torch.arange(n, dtype=torch.int64, device=x.device) for n in x.shape[:2])
        return owner[:, None].expand(x.shape[:2]), places.expand(x.shape[:2])
    check_tensor("cu_seqlens", cu_seqlens, ("batch + 1",), INDEX_DTYPES)
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
    flat, shape = (x if x is None else x.flatten(0, 1) for x in (q, qv)), q.shape[:2]
    flat_q, flat_qv = flat
    o, lse = translate.attend_packed(flat_q, k, v, translate.Packed.of_batch(q), of_k, given, qv=flat_qv)
    return o.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
