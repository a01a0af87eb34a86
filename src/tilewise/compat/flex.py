"""torch's `flex_attention`, computed by tilewise: mask_mods become bands, score_mods become scale, softcap, ALiBi and bias.

A mask_mod of comparisons between query, key, their distance and captured tensors of positions (documents, prefixes, windows, chunks, padding) is
recognised in about a millisecond (`flex_mods.py`); any other is evaluated block by block into bits (`masks/flex.py`). A score_mod that is
no `a * score + b(batch, head, query, key)`, softcapped or not, is refused.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.compat._refusals import translate_errors
from tilewise.compat.flex_apart import apart
from tilewise.compat.flex_mods import Program, Unrecognised, pairs_of, record, tensor_digest
from tilewise.compat.flex_scores import Changes, bias_of, changes_of
from tilewise.errors import ShapeError, UnsupportedError, check_capture
from tilewise.masks import Bands, Mask
from tilewise.masks.band_tables import expand
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.flex import NOT_LISTED, PARTIAL, WHOLE, check_block_mask, from_flex, listed_blocks, lists_extent, mask_extent
from tilewise.masks.tiles import FULL, lower

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

LAYER = "tilewise.compat.flex.flex_attention"
NOT_TRACED = (
    "this cannot be traced, because it reads block_mask and runs mask_mod; torch.compile without fullgraph=True calls it between graphs "
    "(or trace tilewise.attention(mask=tilewise.compat.flex.mask_of(block_mask)), with a mask made before)"
)


@translate_errors(q="query", k="key", v="value")
@torch.compiler.disable(reason=NOT_TRACED)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict | None = None,
    *,
    return_aux: "AuxRequest | None" = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, computed by tilewise; eager, it is as fast as compiled.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim).  key: (batch, heads_k, seqlen_k, head_dim).  value: likewise, with head_dim_v.
        score_mod: `a * score + b`, or `c * tanh(score / c) + b` (softcap), where b may depend on batch, head, query and key: ALiBi becomes slopes,
            other terms a bias, with gradients of captured tensors; and `torch.where(visible, score, -inf)` around these.
        block_mask: its lengths must be those of query and key; read at each call, unless it is frozen (`mask_of`).
        scale: None is head_dim ** -0.5.
        enable_gqa: heads_q may be a multiple of heads_k.
        return_lse: also return LSE (batch, heads_q, seqlen_q).
        kernel_options: options of torch's kernels, which have no meaning here.
        return_aux: AuxRequest(lse=True) asks for LSE in torch's AuxOutput.

    Returns:
        O (batch, heads_q, seqlen_q, head_dim_v), with `return_lse` (O, LSE), with `return_aux` (O, AuxOutput).

    Raises:
        ShapeError: tensors that do not fit together, or to block_mask.
        UnsupportedError: a score_mod that is not recognised, return_aux.max_scores, or a tensor that score_mod or mask_mod captures and torch.vmap
            maps over, or torch.func.grad differentiates.
    """
    _check(query, key, value, block_mask, enable_gqa, return_lse, return_aux)
    batch, heads = query.shape[:2]
    seqlen_k = key.shape[2]
    mask = None if block_mask is None else mask_of(block_mask, batch, heads)
    changes = Changes() if score_mod is None else changes_of(score_mod, query, seqlen_k, mask)
    if changes.mask is not None:
        mask = changes.mask if mask is None else mask & changes.mask
    bias = None if changes.term is None else bias_of(changes, query, seqlen_k)
    if key.shape[0] != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    o, lse = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask=mask,
        scale=changes.factor * (query.shape[3] ** -0.5 if scale is None else scale),
        softcap=changes.softcap,
        bias=bias,
        alibi_slopes=changes.slopes,
        return_lse=True,
    )
    o = o.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return o, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (o, lse) if return_lse else o


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool, return_lse: bool, return_aux: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            found = type(x).__name__ if not isinstance(x, Tensor) else "a nested tensor" if x.is_nested else f"shape {tuple(x.shape)}"
            raise ShapeError(f"{LAYER}: {name} must be a dense tensor (batch, heads, seqlen, head_dim), got {found}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(f"{LAYER}: query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True for grouped heads")
    if key.shape[0] != 1 and key.shape[0] != query.shape[0]:  # torch's compiler takes `in` of a symbol for false
        raise ShapeError(f"{LAYER}: key has batch {key.shape[0]}, expected that of query, {query.shape[0]}, or 1")
    if return_aux is not None:
        if return_lse:
            raise ValueError(f"{LAYER}: return_lse and return_aux ask for the same; leave return_lse out")
        if return_aux.max_scores:
            raise UnsupportedError(
                f"{LAYER}: return_aux.max_scores is not computed here; ask for lse alone, or call torch's flex_attention"
            )
    if block_mask is None:
        return
    check_block_mask(block_mask)
    wanted, given = tuple(block_mask.seq_lengths), (query.shape[2], key.shape[2])
    if wanted != given:
        raise ShapeError(
            f"{LAYER}: block_mask is made for seqlen_q {wanted[0]} and seqlen_k {wanted[1]}, the call has {given[0]} and {given[1]}; make a "
            "BlockMask of these lengths"
        )
    for name, had, has in zip(("batch", "heads"), lists_extent(block_mask), query.shape, strict=False):
        if had != 1 and had != has:
            raise ShapeError(
                f"{LAYER}: block_mask is made for {name} {had}, the call has {name} {has}; they must agree, or the mask's be 1"
            )


class Kept(NamedTuple):
    """The masks made for a BlockMask, none of which holds anything of the user's."""

    frozen: bool
    made_from: bytes | None  # `_digest` of the BlockMask
    uses: set[str]  # of the inputs b and h
    masks: dict[tuple[int, int], Mask]  # by (batch, heads), as far as mask_mod uses them


_KEPT: WeakKeyDictionary = WeakKeyDictionary()  # BlockMask -> Kept


@torch.compiler.disable(reason=NOT_TRACED)
def mask_of(block_mask: "BlockMask", batch: int = 1, heads: int = 1, *, frozen: bool = False) -> Mask:
    """A BlockMask as a mask for `tilewise.attention`: bands where its mask_mod is recognised, else bits.

    The mask is what the BlockMask means at this call, whatever its mask_mod reads: attributes, globals, NumPy arrays, tensors. Each call runs
    mask_mod once on stand-ins of one element, and gives the mask of the call before where the operations, their numbers, the elements of the
    tensors among them and the lists of blocks are all equal to those of that call. Otherwise the mask is made anew, and always where mask_mod
    cannot be recorded so: it writes to tensors, asks for the shape of its indices, or calls operators that are not torch's own.
    On a GPU the comparison waits for the tensors. Nothing that mask_mod holds is kept alive.

    Args:
        batch, heads: of the query, where mask_mod tells them apart.
        frozen: whether the mask is kept for this BlockMask: from now on neither mask_of nor flex_attention looks at the BlockMask, and changes of
            what it means are not seen. For another batch or heads the mask is made at the first call with these. Capturing a CUDA graph needs it.

    Raises:
        ShapeError: block_mask is no BlockMask, is made for another batch or heads, or its lists do not fit its lengths.
        UnsupportedError: its mask has no bands and more than 65536 x 65536 pairs, mask_mod reads a tensor that torch.vmap maps over, or a CUDA graph
            is being captured.
    """
    check_block_mask(block_mask)
    sizes, made_for = mask_extent(block_mask, batch, heads), lists_extent(block_mask)

    def place(kept: Kept) -> tuple[int, int]:
        b, h = (size if name in kept.uses else had for name, size, had in zip("bh", sizes, made_for, strict=True))
        return b, h

    kept = _KEPT.get(block_mask)
    if kept is None or not kept.frozen or place(kept) not in kept.masks:
        check_capture(block_mask.kv_num_blocks, "a BlockMask", "call mask_of(block_mask, batch, heads, frozen=True) before the capture")
        device = block_mask.kv_num_blocks.device
        with apart("block_mask", block_mask.mask_mod, device):
            try:
                program = record(block_mask.mask_mod, device)
            except Unrecognised:
                program = None
            now = None if program is None else _digest(program, block_mask)
            if kept is None or not (kept.frozen or (now is not None and now == kept.made_from)):
                kept = Kept(False, now, {"b", "h"} if program is None else program.uses(), {})
            if place(kept) not in kept.masks:
                kept.masks[place(kept)] = _made(program, block_mask, *place(kept))
    if frozen and not kept.frozen:
        kept = kept._replace(frozen=True)
    if kept.frozen or kept.made_from is not None:
        _KEPT[block_mask] = kept
    else:
        _KEPT.pop(block_mask, None)
    return kept.masks[place(kept)]


def _digest(program: Program, block_mask: "BlockMask") -> bytes | None:
    """Equal where the mask is; None where that cannot be said."""
    lists = [getattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")]
    try:
        parts = [b"" if x is None else str(tuple(x.shape)).encode() + tensor_digest(x) for x in lists]
        return b"|".join([program.digest(), *parts, repr((block_mask.seq_lengths, block_mask.BLOCK_SIZE)).encode()])
    except Unrecognised:
        return None


def _made(program: Program | None, block_mask: "BlockMask", batch: int, heads: int) -> Mask:
    try:
        if program is not None:
            return _recognised(program, block_mask, batch, heads)
    except Unrecognised:
        pass
    return from_flex(block_mask, batch, heads)


def _recognised(program: Program, block_mask: "BlockMask", batch: int, heads: int) -> Mask:
    seqlen_q, seqlen_k = block_mask.seq_lengths
    mask = pairs_of(program, program.result, batch, heads, seqlen_q, seqlen_k)
    listed = listed_blocks(block_mask)
    for plane in mask.planes(seqlen_q, seqlen_k, *mask.extent):
        for blocks in _cut(listed, plane.batch, plane.heads, mask.extent):
            if not _agree(blocks, plane.region, block_mask.BLOCK_SIZE):
                raise Unrecognised("describes other pairs than the blocks that are listed")
    return mask


def _cut(listed: np.ndarray, batch: range, heads: range, extent: tuple[int, int]) -> list[np.ndarray]:
    """The blocks (m_blocks, n_blocks) of these batch entries and heads of a mask that tells `extent` of them apart."""
    chosen = listed
    for axis, (part, told_apart) in enumerate(zip((batch, heads), extent, strict=True)):
        if told_apart > 1 and listed.shape[axis] > 1:
            chosen = chosen.take(part, axis)
    return list(chosen.reshape(-1, *listed.shape[2:]))


def _agree(listed: np.ndarray, region: Bands | Bitmap, block_size: tuple[int, int]) -> bool:
    """Whether all blocks that are not listed are empty in `region`, and all that are listed as full are full."""
    runs = lower(region, *block_size)
    if (runs.m_blocks, runs.n_blocks) != listed.shape:
        return False
    run, place = expand(runs.n1.astype(np.int64) - runs.n0)
    m_block = np.repeat(np.arange(runs.m_blocks), np.diff(runs.row_ptr))[run]
    seen = np.zeros(listed.shape, np.int8)
    np.maximum.at(seen, (m_block, runs.n0[run] + place), np.where(runs.kind[run] == FULL, WHOLE, PARTIAL).astype(np.int8))
    return not ((listed == NOT_LISTED) & (seen > NOT_LISTED)).any() and not ((listed == WHOLE) & (seen < WHOLE)).any()
