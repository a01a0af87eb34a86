"""The torch.library operator `tilewise::decode`: its operands, what it refuses, and what it does when it runs.

Lengths and pages are tensors (a length for all may be a number);
their values are never read when it is traced. When it runs they are checked on the CPU; on a GPU they stay there (cache_values.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import errors, masks
from tilewise.backends import Backend
from tilewise.backends.sequences import of_sequence, one_by_one
from tilewise.problem import Call, DecodeCall, Rotary, Share
from tilewise.rotary import rotated
from tilewise.runtime import append_operator, graphs, op, plain, vmaps
from tilewise.runtime import cache_values as values
from tilewise.runtime import operator as ops
from tilewise.runtime.dispatch import choose

NO_GRADIENT = "decode is for inference and has no gradient"


class Operands(NamedTuple):
    """The operands of `operator`, in the order of its schema.

    Tensors as in `decoding.decode`, but alibi_slopes (batch or 1, heads_q) fp32. `length` is the number of tokens of every sequence where it is
    known as a number; without it and without cache_seqlens all sequences fill their capacity. Lengths count the new tokens, which are in the caches
    already.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad: Tensor | None
    tree: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    mask_tensors: list[Tensor]
    mask: str
    length: int | None
    shared_prefix: int
    split: int | None
    interleaved: bool
    scale: float | None
    softcap: float
    backend: str | None
    check: bool
    out_dtype: torch.dtype | None = None  # of O, where it is not q's
    cp_rank: int = 0  # as `problem.Share`; a world of 1: the caches hold all tokens
    cp_world: int = 1
    cp_interleave: int = 1

    @property
    def share(self) -> Share | None:
        return None if self.cp_world == 1 else Share(self.cp_rank, self.cp_world, self.cp_interleave)


OTHERWISE = "mask", "scale", "shared_prefix", "split", "share"  # in DecodeCall
AS_IN_CALL = tuple(name for name in Operands._fields if name in DecodeCall.__dataclass_fields__ and name not in OTHERWISE)


def run(given: Operands) -> tuple[Tensor, Tensor]:
    """O and LSE: at once where nobody but the caller takes part, which saves the operator's 40 us, else by the operator."""
    if ops.traced():
        how = given.mask, op.held(given), given.backend, given.check, given.page_table is not None
        reads = graphs.decode_reads(given.q, given.k_cache, given.v_cache, *how)
        return (operator_reading if reads else operator)(*op.filled(given))
    if plain.needs_dispatch((tensors := op.named(given)).values()):
        errors.check_local(tensors, function="decode")
        return operator(*given)
    return _compute(given)


def check(given: Operands, new: int | None) -> None:
    """Raise what `run` would, before new tokens are written: `new` of each sequence, or as many as its queries. Whoever traces or maps a call gets
    its errors when it runs.
    """
    if ops.traced() or plain.needs_dispatch(op.named(given).values()):
        return
    call = call_of(given, None)
    backend = backend_of(call, given.backend)
    if call.q.numel() and call.seqlens.shape[0] and goes_whole(call):
        backend.check_decode(call)
    if values.wanted(given.q.device, given.check):
        if new is None:
            assert given.cu_seqlens_q is not None
            more = append_operator.packed(given.cu_seqlens_q, given.q.shape[0])
        else:
            more = [new] * call.seqlens.shape[0]
        _check(given, more)
        if call.mask.kind not in ("full", "band"):  # it may not fit what there will be of a sequence
            rows = [call.q.shape[1]] * len(more) if given.cu_seqlens_q is None else given.cu_seqlens_q.diff().tolist()
            for b, (before, n, queries) in enumerate(zip(call.seqlens.tolist(), more, rows, strict=True)):
                of_sequence(call.mask, b, before + n).planes(queries, before + n, 1, call.q.shape[-2])


def _compute(given: Operands) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q), or (total_q, heads_q, head_dim_v) and (heads_q, total_q)."""
    checked = values.wanted(given.q.device, given.check)
    call = call_of(given, _check(given) if checked else None)
    backend = backend_of(call, given.backend)
    if call.seqlens.shape[0] == 0 or call.q.numel() == 0:
        o, lse = _empty(call.q, call.v_cache, given.out_dtype)
        return o.zero_(), lse.fill_(-torch.inf)
    covered = goes_whole(call)
    found = backend.decode(call) if covered else None
    if found is None and call.rotary is not None:
        call = _rotated(call)
        found = backend.decode(call) if covered else None
    o, lse = found or one_by_one(lambda each: choose(each.problem, given.backend).forward(each), call)
    return o.to(given.out_dtype or o.dtype).contiguous(), lse.contiguous()  # as the fake kernel says, whatever the backend finds natural


def _vmap(operator: Callable, size: int, in_dims: tuple, operands: tuple):
    """A call for each entry. What the mapped dimension could be folded into, the batch, a paged cache and a mask do not have."""
    if size == 0:
        q, _, v_cache = (x if dim is None else x.movedim(dim, 0).sum(0) for x, dim in zip(operands[:3], in_dims[:3], strict=True))
        return tuple(x.new_empty((0, *x.shape)) for x in _empty(q, v_cache)), (0, 0)
    return vmaps.one_by_one(operator, size, in_dims, operands)


def _refuse_gradient(ctx, *grads):
    raise RuntimeError(f"{NO_GRADIENT}; call attention where one is wanted")


operator, operator_reading = op.declare(
    "decode",
    Operands,
    _compute,
    fake=lambda given: _empty(given.q, given.v_cache, given.out_dtype),
    results=2,
    tangent=partial(errors.check_no_tangent, reason=NO_GRADIENT),
    vmap=_vmap,
    backward=_refuse_gradient,
)


def _like(cache: Tensor, q: Tensor) -> Tensor:
    """What stands for the cache where a backend is chosen: elements of 8 bits are q's by the time they are multiplied."""
    return cache if cache.dtype == q.dtype else cache.new_empty((1, 1, *cache.shape[2:]), dtype=q.dtype)


