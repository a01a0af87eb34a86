"""The kernels of documents.py: a thread a row finds its document, hence its keys; a thread block a tile of queries, hence the tiles it visits.

Then a thread a tile of queries, or a cluster's tiles, counts those that visit fewer tiles: its place in the order in which the forward pass goes
backwards. Of few tiles the first kernel's blocks are a cluster, and the first of them does that as well: another launch would take longer.
"""

from tilewise.backends.hopper.operands import Packed
from tilewise.sm90.dsl import Constexpr, CUstream, Int32, SmemAllocator, arch, const_expr, cute, cutlass, range_constexpr

WARP = 32
RANKED = 128  # tiles of queries a thread block ranks
FEW = 8  # tiles of queries: the largest cluster that every GPU has


@cute.jit
def launch(
    documents: Packed, order: cute.Tensor, ends: cute.Tensor, walks: cute.Tensor, config: Constexpr, stream: CUstream
):  # fmt: skip
    """order (ceil(m_blocks / cluster),), ends (2, seqlen_q) and walks (m_blocks, 4) from cu_seqlens."""
    block = (config.tile_m, 1, 1)
    if walks.shape[0] <= FEW:
        kernel(documents, ends, walks, order, config).launch(grid=(FEW, 1, 1), block=block, cluster=(FEW, 1, 1), stream=stream)
    else:
        kernel(documents, ends, walks, None, config).launch(grid=(walks.shape[0], 1, 1), block=block, stream=stream)
        rank(walks, order, config).launch(grid=(cute.ceil_div(order.shape[0], RANKED), 1, 1), block=(RANKED, 1, 1), stream=stream)


@cute.kernel
def kernel(documents: Packed, ends: cute.Tensor, walks: cute.Tensor, order: cute.Tensor | None, config: Constexpr):
    """order: of the clusters, which may have more blocks than there are tiles."""
    thread, m_block = arch.thread_idx()[0], arch.block_idx()[0]
    row = m_block * config.tile_m + thread
    begin, end = interval(row, documents)
    last_begin, first_end = begin, end  # of rows that exist
    if row < ends.shape[1]:
        ends[0, row], ends[1, row] = begin, end
    else:
        begin, end, last_begin, first_end = documents.seqlen_k, Int32(0), Int32(0), documents.seqlen_k
    if begin >= end:  # it sees nothing, and adds nothing to what the tile visits
        begin = documents.seqlen_k
    storage = SmemAllocator()
    sums = storage.allocate_tensor(Int32, cute.make_layout((4, config.tile_m // WARP)), 16)
    of_warp = (
        -arch.warp_redux_sync(-begin, "max"),
        arch.warp_redux_sync(end, "max"),
        arch.warp_redux_sync(last_begin, "max"),
        -arch.warp_redux_sync(-first_end, "max"),
    )
    if thread % WARP == 0:
        for i in range_constexpr(4):
            sums[i, thread // WARP] = of_warp[i]
    arch.sync_threads()
    if thread == 0 and m_block < walks.shape[0]:
        for warp in range_constexpr(1, config.tile_m // WARP):
            begin, end = min(begin, sums[0, warp]), max(end, sums[1, warp])
            last_begin, first_end = max(last_begin, sums[2, warp]), min(first_end, sums[3, warp])
        begin, end = min(begin, sums[0, 0]), max(end, sums[1, 0])
        last_begin, first_end = max(last_begin, sums[2, 0]), min(first_end, sums[3, 0])
        tile_n = config.tile_n
        first = min(begin, documents.seqlen_k - 1) // tile_n
        if end == 0:
            first = Int32(0)
        last = max(cute.ceil_div(end, tile_n), first + config.least)
        free_first = min(max(cute.ceil_div(last_begin, tile_n), first), last)
        walks[m_block, 0], walks[m_block, 1] = first, last
        walks[m_block, 2], walks[m_block, 3] = free_first, min(max(first_end // tile_n, free_first), last)
    if const_expr(order is not None):
        arch.cluster_arrive()  # the tile's walk is written
        arch.cluster_wait()  # all are
        if m_block == 0:
            place(thread, walks, order, config)


@cute.kernel
def rank(walks: cute.Tensor, order: cute.Tensor, config: Constexpr):
    place(arch.block_idx()[0] * RANKED + arch.thread_idx()[0], walks, order, config)


@cute.jit
def place(unit: Int32, walks: cute.Tensor, order: cute.Tensor, config: Constexpr):
    """Units that visit the most tiles come last; among equals, as they are."""
    fewer = Int32(0)
    if unit < order.shape[0]:
        tiles = visited(walks, unit, config)
        for other in cutlass.range(order.shape[0], unroll=4):
            others = visited(walks, other, config)
            fewer += Int32(others < tiles or (others == tiles and other < unit))
        order[fewer] = unit


@cute.jit
def visited(walks: cute.Tensor, unit: Int32, config: Constexpr) -> Int32:
    """Tiles of keys from the first to the last that any of a cluster's tiles of queries visits."""
    first, last = walks[unit * config.cluster, 0], walks[unit * config.cluster, 1]
    for rank in range_constexpr(1, config.cluster):
        m_block = min(unit * config.cluster + rank, walks.shape[0] - 1)
        first, last = min(first, walks[m_block, 0]), max(last, walks[m_block, 1])
    return last - first


@cute.jit
def interval(row: Int32, documents: Packed):
    """The keys [begin, end) of a row, within the keys that exist whatever cu_seqlens say; (0, 0) for none."""
    low, high = Int32(0), documents.cu_seqlens_q.shape[0]
    while low < high:  # the first end beyond the row
        middle = (low + high) // 2
        if documents.cu_seqlens_q[middle] <= row:
            low = middle + 1
        else:
            high = middle
    begin, end = Int32(0), Int32(0)
    if low > 0 and low < documents.cu_seqlens_q.shape[0]:
        q0, q1 = documents.cu_seqlens_q[low - 1], documents.cu_seqlens_q[low]
        k0, k1 = documents.cu_seqlens_k[low - 1], documents.cu_seqlens_k[low]
        place, left = row + k1 - q1, row + k0 - q0
        begin = max(max(max(k0, 0), place + documents.lo), left + documents.lo_left)
        end = min(min(min(k1, documents.seqlen_k), place + documents.hi + 1), left + documents.hi_left + 1)
        if begin >= end:
            begin, end = Int32(0), Int32(0)
    return begin, end
