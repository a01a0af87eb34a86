"""The kernel of repair, last of the backward pass: its warps settle an entry each, then its thread blocks sum up the holes that are left."""

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.epilogue import scale_of_dV
from tilewise.backends.hopper.backward.repair.elements import STEP
from tilewise.backends.hopper.backward.repair.entries import OF_DV, WARPS, entry_of
from tilewise.backends.hopper.backward.repair.holes import any_hole, holes_in
from tilewise.backends.hopper.backward.repair.settle import settle
from tilewise.backends.hopper.backward.repair.sums import repair
from tilewise.backends.hopper.backward.tiles import WARP
from tilewise.backends.hopper.operands import Band
from tilewise.sm90.dsl import Constexpr, Float32, Int32, SmemAllocator, arch, cute, cutlass

THREADS = WARPS * WARP  # of a thread block


@cute.kernel
def kernel(
    tensors, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, band: Band, scale: Float32, scale_log2: Float32, config: Constexpr[Config]
):  # fmt: skip
    """Work the list off, with any number of thread blocks. A block takes WARPS entries at a time.

    tensors: parts.Tensors; mdQ, mdK, mdV: (batch, seqlen, heads, head_dim).
    """
    storage = SmemAllocator()
    sums = storage.allocate_tensor(
        Float32, cute.make_layout((config.repaired_columns // 2, WARP, WARPS), stride=(WARP, 1, WARP * config.repaired_columns // 2)), 128
    )
    lost = storage.allocate_tensor(Int32, cute.make_layout((config.repaired_columns // STEP, WARP), stride=(WARP, 1)), 16)
    left = storage.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
    gradients, warp = (mdQ, mdK, mdV), arch.make_warp_uniform(arch.warp_idx())
    arch.griddepcontrol_wait()
    block, blocks, count = arch.block_idx()[0], arch.grid_dim()[0], tensors.spoiled[0]
    for first in cutlass.range(block, count, WARPS * blocks, unroll=1):
        if arch.lane_idx() == 0:
            left[warp] = Int32(0)
        for i in cutlass.range(2 + 2 * WARPS, unroll=1):  # a warp settles its entry's two gradients; then all warps repair all entries
            own = i < 2
            which, turn = warp if own else i // 2 - 1, i % 2
            number = first + which * blocks
            if i == 2:
                arch.sync_threads()
            wanted = number < count
            if not own:
                wanted = (left[which] >> turn) & 1 != 0
            if wanted:
                entry = entry_of(tensors, gradients, tensors.spoiled[1 + number], turn, band, config)
                if entry.of >= 0:
                    holes = holes_in(entry, config)
                    if own:
                        settle(entry, holes, tensors, band, config)
                        remains = any_hole(holes)
                        if remains and arch.lane_idx() == 0:
                            left[warp] = left[warp] | 1 << turn
                    else:
                        factor = scale_of_dV(tensors, config) if entry.of == OF_DV else scale
                        repair(entry, holes, tensors, factor, sums, lost, warp, band, scale_log2, config)
        arch.sync_threads()
