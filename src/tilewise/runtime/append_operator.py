"""The torch.library operator `tilewise::append`: new keys and values written into a cache, plain or paged, where their sequences end.

It writes the caches and nothing else. On the CPU it checks values first, and writes nothing where one is wrong; on a GPU it reads none, and tokens
that have no place (beyond the capacity, on a page that does not exist) are not written.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import errors
from tilewise.backends import Backend
from tilewise.masks import Full
from tilewise.problem import AppendCall, Call, Share
from tilewise.rotary import rotated
from tilewise.runtime import cache_values as values
from tilewise.runtime import graphs, op, plain
from tilewise.runtime import operator as ops
from tilewise.runtime.dispatch import choose

NO_GRADIENT = "append is for inference and has no gradient"


class Operands(NamedTuple):
    """The operands of `operator`, in the order of its schema; tensors as in `decoding.append`."""

    k_cache: op.Written
    v_cache: op.Written
    k: Tensor
    v: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cu_seqlens: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_first: Tensor | None
    interleaved: bool
    check: bool
    skip: bool = False  # whether a token on a negative page is left out, where else it is an error
    cp_rank: int = 0  # as `problem.Share`: only its tokens are written; a world of 1: all are
    cp_world: int = 1
    cp_interleave: int = 1

    @property
    def share(self) -> Share | None:
        return None if self.cp_world == 1 else Share(self.cp_rank, self.cp_world, self.cp_interleave)


def run(given: Operands) -> Tensor | None:
    """At once where nobody but the caller takes part, which saves the operator's time, else by the operator.

    Returns (batch,) int32, the tokens that each sequence then has, where that is known without another launch.
    """
    if ops.traced():
        (operator_reading if graphs.checks(given.k, given.check) else operator)(*given)
    elif plain.needs_dispatch((tensors := op.named(given)).values()):
        errors.check_local(tensors, function="append")
        if ops.transforms() or plain.mapped(tensors.values()):
            raise errors.UnsupportedError(
                "append writes its caches in place, which torch.vmap, torch.func.functionalize and derivatives of torch.func do not follow through "
                "an operator; call it outside of them, or let torch.compile trace it"
            )
        for name in ("k_cache", "v_cache"):
            if tensors[name].is_neg():
                raise errors.ShapeError(f"{name} is a view that means the negatives of what it holds; append to {name}.resolve_neg()")
        operator(*given)
    else:
        return _append(given)
    return None


@torch.no_grad()
def _append(given: Operands) -> Tensor | None:
    """As `run`. On a GPU by its backend, or else, as on the CPU, by torch."""
    k, v = given.k, given.v
    check = values.wanted(k.device, given.check)
    _check_memory(given)
    if check:
        _check(given)
    if k.numel() + v.numel() == 0 or given.cache_seqlens.shape[0] == 0:
        return None
    if k.is_cuda and (ends := _by_backend(given)) is not None:
        return ends
    owner, place = _tokens(given)
    lengths = given.cache_seqlens.to(torch.int64)
    position = lengths[owner] + place
    if given.rotary_cos is not None and given.rotary_sin is not None:
        first = lengths if given.rotary_first is None else given.rotary_first.to(torch.int64)
        turned_to = (first[owner] + place).where(_of_a_sequence(given, owner), 0)
        k = rotated(k, given.rotary_cos, given.rotary_sin, turned_to, interleaved=given.interleaved)
    position = _in_cache(given, position)
    if check and given.cu_seqlens is None and not given.skip and given.share is None:
        slots = _slots(given, owner, position)
    else:
        slots, k, v = _with_a_place(given, owner, position, k, v)
    given.k_cache.index_put_(slots, k)
    given.v_cache.index_put_(slots, v)
    return None


def _by_backend(given: Operands) -> Tensor | None:
    return _backend(given.k.device).append(_call(given))


def bind(given: Operands) -> Callable[[tuple, Tensor | None], Tensor | None] | None:
    """`Backend.bind_append` of that which appends there; ShapeError for tensors that share memory."""
    _check_memory(given)
    empty = 0 in given.k.shape or 0 in given.v.shape or given.cache_seqlens.shape[0] == 0
    return None if empty else _backend(given.k.device).bind_append(_call(given))


def _call(given: Operands) -> AppendCall:
    return AppendCall(
        k_cache=given.k_cache,
        v_cache=given.v_cache,
        k=given.k,
        v=given.v,
        cache_seqlens=given.cache_seqlens,
        page_table=given.page_table,
        cache_batch_idx=given.cache_batch_idx,
        cu_seqlens=given.cu_seqlens,
        rotary_cos=given.rotary_cos,
        rotary_sin=given.rotary_sin,
        rotary_first=given.rotary_first,
        interleaved=given.interleaved,
        share=given.share,
    )


@cache
def _backend(device: torch.device) -> Backend:
    """That which computes attention there; what it appends is not bound to what it attends."""
    plain = torch.empty((1, 0, 1, 64), dtype=torch.bfloat16, device=device)
    return choose(Call(q=plain, k=plain, v=plain, mask=Full(), scale=1.0).problem)


def _run(given: Operands) -> tuple[()]:
    _append(given)
    return ()


operator, operator_reading = op.declare(
    "append", Operands, _run, fake=lambda given: None, results=0, tangent=partial(errors.check_no_tangent, reason=NO_GRADIENT)
)


def _check_memory(given: Operands) -> None:
    """ShapeError for new tokens that lie where they may be written to, and for caches that overlap, unless values are the first columns of keys that
    are not rotated.
    """
    k, v, k_cache, v_cache = map(_bytes, (given.k, given.v, given.k_cache, given.v_cache))
    for other, y, written in (("k_cache", given.k_cache, k_cache), ("v_cache", given.v_cache, v_cache)):
        for name, x, read in (("k", given.k, k), ("v", given.v, v)):
            if read[0] < written[1] and written[0] < read[1]:
                errors.check_apart(name, x, {other: y}, "written while it is read")
    if k_cache[0] < v_cache[1] and v_cache[0] < k_cache[1]:
        steps = zip(given.k_cache.stride(), given.v_cache.stride(), given.v_cache.shape, strict=True)
        if k_cache[0] != v_cache[0] or any(ours != theirs and size > 1 for ours, theirs, size in steps):
            errors.check_apart("v_cache", given.v_cache, {"k_cache": given.k_cache}, "written, too")
    if given.rotary_cos is not None and _one_memory(given):
        raise errors.ShapeError(
            "rotary_cos turns k, whose first columns are v where the caches are one memory; rotate before, and give none"
        )


def _bytes(x: Tensor) -> tuple[int, int]:
    """The addresses of x's first byte and of the one behind its last; nowhere, where it has no memory."""
    begin = x.data_ptr()
    if begin == 0 or 0 in x.shape:
        return 0, 0
    return begin, begin + x.itemsize * (1 + sum([(size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)]))


