"""Exact merge of attention over disjoint sets of keys (docs/algorithm.md, the merge equations)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.errors import ShapeError, check_like, check_tensor


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over the union of disjoint sets of keys, from the attention over each.

    `L = log(sum_n exp(L_n))` and `O = sum_n exp(L_n - L) O_n`; associative, and exact up to rounding: keep partial outputs in fp32 where it matters.

    Args:
        outputs: O_n, each (batch, seqlen_q, heads_q, head_dim_v), or packed (total_q, heads_q, head_dim_v); one dtype.
        lses: L_n, each (batch, heads_q, seqlen_q), or packed (heads_q, total_q); natural logarithm, fp32 or fp64.

    Returns:
        O in the outputs' dtype and L in the lses' dtype, both differentiable. A row that is empty (-inf) in one part takes nothing from it;
        a row that is empty in all gives O = 0 and L = -inf.

    Raises:
        ShapeError: no part, unequal numbers of parts, or parts of other shapes, dtypes or devices.
    """
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, Sequence):
            raise ShapeError(f"{name} must be a list or tuple of tensors, one for each part, got {type(parts).__name__}")
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise ShapeError(f"merge needs as many lses as outputs, and at least one of each; got {len(outputs)} outputs and {len(lses)} lses")
    packed = isinstance(outputs[0], Tensor) and outputs[0].dim() == 3
    axes_o = ("total_q", "heads_q", "head_dim_v") if packed else ("batch", "seqlen_q", "heads_q", "head_dim_v")
    axes_lse = ("heads_q", "total_q") if packed else ("batch", "heads_q", "seqlen_q")
    for n, (o, lse) in enumerate(zip(outputs, lses, strict=True)):
        check_tensor(f"outputs[{n}]", o, axes_o)
        check_tensor(f"lses[{n}]", lse, axes_lse, (torch.float32, torch.float64))
        check_like(f"outputs[{n}]", o, outputs[0], other="outputs[0]")
        check_like(f"lses[{n}]", lse, outputs[0], same_dtype=False, other="outputs[0]")
        if o.shape != outputs[0].shape or lse.dtype != lses[0].dtype:
            raise ShapeError(
                f"outputs[{n}] and lses[{n}] are {tuple(o.shape)}, {lse.dtype}; outputs[0] and lses[0] are {tuple(outputs[0].shape)}, {lses[0].dtype}"
            )
        *lead, rows, heads, _ = o.shape
        if lse.shape != (*lead, heads, rows):
            raise ShapeError(
                f"lses[{n}] has shape {tuple(lse.shape)}, but outputs[{n}] of shape {tuple(o.shape)} needs {(*lead, heads, rows)}"
            )
    weight, lse = weights(torch.stack(tuple(lses)))
    weight = weight.transpose(-1, -2).unsqueeze(-1)
    weighted = (w * torch.where(w == 0, 0.0, part) for w, part in zip(weight, outputs, strict=True))
    o = sum(weighted, 0 + next(weighted))
    return o.to(outputs[0].dtype), lse


def weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """What each part's O counts for, exp(L_n - L), and L, from L_n (parts, ...); -inf and 0 where all are -inf."""
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = torch.exp(lses - top)
    total = weight.sum(0)
    some = total.clamp(min=1.0)  # the largest part adds 1
    return weight / some, (top + some.log()).masked_fill(total == 0, -torch.inf)
