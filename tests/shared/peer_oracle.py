"""What the tests of tilewise.compat share: tensors by seed, and a peer's function held to the fp64 oracle in values and gradients."""

from dataclasses import replace

import torch
from torch import Tensor

from tilewise.masks import Mask
from tilewise.problem import Call, Gradients
from tilewise.testing import tolerance


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def qkv(batch: int, seqlen_q: int, seqlen_k: int, heads=(4, 2), dims=(16, 16), dtype: torch.dtype = torch.float32, grad: bool = True):
    """q, k, v (batch, seqlen, heads, dim); leaves that want a gradient where `grad`."""
    shapes = (seqlen_q, heads[0], dims[0]), (seqlen_k, heads[1], dims[0]), (seqlen_k, heads[1], dims[1])
    return tuple(randn(batch, *shape, seed=n, dtype=dtype).requires_grad_(grad) for n, shape in enumerate(shapes))


def call_of(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **fields) -> Call:
    """The `Call` of (batch, seqlen, heads, dim); slopes (heads,) or (batch, heads)."""
    slopes = fields.pop("alibi_slopes", None)
    if slopes is not None:
        fields["alibi_slopes"] = slopes if slopes.dim() == 2 else slopes[None]
    call = Call(q=q.detach(), k=k.detach(), v=v.detach(), mask=mask, scale=fields.pop("scale", q.shape[-1] ** -0.5), grad=True, **fields)
    return replace(call, sink=None if call.sink is None else call.sink.detach())


def check(call: Call, o: Tensor, lse: Tensor | None = None, leaves: tuple[Tensor, ...] = ()) -> None:
    """Hold O and LSE (-inf for empty rows), and where there are `leaves` (q, k, v, and the sink's) their gradients for a random dO, to the oracle."""
    d_o = randn(*o.shape, seed=9, dtype=o.dtype)
    expect = tolerance.expected(call, d_o if leaves else None)
    tolerance.hold("o", o.detach(), expect.o)
    if lse is not None:
        tolerance.check_lse("lse", lse.detach(), expect.lse)
    if leaves:
        grads = torch.autograd.grad(o, leaves, d_o)
        names = ("q", "k", "v", "sink")[: len(leaves)]
        tolerance.check_gradients(
            call, Gradients(**{"bias": None, "sink": None} | dict(zip(names, grads, strict=True))), d_o, expect=expect
        )