def _one_memory(given: Operands) -> bool:
    """Whether values are the first columns of their keys."""
    return given.k_cache.data_ptr() == given.v_cache.data_ptr() != 0  # which it is where there is no memory


def _check(given: Operands) -> None:
    """ShapeError for tokens that have no place."""
    if given.skip:
        return _check_slots(given)
    lengths, n_pages, page_size = given.cache_seqlens.tolist(), *given.k_cache.shape[:2]
    k, v = given.k, given.v
    if given.cu_seqlens is None:
        new = [given.k.shape[1]] * len(lengths)
    else:
        new = packed(given.cu_seqlens, given.k.shape[0])
        k, v = k[: sum(new)], v[: sum(new)]
    ends = [length + more for length, more in zip(lengths, new, strict=True)]
    values.check_lengths(ends, given.k_cache, given.page_table, new, given.share)
    if given.page_table is not None:
        last, first = (each if given.share is None else list(map(given.share.held, each)) for each in (ends, lengths))
        values.check_pages(given.page_table, last, n_pages, page_size, first)
    if given.cache_batch_idx is not None:
        values.check_rows(given.cache_batch_idx, n_pages)
    if given.check or values.always():
        owner, place = (x.flatten()[: sum(new)] for x in _tokens(given))
        place = _in_cache(given, given.cache_seqlens.to(torch.int64)[owner] + place)
        owner, place = owner[place >= 0], place[place >= 0]
        values.check_own_places(_slots(given, owner, place), owner)
    if given.rotary_first is not None and (given.rotary_first < 0).any():
        raise errors.ShapeError(f"rotary_first must not be negative, got {given.rotary_first.tolist()}")
    if _one_memory(given) and v.data_ptr() != k.data_ptr():
        columns = k[..., : v.shape[-1]]
        if not ((columns == v) | columns.isnan()).all():
            raise errors.ShapeError(
                f"v must be k[..., :{v.shape[-1]}], for v_cache is these columns of k_cache; pass caches that are apart if it is not"
            )


