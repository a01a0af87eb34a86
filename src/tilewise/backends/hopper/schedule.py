"""Which thread block computes which tile of queries, and when: blocks that stay, and draw their next tile from a counter.

A tile of queries of one head is a unit of work. Units are numbered so that those with the most keys come first and those that run at the same
time share keys: a section of `section` heads, all its last tiles, then those before them. One thread block a multiprocessor begins with the
unit of its own number; the next is the number of blocks plus what it draws from the counter. Its loader draws ahead, so that a tile's loads
begin while the tile before it is still computed.
"""

from typing import NamedTuple

from tilewise.hopper import tma
from tilewise.hopper.dsl import Constexpr, Int32, SmemAllocator, arch, const_expr, cute, pipeline

WARP = 32
AHEAD = 2  # units that the loader may be ahead of its readers


class Units(NamedTuple):
    """All units of a launch: `count` of them, over `heads` (of all batches) and tiles of queries, `section` heads at a time."""

    count: Int32
    heads: Int32
    m_blocks: Int32
    section: Int32
    order: cute.Tensor | None = None  # (m_blocks,) int32: tiles of queries, those with the most keys first; None: the last one first


class Queue(NamedTuple):
    """Where blocks draw from, and where a block's loader tells its readers what it drew."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 before and after
    drawn: cute.Tensor  # (AHEAD,) int32
    pipe: pipeline.PipelineAsync


class Block(NamedTuple):
    """A unit: the queries from m0 on, of one head."""

    m0: Int32
    head: Int32
    head_k: Int32
    batch: Int32


def make_queue(storage: SmemAllocator, counter: cute.Tensor | None, readers: int) -> Queue | None:
    """With its barriers initialised, and visible after `tma.barriers_ready`; None where each block has one unit."""
    if counter is None:
        return None
    barriers = storage.allocate_array(cute.Int64, 2 * AHEAD)
    one, all_readers = (pipeline.CooperativeGroup(pipeline.Agent.Thread, size) for size in (1, readers))
    pipe = pipeline.PipelineAsync.create(
        barrier_storage=barriers, num_stages=AHEAD, producer_group=one, consumer_group=all_readers, defer_sync=True
    )
    return Queue(counter, storage.allocate_tensor(Int32, cute.make_layout(AHEAD), 8), pipe)


@cute.jit
def block_of(unit: Int32, units: Units, heads_q: Int32, heads_k: Int32, config: Constexpr) -> Block:
    """The unit of number `unit`: within a section the last tiles of all heads first, since under a causal mask they have the most keys."""
    per_section = units.section * units.m_blocks
    section = unit // per_section
    within, first = unit - section * per_section, section * units.section
    width = min(units.section, units.heads - first)  # the last section may have fewer heads
    row = within // width
    head = first + within - row * width
    batch = head // heads_q
    head -= batch * heads_q
    m_block = units.m_blocks - 1 - row
    if const_expr(units.order is not None):
        m_block = units.order[row]
    return Block(m_block * config.tile_m, head, head // (heads_q // heads_k), batch)


@cute.jit
def draw(queue: Queue | None, state: pipeline.PipelineState, units: Units) -> Int32:
    """The loader's next unit (the count of units or more: there is none), told to the readers. One warp calls it.

    Every block draws until there is nothing left, which makes as many draws as there are units; the last one sets the counter back.
    """
    unit = units.count
    if const_expr(queue is not None):
        ticket = Int32(0)
        if arch.lane_idx() == 0:
            ticket = arch.atomic_add(queue.counter.iterator, Int32(1))
            if ticket == units.count - 1:
                queue.counter[0] = Int32(0)
        unit = arch.shuffle_sync(ticket, 0) + arch.grid_dim()[0]
        queue.pipe.producer_acquire(state)
        if arch.lane_idx() == 0:
            queue.drawn[state.index] = unit
            queue.pipe.producer_commit(state)
    return unit


@cute.jit
def told(queue: Queue | None, state: pipeline.PipelineState, units: Units) -> Int32:
    """The readers' next unit, in every thread."""
    unit = units.count
    if const_expr(queue is not None):
        queue.pipe.consumer_wait(state)
        unit = queue.drawn[state.index]
        queue.pipe.consumer_release(state)
    return unit


def at_first_drawn() -> pipeline.PipelineState:
    return tma.at_first(AHEAD)
