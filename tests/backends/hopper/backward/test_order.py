"""The order of the backward pass on Hopper, on a CPU: every pair is visited, every turn comes exactly once, and nobody waits for ever.

The kernel's own functions, which are arithmetic, on Python's integers.
"""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from tilewise.backends.hopper.backward.plan import NONE_ASCENDS
from tilewise.backends.hopper.operands import Packed
from tilewise.backends.tables import documents
from tilewise.backends.tables.band import NOTHING, band_of
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.sm90.jit import why_no_compiler

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))


@pytest.fixture(scope="module")
def order(in_python):
    """The modules' functions and tuples."""
    from tilewise.backends.hopper.backward import order as backward_order
    from tilewise.backends.hopper.visible import bands, queries

    of_order = "settled_order", "visitors_of", "block_of", "walk_of", "last_visits", "begun", "turn_of"
    of_bands = "interval", "interval_in", "queries_of", "some_of", "tiles_of"
    return plain(in_python, vars(bands) | vars(queries) | vars(backward_order), (*of_order, *of_bands))


@pytest.fixture(scope="module")
def documents_kernels(in_python):
    from tilewise.backends.hopper.backward import intervals as backward_intervals
    from tilewise.backends.hopper.forward import intervals

    return plain(in_python, vars(intervals) | vars(backward_intervals), ("interval", "weighed", "settled", "settle"))


