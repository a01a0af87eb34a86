"""Kernels that are nothing but a function of another one's."""

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.backward.finish import share_before
from tilewise.backends.hopper.operands import Draw
from tilewise.sm90.dsl import Constexpr, CUstream, Int32, arch, const_expr, cute, range_constexpr


@cute.jit
def launch(found: cute.Tensor, m_blocks: Int32, n_blocks: Int32, config: Constexpr, stream: CUstream):
    kernel(found, m_blocks, n_blocks).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def kernel(found: cute.Tensor, m_blocks: Int32, n_blocks: Int32):
    """What the last 32 of n_blocks thread blocks finish begins there."""
    i = arch.thread_idx()[0]
    found[i] = share_before(n_blocks - i, m_blocks, n_blocks)


@cute.jit
def launch_draws(found: cute.Tensor, draw: Draw, batch: Int32, head: Int32, query: Int32, key: Int32, config: Constexpr, stream: CUstream):
    kernel_of_draws(found, draw, batch, head, query, key, config).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def kernel_of_draws(found: cute.Tensor, draw: Draw, batch: Int32, head: Int32, query: Int32, key: Int32, config: Constexpr):
    """found: (lane, 2 words of rows, 2 of columns, whether a pair on the diagonal is kept). config: numbers of a row, of queries or of keys."""
    lane, number = arch.thread_idx()[0], dropout.head_of(draw, batch, head)
    keys, queries = const_expr(config[0]), const_expr(config[1])
    rows = dropout.of_rows(draw, number, query + lane // 4, key + lane % 4 * 2, keys)
    columns = dropout.of_columns(draw, number, query + lane % 4 * 2, key + lane // 4, queries)
    for i in range_constexpr(2):
        found[lane, i], found[lane, 2 + i] = rows[i], columns[i]
    found[lane, 4] = Int32(dropout.is_kept(draw, number, query + lane, key + lane))
