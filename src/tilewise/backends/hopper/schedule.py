"""Which thread block computes which tile of queries, and when: blocks that stay, and take one tile after another.

A tile of queries of one head, or `cluster` neighbouring ones, are a unit of work, for a thread block or a cluster of them. Units are numbered so
that those with the most keys come first and those that run at the same time share keys: a section of `section` heads, all its last tiles, then
those before them. A cluster begins with the unit of its own number. Where all units take as long it goes on by the number of clusters; else
its first block draws the next unit from a counter and tells the others. Loaders are ahead of their readers, so that a tile's loads begin while
the tile before it is still computed.
"""

from typing import NamedTuple

from tilewise.hopper import tma
from tilewise.hopper.dsl import Constexpr, Int32, SmemAllocator, arch, const_expr, cute, pipeline, range_constexpr

AHEAD = 2  # units that the loader may be ahead of its readers
BYTES = 4  # of what it tells them


class Units(NamedTuple):
    """All units of a launch: `count` of them, `rows` (of one tile, or of a cluster's) for each of `heads` (of all batches), `section` at a time."""

    count: Int32
    heads: Int32
    rows: Int32
    section: Int32


class Queue(NamedTuple):
    """Where clusters draw from, and where each of their blocks finds what was drawn."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 before and after
    drawn: cute.Tensor  # (AHEAD,) int32
    pipe: pipeline.PipelineTmaAsync


class Block(NamedTuple):
    """A block's part of a unit: the queries from m0 on, of one head."""

    m0: Int32
    head: Int32
    head_k: Int32
    batch: Int32


def make_queue(storage: SmemAllocator, counter: cute.Tensor | None, warps: int, cluster: int) -> Queue | None:
    """With its barriers initialised, and visible after `tma.barriers_ready`; None where no one draws. The loader is a reader, too."""
    if counter is None:
        return None
    pipe = tma.make_pipe(storage, AHEAD, BYTES, warps + 1, cluster)
    return Queue(counter, storage.allocate_tensor(Int32, cute.make_layout(AHEAD), 8), pipe)


@cute.jit
def first_unit(config: Constexpr) -> Int32:
    return arch.block_idx()[0] // config.cluster


@cute.jit
def block_of(unit: Int32, units: Units, heads_q: Int32, heads_k: Int32, config: Constexpr) -> Block:
    """This block's part of a unit. Within a section the last tiles of all heads come first: under a causal mask they have the most keys."""
    per_section = units.section * units.rows
    section = unit // per_section
    within, first = unit - section * per_section, section * units.section
    width = min(units.section, units.heads - first)  # the last section may have fewer heads
    row = within // width
    head = first + within - row * width
    batch = head // heads_q
    head -= batch * heads_q
    m_block = units.rows - 1 - row
    if const_expr(config.cluster > 1):
        m_block = m_block * config.cluster + arch.block_idx_in_cluster()
    return Block(m_block * config.tile_m, head, head // (heads_q // heads_k), batch)


@cute.jit
def forgotten(unit: Int32) -> Int32:
    """The same number, of which the compiler does not know that it is: what was computed from it before is computed anew, not kept in registers."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[unit])


@cute.jit
def draw(queue: Queue | None, done: Int32, unit: Int32, units: Units, config: Constexpr) -> Int32:
    """The loader's unit after `unit`, its `done`-th (the count of units or more: there is none), told to all readers. One warp calls it.

    Every cluster draws until there is nothing left, which makes as many draws as there are units; the last one sets the counter back.
    """
    if const_expr(queue is not None):
        state = tma.after_empty(done, AHEAD)
        queue.pipe.producer_acquire(state)
        if arch.block_idx_in_cluster() == 0 and arch.lane_idx() == 0:
            ticket = arch.atomic_add(queue.counter.iterator, Int32(1))
            if ticket == units.count - 1:
                queue.counter[0] = Int32(0)
            for rank in range_constexpr(config.cluster):
                tell(queue, state, ticket + arch.grid_dim()[0] // config.cluster, rank)
    return told(queue, done, unit, config)


@cute.jit
def tell(queue: Queue, state: pipeline.PipelineState, unit: Int32, rank: Constexpr[int]):
    """Write `unit` into the slot of block `rank` of this cluster, whose barrier counts the bytes."""
    slot, barrier = (queue.drawn.iterator + state.index).toint(), queue.pipe.producer_get_barrier(state).toint()
    arch.inline_ptx(
        "{ .reg .b32 slot, barrier; mapa.shared::cluster.u32 slot, {$r0}, {$r3}; mapa.shared::cluster.u32 barrier, {$r1}, {$r3}; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [slot], {$r2}, [barrier]; }",
        read_only_args=[slot, barrier, unit, Int32(rank)],
    )


@cute.jit
def told(queue: Queue | None, done: Int32, unit: Int32, config: Constexpr) -> Int32:
    """The readers' unit after `unit`, their `done`-th, in every thread."""
    following = unit + arch.grid_dim()[0] // config.cluster
    if const_expr(queue is not None):
        state = tma.after(done, AHEAD)
        queue.pipe.consumer_wait(state)
        following = queue.drawn[state.index]
        queue.pipe.consumer_release(state)
    return following
