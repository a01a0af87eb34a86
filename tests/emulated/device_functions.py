"""Kernels that are nothing but a function of another one's."""

from tilewise.backends.hopper.backward.finish import share_before
from tilewise.sm90.dsl import Constexpr, CUstream, Int32, arch, cute


@cute.jit
def launch(found: cute.Tensor, m_blocks: Int32, n_blocks: Int32, config: Constexpr, stream: CUstream):
    kernel(found, m_blocks, n_blocks).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def kernel(found: cute.Tensor, m_blocks: Int32, n_blocks: Int32):
    """What the last 32 of n_blocks thread blocks finish begins there."""
    i = arch.thread_idx()[0]
    found[i] = share_before(n_blocks - i, m_blocks, n_blocks)
