"""dK and dV before they are rounded, for those who add others to them (`Call.wide_keys`): what is held of every backend."""

from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends import Backend
from tilewise.masks import SlidingWindow
from tilewise.problem import Call, Gradients
from tilewise.testing import poison, tolerance
from tilewise.testing.cases import Case, make, upstream

NEARER = 0.9  # of the error: what a rounding less leaves of two or three of the same size is 0.71 or 0.82


def both(backend: Backend, call: Call, d_o: Tensor, d_lse: Tensor | None) -> tuple[Gradients, Gradients]:
    """Gradients without and with `wide_keys`, written to memory that was NaN."""
    with poison.memory():
        o, lse = backend.forward(call)
        plain, wide = (backend.backward(each, o, lse, d_o, d_lse) for each in (call, replace(call, wide_keys=True)))
    return plain, wide


def same_bits_rounded(plain: Gradients, wide: Gradients) -> None:
    """fp32 elements that round to what is given without; dQ, and which elements are NaN, as without."""
    for name, narrow, found in zip("qkv", plain, wide, strict=False):
        assert found.dtype == (narrow.dtype if name == "q" else torch.float32), name
        assert torch.equal(found.isnan(), narrow.isnan()), name
        assert torch.equal(found.to(narrow.dtype).nan_to_num(7.0), narrow.nan_to_num(7.0)), name


def held(backend: Backend, case: Case, seed: int = 0, device: str = "cpu") -> None:
    """The same bits once they are rounded, and nearer to fp64 before; all that is hidden is NaN or infinite."""
    call, (d_o, d_lse) = make(case, seed, device, grad=True), upstream(case, seed, device)
    plain, wide = both(backend, *poison.hide(call, d_o, d_lse))
    same_bits_rounded(plain, wide)
    expect = tolerance.expected(call, d_o, d_lse)
    for name in "kv":
        want, narrow, found = (getattr(each, name) for each in (expect, plain, wide))
        tolerance.hold(f"d{name}", found, replace(want, dtype=torch.float32))
        errors = [(x.double() - want.ref).square().sum().sqrt() for x in (narrow, found)]
        assert narrow.dtype == torch.float32 or errors[1] <= NEARER * errors[0], (name, *errors)


def sums_are_exact(backend: Backend, dims: tuple[int, int], device: str = "cpu") -> None:
    """Where each query sees one key, P is rounded to 1, and dV is the sum of the group's dO: integers that bf16 has no room for, bit by bit."""
    draw, n, (heads_q, heads_k) = torch.Generator().manual_seed(0), 150, (6, 2)
    q, k, v, d_o = (
        torch.randint(-255, 256, (1, n, heads, dim), generator=draw).to(device=device, dtype=torch.bfloat16)
        for heads, dim in ((heads_q, dims[0]), (heads_k, dims[0]), (heads_k, dims[1]), (heads_q, dims[1]))
    )
    call = Call(q=q / 64, k=k / 64, v=v, mask=SlidingWindow(0, 0), scale=dims[0] ** -0.5, grad=True)
    plain, wide = both(backend, call, d_o, None)
    exact = d_o.float().unflatten(2, (heads_k, -1)).sum(3)
    assert torch.equal(wide.v, exact) and not torch.equal(plain.v.float(), exact)
