"""The fp64 oracle beside sums without rounding, over many keys: its own error is a small share of what it allows others."""

import math
from fractions import Fraction

import torch

from tilewise.backends.reference import Reference, product
from tilewise.backends.tiled import Tiled
from tilewise.masks import Full
from tilewise.testing import conformance
from tilewise.testing.cases import Case

KEYS = 4096


def test_products_of_many_terms():
    """Exactly rounded sums (math.fsum of exact products) are what they are compared with."""
    draw = torch.Generator().manual_seed(0)
    p = torch.rand(2, KEYS, generator=draw, dtype=torch.float64).softmax(-1)
    v = torch.randn(KEYS, 8, generator=draw, dtype=torch.float64)
    found = product(p, v)
    for i in range(2):
        for j in range(8):
            exact = sum(Fraction(x) * Fraction(y) for x, y in zip(p[i].tolist(), v[:, j].tolist(), strict=True))
            size = math.sqrt(sum((x * y) ** 2 for x, y in zip(p[i].tolist(), v[:, j].tolist(), strict=True)))
            assert abs(float(Fraction(found[i, j].item()) - exact)) < 2 * 2**-53 * size * math.sqrt(128)


def test_many_keys():
    case = Case(batch=1, seqlen_q=40, seqlen_k=KEYS, heads_q=2, heads_k=1, head_dim=64, mask=Full(), dtype="fp64")
    assert max(conformance.run_case(backend, case, seed) for backend in (Tiled(), Reference()) for seed in range(2)) < 0.5
