"""Masks as limits relative to each query's own position: exactly those of one band on the bottom right diagonal."""

import pytest

from tilewise.backends.tables.window import FAR, window_of
from tilewise.masks import Causal, FirstKeys, Full, PrefixLM, SlidingWindow


@pytest.mark.parametrize(
    ("mask", "limits"),
    [
        (Full(), (-FAR, FAR)),
        (Causal(), (-FAR, 0)),
        (Causal(offset=-3), (-FAR, -3)),
        (SlidingWindow(40, 0), (-40, 0)),
        (SlidingWindow(40, 3), (-40, 3)),
        (Causal() & SlidingWindow(7, 7), (-7, 0)),
        (Causal("top_left"), None),
        (SlidingWindow(40, 0, "top_left"), None),
        (PrefixLM(30), None),
        (FirstKeys(10), None),
    ],
    ids=str,
)
def test_limits(mask, limits):
    assert window_of(mask) == limits


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal(offset=-3), SlidingWindow(40, 3), Causal() & SlidingWindow(7, 7)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 100), (5, 100), (30, 20)])
def test_limits_are_what_the_mask_shows(mask, seqlen_q, seqlen_k):
    lo, hi = window_of(mask)
    seen = {
        (q, k)
        for band in mask.resolve(seqlen_q, seqlen_k)
        for q in range(band.q0, band.q1)
        for k in range(band.k0, band.k1)
        if band.lo <= k - q <= band.hi
    }
    assert seen == {(q, k) for q in range(seqlen_q) for k in range(seqlen_k) if lo <= k - (seqlen_k - seqlen_q + q) <= hi}
