"""xformers' `memory_efficient_attention`, computed by tilewise.

xformers' bias classes are known by their names and fields, as of 0.0.35, so that xformers (or mslk, where they live since) need not be installed.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.compat._attn_mask import mask_and_bias
from tilewise.compat._refusals import translate_errors
from tilewise.decoding import decode
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Causal, Documents, Full, Mask, Slices, SlidingWindow

LAYER = "tilewise.compat.xformers.memory_efficient_attention"


@translate_errors(q="query", k="key", v="value", bias="attn_bias", dropout_p="p")
def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """xformers' function of this name, computed by tilewise.

    Args:
        query: (batch, seqlen_q, heads, head_dim); (batch, seqlen_q, head_dim) for one head; (batch, seqlen_q, groups, heads, head_dim), where keys
            and values that are expanded over the heads of a group are read once.
        key: (batch, seqlen_k, ...) likewise.  value: likewise, with head_dim_v.
        attn_bias: values to add, (batch, heads, seqlen_q, seqlen_k) or what broadcasts to it (3-D inputs: (batch, seqlen_q, seqlen_k), 5-D: with
            groups before heads), with a gradient where they require one; or an object of one of xformers' classes.
        p: probability of dropout.
        scale: None is head_dim ** -0.5.
        op: None; tilewise chooses its kernels itself.
        output_dtype: None, or query's.

    Returns:
        (batch, seqlen_q, ..., head_dim_v), contiguous. A query that sees no key gives 0.

    Raises:
        ShapeError: tensors that do not fit together, or to attn_bias.
        UnsupportedError: op, another output_dtype, a bias class that is not known.
    """
    if op is not None:
        raise UnsupportedError(
            f"{LAYER}: op must be None, got {op!r:.100}: it names kernels of xformers, and tilewise chooses its own; leave it out"
        )
    if output_dtype not in (None, query.dtype):
        raise UnsupportedError(
            f"{LAYER}: output_dtype must be None or {query.dtype}, query's, got {output_dtype}; convert the result with .to(...)"
        )
    shape = query.shape
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4, 5):
        shapes = f"{tuple(shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        raise ShapeError(
            f"{LAYER}: query, key and value must be all 3-D, 4-D or 5-D, (batch, seqlen, [[groups,] heads,] head_dim), got {shapes}"
        )
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
    if query.dim() == 5:
        query, key, value = query.flatten(2, 3), *_grouped(query, key, value)
    kind = type(attn_bias).__name__  # not the bases': a class that derives from a known one means other pairs
    if kind in PAGED:
        o = _paged(query, key, value, attn_bias, PAGED[kind], p, scale)
    else:
        mask, bias = _mask_and_bias(attn_bias, query, key, shape)
        o = attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=p)
    return o.reshape(*shape[:-1], value.shape[-1])


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """5-D keys and values as 4-D: one head a group where both are the same for all heads of a group."""
    groups, heads = query.shape[2:4]
    for name, x in (("key", key), ("value", value)):
        if x.shape[2] != groups or (x.shape[3] != 1 and x.shape[3] != heads):
            raise ShapeError(
                f"{LAYER}: {name} has {tuple(x.shape[2:4])} (groups, heads), query has {(groups, heads)}; expand the heads, or pass 1"
            )
    if all(x.shape[3] == 1 or x.stride(3) == 0 for x in (key, value)):
        return key[:, :, :, 0], value[:, :, :, 0]
    key, value = (x.expand(-1, -1, -1, heads, -1).flatten(2, 3) for x in (key, value))
    return key, value


def _mask_and_bias(attn_bias: Any, query: Tensor, key: Tensor, shape: tuple[int, ...]) -> tuple[Mask | None, Tensor | None]:
    """What attn_bias means for 4-D query and key, of which the query was given in `shape`."""
    kind = type(attn_bias).__name__
    if attn_bias is None:
        return None, None
    if kind == WITH_BIAS:
        return Causal("top_left"), _added(attn_bias._bias, query, key, shape)[1]
    if kind in MASKS:
        return MASKS[kind](attn_bias), None
    if isinstance(attn_bias, Tensor):
        return _added(attn_bias, query, key, shape)
    raise UnsupportedError(
        f"{LAYER}: attn_bias is a {type(attn_bias).__name__}, which is not known; known are tensors and {', '.join((*MASKS, WITH_BIAS, *PAGED))}: "
        "pass attn_bias.materialize(...), or a mask to tilewise.attention"
    )


def _added(bias: Tensor, query: Tensor, key: Tensor, shape: tuple[int, ...]) -> tuple[Mask | None, Tensor | None]:
    """Mask and bias of a tensor to add, with dimensions of heads as in `shape`; the bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_k)."""
    if bias.dtype == torch.bool:
        raise ShapeError(
            f"{LAYER}: attn_bias must be numbers to add, got torch.bool; pass tilewise.Dense(attn_bias) as mask= to tilewise.attention"
        )
    batch, seqlen_q, heads, _ = query.shape
    if len(shape) == 3 and bias.dim() == 3:
        bias = bias.unsqueeze(1)
    if len(shape) == 5 and bias.dim() == 5:
        groups = tuple(shape[2:4])
        if any(got != 1 and got != size for got, size in zip(bias.shape[1:3], groups, strict=True)):
            raise ShapeError(f"{LAYER}: attn_bias has {tuple(bias.shape[1:3])} (groups, heads), expected {groups} or 1 in place of each")
        bias = (bias if bias.shape[1:3] == (1, 1) else bias.expand(-1, *groups, -1, -1)).flatten(1, 2)
    return mask_and_bias(bias, query, (batch, heads, seqlen_q, key.shape[1]), LAYER)


def _local(bias: Any) -> Mask:
    return SlidingWindow(bias.window_left, bias.window_right)


def _causal_local(align: str) -> Callable[[Any], Mask]:
    """xformers counts a query's own position into _window_size."""
    return lambda bias: SlidingWindow(bias._window_size - 1, 0, align)


