"""The order of the backward pass on Hopper, on a CPU: every pair is visited, every turn comes exactly once, and nobody waits for ever.

The kernel's own functions, which are arithmetic, on Python's integers.
"""

import inspect
import random
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

from tilewise.backends.hopper.band import band_of
from tilewise.hopper.compile import why_no_compiler
from tilewise.masks import Causal, Full, SlidingWindow

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))


@pytest.fixture(scope="module")
def order():
    """The module's functions and tuples."""
    from tilewise.backends.hopper import backward_order

    plain = dict(vars(backward_order), Int32=int, Boolean=bool, const_expr=bool, cute=SimpleNamespace(ceil_div=lambda a, b: -(-a // b)))
    for name in ("queries_seeing", "visitors_of", "block_of", "walk_of", "turn_of", "next_tile"):
        plain[name] = FunctionType(inspect.unwrap(plain[name]).__code__, plain)
    return SimpleNamespace(**plain)


class Problem:
    """Blocks of keys of `heads` heads on a machine that runs `slots` at a time."""

    def __init__(self, order, mask, seqlen_q, seqlen_k, tile_m, tile_n, heads, slots, rising, together):
        sees = "all" if mask.kind == "full" else "from" if isinstance(mask, Causal) else "interval"
        self.config = SimpleNamespace(tile_m=tile_m, tile_n=tile_n, sees=sees, rotate=True)
        self.order, self.band = order, order.Band(*band_of(mask, seqlen_q, seqlen_k))
        self.lengths, self.heads, self.slots = (seqlen_q, seqlen_k), heads, slots
        self.m_blocks, n_blocks = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
        numbers, how = range(n_blocks * heads), order.Order(slots, 0 if sees == "all" else min(rising, heads), together)
        self.blocks = [order.block_of(number, n_blocks, heads, heads, how, self.config) for number in numbers]
        (plane,) = mask.planes(seqlen_q, seqlen_k, 1, 1)
        self.visible = np.asarray(plane.region.dense())

    def walk(self, block):
        return self.order.walk_of(block, self.band, *self.lengths, self.config)

    def visits(self, block):
        walk = self.walk(block)
        m_block = walk.start
        for _ in range(walk.last - walk.first):
            yield m_block
            m_block = self.order.next_tile(m_block, walk)

    def turn(self, block, m_block):
        return self.order.turn_of(m_block, self.m_blocks, block, self.band, self.lengths[1], self.config)


def draw(order) -> Problem:
    masks = (
        Full(),
        Causal(random.choice(("bottom_right", "top_left"))),
        SlidingWindow(random.choice((None, 0, 3, 50)), random.choice((None, 0, 3, 200)), random.choice(("bottom_right", "top_left"))),
    )
    lengths, tiles = (random.randint(1, 500), random.randint(1, 700)), (random.choice((64, 128)), random.choice((64, 128, 192)))
    how = random.choice((1, 2, 3, 5, 7, 132)), random.randint(0, 5), random.randint(1, 5)
    return Problem(order, random.choice(masks), *lengths, *tiles, random.randint(1, 7), *how)


def test_walks_and_turns(order):
    random.seed(0)
    for _ in range(150):
        problem = draw(order)
        assert len({(block.n0, block.head_k, block.batch) for block in problem.blocks}) == len(problem.blocks)
        turns = {}
        for block in problem.blocks:
            check_walk(problem, block)
            for m_block in problem.visits(block):
                turns.setdefault((block.head_k, m_block), []).append(problem.turn(block, m_block))
        for head in range(problem.heads):
            for m_block in range(problem.m_blocks):
                visitors = order.visitors_of(m_block, problem.band, problem.lengths[1], problem.config)
                assert sorted(turns.get((head, m_block), [])) == list(range(visitors.last - visitors.first))


def check_walk(problem, block):
    config, walk, visits = problem.config, problem.walk(block), list(problem.visits(block))
    assert sorted(visits) == list(range(walk.first, walk.last))
    columns = problem.visible[:, block.n0 : block.n0 + config.tile_n]
    for m_block in range(problem.m_blocks):
        tile = columns[m_block * config.tile_m : (m_block + 1) * config.tile_m]
        assert m_block in visits or not tile.any()
        if walk.free_first <= m_block < walk.free_last:
            assert tile.all() and columns.shape[1] == config.tile_n
    for key in range(columns.shape[1]):
        begin, end = problem.order.queries_seeing(block.n0 + key, problem.band)
        rows = np.arange(len(columns))
        assert (((rows >= begin) & (rows < end)) == columns[:, key]).all()


def test_nobody_waits_for_ever(order):
    """Blocks start in the order of their numbers, `slots` at a time; each adds when it is its turn and starts the next tile only then."""
    random.seed(1)
    for _ in range(100):
        problem = draw(order)
        waiting, added, running, progress = list(problem.blocks), {}, [], 0
        while waiting or running:
            while waiting and len(running) < problem.slots:
                block = waiting.pop(0)
                running.append((block, iter(list(problem.visits(block)))))
            moved = []
            for block, rest in running:
                m_block = next(rest, None)
                while m_block is not None and added.get((block.head_k, m_block), 0) == problem.turn(block, m_block):
                    added[block.head_k, m_block] = added.get((block.head_k, m_block), 0) + 1
                    m_block = next(rest, None)
                if m_block is not None:
                    moved.append((block, iter([m_block, *rest])))
            assert len(moved) < len(running) or sum(added.values()) > progress, "all of them wait"
            running, progress = moved, sum(added.values())
