"""The tables that the Hopper kernel walks, walked here: every visible pair is visited once, every other one is hidden."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.backends.tables.runs import tables
from tilewise.masks import Causal, Dense, Documents, FirstKeys, Full, PerHead, Slices, SlidingWindow
from tilewise.testing.cases import masks, random_mask

CPU = torch.device("cpu")
TILES = ((128, 128), (192, 128), (128, 112), (128, 80), (16, 32))


def visited(found, plane: int, m_block: int, seqlen_k: int, tile_m: int, tile_n: int):
    """How often each pair of a query tile is visited (tile_m, keys up to the end of the last tile), and which tiles come in which order."""
    count = np.zeros((tile_m, -(-seqlen_k // tile_n) * tile_n), int)
    first, middle, last = found.spans[plane, m_block].tolist()
    order = []
    for r in range(first, last):
        n0, n1, ref, _ = found.runs[r].tolist()
        assert n0 < n1
        for n in range(n1 - 1, n0 - 1, -1):
            order.append(n)
            keys, rows = n * tile_n + np.arange(tile_n), m_block * tile_m + np.arange(tile_m)
            if r >= middle:
                seen = np.ones((tile_m, tile_n), bool)
            elif ref >= 0:
                words = found.bitmaps[ref].numpy().view(np.uint32)
                seen = (words[:, np.arange(tile_n) // 32] >> (np.arange(tile_n, dtype=np.uint32) % 32) & 1).astype(bool)
            else:
                q0, q1, k0, k1, lo, hi = found.bands[-1 - ref].tolist()
                begin, end = np.maximum(k0, rows + lo), np.minimum(k1, rows + hi + 1)
                end = np.where((rows < q0) | (rows >= q1), begin, end)
                seen = (keys >= begin[:, None]) & (keys < end[:, None])
            count[:, n * tile_n : (n + 1) * tile_n] += seen
    return count, order


def check(mask, seqlen_q, seqlen_k, tile_m, tile_n, batch=2, heads=4):
    planes = mask.planes(seqlen_q, seqlen_k, batch, heads)
    found = tables(planes, batch, heads, tile_m, tile_n, CPU)
    assert all(x.dtype == torch.int32 for x in vars(found).values() if isinstance(x, torch.Tensor))
    assert sorted(found.order.tolist()) == list(range(-(-seqlen_q // tile_m)))
    for b in range(batch):
        for h in range(heads):
            number = int(found.planes[b, h])
            assert b in planes[number].batch and h in planes[number].heads
    for number, plane in enumerate(planes):
        dense = plane.region.dense()
        for m_block in range(-(-seqlen_q // tile_m)):
            rows = dense[m_block * tile_m : (m_block + 1) * tile_m]
            count, order = visited(found, number, m_block, seqlen_k, tile_m, tile_n)
            assert (count[: len(rows), :seqlen_k] == rows).all()
            assert (count[: len(rows), seqlen_k:] == 0).all()
            wanted = {n for n in range(-(-seqlen_k // tile_n)) if rows[:, n * tile_n : (n + 1) * tile_n].any()}
            assert sorted(order) == sorted(wanted or {0})
    return found


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_mask(tile):
    for seqlen_q, seqlen_k in ((45, 70), (300, 260), (260, 513), (128, 128)):
        for mask in masks(seqlen_q, seqlen_k):
            check(mask, seqlen_q, seqlen_k, *tile)


def test_bands_that_share_tiles_and_rows_that_see_nothing():
    documents = Documents([0, 3, 3, 40, 41, 77, 150, 299], inner=Causal() & SlidingWindow(20, 0))
    for mask in (documents, Full() - documents, documents | FirstKeys(4), FirstKeys(0), Documents([0, 10])):
        check(mask, 400, 400, 128, 128)


def test_random_dense_masks():
    generator = torch.Generator().manual_seed(5)
    for density in (0.0, 0.002, 0.5, 1.0):
        for seqlen_q, seqlen_k in ((1, 1), (200, 333), (129, 127)):
            shown = torch.rand(2, 1, seqlen_q, seqlen_k, generator=generator) < density
            check(Dense(shown), seqlen_q, seqlen_k, 128, 112)


@st.composite
def sliced(draw):
    """Lengths, and slices of them, some with a window cut out."""
    seqlen_q, seqlen_k = draw(st.integers(1, 90)), draw(st.integers(1, 90))

    def spans(seqlen):
        return st.tuples(st.integers(0, seqlen), st.integers(0, seqlen)).map(lambda ends: tuple(sorted(ends)))

    slices = draw(st.lists(st.tuples(spans(seqlen_q), spans(seqlen_k), st.integers(0, 3)), max_size=8))
    mask = Slices(*map(list, zip(*slices, strict=True))) if slices else Slices([], [], [])
    return seqlen_q, seqlen_k, mask - SlidingWindow(draw(st.integers(0, 9)), 2) if draw(st.booleans()) else mask


@given(sliced(), st.sampled_from([(16, 8), (32, 16), (16, 40)]))
@settings(max_examples=60, deadline=None)
def test_random_slices(problem, tile):
    seqlen_q, seqlen_k, mask = problem
    check(mask, seqlen_q, seqlen_k, *tile, batch=1, heads=1)


def test_longest_last_and_kept():
    mask = PerHead({(0, 1): Causal(), (1, 2): Causal() & Dense(torch.ones(1, 1000, dtype=torch.bool))})
    found = check(mask, 1000, 1000, 128, 128, batch=1, heads=2)
    assert found.order.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert tables(mask.planes(1000, 1000, 1, 2), 1, 2, 128, 128, CPU) is found
    assert tables(mask.planes(1000, 1000, 1, 2), 1, 2, 128, 80, CPU) is not found


def test_bitmaps_are_counted():
    """What is kept with a region of bits counts against what all of them may take."""
    (plane,) = random_mask(300, 300).planes(300, 300)
    before = plane.region.nbytes()
    tables((plane,), 1, 1, 128, 128, CPU)
    assert plane.region.nbytes() > before
