"""Random calls of decode that cross all its features, in poisoned memory, each held to the oracle, to its sequences alone, and to what it may write.

A kind has what a kernel is compiled for; a problem of that kind has any sizes and values, so that a bounded number of kernels serves many problems.
"""

import math
from dataclasses import dataclass, replace
from random import Random

import torch
from decode_problems import (
    CAUSAL,
    INDICES,
    DecodeCase,
    held,
    made,
    parts,
    random_trees,
    stand_for,
    with_eight_bits,
    with_int64,
    with_rotary,
)  # fmt: skip
from torch import Tensor

import tilewise as tw
from tilewise.masks import Causal, Dense, Full, Mask, PerHead, PrefixLM, SlidingWindow
from tilewise.masks.mask import Combined
from tilewise.problem import DecodeCall
from tilewise.testing import tolerance

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
SIXTEEN = torch.bfloat16, torch.float16
TILES = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
LATENT = (576, 512), (320, 256)
EDGES = 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025
RENAMED = {"k_cache": "k", "v_cache": "v"}  # what attention_varlen calls them
OF_VARLEN = {*RENAMED, "q", "cu_seqlens_q", "cache_seqlens", "page_table", "mask", "causal", "scale", "softcap", "alibi_slopes", "sink", "k_scale",
             "v_scale", "shared_prefix"}  # fmt: skip
INDEX_WORDS = {"seqlens": "cache_seqlens"} | {name: name for name in INDICES[1:]}


@dataclass(frozen=True, kw_only=True)
class Kind:
    dtype: torch.dtype
    dims: tuple[int, int]  # of the tile that holds the heads
    latent: bool = False
    box: int = 0  # contiguous caches; else pages are odd multiples of so many tokens, or of any size where it is 1
    ragged: bool = False
    entries: bool = False
    leftpad: bool = False
    tree: bool = False
    split: bool = False
    prefix: bool = False
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    general: bool = False  # a mask that no kernel takes whole
    eight: tuple[torch.dtype, torch.dtype] | None = None
    scales: tuple[str | None, str | None] = (None, None)
    rotary: tuple[int, bool, torch.dtype] | None = None  # pairs, interleaved, dtype of the tables
    wide: tuple[str, ...] = ()  # index tensors in int64
    new: str = ""  # tokens that the call appends: "each" sequence has as many, or "packed" as queries are


