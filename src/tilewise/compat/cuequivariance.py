"""cuEquivariance's `triangle_attention`, as models of proteins call it, computed by tilewise on any device.

Its formula gives masked scores -1e9, so that a row without a visible key is a mean of V there and 0 here; where a key is visible both are the same.
"""

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.compat._refusals import translate_errors
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Dense, Mask, Padding

LAYER = "tilewise.compat.cuequivariance.triangle_attention"


@translate_errors()
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    """cuequivariance_torch's function of this name (0.13), with gradients of q, k, v and bias.

    Args:
        q: (B, N, heads, Q, head_dim); B may be left out of every tensor where it is 1.  k, v: (B, N, heads, K, head_dim).
        bias: (B, 1, heads, Q, K), added to the scaled scores in fp32.
        mask: (B, N, 1, 1, K), True where a key is visible; other dtypes are converted to bool.
        scale: None is head_dim ** -0.5.
        return_aux: False; the largest score of each row is not kept here.
        kv_lengths: (B, N, 1, 1, 1) integers in place of mask: this many first keys are visible, all where it is more than K.

    Returns:
        (B, N, heads, Q, head_dim), or without B as q has it; 0 where no key is visible.

    Raises:
        ValueError: both mask and kv_lengths, as there.
        ShapeError: tensors that do not fit together.
        UnsupportedError: return_aux.
    """
    if return_aux:
        raise UnsupportedError(
            f"{LAYER}: it returns no auxiliary tensors; for the LSE call tilewise.attention(..., bias=bias, return_lse=True)"
        )
    if mask is not None and kv_lengths is not None:
        raise ValueError(f"{LAYER}: pass mask or kv_lengths, not both")
    given = {"q": q, "k": k, "v": v, "bias": bias} | {n: x for n, x in (("mask", mask), ("kv_lengths", kv_lengths)) if x is not None}
    if q.dim() not in (4, 5):
        raise ShapeError(f"{LAYER}: q must be (B, N, heads, Q, head_dim), or without B, got {tuple(q.shape)}")
    one = q.dim() == 4
    given = {name: x.unsqueeze(0) if x.dim() == 4 else x for name, x in given.items()}
    batch, rows, heads, queries, _ = given["q"].shape
    keys = given["k"].shape[-2]
    wanted = {
        "k": (batch, rows, heads, keys, q.shape[-1]),
        "v": (batch, rows, heads, keys, given["v"].shape[-1]),
        "bias": (batch, 1, heads, queries, keys),
        "mask": (batch, rows, 1, 1, keys),
        "kv_lengths": (batch, rows, 1, 1, 1),
    }
    for name, shape in wanted.items():
        if name in given and given[name].shape != shape:
            raise ShapeError(f"{LAYER}: {name} must be {shape} for q of {tuple(q.shape)}, got {tuple(given[name].shape)}")
    added = given["bias"] if given["bias"].dtype in (q.dtype, torch.float32) else given["bias"].float()
    outputs = []
    for b in range(batch):  # a bias is shared by all rows of one entry
        q4, k4, v4 = (given[name][b].transpose(1, 2) for name in ("q", "k", "v"))
        outputs.append(attention(q4, k4, v4, bias=added[b], mask=_visible(given, b, keys), scale=scale).transpose(1, 2))
    if not outputs:
        return given["q"].clone()  # which has no elements
    return outputs[0] if one else outputs[0].unsqueeze(0) if batch == 1 else torch.stack(outputs)


def _visible(given: dict[str, Tensor], b: int, keys: int) -> Mask | None:
    if "mask" in given:
        return Dense(given["mask"][b].to(torch.bool))
    if "kv_lengths" in given:
        return Padding(given["kv_lengths"][b].flatten().clamp(max=keys))
    return None
