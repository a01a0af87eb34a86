"""Where 8 bits pay: a drop-in for 8 bits multiplies in 16 where that is faster, which is more exact as well."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.compiler import assume_constant_result

from tilewise.problem import Problem
from tilewise.runtime import dispatch

FEWEST_KEYS = 2048  # up to this many, quantising takes longer than it saves (H100, docs/benchmarks.md#8-bits)
WIDEST = 64  # head_dim up to which 16 bits are faster at any length (the same rows)
PAYS = "hopper"  # where 8 bits were measured to be faster: by Triton they were slower on an H100, and on no other card measured


def paying(precision: str | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> str | None:
    """`precision` for q (batch, seqlen_q, heads_q, head_dim), k and v, which nobody has checked, or None: with few keys, small heads, no kernel
    here that gains by it, a bias, or tensors that are not of 16 bits."""
    if precision is None or bias is not None or not all(isinstance(x, Tensor) and x.dim() >= 3 for x in (q, k, v)):
        return None
    if q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if k.shape[-3] <= FEWEST_KEYS or q.shape[-1] <= WIDEST or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        return None
    sizes = q.shape[-1], v.shape[-1], q.shape[-2] // k.shape[-2]
    return precision if _kernel(q.device.type, str(q.dtype).removeprefix("torch."), *sizes, precision) else None


@assume_constant_result
@lru_cache(256)
def _kernel(device: str, dtype: str, head_dim: int, head_dim_v: int, group: int, precision: str) -> bool:
    """Whether a kernel multiplies so that gains by it."""
    problem = Problem(
        device=device,
        dtype=getattr(torch, dtype),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        group=group,
        mask="full",
        precision=precision,
    )
    return dispatch.choose(problem).name == PAYS
