"""The kernel of repair, last of the backward pass: its warps settle an entry each, then its thread blocks sum up the holes that are left."""

from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.repair.elements import EIGHT, STEP
from tilewise.backends.hopper.backward.repair.entries import OF_DV, WARPS, Operands, entry_of
from tilewise.backends.hopper.backward.repair.holes import any_hole, find_holes
from tilewise.backends.hopper.backward.repair.settle import settle
from tilewise.backends.hopper.backward.repair.sums import repair
from tilewise.backends.hopper.backward.tiles import WARP
from tilewise.backends.hopper.operands import Band, Changes, Gradients, Repaired, RepairScalars, Spoiled
from tilewise.sm90.dsl import Constexpr, CUstream, Float32, Int32, SmemAllocator, arch, const_expr, cute, cutlass

THREADS = WARPS * WARP  # of a thread block


@cute.jit
def launch(
    repaired: Repaired, spoiled: Spoiled, scalars: RepairScalars, band: Band, changes: Changes | None, config: Constexpr[RepairConfig],
    stream: CUstream,
):  # fmt: skip
    """Behind the kernels that write the gradients, on their stream."""
    tensors = Operands(*repaired[:4], *spoiled, Changes() if const_expr(changes is None) else changes)
    kernel(tensors, Gradients(*repaired[4:]), scalars, band, config).launch(
        grid=(scalars.blocks, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream, use_pdl=True
    )


@cute.kernel
def kernel(tensors: Operands, gradients: Gradients, scalars: RepairScalars, band: Band, config: Constexpr[RepairConfig]):
    """Work the list off, with any number of thread blocks. A block takes WARPS entries at a time."""
    storage = SmemAllocator()
    steps, vectors = const_expr(config.columns // STEP), const_expr(config.columns // EIGHT)
    sums = storage.allocate_tensor(Float32, cute.make_layout((4, vectors, WARP, WARPS), stride=(1, 4 * WARP, 4, 4 * WARP * vectors)), 128)
    lost = storage.allocate_tensor(Int32, cute.make_layout((steps, WARP), stride=(WARP, 1)), 16)
    words = storage.allocate_tensor(Int32, cute.make_layout((steps, WARP, WARPS), stride=(WARP, 1, WARP * steps)), 16)
    left = storage.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
    warp = arch.make_warp_uniform(arch.warp_idx())
    holes = words[None, arch.lane_idx(), warp]
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
                entry = entry_of(tensors, gradients, tensors.spoiled[1 + number], turn, band, scalars, config)
                if entry.of >= 0:
                    remains = find_holes(entry, holes, config)
                    if own:
                        settle(entry, holes, tensors, band, scalars.looks, config)
                        remains = any_hole(holes)
                        if remains and arch.lane_idx() == 0:
                            left[warp] = left[warp] | 1 << turn
                    else:
                        factor = scalars.of_dV if entry.of == OF_DV else scalars.scale
                        repair(entry, holes, tensors, factor, sums, lost, warp, band, scalars, config)
        arch.sync_threads()
