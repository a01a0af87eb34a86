"""NaN and infinities of V in tiles that some rows see and others do not: they reach the rows that see them, and no others (forward/hidden.py)."""

import math

import pytest
import torch
from hopper_problems import NEEDS_HOPPER, cumulated

from tilewise.backends.hopper import Hopper
from tilewise.masks import Causal, Dense, Documents, Full, PrefixLM, SlidingWindow
from tilewise.problem import Call
from tilewise.testing import tolerance

pytestmark = NEEDS_HOPPER

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72)]
MASKS = [
    Causal(),
    SlidingWindow(70, 3),
    SlidingWindow(400, None),
    Documents(cumulated((500, 1, 0, 399)), inner=Causal()),
    PrefixLM(300),
    Full(),
]


def spoiled(dims, mask, seqlen=900, seed=0, dtype=torch.bfloat16, **changes) -> Call:
    """Rows of V with NaN, infinities of one sign, and of both; every column has another kind, and some have none."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(1, seqlen, 2, dim, device="cuda", generator=generator) for dim in (dims[0], dims[0], dims[1]))
    v[0, 3::137, 0, 1] = math.nan
    v[0, 5::131, 0, 2:] = math.inf
    v[0, 9::123, :, 4::3] = -math.inf
    v[0, -200:-150, 1] = math.nan
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, **changes)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_they_reach_who_sees_them(dims, mask):
    for seed, dtype in enumerate((torch.bfloat16, torch.float16)):
        call = spoiled(dims, mask, seed=seed, dtype=dtype)
        tolerance.check_outputs(call, *Hopper().forward(call))


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(3000, 0)], ids=repr)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_long_walks(dims, mask):
    """Those of pairs of thread blocks among them; the same bits every time."""
    call = spoiled(dims, mask, seqlen=5000)
    first = Hopper().forward(call)
    tolerance.check_outputs(call, *first)
    for _ in range(5):
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(Hopper().forward(call), first, strict=True))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_bitmaps_and_biases(dims):
    generator = torch.Generator("cuda").manual_seed(1)
    dense = Dense(torch.rand(900, 900, device="cuda", generator=generator) < 0.5)
    tolerance.check_outputs(call := spoiled(dims, dense), *Hopper().forward(call))
    bias = torch.randn(1, 2, 900, 900, device="cuda", generator=generator).bfloat16()
    bias[:, :, 100:130] = -math.inf  # rows that see nothing
    bias[:, 0, :, 200:240] = -math.inf  # keys that weigh nothing
    for mask in (Causal(), Full()):
        tolerance.check_outputs(call := spoiled(dims, mask, bias=bias), *Hopper().forward(call))
