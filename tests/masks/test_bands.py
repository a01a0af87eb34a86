"""The algebra of bands against dense booleans."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.errors import ShapeError
from tilewise.masks import (
    Causal,
    Documents,
    Full,
)
from tilewise.masks.band_tables import areas, canonical
from tilewise.masks.bands import INF, Band, Bands, within
from tilewise.masks.bitmap import Bitmap

lengths = st.integers(0, 14)


@st.composite
def bands(draw, seqlen_q, seqlen_k, most=5):
    def one():
        q0, q1 = sorted(draw(st.tuples(st.integers(0, seqlen_q), st.integers(0, seqlen_q))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, seqlen_k), st.integers(0, seqlen_k))))
        diagonal = st.integers(-seqlen_q - 1, seqlen_k + 1)
        return Band(q0, q1, k0, k1, draw(st.just(-INF) | diagonal), draw(st.just(INF) | diagonal))

    return [one() for _ in range(draw(st.integers(0, most)))]


@st.composite
def framed(draw, sets=1):
    """Lengths and lists of bands that may overlap."""
    seqlen_q, seqlen_k = draw(lengths), draw(lengths)
    return seqlen_q, seqlen_k, *(draw(bands(seqlen_q, seqlen_k)) for _ in range(sets))


def matrix(listed, seqlen_q, seqlen_k):
    """The definition: every pair tried against every band."""
    out = np.zeros((seqlen_q, seqlen_k), dtype=bool)
    for band in listed:
        for q in range(band.q0, band.q1):
            for k in range(band.k0, band.k1):
                out[q, k] |= band.lo <= k - q <= band.hi
    return out


def agrees(region, expected):
    """The region is `expected`, counts it, holds each pair in one band, and is canonical."""
    assert (region.dense() == expected).all()
    assert region.pairs() == expected.sum()
    count = sum((within(band, 0, region.seqlen_q, 0, region.seqlen_k).astype(int) for band in region), np.zeros(expected.shape, int))
    assert (count == expected).all()
    assert (canonical(region.table) == region.table).all()
    assert (areas(region.table) > 0).all()


@settings(max_examples=300, deadline=None)
@given(framed(sets=2))
def test_algebra_is_that_of_dense_booleans(case):
    seqlen_q, seqlen_k, one, two = case
    a, b = Bands.of(one, seqlen_q, seqlen_k), Bands.of(two, seqlen_q, seqlen_k)
    x, y = matrix(one, seqlen_q, seqlen_k), matrix(two, seqlen_q, seqlen_k)
    agrees(a, x)
    agrees(b, y)
    agrees(a & b, x & y)
    agrees(a | b, x | y)
    agrees(a - b, x & ~y)
    agrees(~a, ~x)
    agrees(a.transpose(), x.T)
    assert a.transpose().transpose() is a


@settings(max_examples=200, deadline=None)
@given(framed(), st.tuples(*[st.integers(-3, 16)] * 4), st.integers(-16, 16), st.integers(-16, 16))
def test_crop_rows_and_shift(case, box, dq, dk):
    seqlen_q, seqlen_k, listed = case
    region, expected = Bands.of(listed, seqlen_q, seqlen_k), matrix(listed, seqlen_q, seqlen_k)
    q0, q1, k0, k1 = box
    inside = np.zeros_like(expected)
    inside[max(q0, 0) : max(q1, 0), max(k0, 0) : max(k1, 0)] = True
    agrees(region.crop(*box), expected & inside)
    agrees(region.rows(2, 7), expected & (np.arange(seqlen_q) >= 2)[:, None] & (np.arange(seqlen_q) < 7)[:, None])
    moved = np.zeros((seqlen_q + 2, seqlen_k + 1), dtype=bool)
    for q, k in np.argwhere(expected):
        if 0 <= q + dq < seqlen_q + 2 and 0 <= k + dk < seqlen_k + 1:
            moved[q + dq, k + dk] = True
    agrees(region.shift(dq, dk, seqlen_q + 2, seqlen_k + 1), moved)


def test_neighbours_merge_so_that_algebra_does_not_fragment():
    whole = Bands.of([Band(0, 100, 0, 100, -INF, 0)], 100, 100)
    rows = [whole.rows(i, i + 10) for i in range(0, 100, 10)]
    union = rows[0]
    for part in rows[1:]:
        union = union | part
    assert union.table.tolist() == whole.table.tolist()
    assert len(whole | ~whole) == 1
    left, right = whole.crop(0, 100, 0, 37), whole.crop(0, 100, 37, 100)
    assert len(left | right) <= 2
    assert len(~Bands.of([Band(i, i + 10, 0, i + 10) for i in range(0, 100, 10)], 100, 100)) == 9


def test_bitmaps_of_long_bands_and_their_transpose():
    mask = Documents([0, 1000, 2500, 3001], inner=Causal())
    bitmap = Bitmap.of_bands(mask.resolve(3001, 3001))
    assert bitmap.pairs() == mask.pairs(3001, 3001)
    assert (bitmap.transpose().dense() == mask.dense(3001, 3001).numpy().T).all()
    assert bitmap.transpose().transpose() is bitmap
    assert pickle.loads(pickle.dumps(bitmap)).pairs() == bitmap.pairs()


def test_frames_must_agree():
    with pytest.raises(ShapeError, match="10 x 10 and 10 x 11; they must agree: shift one"):
        _ = Full().resolve(10, 10) & Full().resolve(10, 11)
    with pytest.raises(ShapeError, match="must agree"):
        _ = Bitmap.of(np.ones((2, 3), bool)) | Bitmap.of(np.ones((3, 3), bool))