def _empty(q: Tensor, v_cache: Tensor, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """O and LSE, unwritten."""
    *rows, heads_q, _ = q.shape
    shape = (heads_q, *rows) if len(rows) == 1 else (rows[0], heads_q, rows[1])
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, heads_q, v_cache.shape[3]), dtype=out_dtype or q.dtype), q.new_empty(shape, dtype=statistics)


def _batch(given: Operands) -> int:
    return given.q.shape[0] if given.cu_seqlens_q is None else given.cu_seqlens_q.shape[0] - 1


def _check(given: Operands, new: list[int] | None = None) -> int | None:
    """ShapeError for values that the caches do not have. The most queries of a sequence, where they are packed. new: tokens that are yet to be
    written, of each sequence.
    """
    capacity = values.capacity_of(given.k_cache, given.page_table)
    lengths = [capacity if given.length is None else given.length] * _batch(given)
    lengths = lengths if given.cache_seqlens is None else given.cache_seqlens.tolist()
    if new is not None:
        lengths = [before + more for before, more in zip(lengths, new, strict=True)]
    values.check_lengths(lengths, given.k_cache, given.page_table, new, given.share)
    if given.page_table is not None:
        held = lengths if given.share is None else list(map(given.share.held, lengths))
        values.check_pages(given.page_table, held, given.k_cache.shape[0], given.k_cache.shape[1])
    if given.cache_batch_idx is not None:
        values.check_rows(given.cache_batch_idx, given.k_cache.shape[0])
    if given.leftpad is not None:
        values.check_padding(given.leftpad, lengths)
    if given.cu_seqlens_q is None:
        return None
    bounds = values.check_cu_seqlens("cu_seqlens_q", given.cu_seqlens_q, given.q.shape[0])
    return max((b - a for a, b in pairwise(bounds)), default=0)


def backend_of(call: DecodeCall, name: str | None) -> Backend:
    """What is asked for by name, or chosen, as for the same tensors in `attention`."""
    q = call.q if call.cu_seqlens_q is None else call.q[None]
    others = {"mask": call.mask, "scale": call.scale, "softcap": call.softcap, "alibi_slopes": call.alibi_slopes, "sink": call.sink}
    return choose(Call(q=q, k=_like(call.k_cache, q), v=_like(call.v_cache, q), **others).problem, name, decodes=True)


def goes_whole(call: DecodeCall) -> bool:
    """Whether a backend may take the call whole: one mask for all sequences and heads, which holds no tensor."""
    return call.mask.kind != "bitmap" and call.mask.alike


def call_of(given: Operands, most_queries: int | None) -> DecodeCall:
    """The call as backends take it. Nothing is read on the host but what a dense mask holds."""
    q, device, rotary = given.q, given.q.device, None
    capacity = values.capacity_of(given.k_cache, given.page_table)
    if given.cache_seqlens is None:
        length = capacity if given.length is None else max(given.length, 0)
        length = min(length, capacity) if given.share is None else length
        seqlens = torch.full((_batch(given),), length, dtype=torch.int32, device=device)
    else:
        seqlens = given.cache_seqlens
    if given.rotary_cos is not None and given.rotary_sin is not None:
        rotary = Rotary(given.rotary_cos, given.rotary_sin, given.interleaved)
    # With a split whether to read it once would hang on the batch.
    shared_prefix = min(given.shared_prefix, capacity) if given.split is None and given.share is None else 0
    return DecodeCall(
        seqlens=seqlens,
        max_seqlen_q=q.shape[0 if given.cu_seqlens_q is not None else 1] if most_queries is None else most_queries,
        shared_prefix=shared_prefix,
        split=None if given.split is None else min(given.split, max(capacity, 1)),
        mask=masks.parse(given.mask, op.held(given)),
        scale=q.shape[-1] ** -0.5 if given.scale is None else given.scale,
        rotary=rotary,
        share=given.share,
        **{name: getattr(given, name) for name in AS_IN_CALL},
    )


def _rotated(call: DecodeCall) -> DecodeCall:
    """The call with its queries rotated."""
    assert call.rotary is not None
    cos, sin, interleaved = call.rotary
    positions = _positions(call.q, call.seqlens, call.cu_seqlens_q)
    return replace(call, q=rotated(call.q, cos, sin, positions, interleaved=interleaved), rotary=None)


def _positions(q: Tensor, seqlens: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """The position of each query in its sequence, which ends with its queries: (batch, seqlen_q), or (total_q,). None is below 0."""
    on = {"dtype": torch.int64, "device": q.device}
    lengths = seqlens.to(torch.int64)
    if cu_seqlens_q is None:
        return (lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], **on)).clamp(min=0)
    if lengths.shape[0] == 0:
        return torch.zeros(q.shape[0], **on)
    owner = values.sequence_of(cu_seqlens_q, q.shape[0])
    place = torch.arange(q.shape[0], **on) - cu_seqlens_q[1:].to(torch.int64)[owner]
    return torch.where(place < 0, lengths[owner] + place, 0).clamp(min=0)
