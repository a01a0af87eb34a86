"""Rotary position embedding (Su et al., "RoFormer", 2021) in plain torch.

Tables `cos`, `sin` are (seqlen_rotary, rotary_dim / 2). Pairs of dimensions are (d, d + rotary_dim / 2), or with `interleaved` (2 d, 2 d + 1); what
lies beyond rotary_dim passes through. Sums are made in fp32 (fp64 for fp64) and rounded once to x's dtype.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise.errors import ShapeError, check_size, check_tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """x (..., heads, head_dim) rotated by the rows of the tables at `positions` (...), integers.

    On the CPU ShapeError for positions beyond the tables; elsewhere they are clamped.
    """
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, ("seqlen_rotary", "rotary_dim / 2"))
    check_size("sin", "shape", sin.shape, cos.shape, "cos")
    half, dim = cos.shape[1], x.shape[-1]
    if 2 * half > dim:
        raise ShapeError(f"cos has rotary_dim / 2 = {half}, but x has head_dim {dim}; rotary_dim must not be larger than head_dim")
    if (
        not is_compiling()
        and x.device.type == "cpu"
        and positions.numel()
        and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]
    ):
        raise ShapeError(f"cos and sin have {cos.shape[0]} positions, but x reaches position {int(positions.max())}; make longer tables")
    if x.device.type != "cpu":
        positions = positions.clamp(0, max(cos.shape[0] - 1, 0))  # their values are not read, and must not fault
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[positions][..., None, :].to(wide) for table in (cos, sin))
    turned = x[..., : 2 * half].to(wide)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * c - b * s, a * s + b * c
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    turned = turned.to(x.dtype)
    return turned if 2 * half == dim else torch.cat((turned, x[..., 2 * half :]), -1)
