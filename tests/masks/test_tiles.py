"""Lowering against dense masks: every pair in exactly one run, every tile in its class, both orientations, ragged tails, and its cost."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.masks import Causal, Dense, Documents, FirstKeys, Full, SlidingWindow
from tilewise.masks.bands import INF, Band, Bands
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.tiles import BAND, BITMAP, FULL, lower


@st.composite
def regions(draw):
    seqlen_q, seqlen_k = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    edge_q, edge_k = st.integers(0, seqlen_q), st.integers(0, seqlen_k)
    diagonal = st.integers(-seqlen_q - 1, seqlen_k + 1)
    listed = []
    for _ in range(draw(st.integers(0, 5))):
        (q0, q1), (k0, k1) = sorted([draw(edge_q), draw(edge_q)]), sorted([draw(edge_k), draw(edge_k)])
        listed.append(Band(q0, q1, k0, k1, draw(st.just(-INF) | diagonal), draw(st.just(INF) | diagonal)))
    region = Bands.of(listed, seqlen_q, seqlen_k)
    return Bitmap.of_bands(region) if draw(st.integers(0, 3)) == 0 else region


def holds(runs, dense):
    """`runs` are the tiles of `dense`: structure, classes and pairs."""
    rows, columns = -(-dense.shape[0] // runs.tile_m), -(-dense.shape[1] // runs.tile_n)
    assert (runs.m_blocks, runs.n_blocks) == (rows, columns)
    assert len(runs.row_ptr) == rows + 1 and runs.row_ptr[0] == 0 and runs.row_ptr[-1] == len(runs.n0)
    assert [array.dtype for array in (runs.row_ptr, runs.n0, runs.n1, runs.kind, runs.ref)] == [
        np.int64,
        np.int32,
        np.int32,
        np.int8,
        np.int32,
    ]
    assert runs.bitmaps.shape[1:] == (runs.tile_m, -(-runs.tile_n // 8))
    covered = np.zeros(dense.shape, dtype=int)
    counts = [0, 0, 0]
    for m_block in range(rows):
        visits = {}
        last = 0
        for run in runs.row(m_block):
            assert last <= runs.n0[run] < runs.n1[run] <= columns
            last = runs.n0[run]
            for n_block in range(runs.n0[run], runs.n1[run]):
                visits.setdefault(n_block, []).append(run)
                tile = runs.mask_tile(m_block, run, n_block)
                assert tile.any()
                view = covered[m_block * runs.tile_m :, n_block * runs.tile_n :][: runs.tile_m, : runs.tile_n]
                assert tile.shape == view.shape
                view += tile
        assert list(visits) == sorted(visits)
        for n_block in range(columns):
            tile = dense[m_block * runs.tile_m :, n_block * runs.tile_n :][: runs.tile_m, : runs.tile_n]
            found = visits.get(n_block, [])
            kinds = {runs.kind[run] for run in found}
            counts[0 if tile.all() else 1 if tile.any() else 2] += 1
            if tile.all():
                assert len(found) == 1 and kinds == {FULL} and runs.ref[found[0]] == -1
            elif tile.any():
                assert kinds == {BITMAP if isinstance(runs.region, Bitmap) else BAND}
                if len(found) > 1:
                    assert np.diff(found).tolist() == [1] * (len(found) - 1) and len(set(runs.ref[found])) == len(found)
                    assert all(runs.n1[run] - runs.n0[run] == 1 for run in found)
            else:
                assert not found
    assert (covered == dense).all()
    assert runs.tiles() == tuple(counts)


@settings(max_examples=300)
@given(regions(), st.integers(1, 9), st.integers(1, 9))
def test_every_pair_once_and_every_tile_in_its_class(region, tile_m, tile_n):
    dense = region.dense()
    holds(lower(region, tile_m, tile_n), dense)
    holds(lower(region.transpose(), tile_n, tile_m), dense.T)


def test_tiles_that_bands_fill_together_are_full():
    halves = Bands.of([Band(0, 8, 0, 16, -INF, 3), Band(0, 8, 0, 16, 4, INF)], 8, 16, disjoint=True)
    runs = lower(halves, 4, 8)
    assert runs.tiles() == (4, 0, 0)
    assert runs.n1.tolist() == [2, 2]
    rows = Bands.of([Band(0, 2, 0, 64), Band(2, 8, 0, 60)], 8, 64, disjoint=True)
    runs = lower(rows, 8, 8)
    assert [(int(n0), int(n1), int(kind)) for n0, n1, kind in zip(runs.n0, runs.n1, runs.kind, strict=True)] == [
        (0, 7, FULL),
        (7, 8, BAND),
        (7, 8, BAND),
    ]


def test_neighbouring_tiles_of_one_band_are_one_run():
    runs = lower(SlidingWindow(100, 0).resolve(64, 64), 64, 8)
    assert (runs.n0.tolist(), runs.n1.tolist(), runs.kind.tolist()) == ([0], [8], [BAND])
    runs = lower(Causal().resolve(64, 64), 16, 16)
    assert runs.n0.tolist() == [0, 0, 1, 0, 2, 0, 3]
    assert runs.kind.tolist() == [BAND, FULL, BAND, FULL, BAND, FULL, BAND]


def test_tails_never_make_a_tile_partial():
    assert lower(Full().resolve(130, 131), 128, 128).tiles() == (4, 0, 0)
    assert lower(Dense(torch.ones(130, 131, dtype=torch.bool)).resolve(130, 131), 128, 128).tiles() == (4, 0, 0)
    assert lower(FirstKeys(131).resolve(1, 131), 64, 128).tiles() == (2, 0, 0)


def test_runs_are_kept_with_their_region_and_cannot_be_changed():
    region = Causal().resolve(50, 60)
    runs = lower(region, 16, 16)
    assert lower(Causal().resolve(50, 60), 16, 16) is runs
    assert lower(region.transpose(), 16, 16) is lower(region.transpose(), 16, 16)
    assert lower(region, 16, 8) is not runs
    with pytest.raises(ValueError, match="read-only"):
        runs.n0[0] = 1
    with pytest.raises(ValueError, match="tile_m and tile_n must be 1 or more, got 0 and 16"):
        lower(region, 0, 16)


def test_a_million_tokens_of_documents_lower_in_milliseconds():
    """At most 50 ms on an idle core (about 5 ms measured); the limit has room for a slow, busy machine."""
    rng = np.random.default_rng(0)
    total = 1 << 20
    cu = [0, *sorted(rng.integers(0, total, 499).tolist()), total]
    for mask in (Documents(cu, inner=Causal()), Documents(cu), Documents(cu) & (SlidingWindow(1023, 0) | FirstKeys(4))):
        start = time.perf_counter()
        region = mask.resolve(total, total)
        runs, columns = lower(region, 128, 128), lower(region.transpose(), 128, 128)
        assert time.perf_counter() - start < 0.4
        assert len(runs.n0) < 30_000 and runs.tiles() == columns.tiles()
        full, partial, skipped = runs.tiles()
        assert full * 128 * 128 <= region.pairs() <= (full + partial) * 128 * 128
        assert full + partial + skipped == (total // 128) ** 2
