"""Which thread block computes which tile of queries, and when: blocks that stay, and take one tile after another.

A tile of queries of one head is a unit of work. Units are numbered so that those with the most keys come first and those that run at the same
time share keys: a section of `section` heads, all its last tiles, then those before them. A thread block begins with the unit of its own
number. Where all units take as long it goes on by the number of blocks; else it draws its next unit from a counter. Its loader is ahead, so
that a tile's loads begin while the tile before it is still computed.
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
    """With its barriers initialised, and visible after `tma.barriers_ready`; None where no one draws."""
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
    return Block((units.m_blocks - 1 - row) * config.tile_m, head, head // (heads_q // heads_k), batch)


@cute.jit
def forgotten(unit: Int32) -> Int32:
    """The same number, of which the compiler does not know that it is: what was computed from it before is computed anew, not kept in registers."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[unit])


@cute.jit
def draw(queue: Queue | None, done: Int32, unit: Int32, units: Units) -> Int32:
    """The loader's unit after `unit`, its `done`-th (the count of units or more: there is none), told to the readers. One warp calls it.

    Every block draws until there is nothing left, which makes as many draws as there are units; the last one sets the counter back.
    """
    following = unit + arch.grid_dim()[0]
    if const_expr(queue is not None):
        ticket = Int32(0)
        if arch.lane_idx() == 0:
            ticket = arch.atomic_add(queue.counter.iterator, Int32(1))
            if ticket == units.count - 1:
                queue.counter[0] = Int32(0)
        following = arch.shuffle_sync(ticket, 0) + arch.grid_dim()[0]
        state = tma.after_empty(done, AHEAD)
        queue.pipe.producer_acquire(state)
        if arch.lane_idx() == 0:
            queue.drawn[state.index] = following
            queue.pipe.producer_commit(state)
    return following


@cute.jit
def told(queue: Queue | None, done: Int32, unit: Int32) -> Int32:
    """The readers' unit after `unit`, their `done`-th, in every thread."""
    following = unit + arch.grid_dim()[0]
    if const_expr(queue is not None):
        state = tma.after(done, AHEAD)
        queue.pipe.consumer_wait(state)
        following = queue.drawn[state.index]
        queue.pipe.consumer_release(state)
    return following
