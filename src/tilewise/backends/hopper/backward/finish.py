"""dQ = scale * its sum, written by a warp of the main kernel while the others compute: of tiles to which all blocks of keys have added.

Where a thread block takes one block of keys, it has a share of its head's tiles of queries. Its warp finishes the share of an earlier block
(`Order.finish_lag`), which is gone and so is what keeps a tile from being finished. It never waits: what it finds incomplete is left.
Persistent blocks (persistent.py) divide all tiles among themselves and wait for each in turn: tiles are complete in about this order.

`parts.finish` does what is not finite, and what was left. It computes the same.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward import persistent as units
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.order import Order, block_of, heads_of, settled_order, visitors_of
from tilewise.backends.hopper.backward.parts import WARP, Tensors, counter_of, now_at
from tilewise.backends.hopper.backward.tiles import place_of_sum, swizzled
from tilewise.backends.hopper.operands import Band
from tilewise.sm90 import tma
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    Float32,
    Int32,
    Int64,
    SmemAllocator,
    Uint32,
    arch,
    const_expr,
    cpasync,
    cute,
    cutlass,
    range_constexpr,
)

THREADS = 128  # of a warpgroup; the sum lies in their order
WARPS = THREADS // WARP
ROWS, COLUMNS = 16, 64  # of a warp's accumulator
SLABS = 2  # of as many rounded elements, on their way out
FINISHED = -1  # in place of a tile's turns
PAUSE = 100  # ns between two looks at a counter


class Finisher(NamedTuple):
    sums: cute.Tensor  # (THREADS * dq_elements,) fp32: a warpgroup's part of a tile, as it lies in memory
    rounded: cute.Tensor  # (ROWS, COLUMNS, SLABS)
    landed: cute.Pointer  # mbarrier: the copy engine has brought the sums
    store: tma.Tma


class Tile(NamedTuple):
    batch: Int32
    head: Int32
    m_block: Int32


@cute.jit
def make_finisher(storage: SmemAllocator, store: tma.Tma, dtype: Constexpr, config: Constexpr[Config]) -> Finisher:
    """With its barrier initialised, and visible after `tma.barriers_ready`."""
    layout = swizzled(dtype, ROWS, COLUMNS, SLABS, COLUMNS)
    sums = storage.allocate_tensor(Float32, cute.make_layout(THREADS * config.dq_elements), 128)
    rounded = storage.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
    landed = storage.allocate_array(cute.Int64, 1)
    if arch.thread_idx()[0] == 0:
        arch.mbarrier_init(landed, 1)
    return Finisher(sums, rounded, landed, store)


@cute.jit
def finish_earlier(
    tensors: Tensors, finisher: Finisher, order: Order, band: Band, scale: Float32, warp_idx: Int32, config: Constexpr[Config]
):  # fmt: skip
    """By the last warp of the producer's warpgroup: what is complete of the share of an earlier block."""
    number, done = arch.block_idx()[0] - order.finish_lag, Int32(0)
    if warp_idx == WARPS - 1 and number >= 0:
        arch.griddepcontrol_wait()
        first, last, _ = share_of(number, tensors, order, config)
        group = tensors.Q.shape[2] // heads_of(tensors.Q, tensors.K, config)
        for i in cutlass.range((last - first) * group, unroll=1):
            tile = tile_of(i, tensors, order, config)
            visitors = visitors_of(tile.m_block, band, tensors.K.shape[1], config)
            now = added(counter_of(tensors, *tile, 0))
            if now == visitors.last - visitors.first and now > 0:
                finish_tile(tensors, finisher, tile, done, scale, config)
                done += parts_of(tensors, config)
        arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def finish_all(
    tensors: Tensors, finisher: Finisher, queue: units.Queue, order: Order, lent: Int32 | None, band: Band, scale: Float32, warp_idx: Int32,
    config: Constexpr[Config],
):  # fmt: skip
    """Likewise, of all tiles those with this block's number and every grid's length after it, but for the `lent` last queries. Waits until they are
    complete, or this block's units come to their end: then all multiprocessors finish what is left in less time than one warp of each.
    """
    arch.griddepcontrol_wait()
    batch, heads, m_blocks, _ = tensors.turns.shape
    order = settled_order(order, band, heads_of(tensors.Q, tensors.K, config) * batch, config)
    number, done = arch.block_idx()[0], Int32(0)
    tiles = batch * heads * m_blocks if warp_idx == WARPS - 1 else Int32(0)
    while number < tiles:
        tile = tile_numbered(number, tensors, order, config)
        visitors = visitors_of(tile.m_block, band, tensors.K.shape[1], config)
        number += arch.grid_dim()[0]
        there = visitors.last > visitors.first
        if const_expr(config.shares):
            seqlen_q = tensors.Q.shape[1]
            there = there and tile.batch * seqlen_q + min((tile.m_block + 1) * config.tile_m, seqlen_q) <= batch * seqlen_q - lent
        if there:
            now, over = added(counter_of(tensors, *tile, 0)), units.ends(queue)
            while now != visitors.last - visitors.first and not over:
                arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(PAUSE)])
                now, over = added(counter_of(tensors, *tile, 0)), units.ends(queue)
            if over:
                number = tiles
            else:
                finish_tile(tensors, finisher, tile, done, scale, config)
                done += parts_of(tensors, config)
    arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def tile_numbered(number: Int32, tensors: Tensors, order: Order, config: Constexpr[Config]) -> Tile:
    """Tiles in the order in which they become complete, about: a group's heads come to theirs side by side. Where walks are short, so do heads that
    take turns, and ascending ones are through with their last documents first (elsewhere it gains nothing: backward-hints-h200.jsonl, run 5).
    """
    (batch, heads, m_blocks, _), heads_k = tensors.turns.shape, heads_of(tensors.Q, tensors.K, config)
    group, first_head, width, ascending = heads // heads_k, Int32(0), Int32(1), Boolean(False)
    if const_expr(config.mask_kind in ("band", "varlen")):
        tiles = order.ascending * m_blocks * group
        width, ascending = order.heads_per_step, number < tiles
        if not ascending:
            number, first_head, width = number - tiles, order.ascending, order.heads_interleaved
    tiles = width * m_blocks * group
    first_head += number // tiles * width
    side_by_side = min(width, heads_k * batch - first_head) * group
    m_block, member = number % tiles // side_by_side, number % tiles % side_by_side
    if const_expr(config.mask_kind == "varlen"):  # noqa: SIM102
        if ascending:
            m_block = m_blocks - 1 - m_block
    head = first_head + member // group
    batch, head = head // heads_k, head % heads_k
    if const_expr(config.block_per_q_head):  # numbered as in order.block_of
        return Tile(batch, head % tensors.K.shape[2] * (heads // tensors.K.shape[2]) + head // tensors.K.shape[2], m_block)
    return Tile(batch, head * group + member % group, m_block)


@cute.jit
def share_of(number: Int32, tensors: Tensors, order: Order, config: Constexpr[Config]):
    """Which tiles of queries are the block's to finish, [first, last), and of which keys' head."""
    n_blocks, m_blocks = cute.ceil_div(tensors.K.shape[1], config.tile_n), tensors.sum_dQ.shape[2]
    heads = heads_of(tensors.Q, tensors.K, config) * tensors.K.shape[0]
    block = block_of(number, n_blocks, heads, order, config)
    n_block = block.n0 // config.tile_n
    return share_before(n_block, m_blocks, n_blocks), share_before(n_block + 1, m_blocks, n_blocks), block


def share_before(n: Int32, m_blocks: Int32, n_blocks: Int32) -> Int32:
    """n * m_blocks // n_blocks; the product has 32 bits up to nearly six million tokens, and 31 would do up to four."""
    return Int32(Uint32(n * m_blocks) // Uint32(n_blocks))


@cute.jit
def tile_of(i: Int32, tensors: Tensors, order: Order, config: Constexpr[Config]) -> Tile:
    """Tile i of what this block finishes. Found anew from the block's number, which the compiler cannot know to be the same: registers are few."""
    number = arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[arch.block_idx()[0] - order.finish_lag])
    first, _, block = share_of(number, tensors, order, config)
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    if const_expr(config.block_per_q_head):
        return Tile(block.batch, block.head_k * group + block.member, first + i)
    return Tile(block.batch, block.head_k * group + i % group, first + i // group)


@cute.jit
def added(counter: Int64) -> Int32:
    """How often. What was added is seen by all that this thread and its warp read after it."""
    now = now_at(counter)
    arch.sync_warp()
    return now


@cute.jit
def finish_tile(tensors: Tensors, finisher: Finisher, tile: Tile, done: Int32, scale: Float32, config: Constexpr[Config]):
    """After `done` parts of others."""
    nothing = Float32(0.0)  # unless an element is not finite
    for consumer in cutlass.range(parts_of(tensors, config), unroll=1):
        nothing += finish_part(tensors, finisher, tile, consumer, done + consumer, scale, config)
    finite = Boolean(True)
    if const_expr(config.repairs):
        finite = arch.vote_all_sync(nothing == 0.0)
    if finite and arch.lane_idx() == 0:
        tensors.turns[(*tile, 0)] = FINISHED


@cute.jit
def parts_of(tensors: Tensors, config: Constexpr[Config]) -> Int32:
    """How many warpgroups' parts of a tile dQ has columns of."""
    if const_expr(not config.narrow):
        return Int32(config.dq_consumers)
    return config.dq_grid[0] * cute.ceil_div(tensors.Q.shape[3], config.dq_width)


@cute.jit
def finish_part(
    tensors: Tensors, finisher: Finisher, tile: Tile, consumer: Int32, done: Int32, scale: Float32, config: Constexpr[Config]
) -> Float32:  # fmt: skip
    """What one warpgroup computed of a tile: 16 rows at a time, which one warp computed. Returns 0 times all elements."""
    gSum = tensors.sum_dQ[tile.batch, tile.head, tile.m_block, None]
    begin, vectors = place_of_sum(gSum, consumer, 0, config)
    bytes_of_sums = 16 * THREADS * min(vectors, COLUMNS // 8)
    if arch.lane_idx() == 0:
        arch.fence_proxy("async")
        source = gSum.iterator + begin
        arch.mbarrier_arrive_and_expect_tx(finisher.landed, bytes_of_sums)
        arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[
                finisher.sums.iterator.toint(),
                source.toint(),
                Int32(bytes_of_sums),
                finisher.landed.toint(),
                Int64(tma.FIRST),
            ],
        )
    arch.mbarrier_wait(finisher.landed, done & 1)
    over_m, _ = config.dq_grid
    row = (tile.m_block * config.tile_m + consumer % over_m * 64) // ROWS
    gdQ = finisher.store.gmem[None, None, tile.head, tile.batch]
    nothing = Float32(0.0)
    for warp in cutlass.range(WARPS, unroll=1):
        slab = warp % SLABS
        arch.cp_async_bulk_wait_group(SLABS - 1, read=True)
        arch.sync_warp()
        nothing += round_rows(finisher, warp, slab, vectors, scale, config)
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        place = cute.local_tile(gdQ, (ROWS, COLUMNS), (row + warp, consumer // over_m))
        piece = finisher.rounded[None, None, slab]
        s, g = cpasync.tma_partition(
            finisher.store.atom, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), cute.group_modes(place, 0, 2)
        )
        cute.copy(finisher.store.atom, s, g, cache_policy=Int64(tma.FIRST))
        arch.cp_async_bulk_commit_group()
    return nothing


@cute.jit
def round_rows(finisher: Finisher, warp: Int32, slab: Int32, vectors: Int32, scale: Float32, config: Constexpr[Config]) -> Float32:
    """A lane has two neighbours of every eight columns, for two rows. Returns 0 times all of them, as far as they are dQ's."""
    lane, dtype = arch.lane_idx(), finisher.rounded.element_type
    source = (finisher.sums.iterator + 4 * (warp * WARP + lane)).toint()
    # the lane gives `stmatrix` the place of this row of eight columns: lanes 0 to 7 the first eight rows, 8 to 15 the others, 16 on the next columns
    row, lower, right = lane % 8, lane // 8 % 2, lane // 16
    target = finisher.rounded.iterator.toint() + slab * 2 * ROWS * COLUMNS + 1024 * lower + 128 * row + 16 * (row ^ right)
    nothing = Float32(0.0)
    for i in range_constexpr(COLUMNS // 16):
        words = cute.make_rmem_tensor(4, Int32)
        pairs = cute.recast_tensor(words, dtype)
        for half in range_constexpr(2):
            x = arch.inline_ptx(
                "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Float32] * 4,
                read_only_args=[source + 16 * THREADS * (2 * i + half)],
            )
            for j in range_constexpr(4):
                pairs[4 * half + j] = (x[j] * scale).to(dtype)
                if const_expr(config.repairs):  # noqa: SIM102
                    if 2 * i + half < vectors:
                        nothing += x[j] * 0.0
        arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[target ^ 32 * i, *(words[j] for j in range(4))],
        )
    return nothing
