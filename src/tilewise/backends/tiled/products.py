"""Matrix products in which a hidden pair contributes nothing, even where its other factor is NaN or infinite."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Call

# A CPU's matrix product adds the terms of an element one after another: over 256 rows that was 11 ulp, three times the naive formula's error,
# on the values of keys that every query sees. Sums of this many (fp64: the second) are added up instead (4 % of the time at seqlen 2048, AMD EPYC,
# 2026-11).
_TERMS = 64, 128
_LIMIT = 1e9  # a product of three such values and the lengths stays far from the end of fp32
_OVERFLOW = 1e30  # scores up to here, and their sums, stay far from it too
_STEEP = 1e4  # up to here, rounding a score and its row's LSE to fp32 changes P by less than 1 %


class Care(NamedTuple):
    """What the values of a call ask for beyond the plain arithmetic. NaN asks for everything."""

    exact: bool  # values or scores near the end of fp32: hidden pairs are replaced, -inf is not added to them, nor are they multiplied by 0
    steep: bool  # scores so large that the rounding of LSE could make exp(s - LSE) overflow


def care(call: Call, *others: Tensor) -> Care:
    """Bounds what can be hidden and how large a score can be from the largest q, k, v, bias, slope and `others`.

    A bias of -inf hides pairs itself, and is no reason to be exact.
    """
    q, k, *rest = (_largest(x) for x in (call.q, call.k, call.v, *others))
    product = abs(call.scale) * q * k * call.head_dim
    low, high = (0.0, 0.0) if call.bias is None or not call.bias.numel() else (float(x) for x in torch.aminmax(call.bias))
    exact = not (product <= _OVERFLOW * min(call.softcap or 1.0, 1.0) and high <= _LIMIT and all(x <= _LIMIT for x in (q, k, *rest)))
    scores = (min(product, call.softcap) if call.softcap else product, -low, high, _largest_alibi(call))
    return Care(exact, not all(x <= _STEEP for x in scores))


def _largest(x: Tensor | None) -> float:
    """max |x|, NaN where there is one; 0 for nothing."""
    if x is None or not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


def _largest_alibi(call: Call) -> float:
    if call.alibi_slopes is None:
        return 0.0
    shift = abs(call.seqlen_k - call.seqlen_q) if call.diagonal is None else _largest(call.diagonal)
    return _largest(call.alibi_slopes) * (shift + call.seqlen_q + call.seqlen_k)


def accumulate(out: Tensor, a: Tensor, b: Tensor, visible: Tensor | None) -> None:
    """out += a @ b for (lanes, n, d) += (lanes, n, m) @ (lanes, m, d), over the pairs that `visible` (n, m) allows (None: all).

    A factor a[i, j] of a hidden pair is never multiplied with b[j]: 0 * NaN is NaN. Rows of b that are finite go through the
    plain product (a is zero at hidden pairs); the others, if anyone sees them, are added one by one.
    """
    if visible is None:
        _add(out, a, b)
        return
    finite = b.isfinite().all(dim=-1).all(dim=0)  # (m,)
    _add(out, a, b.masked_fill(~finite[:, None], 0.0))
    for j in (~finite & visible.any(dim=0)).nonzero().flatten().tolist():
        out += torch.where(visible[:, j, None], a[:, :, j, None] * b[:, j, None], 0.0)


def _add(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b."""
    if b.device.type != "cpu":
        out.baddbmm_(a, b)
        return
    terms = _TERMS[b.dtype == torch.float64]
    for i in range(0, b.shape[1], terms):
        out += a[:, :, i : i + terms] @ b[:, i : i + terms]  # `baddbmm_` may begin with `out`, and add the terms to it (MKL in fp64)
