"""The kernels that find what packed documents see, carried out without a GPU."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulator.backend import NEEDED, Emulated

from tilewise.backends.hopper.forward.rows import RowsConfig, kernel
from tilewise.backends.hopper.operands import Packed
from tilewise.backends.tables.documents import offsets
from tilewise.masks import Causal, Documents, Full, SlidingWindow

pytestmark = NEEDED

TILE = RowsConfig(tile_m=64, tile_n=16)


def launched(cu_q, cu_k, inner, seqlen_q: int, seqlen_k: int, tile=TILE):
    """order, ends and walks as the GPU makes them."""
    m_blocks = -(-seqlen_q // TILE.tile_m)
    made = [torch.full(shape, -7, dtype=torch.int32) for shape in ((-(-m_blocks // tile.cluster),), (2, seqlen_q), (m_blocks, 4))]
    given = (torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k))
    Emulated().compiled(*kernel(tile))(Packed(*given, seqlen_k, *offsets(inner)), *made)
    return (x.numpy() for x in made)


PACKS = (
    ((0, 100), (0, 100), 100, 100),
    ((0, 3, 3, 40, 130), (0, 3, 3, 40, 130), 150, 140),
    ((0, 0, 64, 128, 192), (0, 5, 5, 70, 200), 192, 200),
    ((0, 0), (0, 90), 70, 90),
    ((0, *range(5, 200, 5)), (0, *range(5, 200, 5)), 195, 195),
)


@pytest.mark.parametrize(
    "inner",
    [
        Full(),
        Causal(),
        Causal("top_left"),
        SlidingWindow(6, 1),
        Causal(offset=-3),
        SlidingWindow(2, 1, "top_left", 4),
        SlidingWindow(None, 2, "top_left"),
    ],
    ids=repr,
)
def test_rows_and_walks(inner):
    for cu_q, cu_k, seqlen_q, seqlen_k in PACKS:
        dense = Documents(cu_q, cu_k, inner=inner).dense(seqlen_q, seqlen_k).numpy()
        order, ends, walks = launched(cu_q, cu_k, inner, seqlen_q, seqlen_k)
        keys = np.arange(seqlen_k)
        assert ((keys >= ends[0][:, None]) & (keys < ends[1][:, None]) == dense).all()
        for m_block, (first, last, free_first, free_last) in enumerate(walks.tolist()):
            rows = dense[m_block * TILE.tile_m : (m_block + 1) * TILE.tile_m]
            tiles = np.add.reduceat(rows, np.arange(0, seqlen_k, TILE.tile_n), axis=1)
            seen = np.flatnonzero(tiles.any(axis=0))
            assert (first, last) == ((seen[0], seen[-1] + 1) if len(seen) else (0, 1))
            assert first <= free_first <= free_last <= last
            whole = np.flatnonzero((tiles == TILE.tile_n).all(axis=0))
            assert list(range(free_first, free_last)) == whole.tolist()
        assert sorted(order) == list(range(len(walks)))
        work = (walks[:, 1] - walks[:, 0])[order]
        assert (np.diff(work) >= 0).all() and all(
            a < b for (a, b), more in zip(itertools.pairwise(order), np.diff(work), strict=True) if more == 0
        )


def test_pairs_are_ranked_by_all_that_either_loads():
    for cu_q, cu_k, seqlen_q, seqlen_k in PACKS:
        order, _, walks = launched(cu_q, cu_k, Causal(), seqlen_q, seqlen_k, replace(TILE, cluster=2))
        units = [walks[i : i + 2] for i in range(0, len(walks), 2)]
        work = [unit[:, 1].max() - unit[:, 0].min() for unit in units]
        assert order.tolist() == sorted(range(len(units)), key=lambda unit: work[unit])


def test_bad_values_lead_to_nothing_outside():
    generator = torch.Generator().manual_seed(4)
    for _ in range(6):
        cu_q, cu_k = (torch.randint(-300, 400, (5,), generator=generator).tolist() for _ in range(2))
        for inner in (Full(), Causal(), SlidingWindow(30, 3)):
            order, ends, walks = launched(cu_q, cu_k, inner, 100, 120)
            assert (ends >= 0).all() and (ends <= 120).all()
            assert (walks >= 0).all() and (walks <= 8).all() and (walks[:, 0] < walks[:, 1]).all()
            assert sorted(order) == [0, 1]
