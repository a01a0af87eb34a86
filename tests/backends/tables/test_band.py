"""Bands that are written down directly are those that the mask algebra finds."""

import random
from itertools import product

import pytest

from tilewise.backends.tables import band
from tilewise.masks import Causal, Full, SlidingWindow

SIDES = (None, 0, 1, 2, 5, 9, 10**12)
MASKS = [Full(), *(Causal(align=align) for align in ("bottom_right", "top_left"))]
MASKS += [SlidingWindow(left, right, align=align) for left, right, align in product(SIDES, SIDES, ("bottom_right", "top_left"))]
MASKS += [Causal(align, offset) for align, offset in product(("bottom_right", "top_left"), (-7, -1, 2, 400))]
MASKS += [
    SlidingWindow(*sides, align, offset) for *sides, align, offset in product((None, 3), (None, 3), ("bottom_right", "top_left"), (-5, 5))
]


def by_algebra(mask, seqlen_q, seqlen_k):
    (plane,) = mask.planes(seqlen_q, seqlen_k, 1, 1)
    found = list(plane.region)
    return (*found[0][:4], max(found[0].lo, -band.FAR), min(found[0].hi, band.FAR)) if found else band.NOTHING


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_bands(mask):
    generator = random.Random(0)
    sizes = [*product((1, 2, 3, 7), (1, 2, 3, 7)), (5, 0), *((generator.randint(1, 5000), generator.randint(1, 5000)) for _ in range(20))]
    for seqlen_q, seqlen_k in sizes:
        assert band.band_of(mask, seqlen_q, seqlen_k) == by_algebra(mask, seqlen_q, seqlen_k), (seqlen_q, seqlen_k)


def test_other_masks_with_one_band():
    mask = SlidingWindow(5, 0) & Causal(align="top_left")
    assert band.band_of(mask, 30, 20) == by_algebra(mask, 30, 20)
