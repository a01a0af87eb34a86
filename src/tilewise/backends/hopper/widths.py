"""Head dims with rows that the copy engine cannot load: zeros behind them up to a multiple of 16 bytes, and results cut back.

Zeros behind q and k add nothing to a score, zeros behind v nothing to the other columns of O: LSE, the scale and the gradients that are kept are
those of the head dims given.
"""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from tilewise.problem import Call, Gradients

MULTIPLE = 8  # elements of 16 bits, in the 16 bytes that are loaded at once


def wider(dim: int) -> int:
    return -(-dim // MULTIPLE) * MULTIPLE


def fits(call: Call) -> bool:
    return call.head_dim % MULTIPLE == 0 == call.head_dim_v % MULTIPLE


def of_call(call: Call) -> Call:
    """The call that the kernels are given; the same where it fits."""
    return call if fits(call) else replace(call, q=padded(call.q), k=padded(call.k), v=padded(call.v), out=None)


def padded(x: Tensor) -> Tensor:
    """x (..., dim), or a copy with zeros behind its last dimension."""
    missing = -x.shape[-1] % MULTIPLE
    return pad(x, (0, missing)) if missing else x


def cut(call: Call, gradients: Gradients) -> Gradients:
    """The gradients of `call` from those of `of_call(call)`: views."""
    dq, dk, dv = gradients.q[..., : call.head_dim], gradients.k[..., : call.head_dim], gradients.v[..., : call.head_dim_v]
    return gradients._replace(q=dq, k=dk, v=dv)
