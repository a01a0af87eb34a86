"""The kernels of tables.py for packed documents: the queries that see each key, and the tiles of queries that each block of keys visits.

A key of a document is seen by an interval of queries, found as a row's keys are: with queries and keys exchanged (intervals.py). A block of keys
visits the tiles from the first to the last that any of its keys needs. Over the blocks both only grow, and `settled` sees to it whatever
cu_seqlens hold: so the blocks that visit a tile of queries are neighbours, and a block's turn there is its distance from the first of them.
"""

from tilewise.backends.hopper.forward import intervals
from tilewise.backends.hopper.operands import Packed
from tilewise.sm90.dsl import Constexpr, CUstream, Int32, SmemAllocator, arch, cute, cutlass

THREADS = 128


@cute.jit
def launch(
    rows: Packed, keys: cute.Tensor, queries: cute.Tensor, found: cute.Tensor, walks: cute.Tensor, visitors: cute.Tensor,
    query_walks: cute.Tensor, config: Constexpr, stream: CUstream,
):  # fmt: skip
    """keys (2, seqlen_q), queries (2, seqlen_k), walks (n_blocks + 1, 4), visitors (m_blocks, 2) and query_walks (tiles of config.rows queries, 4)
    from cu_seqlens; found (n_blocks, 4) is scratch. The last row of walks: `weighed`.
    """
    cu_seqlens_q, cu_seqlens_k, _, lo, hi, lo_left, hi_left = rows
    columns = Packed(cu_seqlens_k, cu_seqlens_q, keys.shape[1], -hi, -lo, -hi_left, -lo_left)
    n_blocks, m_blocks = found.shape[0], visitors.shape[0]
    across, down = config.rows, config.columns
    intervals.kernel(rows, keys, query_walks, None, across).launch(
        grid=(query_walks.shape[0], 1, 1), block=(across.tile_m, 1, 1), stream=stream
    )
    intervals.kernel(columns, queries, found, None, down).launch(grid=(n_blocks, 1, 1), block=(down.tile_m, 1, 1), stream=stream)
    grid = cute.ceil_div(max(n_blocks + 1, m_blocks), THREADS), 1, 1
    settle(found, walks, visitors, queries.shape[1], down).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def settle(found: cute.Tensor, walks: cute.Tensor, visitors: cute.Tensor, seqlen_k: Int32, config: Constexpr):
    """A thread a block of keys, and a tile of queries. config: tile_m keys, tile_n queries."""
    at = arch.block_idx()[0] * THREADS + arch.thread_idx()[0]
    storage = SmemAllocator()
    needs = storage.allocate_tensor(Int32, cute.make_layout((THREADS, 2)), 16)
    first, last, first_visitor, last_visitor = visitors.shape[0], Int32(0), found.shape[0], Int32(0)
    longest, total = Int32(0), Int32(0)
    for begin in cutlass.range(0, found.shape[0], THREADS, unroll=1):
        mine, end = begin + arch.thread_idx()[0], min(found.shape[0] - begin, THREADS)
        if mine < found.shape[0]:
            needs[mine - begin, 0], needs[mine - begin, 1] = found[mine, 0], found[mine, 1]
        arch.sync_threads()
        first, last, first_visitor, last_visitor = settled(at, begin, end, needs, first, last, first_visitor, last_visitor)
        longest, total = weighed(end, needs, longest, total)
        arch.sync_threads()
    last, last_visitor = max(first, last), max(first_visitor, last_visitor)
    if at < found.shape[0]:
        free_first = min(max(found[at, 2], first), last)
        free_last = min(max(found[at, 3], free_first), last)
        if (at + 1) * config.tile_m > seqlen_k:  # keys that do not exist are to be hidden
            free_last = free_first
        walks[at, 0], walks[at, 1], walks[at, 2], walks[at, 3] = first, last, free_first, free_last
    if at == found.shape[0]:
        walks[at, 0], walks[at, 1], walks[at, 2], walks[at, 3] = longest, total, Int32(0), Int32(0)
    if at < visitors.shape[0]:
        visitors[at, 0], visitors[at, 1] = first_visitor, last_visitor


@cute.jit
def weighed(count: Int32, needs: cute.Tensor, longest: Int32, total: Int32) -> tuple[Int32, Int32]:
    """With `count` more blocks of keys: how many tiles of queries one needs at most, and all together; for `order.settled_order`."""
    for i in cutlass.range(count, unroll=4):
        tiles = max(needs[i, 1] - needs[i, 0], 0)
        longest, total = max(longest, tiles), total + tiles
    return longest, total


@cute.jit
def settled(
    at: Int32, begin: Int32, count: Int32, needs: cute.Tensor, first: Int32, last: Int32, first_visitor: Int32, last_visitor: Int32
):  # fmt: skip
    """Of block `at` of the keys: the tiles [first, last) that it visits; of tile `at` of the queries: the blocks [first, last) that visit it; as far
    as the `count` blocks from `begin` on have a say, which need the tiles [needs[i, 0], needs[i, 1]).

    A block visits from the first that it or a later block needs to the last that it or an earlier block needs; which is what it needs itself, but
    for blocks that need nothing, and bad cu_seqlens.
    """
    for i in cutlass.range(count, unroll=4):
        n_block, needs_first, needs_last = begin + i, needs[i, 0], needs[i, 1]
        if needs_first < needs_last:
            if n_block >= at:
                first = min(first, needs_first)
            if n_block <= at:
                last = max(last, needs_last)
            if needs_last > at:
                first_visitor = min(first_visitor, n_block)
            if needs_first <= at:
                last_visitor = n_block + 1
    return first, last, first_visitor, last_visitor
