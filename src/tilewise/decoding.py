"""Attention of the newest tokens against a key/value cache, plain or paged: the contract and its checks.

runtime/decode_operator.py and runtime/append_operator.py do the work. Nothing here reads a tensor's values.
"""

from typing import Literal, NamedTuple, Never, Unpack, overload

import torch
from torch import Tensor

from tilewise.api import INDEX_DTYPES, autocast, combine, in_rows, operands
from tilewise.errors import (
    DTYPES,
    EIGHT_BITS,
    ShapeError,
    UnsupportedError,
    check_apart,
    check_flag,
    check_head_dim,
    check_heads,
    check_like,
    check_no_grad,
    check_no_tangent,
    check_out,
    check_sink,
    check_size,
    check_tensor,
    check_words,
    meets_itself,
)
from tilewise.keywords import DecodeOptions
from tilewise.masks import Dense, Mask
from tilewise.masks.arguments import check_count
from tilewise.problem import INT32, Share, one_sink
from tilewise.runtime import append_operator, decode_cache, decode_operator
from tilewise.runtime.operator import traced
from tilewise.runtime.plain import needs_dispatch

OF_CACHES = (*DTYPES, *EIGHT_BITS)


@overload
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[DecodeOptions]
) -> Tensor: ...
@overload
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[True], **options: Unpack[DecodeOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: bool = False, **options: Unpack[DecodeOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    tree: Tensor | None = None,
    shared_prefix: int = 0,
    split: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    interleaved: bool = False,
    causal: bool = True,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    check: bool = False,
    cp_rank: int = 0,
    cp_world: int = 1,
    cp_interleave: int = 1,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each sequence against its cache, to which k and v, where given, are first appended in place.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); its rows are the last seqlen_q positions of each sequence. With cu_seqlens_q (total_q, heads_q,
            head_dim).
        k_cache: (batch, capacity, heads_k, head_dim), or with a page table (pages, page_size, heads_k, head_dim), in q's dtype, or 8 bits a number,
            float8_e4m3fn or int8 (`quantise` makes them). Pages are read where they lie: their last dimension is contiguous, and for Hopper's
            kernels the address and the other strides of dimensions above 1 are multiples of 16 bytes. What is not paged and lies otherwise is
            copied whole in every call.
        v_cache: likewise, with head_dim_v; 8 bits where k_cache has them. Of a latent cache (MLA's absorbed form, 576 / 512) the view
            k_cache[..., :head_dim_v], which a backend may read once for both; then v, where k is given, is k[..., :head_dim_v].
        cache_seqlens: tokens in the cache before k and v are appended, (batch,) int32 (best) or int64, or one int for all; None where every sequence
            fills its capacity. What lies beyond is never read.
        page_table: (batch, max_pages) int32 (best) or int64: page p of sequence b holds its tokens p * page_size onwards. Sequences may share pages.
            Entries that a sequence's tokens do not reach may hold anything.
        k, v: (batch, new, heads_k, head_dim) and head_dim_v in the caches' dtype: written at positions cache_seqlens onwards, as by `append`, and
            attended (their scales, by token, are the caller's to write before). With cu_seqlens_q also packed, (total_q, heads_k, ...): as many for a
            sequence as it has queries. They share no memory with the caches. cache_seqlens is not advanced.
        cu_seqlens_q: (batch + 1,) int32 (best) or int64: sequence b owns the queries cu_seqlens_q[b]:cu_seqlens_q[b + 1], one, many or none, as in
            speculative decoding and batches of prefill and decode. Rows behind the last sequence get O = 0 and LSE = -inf, sinks or none.
        cache_batch_idx: (batch,) int32 (best) or int64: the entry of k_cache that holds each sequence. Not with a page table: its rows say that.
        leftpad: (batch,) int32 (best) or int64: the first token of each sequence that may be seen. Positions still count from 0.
        tree: (batch or 1, new, new) bool: token i of the newest `new` sees token j of them only where it is True, and the mask shows it too.
            Positions are places in the cache, for masks, ALiBi and rotary alike: with rotary tables that follow the tree's depth, rotate before.
        shared_prefix: a promise that this many first tokens are the same for all sequences (the same pages), which a backend may read once, but with
            `split` does not. Results do not hang on it.
        split: keys of one piece, rounded up to whole tiles. With it a sequence's bits do not depend on what else is in the batch; on the CPU they
            never do, but in fp64.
        cp_rank, cp_world, cp_interleave: the caches hold a share of every sequence, the tokens at positions p with
            p // cp_interleave % cp_world == cp_rank, one behind another, in entries or pages as ever. All else speaks of positions in whole
            sequences, and is the same on all ranks: cache_seqlens, which has to be given, leftpad, masks, ALiBi, rotary, the tree, and k and v,
            of which each rank writes what it holds. Capacities, pages and scales by token are the share's, and a Dense mask spans cp_world times the
            capacity. O and LSE are of this rank's keys, sinks counted by rank 0 alone, so that `tilewise.merge` over the ranks gives the whole
            (`tilewise.distributed.decode`); rows without a key have O = 0, LSE = -inf. shared_prefix is not made use of.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2): q and k are rotated by their positions in their sequences (`append`).
        interleaved: rotary pairs are (2 d, 2 d + 1), not (d, d + rotary_dim / 2).
        causal: query i sees the cache up to its own position (bottom right).
        mask: as in `attention`, the same for all sequences and aligned to each one's own length; a Dense mask stands alone and spans the capacity,
            (batch or 1, heads or 1, seqlen_q or 1, capacity), with cu_seqlens_q for every query alike.
        k_scale, v_scale: what the elements of an 8-bit cache are multiplied by, in fp32 (best); None is 1. By their dimensions: () the whole cache;
            (heads_k,) each head; (batch, heads_k) each sequence and head, as FlashAttention-3's descale; (batch, capacity, heads_k), with a page
            table (pages, page_size, heads_k), each token and head: laid out as the cache without its last dimension. Scales of what is never
            read may be NaN.
        out: where to write O, as in `attention`; it is returned. It must share no memory with the caches. Of fp32, where q has 16 bits, it takes an O
            that the CPU, Hopper and Triton kernels do not round, for `tilewise.merge`.
        check: read lengths, pages and the other index tensors, and report what is wrong. On a GPU that waits for it, so by default they are clamped
            there and nothing is said; TILEWISE_CHECK=1 asks for it in all calls. On the CPU they are always checked, but not whether two new
            tokens go to one place.

    The other arguments are those of `attention`. What traces, exports or maps the call sees the operators `tilewise::append`, which writes the
    caches, and `tilewise::decode`; torch.vmap runs the latter entry by entry. A dense mask, one that differs by head, and what the device's backend
    does not cover take a general path, sequence by sequence, which is slow and on a GPU reads the lengths on the host.

    Returns:
        O as q with head_dim_v, and with `return_lse` LSE (batch, heads_q, seqlen_q), packed (heads_q, total_q).

    Raises:
        ShapeError, ValueError, UnsupportedError: as `attention`; lengths outside the cache, pages that do not exist or cannot be read where they
            lie, tensors that require grad.
    """
    if unknown:
        check_words("decode", unknown, decode.__kwdefaults__ or {})
    share, sink, others_sink = None, one_sink(sink), None
    if cp_world != 1 or cp_rank != 0 or cp_interleave != 1:
        share = share_of(cp_rank, cp_world, cp_interleave)
        sink, others_sink = (sink, None) if cp_rank == 0 else (None, sink)
    tensors = (  # as DecodeTensors
        q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, cache_batch_idx, leftpad, tree, alibi_slopes, sink, k_scale, v_scale,
        k, v, rotary_cos, rotary_sin, out,
    )  # fmt: skip
    options = causal, mask, scale, softcap, shared_prefix, split, interleaved, backend, return_lse, check, share
    if (known := decode_cache.find(tensors, options)) is not None and (results := known(tensors)) is not None:
        return results if return_lse else results[0]
    packed = cu_seqlens_q is not None
    check_tensor("q", q, ("total_q", "heads_q", "head_dim") if packed else ("batch", "seqlen_q", "heads_q", "head_dim"))
    for name, flag in (("return_lse", return_lse), ("interleaved", interleaved), ("check", check)):
        check_flag(name, flag)
    _check_caches(k_cache, v_cache, paged=page_table is not None)
    if page_table is not None:
        _check_rows_of_pages(k_cache, v_cache)
    check_rotary(rotary_cos, rotary_sin, q, decode_operator.NO_GRADIENT)
    batch, other = batch_of_queries(q, cu_seqlens_q), "cu_seqlens_q" if packed else "q"
    capacity = _capacity(k_cache, page_table, cache_batch_idx, batch, other)
    for name, x in (("cache_batch_idx", cache_batch_idx), ("leftpad", leftpad)):
        if x is not None:
            _check_indices(name, x, batch, k_cache, other)
    _check_counts(shared_prefix, split)
    if tree is not None:
        _check_tree(tree, batch, q, other)
    if (k is None) != (v is None):
        raise ShapeError(f"{'v' if v is None else 'k'} is missing: k and v are appended together, or neither")
    seqlens, length = _lengths(cache_seqlens, batch, k_cache, other)
    if share is not None and cache_seqlens is None:
        raise ShapeError("cache_seqlens must be given with cp_world: how many tokens the whole sequences have")
    k_scale = k_scale if k_scale is None else scale_of("k", k_scale, k_cache, batch, other)
    v_scale = v_scale if v_scale is None else scale_of("v", v_scale, v_cache, batch, other)
    caches = k_cache, v_cache
    q, k_cache, v_cache, _ = autocast(q, k_cache, v_cache)
    _check(q, k_cache, v_cache, alibi_slopes, sink)
    if others_sink is not None:  # it is rank 0's to count, but an error on all ranks or on none
        check_sink(others_sink, q, q.shape[-2])
    combined = combine(causal, mask)
    if combined.kind == "bitmap":
        _check_dense(mask, q, batch, capacity if share is None else capacity * share.world)
    elif combined.extent[0] != 1:
        raise UnsupportedError(
            f"mask differs by sequence, {mask}, as only a Dense one may in decode; cache_seqlens= says how many keys each has, leftpad= the first"
        )
    given = operands(
        q[None] if packed else q,
        k_cache,
        v_cache,
        combined,
        dropout=(0.0, None, 0),
        scale=scale,
        softcap=softcap,
        alibi_slopes=None if packed else alibi_slopes,
        sink=sink,
        deterministic=False,
        backend=backend,
    )
    slopes = slopes_of(alibi_slopes, q, batch, other) if packed else given.alibi_slopes
    if out is not None:
        _check_out(out, q, caches)
    asked = decode_operator.Operands(
        q=given.q.squeeze(0) if packed else given.q,
        k_cache=given.k,
        v_cache=given.v,
        cache_seqlens=seqlens,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cache_batch_idx=cache_batch_idx,
        leftpad=leftpad,
        tree=tree,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        alibi_slopes=slopes,
        sink=sink,
        k_scale=k_scale,
        v_scale=v_scale,
        mask_tensors=given.mask_tensors,
        mask=given.mask,
        length=length,
        shared_prefix=shared_prefix,
        split=split,
        interleaved=interleaved,
        scale=given.scale,
        softcap=given.softcap,
        backend=backend,
        check=check,
        out_dtype=None if out is None or out.dtype == q.dtype else out.dtype,
        **{} if share is None else {f"cp_{name}": n for name, n in share._asdict().items()},
    )
    written = None
    if k is not None and v is not None:
        if seqlens is None and length is None:
            raise ShapeError("cache_seqlens must be given with k: it says where the new keys go")
        asked = asked._replace(cache_seqlens=_as_tensor(seqlens, length, batch, k_cache), length=None)
        written = _new_tokens(asked, caches, k, v)
    results = decode_cache.first(tensors, options, asked, written)
    if results is None:
        o, lse = decode_operator.run(asked if written is None else _appended_to(asked, written))
        results = o if out is None else out.copy_(o), lse
    return results if return_lse else results[0]


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    slots: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_first: Tensor | None = None,
    interleaved: bool = False,
    check: bool = False,
    cp_rank: int = 0,
    cp_world: int = 1,
    cp_interleave: int = 1,
) -> None:
    """Write new keys and values into a cache, in place, behind the tokens that each sequence has there.

    Args:
        k_cache, v_cache, page_table, cache_batch_idx, check: as in `decode`. A page or entry that is written to must be one sequence's alone: of
            two tokens that go to one place one is lost, which `check` reports.
        k, v: (batch, new, heads_k, head_dim) and head_dim_v in the caches' dtype, or with cu_seqlens packed, (total_new, heads_k, ...). They share no
            memory with the caches.
        cache_seqlens: tokens in the cache before, (batch,) int32 (best) or int64, or one int for all; it is not advanced.
        cu_seqlens: (batch + 1,) int32 (best) or int64: sequence b owns the new tokens cu_seqlens[b]:cu_seqlens[b + 1].
        slots: (tokens,) int32 or int64, in place of all that says where sequences end: k and v are (tokens, heads_k, ...), and token i goes to place
            slots[i] % page_size of page slots[i] // page_size, or nowhere where slots[i] is negative, which is no error. Nothing is rotated then.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2): token i of a sequence's new ones is rotated to position cache_seqlens + i.
        rotary_first: (batch,) int32 or int64: the position of the first new token, in place of cache_seqlens.
        interleaved: rotary pairs are (2 d, 2 d + 1), not (d, d + rotary_dim / 2).
        cp_rank, cp_world, cp_interleave: as in `decode`: of the new tokens, which all ranks are given, this one writes those that it holds, behind
            those that it holds of cache_seqlens. Not with slots.

    What traces the call sees the operator `tilewise::append`. On a GPU tokens that have no place (beyond the capacity, on a page that does not exist)
    are not written; on the CPU, and with `check`, they are an error, and nothing is written.

    Raises:
        ShapeError, ValueError: tensors that do not fit each other, or require grad; lengths or pages that the cache does not have.
    """
    turn = RotaryArgs(rotary_cos, rotary_sin, rotary_first, interleaved)
    places, trivial = Places(page_table, cache_batch_idx, cu_seqlens), cp_world == 1 and cp_rank == 0 and cp_interleave == 1
    share = None if trivial else share_of(cp_rank, cp_world, cp_interleave)
    if slots is not None:
        if share is not None:
            raise ShapeError(
                "slots says where each token goes, so cp_world must not be given with it; a token of another rank has a negative one"
            )
        append_operator.run(_to_slots(k_cache, v_cache, k, v, slots, (cache_seqlens, *places, *turn[:3]), check))
        return
    append_operator.run(_to_append(k_cache, v_cache, k, v, cache_seqlens, places, turn, check, share))


class Places(NamedTuple):
    """Where new tokens go, as `append` has it."""

    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cu_seqlens: Tensor | None


class RotaryArgs(NamedTuple):
    """How new keys are rotated, as `append` has it."""

    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_first: Tensor | None
    interleaved: bool


def _new_tokens(
    asked: decode_operator.Operands, caches: tuple[Tensor, Tensor], k: Tensor, v: Tensor
) -> append_operator.Operands:  # fmt: skip
    """What is to be appended for sequences that have k and v, once nothing is wrong with the call."""
    cu_seqlens = asked.cu_seqlens_q if isinstance(k, Tensor) and k.dim() == 3 else None
    if cu_seqlens is not None:
        check_tensor("k", k, ("total_q", "heads_k", "head_dim"), OF_CACHES)
        check_size("k", "total_q", k.shape[0], asked.q.shape[0], "q")
    places = Places(asked.page_table, asked.cache_batch_idx, cu_seqlens)
    turn = RotaryArgs(asked.rotary_cos, asked.rotary_sin, None, asked.interleaved)
    written = _to_append(*caches, k, v, asked.cache_seqlens, places, turn, asked.check, asked.share)
    decode_operator.check(asked, None if cu_seqlens is not None else k.shape[1])
    return written


def _appended_to(asked: decode_operator.Operands, written: append_operator.Operands) -> decode_operator.Operands:
    """What is asked, when the new tokens are written."""
    ends = append_operator.run(written)
    if ends is None:
        ends = written.cache_seqlens + (written.k.shape[1] if written.cu_seqlens is None else written.cu_seqlens.diff())
    k_cache, v_cache = asked.k_cache, asked.v_cache
    if k_cache is not written.k_cache or v_cache is not written.v_cache:  # copies, of the caches as they were
        _, k_cache, v_cache, _ = autocast(asked.q, written.k_cache, written.v_cache)
        k_cache, v_cache = in_rows("k_cache", k_cache), in_rows("v_cache", v_cache)
    return asked._replace(cache_seqlens=ends, k_cache=k_cache, v_cache=v_cache)


def _to_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor | int | None, places: Places,
    turn: RotaryArgs, check: bool, share: Share | None = None,
) -> append_operator.Operands:  # fmt: skip
    """What `append` is asked for, with shapes, dtypes and devices checked."""
    page_table, cache_batch_idx, cu_seqlens = places
    rotary_cos, rotary_sin, rotary_first, interleaved = turn
    for name, flag in (("interleaved", interleaved), ("check", check)):
        check_flag(name, flag)
    _check_caches(k_cache, v_cache, paged=page_table is not None)
    axes = ("batch", "new") if cu_seqlens is None else ("total_new",)
    for name, x, cache, dim in (("k", k, k_cache, "head_dim"), ("v", v, v_cache, "head_dim_v")):
        check_tensor(name, x, (*axes, "heads_k", dim), OF_CACHES)
        check_like(name, x, cache, other=f"{name}_cache")
        check_size(name, "heads_k", x.shape[-2], cache.shape[-2], f"{name}_cache")
        check_size(name, dim, x.shape[-1], cache.shape[-1], f"{name}_cache")
        _check_own_memory(f"{name}_cache", cache)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        check_no_grad(name, x, append_operator.NO_GRADIENT)
        check_no_tangent(name, x, append_operator.NO_GRADIENT)
    for axis, got, expected in zip(axes, v.shape, k.shape, strict=False):
        check_size("v", axis, got, expected, "k")
    if cu_seqlens is not None:
        _check_cu_seqlens("cu_seqlens", cu_seqlens, k_cache)
    batch, other = (k.shape[0], "k") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "cu_seqlens")
    _capacity(k_cache, page_table, cache_batch_idx, batch, other)
    for name, x in (("cache_batch_idx", cache_batch_idx), ("rotary_first", rotary_first)):
        if x is not None:
            _check_indices(name, x, batch, k_cache, other)
    check_rotary(rotary_cos, rotary_sin, k, append_operator.NO_GRADIENT)
    if rotary_cos is not None and k.dtype in EIGHT_BITS:
        raise UnsupportedError(f"rotary_cos cannot turn a k of {k.dtype}; rotate k before it is quantised")
    if cache_seqlens is None:
        raise ShapeError("cache_seqlens must be an integer tensor (batch,) or an int: it says where the new keys go")
    seqlens = _as_tensor(*_lengths(cache_seqlens, batch, k_cache, other), batch, k_cache)
    return append_operator.Operands(k_cache, v_cache, k, v, seqlens, *places, *turn, check, False, *share or ())


def _to_slots(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, others: tuple, check: bool
) -> append_operator.Operands:  # fmt: skip
    """What `append` is asked for where each token has a slot: a sequence of its own, on one page. others: what does not go with that."""
    names = "cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens", "rotary_cos", "rotary_sin", "rotary_first"
    if wrong := [name for name, x in zip(names, others, strict=True) if x is not None]:
        raise ShapeError(f"slots says where each token goes, so {', '.join(wrong)} must not be given with it; rotate k before")
    check_tensor("slots", slots, ("tokens",), INDEX_DTYPES)
    for name, x, dim in (("k", k, "head_dim"), ("v", v, "head_dim_v")):
        check_tensor(name, x, ("tokens", "heads_k", dim), OF_CACHES)
    check_size("slots", "tokens", slots.shape[0], k.shape[0], "k")
    _check_caches(k_cache, v_cache, paged=True)
    _check_device("slots", slots, k_cache)
    page_size = max(k_cache.shape[1], 1)
    page = slots.div(page_size, rounding_mode="floor")[:, None]
    places = Places(page, None, None)
    asked = _to_append(k_cache, v_cache, k[:, None], v[:, None], slots % page_size, places, RotaryArgs(None, None, None, False), check)
    return asked._replace(skip=True)


def _check_own_memory(name: str, cache: Tensor) -> None:
    if meets_itself(cache):
        raise ShapeError(
            f"{name} has strides {tuple(cache.stride())} for shape {tuple(cache.shape)}: tokens share memory there, and would overwrite each other; "
            f"pass {name}.contiguous(), or choose entries with cache_batch_idx"
        )


def _check_caches(k_cache: Tensor, v_cache: Tensor, paged: bool) -> None:
    lead = ("pages", "page_size") if paged else ("batch", "capacity")
    for name, x, dim in (("k_cache", k_cache, "head_dim"), ("v_cache", v_cache, "head_dim_v")):
        check_tensor(name, x, (*lead, "heads_k", dim), OF_CACHES)
    eight = k_cache.dtype in EIGHT_BITS and v_cache.dtype in EIGHT_BITS
    check_like("v_cache", v_cache, k_cache, other="k_cache", same_dtype=not eight)
    for axis, got, expected in zip((*lead, "heads_k"), v_cache.shape, k_cache.shape[:3], strict=False):
        check_size("v_cache", axis, got, expected, "k_cache")


def _check_rows_of_pages(k_cache: Tensor, v_cache: Tensor) -> None:
    """Pages are read where they lie: a copy would be of the whole pool, in every call."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ShapeError(
                f"{name} has strides {tuple(x.stride())} for shape {tuple(x.shape)}; with a page table its last dimension must be contiguous: "
                f"keep the pool so, as {name}.contiguous() once makes it"
            )


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, alibi_slopes: Tensor | None, sink: Tensor | None) -> None:
    """That q and the caches fit each other, and that nobody asks for a gradient."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_like(name, x, q, same_dtype=x.dtype not in EIGHT_BITS)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("alibi_slopes", alibi_slopes), ("sink", sink)):
        if isinstance(x, Tensor):
            check_no_grad(name, x, decode_operator.NO_GRADIENT)
            check_no_tangent(name, x, decode_operator.NO_GRADIENT)
    check_size("k_cache", "head_dim", k_cache.shape[3], q.shape[-1], "q")
    check_heads(q.shape[-2], k_cache.shape[2])
    check_head_dim(q.shape[-1], v_cache.shape[3])


def scale_of(name: str, scale: Tensor, cache: Tensor, batch: int, other: str) -> Tensor:
    """The checked scale of an 8-bit cache, called `name`, in fp32."""
    name, cache_name = f"{name}_scale", f"{name}_cache"
    if cache.dtype not in EIGHT_BITS:
        raise ShapeError(f"{name} is for caches of 8 bits, but {cache_name} is {cache.dtype}; leave it out, or quantise the cache")
    shapes = {0: (), 1: ("heads_k",), 2: ("batch", "heads_k"), 3: ("entries", "places", "heads_k")}
    axes = shapes.get(scale.dim() if isinstance(scale, Tensor) and not scale.is_nested else 0)
    if axes is None:
        raise ShapeError(
            f"{name} must be (), (heads_k,), (batch, heads_k) or {cache_name}'s shape without its last dimension, got shape {tuple(scale.shape)}"
        )
    check_tensor(name, scale, axes)
    check_like(name, scale, cache, same_dtype=False, other=cache_name)
    check_no_grad(name, scale, decode_operator.NO_GRADIENT)
    check_no_tangent(name, scale, decode_operator.NO_GRADIENT)
    sizes = {1: cache.shape[2:3], 2: (batch, cache.shape[2]), 3: cache.shape[:3]}.get(scale.dim(), ())
    for axis, got, expected in zip(axes, scale.shape, sizes, strict=True):
        check_size(name, axis, got, expected, other if axis == "batch" else cache_name)
    return scale.float()


def _check_dense(mask: Mask | None, q: Tensor, batch: int, capacity: int) -> None:
    """A mask that holds a dense tensor: nothing else, over the whole capacity, and for q's rows, packed or not, and heads."""
    if not isinstance(mask, Dense):
        raise UnsupportedError(
            "decode takes a Dense mask alone, or a mask without one; write the whole mask as one Dense (causal= still applies)"
        )
    entries, (rows, keys) = mask.tensor.shape[0] if mask.tensor.dim() == 4 else 1, mask.tensor.shape[-2:]
    if (entries != 1 and entries != batch) or keys != capacity:
        raise ShapeError(
            f"mask has batch {entries} and {keys} keys, but q has batch {batch} and the cache holds {capacity} tokens "
            "a sequence; a Dense mask needs batch 1 or q's, and the whole capacity"
        )
    if q.dim() == 3 and rows != 1:
        raise ShapeError(
            f"mask has {rows} queries, but with cu_seqlens_q a Dense mask must have 1, for every query alike; use tree= or a mask"
        )
    heads = mask.tensor.shape[-3] if mask.tensor.dim() > 2 else 1
    for axis, got, expected in (("seqlen_q", rows, q.shape[-3]), ("heads", heads, q.shape[-2])):
        if got not in (1, expected):
            raise ShapeError(f"mask has {axis} {got}, but q has {expected}; a Dense mask needs 1 or q's")


