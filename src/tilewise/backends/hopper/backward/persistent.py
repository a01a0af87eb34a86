"""Thread blocks of the backward pass on Hopper that stay, and take one block of keys, a unit, after another.

A unit's beginning and end take as long as two or three tiles of queries: a launch, K and V from memory, dK and dV on their way out. Here the
copy engine asks for the next unit's operands while this one's dK and dV leave, from shared memory that dS and dQ went through.

Units are drawn from a counter, and only by blocks that run, so they begin in the order of their numbers. A unit waits for those before it only
(order.py), so nobody waits for one that nobody has begun, however few blocks find room.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.order import Block, Order, Walk, block_of, settled_order, walk_of
from tilewise.backends.hopper.backward.parts import Tensors
from tilewise.backends.hopper.operands import Band
from tilewise.sm90 import tma
from tilewise.sm90.dsl import Boolean, Constexpr, Int32, SmemAllocator, arch, cute, range_constexpr

AHEAD = 2  # units that may be told of and not read yet
END = -1  # in place of a unit: there are no more


class Queue(NamedTuple):
    """How a block's producer, which draws, tells all others."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 once `prepare` has come to its end
    told: cute.Tensor  # (AHEAD,) int32: a unit, or END
    full: cute.Pointer  # (AHEAD) mbarriers, on which the producer arrives once it has written a slot,
    empty: cute.Pointer  # and those on which every warp that reads it arrives


@cute.jit
def make_queue(storage: SmemAllocator, counter: cute.Tensor, readers: int) -> Queue:
    """With its barriers initialised, and visible after `tma.barriers_ready`; `readers` warps read from it."""
    told = storage.allocate_tensor(Int32, cute.make_layout(AHEAD), 16)
    queue = Queue(counter, told, storage.allocate_array(cute.Int64, AHEAD), storage.allocate_array(cute.Int64, AHEAD))
    if arch.thread_idx()[0] == 0:
        for i in range_constexpr(AHEAD):
            told[i] = Int32(0)
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
    heads = tensors.K.shape[2] * tensors.K.shape[0]
    block = block_of(unit, blocks_of(tensors, config), heads, settled_order(order, band, heads, config), config)
    return block, walk_of(block, band, tensors.Q.shape[1], tensors.K.shape[1], config)


@cute.jit
def draw(queue: Queue) -> Int32:
    """The next unit that nobody has; one warp calls it."""
    unit = Int32(0)
    if arch.lane_idx() == 0:
        unit = arch.atomic_add(queue.counter.iterator, Int32(1))
    return arch.make_warp_uniform(unit)


@cute.jit
def tell(queue: Queue, done: Int32, unit: Int32):
    """The unit after `done` others."""
    slot = tma.after_empty(done, AHEAD)
    arch.mbarrier_wait(queue.empty + slot.index, slot.phase)
    if arch.lane_idx() == 0:
        queue.told[slot.index] = unit
        arch.mbarrier_arrive(queue.full + slot.index)
    arch.sync_warp()


@cute.jit
def told(queue: Queue, done: Int32) -> Int32:
    """The unit after `done` others, once it was told; may be read again until `forget`."""
    slot = tma.after(done, AHEAD)
    arch.mbarrier_wait(queue.full + slot.index, slot.phase)
    return read(queue, done)


@cute.jit
def read(queue: Queue, done: Int32) -> Int32:
    """Read anew each time, so that nothing has to be kept in registers in between."""
    slot = tma.after(done, AHEAD)
    unit = arch.inline_ptx(
        "ld.volatile.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[(queue.told.iterator + slot.index).toint()]
    )
    return arch.make_warp_uniform(unit)


@cute.jit
def ends(queue: Queue) -> Boolean:
    """Whether there are no more units to be told of: the last one comes to its end."""
    first, second = (
        arch.inline_ptx(
            "ld.volatile.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[(queue.told.iterator + i).toint()]
        )
        for i in range(AHEAD)
    )
    return min(first, second) == END


@cute.jit
def forget(queue: Queue, done: Int32):
    """This warp is done with the unit."""
    if arch.lane_idx() == 0:
        arch.mbarrier_arrive(queue.empty + tma.after(done, AHEAD).index)