def plain(in_python, module: dict, names: tuple[str, ...]) -> SimpleNamespace:
    """A module with its functions of these names as functions of Python."""
    ways = {
        "cute": SimpleNamespace(ceil_div=lambda a, b: -(-a // b), make_layout=tuple),
        "cutlass": SimpleNamespace(range=lambda *bounds, unroll: range(*bounds)),
    }
    found = dict(module, Int32=int, Boolean=bool, Float32=float, const_expr=bool, **ways)
    in_python(names, found)
    return SimpleNamespace(**found, everything=found)


class Problem:
    """Blocks of keys of `heads` heads on a machine that runs `num_sms` at a time; heads_k: how many of them have keys, where heads are apart."""

    def __init__(
        self,
        order,
        kernels,
        mask,
        seqlen_q,
        seqlen_k,
        tile_m,
        tile_n,
        heads,
        num_sms,
        ascending,
        heads_interleaved,
        shares=1,
        heads_per_step=1,
        heads_k=0,
    ):
        mask_kind = {"full": "full", "band": "band"}.get(mask.kind, "varlen")
        if isinstance(mask, Causal):
            mask_kind = "causal"
        if mask_kind != "varlen":
            ascending = max(ascending, 0)
        elif ascending == NONE_ASCENDS or heads % heads_per_step or min(ascending, heads) % heads_per_step:
            heads_per_step = 1
        by_keys = heads_per_step > 1 or heads % 2 == 1
        self.config = SimpleNamespace(
            tile_m=tile_m, tile_n=tile_n, mask_kind=mask_kind, shares=mask_kind == "full", by_keys=by_keys, block_per_q_head=heads_k > 0
        )
        self.order, self.lengths, self.heads, self.num_sms = order, (seqlen_q, seqlen_k), heads, num_sms
        if mask_kind == "varlen":
            self.band = order.Band(*NOTHING, Columns(kernels, mask, seqlen_q, seqlen_k, tile_m, tile_n))
        else:
            self.band = order.Band(*band_of(mask, seqlen_q, seqlen_k), None)
        self.m_blocks, n_blocks = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
        ascending, heads_interleaved = 0 if mask_kind == "full" else min(ascending, heads), heads_interleaved
        shared_from = n_blocks * heads // num_sms * num_sms
        shares = shares if mask_kind == "full" and not heads_k else 1
        ascending -= ascending % heads_per_step
        divisors = (
            heads_per_step * n_blocks,
            heads_per_step,
            heads_interleaved * n_blocks,
            heads_interleaved,
            max((heads - max(ascending, 0)) % heads_interleaved, 1),
            heads,
            shares,
            heads_k,
        )
        how = order.Order(num_sms, ascending, heads_per_step, heads_interleaved, 0, shared_from, shares, *divisors)
        how = order.settled_order(how, self.band, heads, self.config)
        numbers = n_blocks * heads + (n_blocks * heads - shared_from) * (shares - 1)
        self.blocks = [order.block_of(number, n_blocks, heads, how, self.config) for number in range(numbers)]
        (plane,) = mask.planes(seqlen_q, seqlen_k, 1, 1)
        self.visible = np.asarray(plane.region.dense())

    def head(self, block):
        """A query head, where heads are apart."""
        return block.head_k, block.member

    def walk(self, block):
        return self.order.walk_of(block, self.band, *self.lengths, self.config)

    def visits(self, block):
        walk = self.walk(block)
        m_block = walk.start
        for _ in range(walk.last - walk.first):
            yield m_block
            m_block += walk.step

    def turn(self, block, m_block):
        return self.order.turn_of(m_block, block, self.band, self.lengths[1], self.config)


class Columns:
    """What the GPU makes of packed documents, for the backward pass; `found` is what intervals.kernel says of their transpose."""

    def __init__(self, kernels, mask, seqlen_q, seqlen_k, tile_m, tile_n):
        lo, hi, lo_left, hi_left = documents.offsets(mask.inner)
        turned = Packed(np.array(mask.cu_seqlens_k), np.array(mask.cu_seqlens_q), seqlen_q, -hi, -lo, -hi_left, -lo_left)
        self.queries = np.array([kernels.interval(key, turned) for key in range(seqlen_k)]).T
        self.visitors, self.walks = np.full((-(-seqlen_q // tile_m), 2), -7), np.full((-(-seqlen_k // tile_n) + 1, 4), -7)
        found = np.array([self._needed(n0, tile_m, tile_n) for n0 in range(0, seqlen_k, tile_n)])
        storage = SimpleNamespace(allocate_tensor=lambda *_: found.copy())
        kernels.everything.update(
            THREADS=1 << 20, SmemAllocator=lambda: storage
        )  # all blocks of keys at once, as other threads have read them
        for at in range(max(len(self.visitors), len(self.walks))):
            kernels.everything["arch"] = SimpleNamespace(block_idx=lambda: (0,), thread_idx=lambda at=at: (at,), sync_threads=lambda: None)
            kernels.settle(found, self.walks, self.visitors, seqlen_k, SimpleNamespace(tile_m=tile_n, tile_n=tile_m))

    def _needed(self, n0, tile_m, tile_n):
        begin, end = self.queries[:, n0 : n0 + tile_n]
        any_sees = begin < end
        if not any_sees.any():
            return 0, 0, 0, 0
        first, last = begin[any_sees].min() // tile_m, -(-end.max() // tile_m)
        free_first = min(max(-(-begin.max() // tile_m), first), last)
        return first, last, free_first, min(max(end.min() // tile_m, free_first), last)


def packed(seqlen_q, seqlen_k, inner):
    """Documents of random lengths; some have no queries, or no keys, and tokens may be left over."""
    count = random.choice((1, 2, 5, 40))
    ends_q, ends_k = (sorted(random.choices(range(seqlen + 1), k=count)) for seqlen in (seqlen_q, seqlen_k))
    return Documents((0, *ends_q), (0, *ends_k), inner=inner)


def draw(order, kernels, most_shares=4) -> Problem:
    place = random.choice(("bottom_right", "top_left")), random.choice((0, 0, -90, 5, 150))
    masks = (
        Full(),
        Causal(*place),
        SlidingWindow(random.choice((None, 0, 3, 50)), random.choice((None, 0, 3, 200)), *place),
    )
    lengths, tiles = (random.randint(1, 500), random.randint(1, 700)), (random.choice((64, 128)), random.choice((64, 128, 192)))
    mask = random.choice(masks)
    if random.random() < 0.4:
        mask = packed(*lengths, mask)
    machine = random.choice((1, 2, 3, 5, 7, 132)), random.randint(NONE_ASCENDS, 5), random.randint(1, 5)
    shares, heads = random.randint(1, most_shares), random.randint(1, 7)
    heads_k = random.choice([0, *(n for n in range(1, heads) if heads % n == 0)])
    return Problem(order, kernels, mask, *lengths, *tiles, heads, *machine, shares, random.choice((1, 2, 3)), heads_k)


def test_walks_and_turns(order, documents_kernels):
    random.seed(0)
    for _ in range(250):
        problem = draw(order, documents_kernels)
        assert len({(block.n0, problem.head(block), block.batch, block.share) for block in problem.blocks}) == len(problem.blocks)
        turns = {}
        for block in problem.blocks:
            check_walk(problem, block)
            for m_block in problem.visits(block):
                turns.setdefault((problem.head(block), m_block), []).append(problem.turn(block, m_block))
        for head in {problem.head(block) for block in problem.blocks}:
            for m_block in range(problem.m_blocks):
                visitors = order.visitors_of(m_block, problem.band, problem.lengths[1], problem.config)
                assert sorted(turns.get((head, m_block), [])) == list(range(visitors.last - visitors.first))


def test_last_visits(order, documents_kernels):
    """What a block is the last to read of Q and dO."""
    random.seed(4)
    for _ in range(250):
        problem = draw(order, documents_kernels)
        for block in problem.blocks:
            last = order.last_visits(block, problem.band, *problem.lengths, problem.config)
            for m_block in problem.visits(block):
                visitors = order.visitors_of(m_block, problem.band, problem.lengths[1], problem.config)
                is_last = problem.turn(block, m_block) == visitors.last - visitors.first - 1
                assert (last.first <= m_block < last.last) == is_last


def check_walk(problem, block):
    config, walk, visits = problem.config, problem.walk(block), list(problem.visits(block))
    assert sorted(visits) == list(range(walk.first, walk.last))
    columns = problem.visible[:, block.n0 : block.n0 + config.tile_n]
    for m_block in range(problem.m_blocks):
        tile = columns[m_block * config.tile_m : (m_block + 1) * config.tile_m]
        others = (
            block.shares > 1 and not walk.first <= m_block < walk.last
        )  # who share the block; that all visits come is seen by the turns
        assert m_block in visits or others or not tile.any()
        if walk.free_first <= m_block < walk.free_last:
            assert tile.all() and columns.shape[1] == config.tile_n
    for key in range(columns.shape[1]):
        begin, end = problem.order.queries_of(block.n0 + key, problem.band, config)
        rows = np.arange(len(columns))
        assert (((rows >= begin) & (rows < end)) == columns[:, key]).all()


def test_every_tile_is_somebodys_to_finish(order, documents_kernels, in_python):
    """The shares of a head's blocks of keys, of which a later block finishes dQ, are all tiles of queries, each once."""
    from tilewise.backends.hopper.backward import finish as backward_finish

    random.seed(3)
    for _ in range(100):
        problem = draw(order, documents_kernels, most_shares=1)
        finish = plain(
            in_python, vars(backward_finish) | {"block_of": lambda number, *_, blocks=problem.blocks: blocks[number]}, ("share_of",)
        )
        keys = SimpleNamespace(shape=(1, problem.lengths[1], problem.heads, 1))
        tensors = SimpleNamespace(Q=keys, K=keys, sum_dQ=SimpleNamespace(shape=(1, problem.heads, problem.m_blocks)))
        shares = [finish.share_of(number, tensors, None, problem.config) for number in range(len(problem.blocks))]
        found = [(problem.head(block), m_block) for first, last, block in shares for m_block in range(first, last)]
        heads = {problem.head(block) for block in problem.blocks}
        assert len(heads) == problem.heads and sorted(found) == sorted(itertools.product(heads, range(problem.m_blocks)))


def test_blocks_that_stay_finish_every_tile_once(in_python):
    """By the numbers of `tile_numbered`."""
    from tilewise.backends.hopper.backward import finish as backward_finish
    from tilewise.backends.hopper.backward import order as backward_order

    finish = plain(in_python, vars(backward_finish), ("tile_numbered",))
    random.seed(5)
    for _ in range(200):
        batch, heads_k, group, m_blocks = (random.randint(1, most) for most in (3, 4, 3, 7))
        apart = random.random() < 0.5
        ascending = random.randint(0, batch * heads_k * (group if apart else 1))
        heads_per_step = next(n for n in range(random.randint(1, 3), 0, -1) if ascending % n == 0)
        fields = dict.fromkeys(backward_order.Order._fields, 1) | {
            "ascending": ascending,
            "heads_per_step": heads_per_step,
            "heads_interleaved": random.randint(1, 5),
        }
        tensors = SimpleNamespace(
            turns=SimpleNamespace(shape=(batch, heads_k * group, m_blocks, 1)),
            Q=SimpleNamespace(shape=(batch, 9, heads_k * group, 8)),
            K=SimpleNamespace(shape=(batch, 9, heads_k, 8)),
        )
        for mask_kind in ("full", "causal", "band", "varlen"):
            numbers = range(batch * heads_k * group * m_blocks)
            found = {
                finish.tile_numbered(
                    number, tensors, backward_order.Order(**fields), SimpleNamespace(mask_kind=mask_kind, block_per_q_head=apart)
                )
                for number in numbers
            }
            assert found == set(itertools.product(range(batch), range(heads_k * group), range(m_blocks)))


def test_nobody_waits_for_ever(order, documents_kernels):
    """Blocks start in the order of their numbers, some at a time, however few find room; each adds when it is its turn and starts the next tile
    only then. Where heads are apart, a block ends after that of the head before it.
    """
    random.seed(1)
    for _ in range(150):
        problem = draw(order, documents_kernels)
        room = random.randint(1, problem.num_sms)  # other kernels may have the rest
        waiting, added, running, progress, ended = list(problem.blocks), {}, [], 0, set()
        while waiting or running:
            while waiting and len(running) < room:
                block = waiting.pop(0)
                running.append((block, iter(list(problem.visits(block)))))
            moved = []
            for block, rest in running:
                m_block = next(rest, None)
                head = problem.head(block)
                while m_block is not None and added.get((head, m_block), 0) == problem.turn(block, m_block):
                    added[head, m_block] = added.get((head, m_block), 0) + 1
                    m_block = next(rest, None)
                before = block.n0, block.head_k, block.member - 1
                if m_block is not None:
                    moved.append((block, iter([m_block, *rest])))
                elif block.member > 0 and before not in ended:
                    moved.append((block, iter([])))
                else:
                    ended.add((block.n0, block.head_k, block.member))
            assert len(moved) < len(running) or sum(added.values()) > progress, "all of them wait"
            running, progress = moved, sum(added.values())


@pytest.mark.parametrize(("ends", "all_ascend"), [(range(0, 2049, 256), True), ((0, 1800, 2048), False)])
def test_all_heads_of_short_documents_ascend(ends, all_ascend, order, documents_kernels):
    mask = Documents(tuple(ends), inner=Causal())
    problem = Problem(order, documents_kernels, mask, 2048, 2048, 64, 128, heads=6, num_sms=4, ascending=4, heads_interleaved=2)
    assert all(block.ascending for block in problem.blocks) == all_ascend


def test_bad_cu_seqlens_make_nobody_wait_for_ever(documents_kernels):
    """Whatever is found for the blocks of keys: those that visit a tile are neighbours, and as many as `visitors` says."""
    generator = np.random.default_rng(2)
    for _ in range(200):
        n_blocks, m_blocks = generator.integers(1, 9, 2)
        found = generator.integers(0, m_blocks + 1, (n_blocks, 4))
        walks = [settled(documents_kernels, n_block, found, m_blocks)[:2] for n_block in range(n_blocks)]
        for m_block in range(m_blocks):
            first, last = settled(documents_kernels, m_block, found, m_blocks)[2:]
            assert [n for n, walk in enumerate(walks) if walk[0] <= m_block < walk[1]] == list(range(first, last))
        for (needs_first, needs_last, *_), (first, last) in zip(found, walks, strict=True):
            assert needs_first >= needs_last or first <= needs_first < needs_last <= last


def settled(kernels, at, found, m_blocks):
    """Three blocks of keys at a time."""
    state = m_blocks, 0, len(found), 0
    for begin in range(0, len(found), 3):
        state = kernels.settled(at, begin, min(3, len(found) - begin), found[begin:], *state)
    return state[0], max(state[:2]), state[2], max(state[2:])
