"""The persistent tile scheduler of the backward pass: a thread block computes one block of keys, a unit, after another.

A unit's prologue and epilogue (a launch, the loads of K and V, the stores of dK and dV) take as long as two or three tiles of queries. A persistent
block loads the next unit's operands while dK and dV of this one leave, through the shared memory of dS and dQ.

Units come from a counter, and only running blocks fetch, so units begin in the order of their numbers. A unit waits only for units before it
(order.py), so none waits for one that has not begun, however few blocks are resident.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.order import Block, Order, block_of, heads_of, settled_order, walk_of
from tilewise.backends.hopper.backward.parts import Tensors
from tilewise.backends.hopper.operands import Band
from tilewise.backends.hopper.visible.queries import Walk
from tilewise.sm90 import tma
from tilewise.sm90.dsl import Boolean, Constexpr, Int32, SmemAllocator, arch, cute, range_constexpr

AHEAD = 2  # entries of the queue: units that are published and not released
END = -1  # in place of a unit: there are no more


class Queue(NamedTuple):
    """The counter that all blocks fetch from, and this block's ring of published units in shared memory."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 once `prepare` has come to its end
    entries: cute.Tensor  # (AHEAD,) int32: a unit, or END
    full: cute.Pointer  # (AHEAD,) mbarriers: the producer arrives after it has written an entry
    empty: cute.Pointer  # (AHEAD,) mbarriers: every warp that reads an entry arrives when it releases it


@cute.jit
def make_queue(storage: SmemAllocator, counter: cute.Tensor, readers: int) -> Queue:
    """Allocates the ring and initialises its barriers, visible after `tma.barriers_ready`; `readers` warps read entries."""
    entries = storage.allocate_tensor(Int32, cute.make_layout(AHEAD), 16)
    queue = Queue(counter, entries, storage.allocate_array(cute.Int64, AHEAD), storage.allocate_array(cute.Int64, AHEAD))
    if arch.thread_idx()[0] == 0:
        for i in range_constexpr(AHEAD):
            entries[i] = Int32(0)
            arch.mbarrier_init(queue.full + i, 1)
            arch.mbarrier_init(queue.empty + i, readers)
    return queue


@cute.jit
def blocks_of(tensors: Tensors, config: Constexpr[Config]) -> Int32:
    """Blocks of keys of one head."""
    return cute.ceil_div(tensors.K.shape[1], config.tile_n)


@cute.jit
def place_of(unit: Int32, tensors: Tensors, band: Band, order: Order, config: Constexpr[Config]) -> tuple[Block, Walk]:
    """A unit's block of keys, and its walk."""
    heads = heads_of(tensors.Q, tensors.K, config) * tensors.K.shape[0]
    block = block_of(unit, blocks_of(tensors, config), heads, settled_order(order, band, heads, config), config)
    return block, walk_of(block, band, tensors.Q.shape[1], tensors.K.shape[1], config)


@cute.jit
def fetch(queue: Queue) -> Int32:
    """The number of the next unit; one warp calls it."""
    unit = Int32(0)
    if arch.lane_idx() == 0:
        unit = arch.atomic_add(queue.counter.iterator, Int32(1))
    return arch.make_warp_uniform(unit)


@cute.jit
def publish(queue: Queue, done: Int32, unit: Int32):
    """Make a unit the one after `done` others, once its entry is free."""
    slot = tma.after_empty(done, AHEAD)
    arch.mbarrier_wait(queue.empty + slot.index, slot.phase)
    if arch.lane_idx() == 0:
        queue.entries[slot.index] = unit
        arch.mbarrier_arrive(queue.full + slot.index)
    arch.sync_warp()


@cute.jit
def consume(queue: Queue, done: Int32) -> Int32:
    """Wait for the unit after `done` others; `read` may be called again until `release`."""
    slot = tma.after(done, AHEAD)
    arch.mbarrier_wait(queue.full + slot.index, slot.phase)
    return read(queue, done)


@cute.jit
def read(queue: Queue, done: Int32) -> Int32:
    """The unit after `done` others. Read again at every call, so that no register holds it in between."""
    slot = tma.after(done, AHEAD)
    unit = arch.inline_ptx(
        "ld.volatile.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[(queue.entries.iterator + slot.index).toint()]
    )
    return arch.make_warp_uniform(unit)


@cute.jit
def ends(queue: Queue) -> Boolean:
    """Whether END is published: this is the block's last unit."""
    first, second = (
        arch.inline_ptx(
            "ld.volatile.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[(queue.entries.iterator + i).toint()]
        )
        for i in range(AHEAD)
    )
    return min(first, second) == END


@cute.jit
def release(queue: Queue, done: Int32):
    """This warp no longer reads the unit's entry."""
    if arch.lane_idx() == 0:
        arch.mbarrier_arrive(queue.empty + tma.after(done, AHEAD).index)
