"""The gradient of a sink, behind the kernels that leave L and -delta of each row: -sum(exp(z - L) delta) over the rows of a head (Eq. 34).

A thread block a head, which adds up in one order, so that every run gives the same bits. Memory bounds it: 8 bytes a row.
"""

from tilewise.backends.hopper.backward.sink.call import Config, SinkScalars, SinkTensors
from tilewise.sm90.dsl import Constexpr, CUstream, Float32, SmemAllocator, arch, cute, cutlass, range_constexpr

WARP, WARPS = 32, 16
THREADS = WARP * WARPS  # of a thread block
VECTOR = 4  # elements in a 16-byte read
LOG2_E = 1.4426950408889634


@cute.jit
def launch(tensors: SinkTensors, scalars: SinkScalars, config: Constexpr[Config], stream: CUstream):
    """On the stream of the kernels before it."""
    kernel(tensors, scalars, config).launch(grid=(tensors.sink.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def kernel(tensors: SinkTensors, scalars: SinkScalars, config: Constexpr[Config]):
    """A block the rows of a head, of all batch entries."""
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16)
    thread, head = arch.thread_idx()[0], arch.block_idx()[0]
    z, total = tensors.sink[head].to(Float32), Float32(0.0)
    batch, _, rows = tensors.lse.shape
    lse, minus_delta = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
    for b in cutlass.range(batch, unroll=1):
        for i in cutlass.range(thread, rows // VECTOR, THREADS, unroll=4):
            for source, target in ((tensors.lse, lse), (tensors.minus_delta, minus_delta)):
                cute.autovec_copy(cute.local_tile(source[b, head, None], (VECTOR,), (i,)), target)
            for j in range_constexpr(VECTOR):
                below = z - scalars.unit * lse[j]
                below = Float32(0.0) if below > 0.0 else below  # a large L may be rounded to below its sink; NaN stays
                total += cute.math.exp2(below * LOG2_E, fastmath=True) * minus_delta[j]
    total = arch.warp_reduction_sum(total)
    if thread % WARP == 0:
        sums[thread // WARP] = total
    arch.sync_threads()
    if thread == 0:
        total = Float32(0.0)
        for warp in range_constexpr(WARPS):
            total += sums[warp]
        tensors.d_sink[head] = (total * scalars.rest).to(tensors.d_sink.element_type)
