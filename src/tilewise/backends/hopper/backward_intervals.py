"""The kernels of backward_tables.py for packed documents: the queries that see each key, and the tiles of queries that each block of keys visits.

A key of a document is seen by an interval of queries, found as a row's keys are: with queries and keys exchanged (intervals.py). A block of keys
visits the tiles from the first to the last that any of its keys needs. Over the blocks both only grow, and `settled` sees to it whatever
cu_seqlens hold: so the blocks that visit a tile of queries are neighbours, and a block's turn there is its distance from the first of them.
"""

from tilewise.backends.hopper import intervals
from tilewise.backends.hopper.intervals import Documents
from tilewise.hopper.dsl import Constexpr, CUstream, Int32, arch, cute, cutlass

THREADS = 128


@cute.jit
def launch(
    cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor, found: cute.Tensor, walks: cute.Tensor,
    visitors: cute.Tensor, lo: Int32, hi: Int32, lo_left: Int32, hi_left: Int32, config: Constexpr, stream: CUstream,
):  # fmt: skip
    """keys (2, seqlen_q), queries (2, seqlen_k), walks (n_blocks, 4) and visitors (m_blocks, 2) from cu_seqlens; found, like walks, is scratch."""
    rows = Documents(cu_seqlens_q, cu_seqlens_k, queries.shape[1], lo, hi, lo_left, hi_left)
    columns = Documents(cu_seqlens_k, cu_seqlens_q, keys.shape[1], -hi, -lo, -hi_left, -lo_left)
    grid = cute.ceil_div(keys.shape[1], THREADS), 1, 1
    keys_of_rows(rows, keys).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
    n_blocks, m_blocks = walks.shape[0], visitors.shape[0]
    intervals.kernel(columns, queries, found, config).launch(grid=(n_blocks, 1, 1), block=(config.tile_m, 1, 1), stream=stream)
    grid = cute.ceil_div(max(n_blocks, m_blocks), THREADS), 1, 1
    settle(found, walks, visitors, queries.shape[1], config).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def keys_of_rows(documents: Documents, keys: cute.Tensor):
    row = arch.block_idx()[0] * THREADS + arch.thread_idx()[0]
    if row < keys.shape[1]:
        keys[0, row], keys[1, row] = intervals.interval(row, documents)


@cute.kernel
def settle(found: cute.Tensor, walks: cute.Tensor, visitors: cute.Tensor, seqlen_k: Int32, config: Constexpr):
    """A thread a block of keys, and a tile of queries. config: tile_m keys, tile_n queries."""
    at = arch.block_idx()[0] * THREADS + arch.thread_idx()[0]
    first, last, first_visitor, last_visitor = settled(at, found, visitors.shape[0])
    if at < walks.shape[0]:
        free_first = min(max(found[at, 2], first), last)
        free_last = min(max(found[at, 3], free_first), last)
        if (at + 1) * config.tile_m > seqlen_k:  # keys that do not exist are to be hidden
            free_last = free_first
        walks[at, 0], walks[at, 1], walks[at, 2], walks[at, 3] = first, last, free_first, free_last
    if at < visitors.shape[0]:
        visitors[at, 0], visitors[at, 1] = first_visitor, last_visitor


@cute.jit
def settled(at: Int32, found: cute.Tensor, m_blocks: Int32):
    """Of block `at` of the keys: the tiles [first, last) that it visits; of tile `at` of the queries: the blocks [first, last) that visit it.

    found: (n_blocks, 4), tiles [found[n, 0], found[n, 1]) needed by block n. It visits from the first that it or a later block needs to the last
    that it or an earlier block needs; which is what it needs itself, but for blocks that need nothing, and bad cu_seqlens.
    """
    first, last, first_visitor, last_visitor = m_blocks, Int32(0), found.shape[0], Int32(0)
    for n_block in cutlass.range(found.shape[0], unroll=4):
        needs_first, needs_last = found[n_block, 0], found[n_block, 1]
        if needs_first < needs_last:
            if n_block >= at:
                first = min(first, needs_first)
            if n_block <= at:
                last = max(last, needs_last)
            if needs_last > at:
                first_visitor = min(first_visitor, n_block)
            if needs_first <= at:
                last_visitor = n_block + 1
    return first, max(first, last), first_visitor, max(first_visitor, last_visitor)
