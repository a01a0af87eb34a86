"""The tables of the backward pass on Hopper for masks beyond one band, walked on a CPU: every visible pair is visited once, every turn comes once,
nobody waits for ever. The kernel's own functions, where they are arithmetic, on Python's integers.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tilewise.backends.hopper.backward import tables
from tilewise.backends.hopper.backward.tables import _in_turns, query_visits_of, visits_of
from tilewise.backends.hopper.operands import KEYS, QUERIES
from tilewise.masks import Causal, ChunkedCausal, Dense, Documents, FirstKeys, Full, PerHead, PrefixLM, PrefixTree, Slices, SlidingWindow
from tilewise.sm90.jit import why_no_compiler
from tilewise.testing.cases import masks, random_mask

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))

CPU = torch.device("cpu")
TILES = ((64, 128), (128, 128), (64, 64))
TREE = PrefixTree((-1, 0, 1, 1, 0, 4, 4), (90, 200, 70, 20, 210, 100, 10))


def shuffled(n_block, m_block):
    """The order of visits if each block walks anyhow."""
    return np.lexsort((np.random.default_rng(0).permutation(len(m_block)), n_block))


@pytest.fixture(scope="module")
def kernel(in_python):
    """Functions of visible/ and backward/order.py."""
    from tilewise.backends.hopper.backward import order as backward_order
    from tilewise.backends.hopper.visible import bands, keys, queries

    found = vars(backward_order) | vars(keys) | vars(queries) | vars(bands) | dict(Int32=int, Boolean=bool, const_expr=bool)
    found["band_of"] = lambda ref, of_tables: bands.Band(*of_tables[-1 - ref].tolist(), None)
    in_python(
        ("interval", "walk_of_head", "tile_at", "visit_of", "shows", "shows_in", "turn_of", "next_in", "is_visited", "sees_any"), found
    )
    return SimpleNamespace(**found)


class Problem:
    """A mask's tables as the kernel has them."""

    def __init__(self, kernel, mask, seqlen_q, seqlen_k, tile_m, tile_n, batch, heads):
        self.kernel, self.config = kernel, SimpleNamespace(mask_kind="tiles", tile_m=tile_m, tile_n=tile_n)
        self.lengths, self.planes = (seqlen_q, seqlen_k), mask.planes(seqlen_q, seqlen_k, batch, heads)
        self.found = visits_of(self.planes, batch, heads, self.config, CPU)
        self.tables, self.of_queries = map(arrays, (self.found, query_visits_of(self.planes, CPU)))
        self.band = kernel.Band(0, 0, 0, 0, 0, 0, self.tables)

    def visits(self, n_block, head, batch):
        """(place, tile of queries), in the order in which the block comes by."""
        block = self.kernel.Block(n_block * self.config.tile_n, head, 0, batch, False, 0, 1)
        walk = self.kernel.walk_of_head(None, block, head, self.band, self.config)
        place = walk.start
        for _ in range(walk.last - walk.first):
            yield place, int(self.kernel.tile_at(place, self.band, self.config))
            place = self.kernel.next_in(place, walk, self.config)

    def turn(self, place):
        block = self.kernel.Block(0, 0, 0, 0, False, 0, 1)
        return int(self.kernel.turn_of(place, block, self.band, None, self.config))

    def seen(self, place, n_block):
        """(tile_n, tile_m): what is seen of the tile at a place, with keys and queries that do not exist."""
        tables = self.tables.visits, self.tables.bands, self.tables.bitmaps
        return seen(*tables, place, n_block, self.config.tile_n, self.config.tile_m)


def arrays(tables) -> SimpleNamespace:
    return SimpleNamespace(**{name: x.numpy() for name, x in vars(tables).items() if isinstance(x, torch.Tensor)})


