"""Who adds up the pieces of a unit: of the thread blocks that have computed them, those that have nothing else to do, or the last one.

A unit has two words in global memory, 0 between launches. The first one counts pieces that are there, blocks that wait until all are, and those of
them that have left again, a field each; what is in it is decided by single atomic operations, so all blocks agree on it. A block waits for a bounded
time: not all of a launch's blocks need to run at once, and no cooperative launch is needed. Blocks leave in the order in which they came. Hence those
that are still there when the last piece comes are numbered without a gap, and each knows its part of the sum without asking again. When all pieces
are there, nobody comes or leaves. Each block counts itself at the second word when it will not read the first one again; the last one sets both to 0.
"""

from typing import NamedTuple

from tilewise.backends.hopper.decode.config import Config
from tilewise.sm90.dsl import Boolean, Constexpr, Int32, arch, cute

ARRIVED = 2  # a named barrier
BITS = 10  # of a field
MOST = (1 << BITS) - 1  # pieces of a unit that blocks wait for
WAITS, LEFT = 1 << BITS, 1 << 2 * BITS  # one more in the second and the third field


class MergeSlice(NamedTuple):
    """Slices number first, first + step, ... of a unit's rows are this block's, and others have the rest; step 0: it has none."""

    first: Int32
    step: Int32


@cute.jit
def arrive(
    counter: cute.Pointer, count: Int32, shared: Boolean, waits: Boolean, polls: Int32, broadcast: cute.Tensor, config: Constexpr[Config]
) -> MergeSlice:
    """By all that compute, when their piece of `count` is in memory; what other blocks have written there, they may read in their turn.

    shared: whether blocks wait for the unit; waits: whether this one does, and looks `polls` times at least. told: (2,) int32 in shared memory. One
    thread's atomic operation releases what all threads wrote before the barrier, and what it acquires holds for all that come behind the next.
    """
    arch.barrier(barrier_id=ARRIVED, number_of_threads=config.threads)
    if arch.thread_idx()[0] == 0:
        first, step = Int32(0), Int32(0)
        if shared:
            first, step = join(counter, count, waits, polls)
        elif arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu") == count - 1:
            counter.store(Int32(0))
            step = Int32(1)
        broadcast[0], broadcast[1] = first, step
    arch.barrier(barrier_id=ARRIVED, number_of_threads=config.threads)
    return MergeSlice(broadcast[0], broadcast[1])


@cute.jit
def join(counter: cute.Pointer, count: Int32, waits: Boolean, polls: Int32) -> MergeSlice:
    """By one thread. The latest to come has the first slices, as it knows at once that all pieces are there."""
    mine = Int32(1 + WAITS) if waits else Int32(1)
    seen = arch.atomic_add(counter, mine, sem="acq_rel", scope="gpu") + mine
    order = field(seen, 1) - 1  # among those that wait
    going = waits and field(seen, 0) < count
    while going:
        seen = now_at(counter)
        polls -= 1
        going = field(seen, 0) < count
        if going and polls <= 0 and field(seen, 2) == order:
            going = arch.atomic_cas(counter, cmp=seen, val=seen + LEFT, sem="relaxed", scope="gpu") != seen
    first, step = Int32(0), Int32(0)
    if field(seen, 0) == count:
        there = field(seen, 1) - field(seen, 2)
        if waits:
            first, step = field(seen, 1) - 1 - order, there
        elif there == 0:  # or those that are there do it, and this block goes on
            step = Int32(1)
    return MergeSlice(first, step)


@cute.jit
def field(state: Int32, i: Constexpr[int]) -> Int32:
    return (state >> i * BITS) & MOST


@cute.jit
def now_at(counter: cute.Pointer) -> Int32:
    """What others wrote before they counted is seen by what this thread reads from now on."""
    return arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[counter.toint()])


@cute.jit
def leave(counter: cute.Pointer, shared: Boolean, turn: MergeSlice) -> Int32:
    """Counts a block with a turn, by one thread. Returns how many were counted before; the last one's sets the second word to 0."""
    before = Int32(0)
    if shared and turn.step > 1 and arch.thread_idx()[0] == 0:
        ptx = "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};"
        before = arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[(counter + 1).toint(), turn.step - 1])
    return before


@cute.jit
def clear(counter: cute.Pointer, shared: Boolean, turn: MergeSlice, before: Int32):
    """The first word, by the last one that `leave` has counted."""
    if shared and before == turn.step - 1 and arch.thread_idx()[0] == 0:
        counter.store(Int32(0))
