"""Matrix products in which a hidden pair contributes nothing, even where its other factor is NaN or infinite."""

import torch
from torch import Tensor

_LIMIT = 1e9  # a product of three such values and the lengths stays far from the end of fp32


def tame(bias: Tensor | None, *tensors: Tensor) -> bool:
    """Whether no product of a few of the values overflows or is NaN, so that hiding a pair may be adding -inf or multiplying by zero.

    A bias may hold -inf: it hides pairs itself.
    """
    if bias is not None and bias.numel() and not bias.max() <= _LIMIT:
        return False
    return all(low >= -_LIMIT and high <= _LIMIT for low, high in (torch.aminmax(x) for x in tensors if x.numel()))


def accumulate(out: Tensor, a: Tensor, b: Tensor, visible: Tensor | None) -> None:
    """out += a @ b for (lanes, n, d) += (lanes, n, m) @ (lanes, m, d), over the pairs that `visible` (n, m) allows (None: all).

    A factor a[i, j] of a hidden pair is never multiplied with b[j]: 0 * NaN is NaN. Rows of b that are finite go through the
    plain product (a is zero at hidden pairs); the others, if anyone sees them, are added one by one.
    """
    if visible is None:
        out.baddbmm_(a, b)
        return
    finite = b.isfinite().all(dim=-1).all(dim=0)  # (m,)
    out.baddbmm_(a[:, :, finite], b[:, finite])
    for j in (~finite & visible.any(dim=0)).nonzero().flatten().tolist():
        out += torch.where(visible[:, j, None], a[:, :, j, None] * b[:, j, None], 0.0)
