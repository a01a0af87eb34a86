"""Scores that grow from tile to tile: a little, beyond fp32's exponent, and to infinity; and a V that is not finite."""

import math

import pytest
import torch
from hopper_problems import NEEDS_HOPPER, cumulated

from tilewise.backends.hopper import Hopper
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.problem import Call
from tilewise.testing import tolerance

pytestmark = NEEDS_HOPPER

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72)]
MASKS = [Full(), Causal(), SlidingWindow(400, 0), SlidingWindow(None, 130), Documents(cumulated((500, 1, 0, 399)), inner=Causal())]
GROWTHS = [0.0, 20.0, 60.0, 80.0, 100.0, 1000.0]  # of a score, from the last key to the first


def growing(dims, mask, growth, seed=0, seqlen=900, sink=False, values=1.0):
    """All queries have a direction in common, and keys have more of it the earlier they come, up to `growth` in the score."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(1, seqlen, 2, dim, device="cuda", generator=generator) for dim in (dims[0], dims[0], dims[1]))
    direction = torch.zeros(dims[0], device="cuda")
    direction[0] = math.sqrt(dims[0])
    slope = torch.linspace(1.0, 0.0, seqlen, device="cuda")[:, None, None]
    q, k = 0.5 * q + direction, 0.5 * k + growth / math.sqrt(dims[0]) * slope * direction
    sinks = torch.tensor([3.0, growth], device="cuda") if sink else None
    q, k, v = (x.bfloat16() for x in (q, k, values * v))
    return Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, sink=sinks)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_growing_scores(dims, mask):
    backend = Hopper()
    for turn, growth in enumerate(GROWTHS):
        for sink in (False, True):
            call = growing(dims, mask, growth, seed=turn, sink=sink)
            try:
                tolerance.check_outputs(call, *backend.forward(call))
            except AssertionError as failure:
                raise AssertionError(f"growth {growth}, sink {sink}: {failure}") from None


@pytest.mark.parametrize("mask", MASKS[:3], ids=repr)
def test_large_values_under_large_weights(mask):
    """P is below 2^127 and V is finite, but their products are not."""
    call = growing((64, 64), mask, 70.0, values=1e30)
    tolerance.check_outputs(call, *Hopper().forward(call))


@pytest.mark.parametrize("spoiled", ["q", "k", "v"])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=repr)
def test_nan_and_infinity_stay_where_they_belong(mask, spoiled):
    call = growing((64, 64), mask, 0.0)
    for value in (math.nan, math.inf, -math.inf):
        getattr(call, spoiled)[0, 700, 1, 5] = value
        tolerance.check_outputs(call, *Hopper().forward(call))


@pytest.mark.parametrize("growth", [60.0, 1000.0])
def test_the_same_bits(growth):
    call = growing((128, 128), Causal(), growth)
    first = Hopper().forward(call)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(Hopper().forward(call), first, strict=True))
