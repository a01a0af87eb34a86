"""How many pairs a mask shows, at lengths whose square no machine integer holds."""

from fractions import Fraction

import pytest

import tilewise as tw
from tilewise.masks import Slices
from tilewise.masks.band_tables import LONGEST

LENGTHS = (2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**45 + 3, 2**60)
MASKS = (
    tw.Full(),
    tw.Causal(),
    tw.Causal(align="top_left"),
    ~tw.Causal(),
    tw.SlidingWindow(10, 3),
    tw.SlidingWindow(None, 7),
    tw.SlidingWindow(5, None, "top_left"),
    tw.FirstKeys(4),
    tw.PrefixLM(6),
    tw.PrefixLM(6) - tw.FirstKeys(2),
    tw.SlidingWindow(10, 0) | tw.FirstKeys(4),
    (tw.SlidingWindow(10, 0) | tw.FirstKeys(4)) & tw.Causal() | tw.SlidingWindow(1, 1),
    tw.Full() - tw.SlidingWindow(2, 2) - tw.FirstKeys(3),
    tw.Documents([0, 3, 9], inner=tw.Causal()),
    tw.Causal() | tw.Documents([0, 3, 9, 30]),
    Slices([(0, 9), (4, 30)], [(3, 20), (0, 12)], [1, 2]) | tw.SlidingWindow(8, 0),
    (tw.PrefixLM(6) - tw.FirstKeys(2)).transpose(),
    tw.PerHead({(0, 1): tw.Causal(), (1, 2): tw.SlidingWindow(3, 0)}),
)
SAMPLES = (64, 77, 90)  # lengths from which on the masks differ from the square, the triangle and a strip along an edge by a constant


def extrapolated(mask, n: int, more: int = 0) -> int:
    """The parabola through the pairs at three small lengths, at n."""
    heads = mask.extent[1]
    total = Fraction(0)
    for x in SAMPLES:
        term = Fraction(int(mask.dense(x, x + more).sum()))
        for y in SAMPLES:
            term *= Fraction(n - y, x - y) if x != y else 1
        total += term
    assert total.denominator == 1 and heads >= 1
    return int(total)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_pairs_are_exact(mask, n):
    assert mask.pairs(n, n, heads=mask.extent[1]) == extrapolated(mask, n)
    if n < LONGEST:
        assert mask.pairs(n, n + 40, heads=mask.extent[1]) == extrapolated(mask, n, 40)


def test_chunks_are_exact():
    n = 2**60
    chunk = 2**31 - 1
    assert tw.ChunkedCausal(2**58).pairs(n, n) == 4 * (2**58 * (2**58 + 1) // 2)
    assert tw.ChunkedCausal(chunk).pairs(chunk * 5 + 7, chunk * 5 + 7) == 5 * (chunk * (chunk + 1) // 2) + 28


def test_all_heads_and_batches_are_counted():
    n = 2**60
    assert tw.Causal().pairs(n, n, 7, 12) == 84 * (n * (n + 1) // 2)


def test_longer_sequences_are_refused():
    with pytest.raises(ValueError, match=r"seqlen_q and seqlen_k must be at most 2\*\*60, got 1 and 1152921504606846977"):
        tw.Causal().pairs(1, 2**60 + 1)