def _check_slots(given: Operands) -> None:
    """ShapeError for tokens on pages that the caches do not have, but for negative ones; and for two in one place, where values are to be checked."""
    assert given.page_table is not None
    page, (n_pages, page_size) = given.page_table.flatten(), given.k_cache.shape[:2]
    if len(wrong := (page >= n_pages).nonzero()):
        token = int(wrong[0])
        slot = int(page[token]) * max(page_size, 1) + int(given.cache_seqlens[token])
        raise errors.ShapeError(
            f"slots[{token}] is {slot}, but the caches have {n_pages} pages of {page_size} tokens, slots 0..{n_pages * page_size - 1}; a token that "
            "goes nowhere has a negative one"
        )
    if given.check or values.always():
        kept = (page >= 0).nonzero().flatten()
        values.check_own_places((page[kept], given.cache_seqlens[kept]), kept)


def packed(cu_seqlens: Tensor, total: int) -> list[int]:
    """How many new tokens each sequence has, of `total` that are packed; ShapeError for bounds that are none."""
    return [b - a for a, b in pairwise(values.check_cu_seqlens("cu_seqlens (decode's cu_seqlens_q)", cu_seqlens, total))]


def _tokens(given: Operands) -> tuple[Tensor, Tensor]:
    """The sequence of each new token and its place among the sequence's new ones: (batch, new), or (total,) where they are packed."""
    on = {"dtype": torch.int64, "device": given.k.device}
    if given.cu_seqlens is None:
        batch, new = given.k.shape[:2]
        return torch.arange(batch, **on)[:, None].expand(batch, new), torch.arange(new, **on).expand(batch, new)
    owner = values.sequence_of(given.cu_seqlens, given.k.shape[0])
    return owner, torch.arange(given.k.shape[0], **on) - given.cu_seqlens.to(torch.int64)[owner]


def _in_cache(given: Operands, position: Tensor) -> Tensor:
    """Of tokens at these positions, which of the cache's keys of their sequence they are; -1 of those that other ranks hold."""
    share = given.share
    return position if share is None else share.held(position).where(share.holds(position) & (position >= 0), -1)


def _of_a_sequence(given: Operands, owner: Tensor) -> Tensor:
    """Which of the new tokens are somebody's: not those behind the last packed sequence."""
    if given.cu_seqlens is None:
        return torch.ones((), dtype=torch.bool, device=owner.device)
    return torch.arange(owner.shape[0], dtype=torch.int64, device=owner.device) < given.cu_seqlens[-1]


def _slots(given: Operands, owner: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Entry or page, and place in it, of each token."""
    if given.page_table is not None:
        page_size = given.k_cache.shape[1]
        column = position.div(page_size, rounding_mode="floor").clamp(0, max(given.page_table.shape[1] - 1, 0))
        return given.page_table[owner, column].to(torch.int64), position % page_size
    return owner if given.cache_batch_idx is None else given.cache_batch_idx.to(torch.int64)[owner], position


def _with_a_place(given: Operands, owner: Tensor, position: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Slots and tokens, where a token without a place is another of the first that has one, so that nothing is written twice with two values.

    Where no token has a place, the first slot keeps what it holds. Nothing is read on the host.
    """
    entries, places = given.k_cache.shape[:2]
    entry, place = (x.flatten() for x in _slots(given, owner, position))
    owner, position = owner.flatten(), position.flatten()
    fits = (position >= 0) & (position < values.capacity_of(given.k_cache, given.page_table)) & (entry >= 0) & (entry < entries)
    fits &= _of_a_sequence(given, owner)
    first = fits.to(torch.uint8).argmax()
    token = torch.where(fits, torch.arange(owner.shape[0], dtype=torch.int64, device=owner.device), first)
    slots = entry[token].clamp(0, entries - 1), place[token].clamp(0, places - 1)
    some = fits.any()
    flat_k, flat_v = (x.flatten(0, -3)[token] for x in (k, v))
    return slots, torch.where(some, flat_k, given.k_cache[slots]), torch.where(some, flat_v, given.v_cache[slots])