def seen(visits, bands, bitmaps, place, block, rows, columns):
    """What is seen of a tile (rows, columns)."""
    tile, ref, *_ = visits[place].tolist()
    row, column = block * rows + np.arange(rows), tile * columns + np.arange(columns)
    if ref == -1:
        return np.ones((rows, columns), bool)
    if ref >= 0:
        words, at = bitmaps[ref].view(np.uint32), np.arange(columns, dtype=np.uint32)
        return (words[:, at // 32] >> (at % 32) & 1).astype(bool)
    q0, q1, k0, k1, lo, hi = bands[-1 - ref].tolist()
    begin, end = np.maximum(k0, row + lo), np.minimum(k1, row + hi + 1)
    end = np.where((row < q0) | (row >= q1), begin, end)
    return (column >= begin[:, None]) & (column < end[:, None])


def check_queries(problem, plane, dense):
    """The visits of tiles of queries, for dQ by a kernel of its own."""
    tables, (seqlen_q, seqlen_k) = problem.of_queries, problem.lengths
    blocks, tiles = -(-seqlen_q // QUERIES), -(-seqlen_k // KEYS)
    count = np.zeros((blocks * QUERIES, tiles * KEYS), int)
    for block in range(blocks):
        for place in range(*tables.spans[plane, block].tolist()):
            tile = tables.visits[place, 0]
            part = count[block * QUERIES : (block + 1) * QUERIES, tile * KEYS : (tile + 1) * KEYS]
            part += seen(tables.visits, tables.bands, tables.bitmaps, place, block, QUERIES, KEYS)
    assert (dense == count[:seqlen_q, :seqlen_k]).all()
    assert (count[:, seqlen_k:] == 0).all()


def check(kernel, mask, seqlen_q, seqlen_k, tile_m, tile_n, batch=2, heads=4):
    problem = Problem(kernel, mask, seqlen_q, seqlen_k, tile_m, tile_n, batch, heads)
    m_blocks, n_blocks = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
    dense = np.broadcast_to(mask.dense(seqlen_q, seqlen_k).numpy(), (batch, heads, seqlen_q, seqlen_k))
    for b, h in {(plane.batch[0], plane.heads[-1]) for plane in problem.planes}:
        count = np.zeros((n_blocks * tile_n, m_blocks * tile_m), int)
        turns = {m_block: [] for m_block in range(m_blocks)}
        for n_block in range(n_blocks):
            order = []
            for place, m_block in problem.visits(n_block, h, b):
                order.append(m_block)
                turns[m_block].append(problem.turn(place))
                count[n_block * tile_n : (n_block + 1) * tile_n, m_block * tile_m : (m_block + 1) * tile_m] += problem.seen(place, n_block)
            assert len(order) == len(set(order))
        check_queries(problem, problem.tables.planes[b, h], dense[b, h])
        assert (dense[b, h] == count[:seqlen_k, :seqlen_q].T).all()
        assert (count[seqlen_k:] == 0).all()
        for m_block, found in turns.items():
            assert found == list(range(len(found)))  # the blocks of keys come in this order in the grid
            assert bool(kernel.is_visited(m_block, h, b, problem.band, seqlen_k, problem.config)) == bool(found)
        for query in range(seqlen_q):
            assert bool(kernel.sees_any(query, h, b, problem.band, problem.config)) == dense[b, h, query].any()
    return problem


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_mask(tile, kernel):
    for seqlen_q, seqlen_k in ((45, 70), (300, 260), (260, 513), (128, 128)):
        for mask in masks(seqlen_q, seqlen_k):
            check(kernel, mask, seqlen_q, seqlen_k, *tile)


def some(seqlen_q, seqlen_k):
    n = min(seqlen_q, seqlen_k)
    sparse = torch.rand(seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(3)) < 0.003
    return (
        Full() - SlidingWindow(30, 30),
        Documents((0, n // 5, n // 5, n // 2, n)) | FirstKeys(3),
        PerHead({(0, 1): Causal(), (1, 4): FirstKeys(n // 3)}),
        random_mask(seqlen_q, seqlen_k, batch=2, heads=4),
        Dense(sparse),
        Dense(sparse) - Full(),
        Full() - Slices([(0, seqlen_q)], [(n // 2, n // 2 + 1)], [0]),
    )


@pytest.mark.parametrize(("walks", "lengths"), [(tables._walks, ((300, 260), (200, 400))), (shuffled, ((301, 261), (199, 399)))])
def test_a_pair_is_found_in_the_tables(kernel, walks, lengths, monkeypatch):
    """What repairs ask for, in whatever order blocks walk; equal masks of equal lengths would have kept their tables."""
    generator = random.Random(0)
    monkeypatch.setattr(tables, "_walks", walks)
    for seqlen_q, seqlen_k in lengths:
        for mask in some(seqlen_q, seqlen_k):
            problem = check(kernel, mask, seqlen_q, seqlen_k, 64, 128)
            dense = np.broadcast_to(mask.dense(seqlen_q, seqlen_k).numpy(), (2, 4, seqlen_q, seqlen_k))
            for _ in range(3000):
                at = *(generator.randrange(size) for size in (2, 4)), *(generator.randrange(size) for size in (seqlen_q, seqlen_k))
                assert bool(kernel.shows(at[2], at[3], at[1], at[0], problem.band, problem.config)) == dense[at]


def test_nobody_waits_for_ever(kernel):
    """Blocks of keys start from the first, a few at a time, and go through the heads of their group; each adds when it is its turn."""
    generator = random.Random(1)
    for seqlen_q, seqlen_k in ((700, 900), (900, 300), (700, 700)):
        others = (TREE,) if seqlen_q == seqlen_k else (PrefixLM(200), Documents((0, 100, 250, 300), inner=SlidingWindow(9, 9)))
        for mask in (*some(seqlen_q, seqlen_k), *others):
            problem = Problem(kernel, mask, seqlen_q, seqlen_k, 64, 64, 2, 4)
            numbers = [(n_block, b) for b in range(2) for n_block in range(-(-seqlen_k // 64))]
            waiting = [[(head, b, *at) for head in range(4) for at in problem.visits(n_block, head, b)] for n_block, b in numbers]
            slots, running, added = generator.choice((1, 2, 5, 40)), [], {}
            while waiting or running:
                while waiting and len(running) < slots:
                    running.append(waiting.pop(0))
                before = sum(map(len, running))
                for rest in running:
                    while rest and added.get((*rest[0][:2], rest[0][3]), 0) == problem.turn(rest[0][2]):
                        head, b, _, m_block = rest.pop(0)
                        added[head, b, m_block] = added.get((head, b, m_block), 0) + 1
                assert sum(map(len, running)) < before or not all(running), "all of them wait"
                running = [rest for rest in running if rest]


@pytest.mark.parametrize(
    ("mask", "down"),
    [
        (Causal(), True),
        (SlidingWindow(300, 0) | SlidingWindow(900, -700), True),
        (PrefixLM(1000), True),
        (ChunkedCausal(500), True),
        (Documents([0, 900, 1000, 16384], inner=Causal()), True),
        (Full() - Full(), True),
        (PrefixTree.group(1024, [512] * 30), False),
        (PrefixTree((-1, 0, 1, 2, 0, 4), (500, 1000, 1500, 500, 6000, 6884)), False),
        (PrefixTree.group(8192, [4096] * 2), True),  # the prompt's own blocks have most of the work
    ],
    ids=lambda x: str(x)[:40],
)
def test_the_way_that_blocks_walk(mask, down):
    """Down, unless the first keys are seen by queries far behind those of the next: of which rows, heads or batch entries does not matter."""
    walked = []
    for heads, batch in ((1, 1), (4, 3)):
        found = visits_of(mask.planes(16384, 16384, batch, heads), batch, heads, SimpleNamespace(tile_m=64, tile_n=128), CPU)
        walks = [found.visits[first:last, 0].tolist() for first, last in found.spans[0].tolist()]
        assert (walks == [sorted(walk, reverse=True) for walk in walks]) == down
        assert down or walks[0] == sorted(walks[0]), "all tiles of the first block are free"
        walked.append(walks)
    assert walked[0] == walked[1]


def test_what_a_walk_takes_is_counted():
    """Three blocks, two at a time: the second waits for the first at both tiles, the third starts when that ends."""
    walks = [np.array([0, 1]), np.array([0, 1]), np.array([1])]
    took = [_in_turns(*given, False)[0] for given in ((walks, 2), (walks, 1), ([walk[::-1] for walk in walks], 2))]
    assert took == [4, 5, 3]
    assert _in_turns([np.arange(0)] * 3, 2, True)[0] == 0


def test_tiles_are_taken_as_they_come_free():
    """The second block begins behind what the first has still to visit, and the third where both have been."""
    took, orders = _in_turns([np.array([0, 1, 2]), np.array([0, 3]), np.array([1, 2, 3])], 3, True)
    assert [order.tolist() for order in orders] == [[0, 1, 2], [1, 0], [2, 0, 1]] and took == 4


def test_they_are_kept_and_counted():
    config = SimpleNamespace(tile_m=64, tile_n=128)
    planes = random_mask(300, 300).planes(300, 300)
    before = planes[0].region.nbytes()
    found = visits_of(planes, 1, 1, config, CPU)
    assert visits_of(planes, 1, 1, config, CPU) is found
    assert planes[0].region.nbytes() >= before + found.bitmaps.nbytes
    assert all(x.dtype == torch.int32 for x in vars(found).values() if isinstance(x, torch.Tensor))
