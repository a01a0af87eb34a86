"""The kernels that find what packed documents see, run here: their Python source with threads of Python in place of the GPU's."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tilewise.backends.hopper.documents import RowsConfig, offsets
from tilewise.hopper.compile import why_no_compiler
from tilewise.masks import Causal, Documents, Full, SlidingWindow

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))

TILE = RowsConfig(tile_m=64, tile_n=16)
WARP = 32


class Block:
    """What a thread block's threads share, and what the DSL's functions do for them."""

    def __init__(self, index: int, threads: int) -> None:
        self.index, self.local, self.errors = index, threading.local(), []
        self.together = threading.Barrier(threads)
        self.warps = [threading.Barrier(WARP) for _ in range(threads // WARP)]
        self.given = [[0] * WARP for _ in self.warps]
        self.smem = np.zeros((4, threads // WARP), int)

    def warp_redux_sync(self, value: int, kind: str) -> int:
        assert kind == "max"
        warp, lane = divmod(self.local.thread, WARP)
        self.given[warp][lane] = value
        self.warps[warp].wait()
        largest = max(self.given[warp])
        self.warps[warp].wait()
        return largest

    def names(self) -> dict:
        arch = SimpleNamespace(
            thread_idx=lambda: (self.local.thread, 0, 0),
            block_idx=lambda: (self.index, 0, 0),
            warp_redux_sync=self.warp_redux_sync,
            sync_threads=self.together.wait,
        )
        cute = SimpleNamespace(make_layout=lambda shape: shape, ceil_div=lambda a, b: -(-a // b))
        storage = SimpleNamespace(allocate_tensor=lambda *_: self.smem)
        dsl = SimpleNamespace(range=lambda *bounds, unroll: range(*bounds))
        return {"arch": arch, "cute": cute, "SmemAllocator": lambda: storage, "cutlass": dsl, "Int32": int, "range_constexpr": range}

    def run(self, function, *arguments) -> None:
        def thread(number: int) -> None:
            self.local.thread = number
            try:
                function(*arguments)
            except Exception as error:
                self.errors.append(error)
                self.together.abort()
                for warp in self.warps:
                    warp.abort()

        threads = [threading.Thread(target=thread, args=(number,)) for number in range(len(self.warps) * WARP)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if self.errors:
            raise self.errors[0]


def launched(monkeypatch, cu_q, cu_k, inner, seqlen_q: int, seqlen_k: int, tile=TILE):
    """order, ends and walks as the GPU makes them."""
    from tilewise.backends.hopper import intervals

    m_blocks = -(-seqlen_q // TILE.tile_m)
    order, ends, walks = (np.full(shape, -7, np.int64) for shape in ((-(-m_blocks // tile.cluster),), (2, seqlen_q), (m_blocks, 4)))
    documents = intervals.Documents(np.array(cu_q), np.array(cu_k), seqlen_k, *offsets(inner))
    for name in ("interval", "visited"):
        monkeypatch.setattr(intervals, name, getattr(intervals, name).__wrapped__)
    for kernel, count, threads, arguments in (
        (intervals.kernel, m_blocks, TILE.tile_m, (documents, ends, walks, tile)),
        (intervals.rank, -(-m_blocks // intervals.RANKED), intervals.RANKED, (walks, order, tile)),
    ):
        for index in range(count):
            block = Block(index, threads)
            for name, value in block.names().items():
                monkeypatch.setattr(intervals, name, value)
            block.run(kernel.__wrapped__, *arguments)
    monkeypatch.undo()
    return order, ends, walks


PACKS = (
    ((0, 100), (0, 100), 100, 100),
    ((0, 3, 3, 40, 130), (0, 3, 3, 40, 130), 150, 140),
    ((0, 0, 64, 128, 192), (0, 5, 5, 70, 200), 192, 200),
    ((0, 0), (0, 90), 70, 90),
    ((0, *range(5, 200, 5)), (0, *range(5, 200, 5)), 195, 195),
)


@pytest.mark.parametrize("inner", [Full(), Causal(), Causal("top_left"), SlidingWindow(6, 1), SlidingWindow(None, 2, "top_left")], ids=repr)
def test_rows_and_walks(inner, monkeypatch):
    for cu_q, cu_k, seqlen_q, seqlen_k in PACKS:
        dense = Documents(cu_q, cu_k, inner=inner).dense(seqlen_q, seqlen_k).numpy()
        order, ends, walks = launched(monkeypatch, cu_q, cu_k, inner, seqlen_q, seqlen_k)
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


def test_pairs_are_ranked_by_all_that_either_loads(monkeypatch):
    for cu_q, cu_k, seqlen_q, seqlen_k in PACKS:
        order, _, walks = launched(monkeypatch, cu_q, cu_k, Causal(), seqlen_q, seqlen_k, replace(TILE, cluster=2))
        units = [walks[i : i + 2] for i in range(0, len(walks), 2)]
        work = [unit[:, 1].max() - unit[:, 0].min() for unit in units]
        assert order.tolist() == sorted(range(len(units)), key=lambda unit: work[unit])


def test_bad_values_lead_to_nothing_outside(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    for _ in range(6):
        cu_q, cu_k = (torch.randint(-300, 400, (5,), generator=generator).tolist() for _ in range(2))
        for inner in (Full(), Causal(), SlidingWindow(30, 3)):
            order, ends, walks = launched(monkeypatch, cu_q, cu_k, inner, 100, 120)
            assert (ends >= 0).all() and (ends <= 120).all()
            assert (walks >= 0).all() and (walks <= 8).all() and (walks[:, 0] < walks[:, 1]).all()
            assert sorted(order) == [0, 1]
