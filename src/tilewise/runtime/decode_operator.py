"""The torch.library operator `tilewise::decode`: schema, fake kernel, what it refuses, and what it does when it runs.

As in operator.py, an operator receives what a graph can hold, the mask as text. Lengths and pages are tensors (a length for all may be a number),
whose values are read and checked when the operator runs, never when it is traced.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import errors, masks, tangents
from tilewise.backends import Backend
from tilewise.errors import ShapeError
from tilewise.masks import Dense, Mask
from tilewise.masks.mask import Combined
from tilewise.problem import Call
from tilewise.runtime import operator as ops
from tilewise.runtime import plain, vmaps
from tilewise.runtime.dispatch import choose

NO_GRADIENT = "decode is for inference and has no gradient"


class Operands(NamedTuple):
    """The operands of `operator`, in the order of its schema.

    Tensors as in `decoding.decode`, but alibi_slopes (batch or 1, heads_q) fp32. `length` is the number of tokens of every sequence where it is
    known as a number; without it and without cache_seqlens all sequences fill their capacity. In `mask`, #i stands for mask_tensors[i].
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor | None
    page_table: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    mask_tensors: list[Tensor]
    mask: str
    length: int | None
    scale: float | None
    softcap: float
    backend: str | None


SCHEMA = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? page_table, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor[] mask_tensors, str mask, SymInt? length, float? scale, float softcap, str? backend"
)
TENSORS = Operands._fields.index("mask_tensors")  # so many operands are single tensors, or None


def run(given: Operands) -> tuple[Tensor, Tensor]:
    """O and LSE: at once where nobody but the caller takes part, which saves the operator's 40 us, else by the operator."""
    if ops.traced():
        return operator(*given)
    if plain.watched((*given[:TENSORS], *given.mask_tensors)):
        errors.check_local(ops.named(given), function="decode")
        return operator(*given)
    return _compute(given)


def _kernel(*operands) -> tuple[Tensor, Tensor]:
    """`_compute` of tensors that nobody has looked at."""
    _refuse_tangents(*operands)
    given = Operands(*operands)
    errors.check_memory(**ops.named(given))
    return _compute(given)


def _refuse_tangents(*operands) -> None:
    for name, x in ops.named(Operands(*operands)).items():
        if x is not None:
            errors.check_no_tangent(name, x, NO_GRADIENT)


def _compute(given: Operands) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q)."""
    lengths = _lengths(given)
    table = None if given.page_table is None else _checked_pages(given.page_table, lengths, *given.k_cache.shape[:2])
    call = Call(
        q=given.q,
        k=given.k_cache,
        v=given.v_cache,
        mask=masks.parse(given.mask, given.mask_tensors),
        scale=given.q.shape[3] ** -0.5 if given.scale is None else given.scale,
        softcap=given.softcap,
        alibi_slopes=given.alibi_slopes,
        sink=given.sink,
    )
    backend = choose(call.problem, given.backend)
    if not lengths:
        return _empty(call.q, call.v)
    in_place = None
    if call.mask.kind != "bitmap" and call.mask.extent == (1, 1):
        changes = {"softcap": call.softcap, "alibi_slopes": call.alibi_slopes, "sink": call.sink}
        in_place = backend.decode(call.q, call.k, call.v, lengths, table, mask=call.mask, scale=call.scale, **changes)
    o, lse = in_place or _one_by_one(backend, call, lengths, table)
    return o.contiguous(), lse.contiguous()  # as the fake kernel says, whatever the backend finds natural


operator = torch.library.custom_op("tilewise::decode", _kernel, mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")


@operator.register_fake
def _(q, k_cache, v_cache, *_args):
    return _empty(q, v_cache)


def _vmap(size: int, in_dims: tuple, operands: tuple):
    """A call for each entry. What the mapped dimension could be folded into, the batch, a paged cache and a mask do not have."""
    if size == 0:
        q, _, v_cache = (x if dim is None else x.movedim(dim, 0).sum(0) for x, dim in zip(operands[:3], in_dims[:3], strict=True))
        return tuple(x.new_empty((0, *x.shape)) for x in _empty(q, v_cache)), (0, 0)
    return vmaps.one_by_one(operator, size, in_dims, operands)


def _refuse_gradient(ctx, *grads):
    raise RuntimeError(f"{NO_GRADIENT}; call attention where one is wanted")


vmaps.register(operator, "decode", _vmap)
operator.register_autograd(_refuse_gradient)
tangents.watch(operator, "decode", _refuse_tangents)


def _empty(q: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """O and LSE, unwritten."""
    batch, seqlen_q, heads_q, _ = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, seqlen_q, heads_q, v_cache.shape[3])), q.new_empty((batch, heads_q, seqlen_q), dtype=statistics)


def _lengths(given: Operands) -> list[int]:
    """The tokens of each sequence. ShapeError where there are more than its cache holds."""
    batch = given.q.shape[0]
    capacity = given.k_cache.shape[1] * (1 if given.page_table is None else given.page_table.shape[1])
    one = capacity if given.length is None else given.length
    lengths = [one] * batch if given.cache_seqlens is None else given.cache_seqlens.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ShapeError(f"cache_seqlens[{b}] is {length}, but the cache holds between 0 and {capacity} tokens a sequence")
    return lengths


def _checked_pages(page_table: Tensor, lengths: list[int], n_pages: int, page_size: int) -> Tensor:
    """The page table on the CPU. ShapeError where a page that a sequence reaches does not exist; the others may be anything."""
    table = page_table.cpu()
    for b, length in enumerate(lengths):
        row = table[b, : _pages(length, page_size)]
        if ((row < 0) | (row >= n_pages)).any():
            raise ShapeError(f"page_table[{b}] names pages {row.tolist()}, but k_cache has pages 0..{n_pages - 1}")
    return table


def _pages(length: int, page_size: int) -> int:
    return -(-length // page_size) if page_size else 0


def _one_by_one(backend: Backend, call: Call, lengths: list[int], table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The plain path: a call of the backend for each sequence."""

    def sequence(cache: Tensor, b: int) -> Tensor:
        rows = cache[b] if table is None else cache[table[b, : _pages(lengths[b], cache.shape[1])].to(cache.device)].flatten(0, 1)
        return rows[None, : lengths[b]]

    parts = []
    for b, length in enumerate(lengths):
        slopes = call.alibi_slopes if call.alibi_slopes is None or call.alibi_slopes.shape[0] == 1 else call.alibi_slopes[b : b + 1]
        k, v, mask = sequence(call.k, b), sequence(call.v, b), _of_sequence(call.mask, b, length)
        parts.append(backend.forward(replace(call, q=call.q[b : b + 1], k=k, v=v, mask=mask, alibi_slopes=slopes)))
    o, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return o, lse


def _of_sequence(mask: Mask, b: int, length: int) -> Mask:
    """The mask of one sequence: a dense one, alone or with Causal, spans the capacity and may differ by sequence; it is cut to what is there."""
    match mask:
        case Dense(tensor=shown):
            shown = shown if shown.dim() == 4 else shown[None, None]
            at = min(b, shown.shape[0] - 1)
            return Dense(shown[at : at + 1, ..., :length])
        case Combined(operation="&", left=Dense() as dense, right=right):
            return _of_sequence(dense, b, length) & right
    return mask
