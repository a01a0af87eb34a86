"""dQ = scale * its sum, written by a warp of the main kernel while the others compute: of tiles to which all blocks of keys have added.

Every block of keys has a share of its head's tiles of queries. When a block starts, those that started long before it are gone, and so is what
keeps a tile from being finished: the warp finishes the share of a block some numbers behind (`Order.behind`). It never waits longer than its own
block walks; what it finds incomplete, or not finite, and the shares of the last blocks are left to `backward_parts.finish`, which computes the same.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward_config import Config
from tilewise.backends.hopper.backward_order import Order, block_of, visitors_of
from tilewise.backends.hopper.backward_parts import QUAD, VECTOR, WARP, Tensors, vector
from tilewise.backends.hopper.visible import Band
from tilewise.hopper.dsl import Boolean, Constexpr, Float32, Int32, Int64, arch, const_expr, cute, cutlass, range_constexpr

THREADS = 128  # of a warpgroup, in whose order the sum lies
WARPS = THREADS // WARP
FINISHED = -1  # in place of a tile's turns


def layout_of(config: Config) -> cute.Layout:
    """Of a warpgroup's part of a tile in shared memory: vectors of 4 numbers, lanes, vectors of a thread, warps; and place for one more."""
    return cute.make_layout((4, WARP, config.dq_numbers // 4, WARPS + 1))


class Part(NamedTuple):
    """What one warpgroup computed of a tile."""

    batch: Int32
    head: Int32
    m_block: Int32
    consumer: Int32


@cute.jit
def finish_earlier(
    tensors: Tensors, mdQ: cute.Tensor, staged: cute.Tensor, order: Order, band: Band, scale: Float32, warp_idx: Int32,
    config: Constexpr[Config],
):  # fmt: skip
    """By the last warp of the producer's warpgroup."""
    number = arch.block_idx()[0] - order.behind
    if warp_idx == WARPS - 1 and number >= 0:
        arch.griddepcontrol_wait()
        first, last, _ = share_of(number, tensors, order, config)
        group = tensors.Q.shape[2] // tensors.K.shape[2]
        for i in cutlass.range((last - first) * group * config.dq_consumers, unroll=1):
            part = part_of(i, tensors, order, config)
            visitors = visitors_of(part.m_block, band, tensors.K.shape[1], config)
            now = added((tensors.turns.iterator + cute.crd2idx(part, tensors.turns.layout)).toint())
            if now == visitors.last - visitors.first and now > 0:
                gSum, gdQ = tensors.sum_dQ[part.batch, part.head, part.m_block, None], mdQ[part.batch, None, part.head, None]
                finite = finish_part(gSum, gdQ, staged, part.m_block, part.consumer, scale, config)
                part = part_of(i, tensors, order, config)
                if finite and arch.lane_idx() == 0:
                    tensors.turns[part] = FINISHED


@cute.jit
def share_of(number: Int32, tensors: Tensors, order: Order, config: Constexpr[Config]):
    """Which tiles of queries are the block's to finish, [first, last), and of which keys' head."""
    n_blocks, m_blocks = cute.ceil_div(tensors.K.shape[1], config.tile_n), tensors.sum_dQ.shape[2]
    block = block_of(number, n_blocks, tensors.K.shape[2] * tensors.K.shape[0], order, config)
    n_block = block.n0 // config.tile_n
    return n_block * m_blocks // n_blocks, (n_block + 1) * m_blocks // n_blocks, block


@cute.jit
def part_of(i: Int32, tensors: Tensors, order: Order, config: Constexpr[Config]) -> Part:
    """Part i of what this block finishes. Found anew from the block's number, which the compiler cannot know to be the same: registers are few."""
    number = arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[arch.block_idx()[0] - order.behind])
    first, _, block = share_of(number, tensors, order, config)
    of_tile, consumer = i // config.dq_consumers, i % config.dq_consumers
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    return Part(block.batch, block.head_k * group + of_tile % group, first + of_tile // group, consumer)


@cute.jit
def added(counter: Int64) -> Int32:
    """How often. What was added is seen by all that this thread and its warp read after it."""
    now = arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[counter])
    arch.sync_warp()
    return now


@cute.jit
def finish_part(
    gSum: cute.Tensor, gdQ: cute.Tensor, staged: cute.Tensor, m_block: Int32, consumer: Int32, scale: Float32, config: Constexpr[Config]
) -> Boolean:  # fmt: skip
    """What one warpgroup computed of a tile; says whether all of it is finite, where it need be.

    The sums of 16 rows, which one warp computed, go to place i + 1 of `staged`, each lane its own; rounded, they are written over those before them.
    """
    vectors, (over_m, _) = const_expr(config.dq_numbers // 4), config.dq_grid
    lane = arch.lane_idx()
    source = (gSum.iterator + consumer * THREADS * config.dq_numbers + 4 * lane).toint()
    target = staged[None, lane, 0, 1].iterator.toint()
    for warp in range_constexpr(WARPS):
        for v in range_constexpr(vectors):
            arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[target + 16 * WARP * (warp * vectors + v), source + 16 * (v * THREADS + warp * WARP)],
            )
    arch.cp_async_commit_group()
    arch.cp_async_wait_group(0)
    row0, column0 = m_block * config.tile_m + consumer % over_m * 64, consumer // over_m * config.dq_width
    nothing = Float32(0.0)  # unless a number is not finite
    for warp in cutlass.range(WARPS, unroll=1):
        rounded = cute.recast_ptr(staged[None, None, None, warp].iterator, dtype=gdQ.element_type)
        nothing += round_rows(staged[None, lane, None, warp + 1], rounded, scale, config)
        arch.sync_warp()
        write_rows(rounded, gdQ, row0 + 16 * warp, column0, config)
    arch.sync_warp()  # all have been read
    finite = Boolean(True)
    if const_expr(config.sees != "all"):
        finite = arch.vote_all_sync(nothing == 0.0)
    return finite


@cute.jit
def place_of(v: Int32, r: Int32, row: Int32) -> Int32:
    """In vectors of 8 columns: where columns 8 v to 8 v + 7 of row `row + 8 r` are, such that 8 lanes that read 2 rows of 4 v use all banks."""
    return (2 * v + r) * 8 + (row ^ 2 * (v % 4))


@cute.jit
def round_rows(sums: cute.Tensor, rounded: cute.Pointer, scale: Float32, config: Constexpr[Config]) -> Float32:
    """A lane has two neighbours of every eight columns, for two rows. Returns 0 times all of them. sums: (4, vectors)."""
    nothing, lane = Float32(0.0), arch.lane_idx()
    for v in range_constexpr(cute.size(sums, mode=[1])):
        x, pair = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(2, rounded.dtype)
        cute.autovec_copy(sums[None, v], x)
        for r in range_constexpr(2):
            for j in range_constexpr(2):
                pair[j] = (x[2 * r + j] * scale).to(rounded.dtype)
                if const_expr(config.sees != "all"):
                    nothing += x[2 * r + j] * 0.0
            at = place_of(v, r, lane // QUAD) * VECTOR + 2 * (lane % QUAD)
            cute.autovec_copy(pair, cute.make_tensor((rounded + at).align(4), cute.make_layout(2)))
    return nothing


@cute.jit
def write_rows(rounded: cute.Pointer, gdQ: cute.Tensor, row0: Int32, column0: Int32, config: Constexpr[Config]):
    """16 rows; four lanes side by side in each."""
    lane = arch.lane_idx()
    for i in range_constexpr(config.dq_width // VECTOR // QUAD):
        for r in range_constexpr(2):
            v, behind = lane % QUAD + QUAD * i, lane // QUAD
            row, column = row0 + 8 * r + behind, column0 + VECTOR * v
            if row < gdQ.shape[0] and column < gdQ.shape[1]:
                found = cute.make_tensor((rounded + place_of(v, r, behind) * VECTOR).align(16), cute.make_layout(VECTOR))
                cute.autovec_copy(found, vector(gdQ[row, None], column // VECTOR, VECTOR))