def batch_of_queries(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """How many sequences q has, packed where there is cu_seqlens_q, which is checked."""
    if cu_seqlens_q is None:
        return q.shape[0]
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    return cu_seqlens_q.shape[0] - 1


def _check_cu_seqlens(name: str, cu_seqlens: Tensor, like: Tensor) -> None:
    check_tensor(name, cu_seqlens, ("batch + 1",), INDEX_DTYPES)
    _check_device(name, cu_seqlens, like)
    if cu_seqlens.shape[0] == 0:
        raise ShapeError(f"{name} must have batch + 1 entries, of which the first is 0, got none")


def _check_indices(name: str, x: Tensor, batch: int, like: Tensor, other: str) -> None:
    """(batch,) integers, as many as `other` says."""
    check_tensor(name, x, ("batch",), INDEX_DTYPES)
    check_size(name, "batch", x.shape[0], batch, other)
    _check_device(name, x, like)


def _check_device(name: str, x: Tensor, like: Tensor) -> None:
    """Index tensors lie where they are used, so that nobody waits for them."""
    check_like(name, x, like, same_dtype=False, other="k_cache")


def _check_tree(tree: Tensor, batch: int, q: Tensor, other: str) -> None:
    check_tensor("tree", tree, ("batch or 1", "new", "new"), (torch.bool,))
    check_like("tree", tree, q, same_dtype=False)
    if tree.shape[0] != 1 and tree.shape[0] != batch:
        raise ShapeError(f"tree has batch {tree.shape[0]}, but {other} has batch {batch}; it needs as many, or 1 for all sequences alike")
    check_size("tree", "tokens that see", tree.shape[1], tree.shape[2], "its last dimension")


def share_of(cp_rank: int, cp_world: int, cp_interleave: int) -> Share | None:
    """What a rank holds, its numbers checked; None where that is everything."""
    rank, world = check_count("cp_rank", cp_rank), check_count("cp_world", cp_world, 1)
    interleave = check_count("cp_interleave", cp_interleave, 1)
    if rank >= world or max(world, interleave) > INT32 or world * interleave > INT32:
        raise ValueError(f"cp_rank must be below cp_world, and cp_world * cp_interleave fit 32 bits, got {rank}, {world}, {interleave}")
    return None if world == 1 else Share(rank, world, interleave)


def _check_counts(shared_prefix: int, split: int | None) -> None:
    for name, x, least, otherwise in (("shared_prefix", shared_prefix, 0, ""), ("split", 1 if split is None else split, 1, " or None")):
        if isinstance(x, bool) or not isinstance(x, int | torch.SymInt) or x < least:
            raise ValueError(f"{name} must be an integer of at least {least}{otherwise}, got {x!r}")


def check_rotary(cos: Tensor | None, sin: Tensor | None, x: Tensor, no_gradient: str) -> None:
    """Refuse tables that do not fit each other, or x."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ShapeError("rotary_cos and rotary_sin must both be given, or neither")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table, ("seqlen_rotary", "rotary_dim / 2"))
        check_like(name, table, x, same_dtype=False)
        check_no_grad(name, table, no_gradient)
        check_no_tangent(name, table, no_gradient)
    check_size("rotary_sin", "shape", sin.shape, cos.shape, "rotary_cos")
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ShapeError(f"rotary_cos has rotary_dim / 2 = {cos.shape[1]}, but head_dim is {x.shape[-1]}; rotary_dim must not be larger")


def slopes_of(slopes: Tensor | None, q: Tensor, batch: int, other: str) -> Tensor | None:
    """ALiBi slopes (batch or 1, heads_q) fp32 of queries, packed or not; `other` says how many sequences there are."""
    if slopes is None:
        return None
    check_tensor("alibi_slopes", slopes, ("batch", "heads_q") if isinstance(slopes, Tensor) and slopes.dim() == 2 else ("heads_q",), DTYPES)
    check_like("alibi_slopes", slopes, q, same_dtype=False)
    check_size("alibi_slopes", "heads_q", slopes.shape[-1], q.shape[-2], "q")
    slopes = (slopes if slopes.dim() == 2 else slopes[None]).float()
    if slopes.shape[0] != 1:
        check_size("alibi_slopes", "batch", slopes.shape[0], batch, other)
    return slopes


def _check_out(out: Tensor, q: Tensor, caches: tuple[Tensor, Tensor]) -> None:
    dtypes = (q.dtype,) if q.dtype.itemsize > 2 else (q.dtype, torch.float32)
    check_out(out, (*q.shape[:-1], caches[1].shape[3]), q, gradient=False, dtypes=dtypes)
    if not traced() and not needs_dispatch((out, *caches)):
        check_apart("out", out, dict(zip(("k_cache", "v_cache"), caches, strict=True)))


def _capacity(k_cache: Tensor, page_table: Tensor | None, cache_batch_idx: Tensor | None, batch: int, other: str) -> int:
    """Tokens that one sequence's cache can hold."""
    if page_table is None:
        if cache_batch_idx is None and k_cache.shape[0] != batch:
            raise ShapeError(
                f"k_cache has batch {k_cache.shape[0]}, but {other} has batch {batch}; they must be equal, or cache_batch_idx or page_table has to "
                "say where each sequence is"
            )
        return k_cache.shape[1]
    if cache_batch_idx is not None:
        raise ShapeError("cache_batch_idx and page_table exclude each other; choose the table's rows: page_table[cache_batch_idx]")
    check_tensor("page_table", page_table, ("batch", "max_pages"), INDEX_DTYPES)
    check_size("page_table", "batch", page_table.shape[0], batch, other)
    _check_device("page_table", page_table, k_cache)
    return page_table.shape[1] * k_cache.shape[1]


def _lengths(cache_seqlens: Tensor | int | None, batch: int, like: Tensor, other: str) -> tuple[Tensor | None, int | None]:
    """cache_seqlens as the operator takes it: as a tensor, or as one number for all."""
    if isinstance(cache_seqlens, Tensor):
        _check_indices("cache_seqlens", cache_seqlens, batch, like, other)
        return cache_seqlens, None
    if cache_seqlens is not None and (isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int | torch.SymInt)):
        raise ShapeError(f"cache_seqlens must be an integer tensor (batch,), an int or None, got {type(cache_seqlens).__name__}")
    if isinstance(cache_seqlens, int) and abs(cache_seqlens) > INT32:
        raise ShapeError(f"cache_seqlens is {cache_seqlens}, which is more than any cache holds; it must fit in 32 bits")
    return None, cache_seqlens


def _as_tensor(seqlens: Tensor | None, length: int | None, batch: int, like: Tensor) -> Tensor:
    if seqlens is not None or length is None:
        assert seqlens is not None
        return seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=like.device)
