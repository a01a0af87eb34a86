"""torch's attn_mask, as its attention function and those that call it take it."""

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.masks import Causal, Dense, Mask

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

TOP_LEFT, BOTTOM_RIGHT = Causal("top_left"), Causal()


def is_causal_bias(x: object) -> "TypeGuard[CausalBias]":
    """Whether x is a CausalBias of torch.nn.attention.bias, which takes a second to import."""
    return type(x).__name__ == "CausalBias"


def mask_and_bias(attn_mask: Tensor, query: Tensor, sizes: tuple[int, ...], layer: str) -> tuple[Mask | None, Tensor | None]:
    """torch's attn_mask for scores of `sizes` (..., heads_q, seqlen_q, seqlen_k), as the mask and the bias of `tilewise.attention`.

    Views where there is one batch dimension. Raises ShapeError where it does not broadcast.
    """
    if is_causal_bias(attn_mask):  # it has no elements
        given = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if given != sizes[-2:]:
            raise ShapeError(f"{layer}: attn_mask is a CausalBias of {given[0]} x {given[1]}, but the scores are {sizes[-2]} x {sizes[-1]}")
        return (TOP_LEFT if attn_mask.variant.name == "UPPER_LEFT" else BOTTOM_RIGHT), None
    if not isinstance(attn_mask, Tensor):
        raise ShapeError(
            f"{layer}: attn_mask must be a torch.Tensor or None, got {type(attn_mask).__name__}; other masks go to tilewise.attention"
        )
    shape = (1,) * (len(sizes) - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(shape) != len(sizes) or any(got != 1 and got != size for got, size in zip(shape, sizes, strict=True)):
        raise ShapeError(
            f"{layer}: attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to (..., heads, seqlen_q, seqlen_k) {tuple(sizes)}; "
            "each size must be that or 1"
        )
    if attn_mask.dtype != torch.bool:
        _check_additive(attn_mask, query, layer)
    x, batch = attn_mask.reshape(shape), shape[:-3]
    if len(batch) > 1:  # which are one for tilewise
        x = x.expand(*(batch if all(size == 1 for size in batch) else sizes[:-3]), *shape[-3:]).flatten(0, -4)
    return (Dense(x), None) if attn_mask.dtype == torch.bool else (None, x)


def _check_additive(attn_mask: Tensor, query: Tensor, layer: str) -> None:
    if attn_mask.dtype in (query.dtype, torch.float32):
        return
    if not attn_mask.is_floating_point() or not torch.is_autocast_enabled(query.device.type):
        raise ShapeError(
            f"{layer}: attn_mask must be torch.bool (True: visible), {query.dtype} as query is, or torch.float32 (added), got {attn_mask.dtype}; "
            "write attn_mask != 0 or attn_mask.to(query.dtype)"
        )