def _full(bias: Any) -> Mask:
    return Full()


def _causal(align: str) -> Callable[[Any], Mask]:
    return lambda bias: Causal(align)


def _blocks(inner: Callable[[Any], Mask]) -> Callable[[Any], Mask]:
    """Sequences one after another, each with `inner`."""
    return lambda bias: Documents(list(bias.q_seqinfo.seqstart_py), list(bias.k_seqinfo.seqstart_py), inner(bias))


def _slots(inner: Callable[[Any], Mask]) -> Callable[[Any], Mask]:
    """Sequences with the first seqlen_py keys from each of seqstart_py on."""
    return lambda bias: _in_slots(bias, inner(bias))


def _in_slots(bias: Any, inner: Mask) -> Mask:
    queries, lengths = list(bias.q_seqinfo.seqstart_py), list(bias.k_seqinfo.seqlen_py)
    starts = list(bias.k_seqinfo.seqstart_py)[: len(lengths)]
    keys = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    if all(a[1] <= b[0] for a, b in pairwise(keys)):  # documents, with one that has no queries for each gap
        cu_q, cu_k = [0, *queries[:1]], [0, *(keys[0][:1] if keys else [0])]
        for end, (start, stop) in zip(queries[1:], keys, strict=True):
            cu_q += [cu_q[-1], end]
            cu_k += [start, stop]
        return Documents(cu_q, cu_k, inner)
    if inner.source not in KINDS:
        raise UnsupportedError(
            f"{LAYER}: the keys of {type(bias).__name__} overlap or are not in order, which goes with causal and full masks alone; call once "
            "a sequence"
        )
    return Slices(list(pairwise(queries)), keys, [KINDS[inner.source]] * len(keys))


KINDS = {Full().source: 0, Causal().source: 1}  # as Slices counts them
WITH_BIAS = "LowerTriangularMaskWithTensorBias"
MASKS: dict[str, Callable[[Any], Mask]] = {
    "LowerTriangularMask": _causal("top_left"),
    "LowerTriangularFromBottomRightMask": _causal("bottom_right"),
    "LowerTriangularFromBottomRightLocalAttentionMask": _causal_local("bottom_right"),
    "LocalAttentionFromBottomRightMask": _local,
    "BlockDiagonalMask": _blocks(_full),
    "BlockDiagonalCausalMask": _blocks(_causal("top_left")),
    "BlockDiagonalCausalFromBottomRightMask": _blocks(_causal("bottom_right")),
    "BlockDiagonalCausalLocalAttentionMask": _blocks(_causal_local("top_left")),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _blocks(_causal_local("bottom_right")),
    "BlockDiagonalPaddedKeysMask": _slots(_full),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _slots(_causal("bottom_right")),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _slots(_local),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _slots(_causal_local("bottom_right")),
    "BlockDiagonalGappyKeysMask": _slots(_full),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _slots(_causal("bottom_right")),
}
PAGED: dict[str, bool] = {  # and whether causal
    "PagedBlockDiagonalPaddedKeysMask": False,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": True,
}


def _paged(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, causal: bool, p: float, scale: float | None) -> Tensor:
    """Packed queries (1, total, heads, head_dim) against pages (1, pages * page_size, heads_k, head_dim)."""
    kind, total = type(attn_bias).__name__, attn_bias.q_seqinfo.seqstart_py[-1]
    if p > 0.0:
        raise UnsupportedError(f"{LAYER}: p must be 0 with {kind}, got {p}; a cache is read without dropout")
    if query.shape[0] != 1 or total != query.shape[1]:
        raise ShapeError(f"{LAYER}: query must have batch 1 and {total} positions with this {kind}, got {tuple(query.shape[:2])}")
    pages = [x.squeeze(0).unflatten(0, (-1, attn_bias.page_size)) for x in (key, value)]
    starts, seqlens = (x.to(query.device) for x in (attn_bias.q_seqinfo.seqstart, attn_bias.k_seqinfo.seqlen))
    o = decode(
        query[0], *pages, cu_seqlens_q=starts, cache_seqlens=seqlens, page_table=attn_bias.block_tables, causal=causal, scale=scale
    )  # fmt: skip
    return o[None]
