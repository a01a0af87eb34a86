"""The kernel of a sink's gradient, carried out without a GPU: as exact as fp32 is, one order of its sums, and what NaN and infinities make of it."""

import itertools
import math

import pytest
import torch
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES
from torch import Tensor

from tilewise.backends.hopper.backward.sink import call as sinks
from tilewise.masks import Causal
from tilewise.problem import Call, Dropout

pytestmark = NEEDED

BF16 = torch.bfloat16
EXTREME = 0.0, -0.0, 1.0, -3.0, 1e30, -1e30, math.inf, -math.inf, math.nan


def bound(sink: Tensor, natural: bool, dropout: Dropout | None = None, pace: str = PACES[0]):
    q = torch.empty(1, 1, len(sink), 64, dtype=BF16)
    backend = Emulated(pace)
    with backend.on_gpu():
        compute = sinks.bind(Call(q=q, k=q, v=q, mask=Causal(), scale=1.0, sink=sink, dropout=dropout), natural)

    def run(*given):
        with backend.on_gpu():
            return compute(*given)

    return run


def formula(sink: Tensor, lse: Tensor, minus_delta: Tensor, natural: bool) -> Tensor:
    """Eq. 34, in fp64."""
    below = sink.double()[:, None] - lse.double() * (1.0 if natural else math.log(2))
    return (below.clamp(max=0.0).exp() * minus_delta.double()).sum((0, 2))


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize(
    ("sink", "rows"),
    [
        (torch.randn(3), 64),
        (torch.randn(3, dtype=BF16), 192),
        (torch.randn(3, dtype=torch.float64), 2240),  # more than a thread block reads at once
        (torch.randn(6)[::2], 128),
    ],
    ids=["fp32", "bf16", "fp64", "strided"],
)
def test_it_is_the_formula(sink, rows, natural):
    lse, minus_delta = torch.rand(2, 3, rows) * 6.0 + 1.0, torch.randn(2, 3, rows) - 0.5
    lse[..., -5:], minus_delta[..., -5:] = math.inf, 0.0  # rows of a tile that are no queries
    found, other = (bound(sink, natural, pace=pace)(sink, lse, minus_delta) for pace in PACES[:2])
    assert torch.equal(found, other) and found.dtype == sink.dtype and found.is_contiguous()
    expected = formula(sink, lse, minus_delta, natural)
    size = formula(sink, lse, minus_delta.abs(), natural)
    assert ((found - expected).abs() <= size * (1e-6 if sink.dtype != BF16 else 2.0**-8)).all()


def test_what_dropout_leaves_to_multiply():
    sink, lse, minus_delta = torch.randn(2), torch.rand(1, 2, 64) + 2.0, torch.randn(1, 2, 64)
    found = bound(sink, True, Dropout(0.5, 1, 2))(sink, lse, minus_delta)
    assert torch.equal(found, 2.0 * bound(sink, True)(sink, lse, minus_delta))


@pytest.mark.parametrize("z", EXTREME)
def test_nan_and_infinities_are_those_of_the_formula(z):
    """One row of each head has them."""
    pairs = list(itertools.product(EXTREME, EXTREME))
    sink = torch.full((len(pairs),), z)
    lse, minus_delta = torch.full((1, len(pairs), 64), 90.0), torch.zeros(1, len(pairs), 64)
    lse[0, :, 5], minus_delta[0, :, 5] = torch.tensor(pairs).T
    expected = formula(sink, lse, minus_delta, True).float()
    torch.testing.assert_close(bound(sink, True)(sink, lse, minus_delta), expected, rtol=1e-5, atol=1e-37, equal_nan=True)