def kind(seed: int, kernels: bool) -> Kind:
    """`kernels`: only what a kernel of a GPU takes, but for the unlikely."""
    r = Random(seed)
    latent, eight = r.random() < 0.15, None
    dims = r.choice(LATENT if latent and (kernels or r.random() < 0.3) else TILES)
    dtype = r.choice(SIXTEEN if kernels else (*SIXTEEN, torch.float32, torch.float32, torch.float64))
    box = r.choice((0, 0, 1, 8, 16, 32, 64, 128))
    box = 16 if kernels and latent and box == 1 else box
    leftpad, prefix, scales = r.random() < 0.25, r.random() < 0.2, (None, None)
    entries, rotary = not box and r.random() < 0.4, None
    if not latent and r.random() < 0.3:
        eight = r.choice(((E4M3, E4M3), (E4M3, E4M3), (INT8, INT8), (E4M3, INT8), (INT8, E4M3)))
        per = None, "all", "head", "token", *([] if box or entries else ["sequence"])
        scales = r.choice(per), r.choice(per)
    if r.random() < 0.3 and not (kernels and (latent or prefix)):
        rotary = (
            r.choice((4, 8, 16, 24, dims[0] // 2)) if not kernels else r.choice((8, 16, 32)),
            r.random() < 0.5,
            r.choice((*SIXTEEN, torch.float32)),
        )
    ragged = r.random() < 0.5
    new = r.choice(("", "", "each", "packed" if ragged else "each"))
    return Kind(
        dtype=dtype, dims=dims, latent=latent, box=box, ragged=ragged, entries=entries, leftpad=leftpad and not (kernels and prefix),
        tree=r.random() < 0.2, split=r.random() < 0.3, prefix=prefix, softcap=r.random() < 0.25, alibi=r.random() < 0.25 and not (kernels and prefix),
        sink=r.random() < 0.3, general=not kernels and r.random() < 0.2, eight=eight, scales=scales, rotary=rotary,
        wide=r.choice(((), (), INDICES, (r.choice(INDICES),))), new="" if rotary and (eight or latent) else new,
    )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """call: with all tokens in their caches. given: what the public function takes, whose caches lack the new tokens, (k, v) or nothing."""

    call: DecodeCall
    given: dict
    new: tuple[tuple[Tensor, Tensor], list[int]] | None  # and how many each sequence has

    def __str__(self) -> str:
        words = {name: (*x.shape, x.dtype) if isinstance(x, Tensor) else x for name, x in self.given.items()}
        return f"{words}, lengths {self.call.seqlens.tolist()}"


def problem(kind: Kind, seed: int, device: str = "cpu", most: int = 300) -> Problem:
    """most: tokens of a sequence, but for a few problems that have several times as many."""
    r, draw = Random(seed), torch.Generator().manual_seed(seed)
    case = case_of(kind, r, most)
    call = made(case, seed)
    if not kind.new and not kind.prefix and kind.scales.count("sequence") == 0 and r.random() < 0.3:
        call = with_shared_places(call, r)
    elif r.random() < 0.5:
        hide(call)
    if kind.eight:
        call, _ = with_eight_bits(call, kind.eight, kind.scales, seed)
    scale = r.choice((call.scale, call.scale, 0.3, 1.0 / math.pi))
    changes: dict = {"scale": scale / 32 if call.k_cache.dtype == INT8 else scale}  # scores as of other data
    if kind.tree:
        new = r.choice((1, 2, 3, 7, 12))
        changes["tree"] = random_trees(r.choice((1, len(case.lengths))), new, draw)
    if kind.alibi and r.random() < 0.5:
        changes["alibi_slopes"] = torch.rand(len(case.lengths), case.heads[0], generator=draw, dtype=torch.float32, device="cpu")
    call = with_int64(replace(call, **changes), kind.wide)
    moved = {name: x.to(device) for name, x in vars(call).items() if isinstance(x, Tensor)}
    call = replace(call, **moved)
    if kind.latent:
        call = replace(call, v_cache=call.k_cache[..., : case.dims[1]])
    else:
        how = r.choice(LAYOUTS)
        how = "as it is" if kind.box and how in UNREADABLE else how
        call = replace(call, **{name: laid_out(getattr(call, name), how) for name in ("k_cache", "v_cache")})
    call = replace(call, q=laid_out(call.q, r.choice(LAYOUTS)))
    tables = {}
    if kind.rotary:
        half, interleaved, dtype = kind.rotary
        given, call = with_rotary(call, min(half, case.dims[0] // 2), interleaved, dtype)
        tables = {"rotary_cos": given.rotary.cos, "rotary_sin": given.rotary.sin, "interleaved": interleaved}
        tolerance.check("q", call.q, turned(given, torch.float64), turned(given, call.q.dtype))
        raw = given.q
    else:
        raw = call.q
    counts = new_tokens(kind, case, r)
    given = words_of(call, raw, counts, r) | tables
    if counts is None:
        return Problem(call, given, None)
    new = taken(call, counts, packed=kind.new == "packed")
    lengths = call.seqlens - torch.tensor(counts, dtype=call.seqlens.dtype, device=device)
    return Problem(call, given | {"k": new[0], "v": new[1], "cache_seqlens": lengths}, (new, counts))


def case_of(kind: Kind, r: Random, most: int) -> DecodeCase:
    longest = most if r.random() < 0.9 else 5 * most
    batch = r.choice((1, 2, 3, 3, 4, 5, 7))
    page = 0 if not kind.box else r.choice((1, 2, 3, 5, 7, 12, 20, 100, 300)) if kind.box == 1 else kind.box * r.choice((1, 1, 3, 5))
    edges = [x for x in (*EDGES, page - 1, page, page + 1, 2 * page) if 0 <= x <= longest]
    lengths = [r.choice((0, 1, r.choice(edges), r.randint(0, longest), r.randint(0, longest))) for _ in range(batch)]
    if r.random() < 0.2:
        lengths = [lengths[0]] * batch
    prefix = r.choice((1, page or 16, most // 2)) if kind.prefix else 0
    few = r.choice((1, 1, 2, 4, 20, 70))
    queries = tuple(r.choice((0, 1, 1, r.randint(0, few))) for _ in lengths) if kind.ragged else few
    dims = dims_of(kind, r)
    heads_k = r.choice((1, 1, 2)) if kind.latent else r.choice((1, 1, 2, 3, 8))
    group = r.choice((1, 1, 2, 3, 4, 5, 8, 16, 64))
    group = min(group, 64 // heads_k)
    mask = r.choice((CAUSAL, CAUSAL, Full(), Causal(offset=-r.randint(0, 5)), SlidingWindow(r.randint(0, most), r.randint(0, 5)) & CAUSAL,
                     SlidingWindow(r.randint(0, 100), r.randint(0, 9))))  # fmt: skip
    if kind.prefix and r.random() < 0.8:
        mask = CAUSAL
    heads, slack = (heads_k * group, heads_k), r.choice((0, 0, 1, 9))
    capacity = max(*lengths, 1) + slack
    if page:
        capacity = -(-capacity // page) * page
    if kind.general:
        mask = general(r, heads[0], batch, 1 if kind.ragged else few, capacity)
    return DecodeCase(
        lengths=tuple(lengths), queries=queries, heads=heads, dims=dims, page=page, capacity=capacity, mask=mask, dtype=kind.dtype,
        softcap=r.choice((1.0, 8.0, 30.0)) if kind.softcap else 0.0, alibi=kind.alibi, sink=kind.sink, entries=kind.entries, latent=kind.latent,
        leftpad=tuple(r.choice((0, n, r.randint(0, n))) for n in lengths) if kind.leftpad else None,
        split=r.choice((1, 64, 100, 256, 1000)) if kind.split else None, prefix=prefix,
    )  # fmt: skip


def dims_of(kind: Kind, r: Random) -> tuple[int, int]:
    """Heads that no smaller tile holds, but for those of all dimensions."""
    if kind.dims in LATENT:
        return r.choice(((576, 512), (448, 384), (392, 8)) if kind.dims == LATENT[0] else ((320, 256), (288, 256), (264, 8)))
    step = 16 if kind.eight else 8
    least = {64: step, 96: 64 + step, 128: 96 + step, 192: 128 + step, 256: 192 + step}[kind.dims[0]]
    dim = r.choice((kind.dims[0], r.randrange(least, kind.dims[0] + 1, step)))
    most = min(dim, kind.dims[1]) if kind.latent else kind.dims[1]
    return dim, r.choice((most, min(dim, most), r.randrange(step, most + 1, step)))


def general(r: Random, heads: int, batch: int, queries: int, capacity: int) -> Mask:
    if r.random() < 0.3:
        return PrefixLM(r.randint(0, 9)) & SlidingWindow(r.randint(0, 50), 0)
    if heads > 1 and r.random() < 0.5:
        return PerHead({(0, 1): Causal(), (1, heads): SlidingWindow(r.randint(0, 40), 0)})
    draw = torch.Generator().manual_seed(r.randint(0, 1 << 30))
    shape = r.choice((1, batch)), r.choice((1, heads)), r.choice((1, queries)), capacity
    shown = Dense(torch.rand(shape, generator=draw, dtype=torch.float32, device="cpu") < 0.7)
    return r.choice((shown, shown & CAUSAL))


def with_shared_places(call: DecodeCall, r: Random) -> DecodeCall:
    """Some sequences in the pages or entries of others that are as long or longer, from the same first token on."""
    names = [name for name in ("page_table", "cache_batch_idx") if getattr(call, name) is not None]
    if not names:
        return call
    fields = {name: x.clone() for name in ("seqlens", "leftpad", *names) if (x := getattr(call, name)) is not None}
    batch = call.seqlens.shape[0]
    for b in range(batch):
        other = r.randrange(batch)
        if other == b or r.random() < 0.5:
            continue
        for x in fields.values():
            x[b] = x[other]
        first = 0 if call.leftpad is None else int(fields["leftpad"][b])
        fields["seqlens"][b] = r.randint(first, int(fields["seqlens"][b]))
    return replace(call, **fields)


def hide(call: DecodeCall) -> None:
    """NaN in the caches where no query of a sequence sees a token."""
    lse = call.q.new_zeros(call.q.shape[:-1])
    for b, (alone, _, _) in enumerate(parts(call, call.q, lse.movedim(-1, -2) if call.cu_seqlens_q is None else lse.T)):
        n, queries, keys = int(call.seqlens[b]), alone.q.shape[1], alone.k.shape[1]
        seen = alone.mask.dense(queries, keys).flatten(0, -2).any(0)
        entries, rows = slots(call, b, n - keys, n)
        for cache in (call.k_cache, call.v_cache):
            cache[entries[~seen], rows[~seen]] = math.nan


def slots(call: DecodeCall, b: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Where tokens first:last of a sequence lie: pages or entries, and places there."""
    at = torch.arange(first, last, dtype=torch.int64, device=call.k_cache.device)
    if call.page_table is not None:
        size = call.k_cache.shape[1]
        return call.page_table[b, at // size].long(), at % size
    return torch.full_like(at, b if call.cache_batch_idx is None else int(call.cache_batch_idx[b])), at


LAYOUTS = "as it is", "as it is", "heads first", "behind each other", "wide rows", "every other number", "odd address"
UNREADABLE = LAYOUTS[-2:]  # by Hopper's kernels, which refuse pages that lie so


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same numbers, in memory that is NaN beside them."""
    if how == "heads first":
        view = _poisoned(x, *x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]).transpose(-2, -3)
    elif how == "behind each other":
        view = _poisoned(x, x.shape[0], 2, *x.shape[1:])[:, 1]
    elif how == "wide rows":
        step = 16 // x.element_size()
        view = _poisoned(x, *x.shape[:-1], x.shape[-1] + 3 * step)[..., step : -2 * step]
    elif how == "every other number":
        view = _poisoned(x, *x.shape, 2)[..., 1]
    elif how == "odd address":
        view = _poisoned(x, x.numel() + 1)[1:].view(x.shape)
    else:
        return x
    return view.copy_(x)


def _poisoned(x: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, 113 if x.dtype == INT8 else math.nan, dtype=torch.float32, device=x.device).to(x.dtype)


def turned(call: DecodeCall, dtype: torch.dtype) -> Tensor:
    """Rotated queries, by the formula."""
    cos, sin, interleaved = call.rotary
    if call.cu_seqlens_q is None:
        at = call.seqlens[:, None].long() - call.q.shape[1] + torch.arange(call.q.shape[1], dtype=torch.int64, device=call.q.device)
    else:
        at = torch.zeros(call.q.shape[0], dtype=torch.int64, device=call.q.device)
        for b, n in enumerate(call.seqlens.tolist()):
            first, last = call.cu_seqlens_q[b : b + 2].tolist()
            at[first:last] = torch.arange(n - last + first, n, dtype=torch.int64, device=call.q.device)
    return rotated_at(call.q, at.clamp(min=0), cos, sin, interleaved, dtype)


def rotated_at(x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    half, found = cos.shape[1], x.to(dtype).clone()
    c, s = (table.to(dtype)[at][..., None, :] for table in (cos, sin))
    one, two = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    a, b = (x[..., each].to(dtype) for each in (one, two))
    found[..., one], found[..., two] = a * c - b * s, b * c + a * s
    return found


def new_tokens(kind: Kind, case: DecodeCase, r: Random) -> list[int] | None:
    """How many each sequence has, none where a call appends nothing."""
    if kind.new == "packed" and all(q <= n for q, n in zip(case.queries, case.lengths, strict=True)):
        return list(case.queries)
    least = min(case.lengths)
    if kind.new != "each" or least == 0:
        return None
    return [r.randint(1, min(least, 6))] * len(case.lengths)


def words_of(call: DecodeCall, q: Tensor, counts: list[int] | None, r: Random) -> dict:
    """What decode takes for the call, but for new tokens."""
    words = {"q": q, "k_cache": call.k_cache, "v_cache": call.v_cache, "scale": call.scale, "softcap": call.softcap}
    words |= {"tree": call.tree, "sink": call.sink, "k_scale": call.k_scale, "v_scale": call.v_scale}
    words |= {"split": call.split, "shared_prefix": call.shared_prefix}
    words |= {word: getattr(call, name) for name, word in INDEX_WORDS.items()}
    slopes = call.alibi_slopes
    words["alibi_slopes"] = slopes[0] if slopes is not None and slopes.shape[0] == 1 and r.random() < 0.5 else slopes
    if call.mask != CAUSAL:
        dense = isinstance(call.mask, Combined) and isinstance(call.mask.left, Dense)
        words |= {"mask": call.mask.left, "causal": True} if dense else {"mask": call.mask, "causal": False}
    lengths = set(call.seqlens.tolist())
    if len(lengths) == 1 and counts is None and r.random() < 0.5:
        full = lengths == {call.k_cache.shape[1] * (1 if call.page_table is None else call.page_table.shape[1])}
        words["cache_seqlens"] = None if full else lengths.pop()
    for name, x in words.items():
        if name in INDEX_WORDS.values() and isinstance(x, Tensor) and r.random() < 0.2:
            words[name] = torch.stack((x, x.flip(0)), -1)[..., 0]
    return {name: x for name, x in words.items() if x is not None}


def taken(call: DecodeCall, counts: list[int], packed: bool) -> tuple[Tensor, Tensor]:
    """The newest tokens out of their caches, where NaN is instead; NaN also in rows behind the last sequence."""
    lengths, found = call.seqlens.tolist(), []
    where = [slots(call, b, n - new, n) for b, (n, new) in enumerate(zip(lengths, counts, strict=True))]
    for cache in (call.k_cache, call.v_cache):
        rows = [cache[each] for each in where]
        rows.append(_poisoned(cache, call.q.shape[0] - sum(counts) if packed else 0, *cache.shape[2:]))
        found.append(torch.cat(rows) if packed else torch.cat(rows).unflatten(0, (len(counts), -1)))
    if call.v_cache.data_ptr() == call.k_cache.data_ptr():
        found[1] = found[0][..., : call.v_cache.shape[-1]]
    for cache in (call.k_cache, call.v_cache):
        for each in where:
            cache[each] = _poisoned(cache, 1)[0]
    return found[0], found[1]


def checked(problem: Problem, alone: bool, run=tw.decode, backend: str | None = None) -> None:
    """alone: whether each sequence by itself has to have its bits. run: how decode is called, of `backend`."""
    call, given = problem.call, problem.given
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
    o, lse = run(**given, return_lse=True)
    wrote = _only_new_tokens(problem, before)
    for name, x in before.items():
        assert name in ("k_cache", "v_cache") or _same(given[name], x), f"{name} was written to"
    held(exact(wrote), o, lse)
    assert all(map(torch.equal, run(**given, return_lse=True), (o, lse))), "the call has other bits when it is repeated"
    out = torch.full_like(o, math.nan)
    assert run(**given, out=out) is out and torch.equal(out, o), "out= has other bits"
    if not given.keys() - OF_VARLEN and given.keys() >= {"cu_seqlens_q", "page_table"} and not call.shared_prefix:
        words = {name: x for name, x in given.items() if name in OF_VARLEN and name not in ("shared_prefix", "cache_seqlens", *RENAMED)}
        words |= {new: given[name] for name, new in RENAMED.items()} | {"causal": given.get("causal", True), "seqused_k": call.seqlens}
        assert torch.equal(tw.attention_varlen(**words, backend=backend), o), "attention_varlen has other bits"
    if alone:
        _held_alone(wrote, given, o, lse, run)


def _only_new_tokens(problem: Problem, before: dict) -> DecodeCall:
    """The call on the caches as they are now, in which new tokens, and nothing else, have been written."""
    call, given = problem.call, problem.given
    (k, v), counts = problem.new or ((call.k_cache, call.v_cache), [])
    turn = [given[name] for name in ("rotary_cos", "rotary_sin", "interleaved")] if "rotary_cos" in given else None
    for b, n in enumerate(counts):
        rows, length = slice(sum(counts[:b]), sum(counts[: b + 1])), int(call.seqlens[b])
        keys, values = (x[rows] if x.dim() == 3 else x[b] for x in (k, v))
        where = slots(call, b, length - n, length)
        if turn:
            at = torch.arange(length - n, length, dtype=torch.int64, device=k.device)
            tolerance.check("k", call.k_cache[where], *(rotated_at(keys, at, *turn, dtype) for dtype in (torch.float64, k.dtype)))
        else:
            assert _same(call.k_cache[where], keys), "a new key is not in its place"
        assert _same(call.v_cache[where], values), "a new value is not in its place"
        before["k_cache"][where], before["v_cache"][where] = call.k_cache[where], call.v_cache[where]
    for name in ("k_cache", "v_cache"):
        assert _same(given[name], before[name]), f"{name} was written to elsewhere"
    return call


def _same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, NaN too."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.equal(*(each.contiguous().view(kinds[x.itemsize]) for each in (x, y)))


def exact(call: DecodeCall) -> DecodeCall:
    """With what caches of 8 bits stand for."""
    if call.k_cache.dtype == call.q.dtype:
        return call
    return replace(call, k_cache=stand_for(call, call.k_cache, call.k_scale), v_cache=stand_for(call, call.v_cache, call.v_scale))


def _held_alone(call: DecodeCall, given: dict, o: Tensor, lse: Tensor, run) -> None:
    """Every sequence in a call of its own, whose tokens are in the caches."""
    places = call.page_table is not None or call.cache_batch_idx is not None
    for b in range(call.seqlens.shape[0]):
        entry, words = slice(b, b + 1), {name: x for name, x in given.items() if name not in ("k", "v", "cu_seqlens_q")}
        words["cache_seqlens"] = call.seqlens[entry]
        words |= {name: given[name][entry] for name in ("page_table", "cache_batch_idx", "leftpad") if name in given}
        for name in ("alibi_slopes", "tree", "k_scale", "v_scale"):
            least = {"tree": 3}.get(name, 2)
            if name in given and given[name].dim() == least and given[name].shape[0] > 1:
                words[name] = given[name][entry]
        if not places:
            words |= {name: given[name][entry] for name in ("k_cache", "v_cache")}
            words |= {name: given[name][entry] for name in ("k_scale", "v_scale") if name in given and given[name].dim() == 3}
        if isinstance(mask := given.get("mask"), Dense) and mask.extent[0] > 1:
            words["mask"] = Dense(mask.tensor[entry])
        if call.cu_seqlens_q is None:
            rows, of_lse = entry, lse[entry]
            words["q"] = given["q"][entry]
        else:
            rows = slice(*call.cu_seqlens_q[b : b + 2].tolist())
            of_lse = lse[:, rows]
            words |= {"q": given["q"][rows], "cu_seqlens_q": call.cu_seqlens_q[b : b + 2] - call.cu_seqlens_q[b]}
        got = run(**words, return_lse=True)
        assert torch.equal(got[0], o[rows]) and torch.equal(got[1], of_lse), f"sequence {b} has other bits alone"
