"""Time stamps inside a kernel: each warp notes the clock when it enters a phase (phases.py), so that one sees stages, roles and turns.

Without a buffer every call here is nothing, and the generated code is that of a kernel without stamps. With one, a stamp is a handful of
instructions of each warp and one write by its first lane, 8 bytes that no thread waits for. It keeps its place among loads, barriers, products
and, since the compiler moves little across a read of the clock, arithmetic: no stamp may stand where the kernel relies on such moves.
"""

from typing import NamedTuple

from tilewise.sm90.dsl import Constexpr, Int32, arch, const_expr, cute
from tilewise.sm90.phases import SLOTS, WARPS, Phase


class Stamps(NamedTuple):
    """A lane's next slot, counted over the whole buffer. A multiple of SLOTS, a warp's slot 0, says that the lane writes nothing (any more)."""

    events: cute.Tensor  # (blocks * WARPS * SLOTS, 2) int32
    next: cute.Tensor  # (1,) int32


@cute.jit
def start(events: cute.Tensor | None):
    """The stamps of this warp, or None without a buffer; the prologue begins."""
    if const_expr(events is None):
        return None
    thread, (block, head, _) = arch.thread_idx()[0], arch.block_idx()
    block += head * arch.grid_dim()[0]
    first = (block * WARPS + thread // 32) * SLOTS
    stamps = Stamps(events, cute.make_rmem_tensor(1, Int32))
    stamps.next[0] = first + 1 if arch.lane_idx() == 0 and first < cute.size(events, mode=[0]) else 0
    if stamps.next[0] != 0:
        events[first, 0], events[first, 1] = arch.smid(), Int32(Phase.PLACE)
    mark(stamps, Phase.START)
    return stamps


@cute.jit
def mark(stamps: Stamps | None, phase: Constexpr[Phase]):
    """From here on this warp is in `phase`."""
    if const_expr(stamps is not None):
        note(stamps, arch.clock(), phase)


@cute.jit
def stop(stamps: Stamps | None):
    mark(stamps, Phase.END)
    if const_expr(stamps is not None):
        note(stamps, arch.globaltimer_lo(), Phase.TIME)


@cute.jit
def note(stamps: Stamps, now: Int32, phase: Constexpr[Phase]):
    """Write (now, phase) into the next slot, if there is one: no branch, so that a warp stays whole between products."""
    slot = stamps.next[0]
    free = slot % SLOTS != 0
    arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[(stamps.events.iterator + 2 * slot).toint(), now, Int32(phase)],
        predicate=free,
    )
    stamps.next[0] = slot + Int32(free)
