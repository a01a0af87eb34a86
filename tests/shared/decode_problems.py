"""Problems of decoding: caches whose unused tokens and pages are NaN, and what each sequence's result is held to."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.backends.hopper.decode import call as decoding
from tilewise.masks import Causal, Dense, Mask
from tilewise.masks.mask import Combined
from tilewise.problem import Call, DecodeCall, Rotary
from tilewise.runtime import decode_operator
from tilewise.testing import tolerance

CAUSAL = Causal()
BEHIND = 5  # rows of ragged queries behind the last sequence


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """lengths: tokens of each sequence. queries: of every sequence, or of each. page: tokens of a page; 0: contiguous caches."""

    lengths: tuple[int, ...]
    queries: int | tuple[int, ...] = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    page: int = 0
    capacity: int | None = None
    mask: Mask = CAUSAL
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    leftpad: tuple[int, ...] | None = None
    entries: bool = False  # the cache's entries in another order, and more of them
    split: int | None = None
    prefix: int = 0  # so many first tokens are the same for all
    latent: bool = False  # v_cache is the first columns of k_cache, in the same memory
    tree: int = 0  # newest tokens that see each other as in a random tree; all of them are queries
    dtype: torch.dtype = torch.bfloat16


def made(case: DecodeCase, seed: int = 0, device: str = "cpu") -> DecodeCall:
    """Every number of the caches that no sequence has is NaN; pages are in random order, and entries of the table behind a length's last are wild."""
    draw = torch.Generator().manual_seed(seed)
    ints = {"dtype": torch.int32, "device": "cpu"}

    def normal(*shape) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(case.dtype)

    batch, (heads_q, heads_k) = len(case.lengths), case.heads
    ragged = isinstance(case.queries, tuple)
    queries = case.queries if isinstance(case.queries, tuple) else (case.queries,) * batch
    capacity = case.capacity or max(*case.lengths, 1)
    table = entries = None
    if case.page:
        width = -(-capacity // case.page)
        needed = [-(-n // case.page) for n in case.lengths]
        shape, order = (sum(needed) + 3, case.page), torch.randperm(sum(needed) + 3, generator=draw, device="cpu").tolist()
        table = torch.full((batch, width), 2**31 - 1, **ints)
        table[:, 1::2] = -7
        for b, n in enumerate(needed):
            table[b, :n] = torch.tensor([order.pop() for _ in range(n)], **ints)
    else:
        shape = (batch + 2 * case.entries, capacity)
        if case.entries:
            entries = torch.randperm(batch + 2, generator=draw, device="cpu")[:batch].int()
    caches = [torch.full((*shape, heads_k, dim), math.nan, dtype=case.dtype, device="cpu") for dim in case.dims]
    same = {dim: normal(case.prefix, heads_k, dim) for dim in case.dims}
    for b, n in enumerate(case.lengths):
        first = case.leftpad[b] if case.leftpad else 0
        for cache, dim in zip(caches, case.dims, strict=True):
            rows = normal(n, heads_k, dim)
            rows[:first] = math.nan
            if case.prefix:
                rows[: case.prefix] = same[dim][:n]
            if table is None:
                cache[b if entries is None else int(entries[b]), :n] = rows
            else:
                for p in range(-(-n // case.page)):
                    part = rows[p * case.page : (p + 1) * case.page]
                    cache[int(table[b, p]), : len(part)] = part
    q = normal(sum(queries) + BEHIND, heads_q, case.dims[0]) if ragged else normal(batch, queries[0], heads_q, case.dims[0])
    cu = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], **ints) if ragged else None
    numbers = torch.linspace(0.05, 1.0, heads_q, dtype=torch.float32, device="cpu")
    call = DecodeCall(
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        seqlens=torch.tensor(case.lengths, **ints),
        page_table=table,
        cu_seqlens_q=cu,
        max_seqlen_q=max(queries),
        cache_batch_idx=entries,
        leftpad=torch.tensor(case.leftpad, **ints) if case.leftpad else None,
        tree=random_trees(batch, case.tree, draw) if case.tree else None,
        shared_prefix=case.prefix,
        split=case.split,
        mask=case.mask,
        scale=case.dims[0] ** -0.5,
        softcap=case.softcap,
        alibi_slopes=numbers[None] if case.alibi else None,
        sink=3.0 * numbers if case.sink else None,
    )
    moved = {name: x.to(device) for name, x in vars(call).items() if isinstance(x, Tensor)}
    call = replace(call, **moved)
    return replace(call, v_cache=call.k_cache[..., : case.dims[1]]) if case.latent else call


INDICES = "seqlens", "page_table", "cu_seqlens_q", "cache_batch_idx", "leftpad"


def with_int64(call: DecodeCall, names: Iterable[str] = INDICES) -> DecodeCall:
    """The call with these of its index tensors in int64, whose wild entries are as far out as int64 goes."""
    wide = {name: x.long() for name in names if (x := getattr(call, name)) is not None}
    if "page_table" in wide:
        table = wide["page_table"]
        wide["page_table"] = torch.where(table == 2**31 - 1, (1 << 40) + 1, torch.where(table == -7, -(1 << 40), table))
    return replace(call, **wide)


def with_eight_bits(
    call: DecodeCall, kinds: tuple[torch.dtype, torch.dtype], scales: tuple[str | None, str | None], seed: int = 0
) -> tuple[DecodeCall, DecodeCall]:
    """The call with caches of 8 bits, and with what they stand for, in q's dtype. A scale is for "all", each "head", "sequence" or "token"; those of
    tokens are any numbers, the others powers of two, whose products are exact. What was NaN is so, or has such a scale where int8 has none.
    """
    draw, found, exact = torch.Generator().manual_seed(seed), {}, {}
    for name, kind, per in zip("kv", kinds, scales, strict=True):
        cache = getattr(call, f"{name}_cache")
        entries, places, heads, _ = cache.shape
        shape = {None: None, "all": (), "head": (heads,), "sequence": (call.seqlens.shape[0], heads), "token": (entries, places, heads)}[
            per
        ]
        scale = None
        if shape is not None:
            scale = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(cache.device)
            scale = scale.abs() + 0.1 if per == "token" else scale.round().exp2()
        wide = cache.float() * (1.0 if kind == torch.float8_e4m3fn else 20.0)
        if kind == torch.int8:
            wide = wide.nan_to_num(77.0).round().clamp(-128, 127)
        eight = wide.to(kind)
        if scale is not None and per == "token":
            share_prefix(call, scale)
            scale = torch.where(cache.isnan().any(-1), math.nan, scale)
        found |= {f"{name}_cache": eight, f"{name}_scale": scale}
        exact[f"{name}_cache"] = stand_for(call, eight, scale)
    return replace(call, **found), replace(call, **exact)


def share_prefix(call: DecodeCall, scale: Tensor) -> None:
    """Tokens that are the same have the same scale: those of the common prefix, wherever each sequence has them."""
    if call.page_table is None:
        scale[:, : call.shared_prefix] = scale[:1, : call.shared_prefix]
        return
    owner, page = int(call.seqlens.argmax()), scale.shape[1]
    for b in (owner, *range(len(call.seqlens))):
        tokens = torch.arange(min(call.shared_prefix, int(call.seqlens[b])), dtype=torch.int64, device=scale.device)
        here, there = (call.page_table[each, tokens // page].long() for each in (b, owner))
        scale[here, tokens % page] = scale[there, tokens % page]


def stand_for(call: DecodeCall, cache: Tensor, scale: Tensor | None) -> Tensor:
    """A cache's numbers times their scales, in q's dtype. Scales of sequences are those of entries, so a cache has no pages then."""
    if scale is None:
        return cache.to(call.q.dtype)
    if scale.dim() == 2:
        assert call.page_table is None and call.cache_batch_idx is None
        scale = scale[:, None]
    return (cache.to(torch.float64 if call.q.dtype == torch.float64 else torch.float32) * scale[..., None]).to(call.q.dtype)


def by_kernel(call: DecodeCall, *cut: decoding.Cut, **tuning) -> tuple[Tensor, Tensor]:
    """What Hopper's kernel gives, found for this call alone; the others as `decode.call.bind` has them."""
    bound = decoding.bind(call, *cut, **tuning)
    assert bound is not None, decoding.why_not(call)
    return bound(call.tensors, call.seqlens)


def with_rotary(call: DecodeCall, half: int, interleaved: bool, dtype: torch.dtype = torch.float32) -> tuple[DecodeCall, DecodeCall]:
    """The call with queries that are yet to be rotated, and as it then is."""
    positions = int(call.seqlens.max()) + 1
    angles = torch.randn(positions, half, generator=torch.Generator().manual_seed(half), dtype=torch.float32, device="cpu")
    tables = (x.to(call.q.device, dtype) for x in (angles.cos(), angles.sin()))
    given = replace(call, rotary=Rotary(*tables, interleaved))
    return given, decode_operator._rotated(given)


def random_trees(batch: int, new: int, draw: torch.Generator) -> Tensor:
    """(batch, new, new) bool: each token sees itself and its ancestors; its parent is drawn from those before it."""
    trees = torch.eye(new, dtype=torch.bool, device="cpu").repeat(batch, 1, 1)
    for tree in trees:
        for i in range(1, new):
            tree[i] |= tree[int(torch.randint(0, i, (1,), generator=draw, device="cpu"))]
    return trees


def parts(call: DecodeCall, o: Tensor, lse: Tensor) -> list[tuple[Call, Tensor, Tensor]]:
    """Each sequence alone, as a call of attention, and what there is of O and LSE for it."""
    found = []
    capacity = call.k_cache.shape[1] * (1 if call.page_table is None else call.page_table.shape[1])
    for b, n in enumerate(call.seqlens.clamp(0, capacity).tolist()):
        rows = slice(None) if call.cu_seqlens_q is None else slice(*call.cu_seqlens_q[b : b + 2].tolist())
        q, of_o = (x[b : b + 1] if call.cu_seqlens_q is None else x[None, rows] for x in (call.q, o))
        of_lse = lse[b : b + 1] if call.cu_seqlens_q is None else lse[None, :, rows]
        first = 0 if call.leftpad is None else min(int(call.leftpad[b]), n)
        k, v = (sequence(call, x, b, n)[None, first:] for x in (call.k_cache, call.v_cache))
        slopes = call.alibi_slopes
        slopes = slopes if slopes is None or slopes.shape[0] == 1 else slopes[b : b + 1]
        changes = {"softcap": call.softcap, "alibi_slopes": slopes, "sink": call.sink}
        mask = of_sequence(call.mask, b, q.shape[1], n, first)
        if call.tree is not None and k.shape[1]:
            mask = shown_by(call.tree[min(b, call.tree.shape[0] - 1)], q.shape[1], k.shape[1]) & mask
        found.append((Call(q=q, k=k, v=v, mask=mask, scale=call.scale, **changes), of_o, of_lse))
    return found


def of_sequence(mask: Mask, b: int, queries: int, length: int, first: int) -> Mask:
    """A mask of all sequences as one of them has it, whose keys begin with the `first`; a Dense one in it spans the capacity."""
    match mask:
        case Dense(tensor=shown):
            return Dense(shown[min(b, shown.shape[0] - 1)][None, ..., first:length])
        case Combined(operation="&", left=Dense() as dense, right=right):
            return of_sequence(dense, b, queries, length, first) & right
    return Dense(mask.dense(queries, length)[..., first:]) if first and str(mask).startswith("Prefix") else mask


def shown_by(tree: Tensor, queries: int, keys: int) -> Mask:
    """What queries see of keys as far as the tree of the newest has a say."""
    new = tree.shape[0]
    shown = torch.ones(queries, keys, dtype=torch.bool, device=tree.device)
    seen, rows = min(new, keys), min(queries, new)
    shown[queries - rows :, keys - seen :] = tree[new - rows :, new - seen :]
    return Dense(shown)


def sequence(call: DecodeCall, cache: Tensor, b: int, n: int) -> Tensor:
    """(n, heads_k, dim): a sequence's tokens in a cache."""
    if call.page_table is None:
        return cache[b if call.cache_batch_idx is None else int(call.cache_batch_idx[b]), :n]
    pages = call.page_table[b, : -(-n // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[:n]


def held(call: DecodeCall, o: Tensor, lse: Tensor) -> None:
    """Each sequence by the one tolerance; rows without keys exactly."""
    for alone, of_o, of_lse in parts(call, o, lse):
        blind = blind_rows(alone)
        assert not of_o[:, :blind].any()
        want = torch.full_like(of_lse, -math.inf) if alone.sink is None else alone.sink[None, :, None].expand_as(of_lse).to(of_lse.dtype)
        torch.testing.assert_close(of_lse[..., :blind], want[..., :blind], rtol=1e-6, atol=1e-6)
        if 0 < blind < alone.q.shape[1]:
            shown = alone.mask.dense(*(x.shape[1] for x in (alone.q, alone.k)))[..., blind:, :]
            alone = replace(alone, q=alone.q[:, blind:], mask=Dense(shown.to(o.device)))
        if blind < of_o.shape[1]:
            tolerance.check_outputs(alone, of_o[:, blind:], of_lse[..., blind:])
    if call.cu_seqlens_q is not None:
        behind = int(call.cu_seqlens_q[-1])
        assert not o[behind:].any() and (lse[:, behind:] == -math.inf).all()


def blind_rows(alone: Call) -> int:
    """How many queries, from the first on, see nothing because there are more of them than keys: they say nothing of errors."""
    queries, keys = alone.q.shape[1], alone.k.shape[1]
    if queries <= keys or keys == 0:
        return 0 if keys else queries
    seen = alone.mask.dense(queries, keys).transpose(-1, -2).flatten(0, -2).any(0)
    return int(seen.to(torch.uint8).argmax()) if seen.any() else queries
