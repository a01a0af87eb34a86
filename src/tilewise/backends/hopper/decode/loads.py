"""K and V on their way to shared memory: one warp each, tile after tile of the block's share.

A box of a page, or of the cache, is asked for at a time. Page numbers are read a tile ahead. Boxes beyond the last key that a row may see are
asked for where there is no page, and come as zeros; so does a page whose number is out of range.
"""

from tilewise.backends.hopper.decode import scheduler
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.scheduler import Piece, Place, Sequence, Shape
from tilewise.sm90 import tma
from tilewise.sm90.dsl import Constexpr, Int32, arch, const_expr, cpasync, cute, cutlass, pipeline, range_constexpr, sm90
from tilewise.sm90.wgmma import K_MAJOR


def columns(dim: int) -> int:
    """Of a swizzled block in shared memory, which is how wide a box is."""
    return 64 if dim % 64 == 0 else 32


def describe(mX: cute.Tensor, dim: int, config) -> tma.Tma:
    """The descriptor for boxes of mX (tokens, dim, heads, entries)."""
    box = config.rows_of_box, columns(dim)
    layout = sm90.make_smem_layout_b(K_MAJOR, (config.tile_m, *box), mX.element_type, 1)
    return tma.Tma(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, cute.select(layout, mode=[0, 1]), box))


@cute.jit
def produce(source: tma.Tma, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, shape: Shape, dim: Constexpr[int],
            config: Constexpr[Config]):  # fmt: skip
    """sX: (tile_n, dim, kv_stages)."""
    state = tma.at_first_empty(config.kv_stages)
    shares = scheduler.shares_of(shape, config)
    place = scheduler.locate(shares, shape, config)
    b, start, at = place
    while at < shares.end:
        sequence = scheduler.sequence_of(b, shape, config)
        span = scheduler.span_of(sequence, shares, shape)
        if at - start >= span:
            b += 1
            start += span
        else:
            piece = scheduler.piece_of(Place(b, start, at), sequence, shares, shape, config)
            state = load_piece(source, sX, pipe, state, b, piece, sequence, shape, dim, config)
            at = piece.next
    # every stage is released before the block ends: no box is on its way


@cute.jit
def load_piece(
    source: tma.Tma, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, b: Int32, piece: Piece,
    sequence: Sequence, shape: Shape, dim: Constexpr[int], config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    if const_expr(config.box == 0):
        entry = b
        if const_expr(config.entries):
            entry = shape.lengths.entries[b]
        for n in cutlass.range(piece.first, piece.last, unroll=1):
            pipe.producer_acquire(state)
            load_box(source, sX, pipe, state, 0, n, piece.head_k, entry, dim, config)
            state.advance()
    else:
        boxes = const_expr(config.tile_n // config.box)
        page, row = page_of(b, piece.first, source, sequence, shape, config)
        for n in cutlass.range(piece.first, piece.last, unroll=1):
            next_page, next_row = page_of(b, n + 1, source, sequence, shape, config)
            pipe.producer_acquire(state)
            for i in range_constexpr(boxes):
                load_box(source, sX, pipe, state, i, arch.shuffle_sync(row, i), piece.head_k, arch.shuffle_sync(page, i), dim, config)
            page, row = next_page, next_row
            state.advance()
    return state


@cute.jit
def page_of(b: Int32, n: Int32, source: tma.Tma, sequence: Sequence, shape: Shape, config: Constexpr[Config]):
    """(page, box in it) of this lane's box of tile n; of boxes that no row sees a page that does not exist."""
    token = n * config.tile_n + arch.lane_idx() * config.box
    number, row = divmod(token, shape.page_size)
    page = Int32(source.gmem.shape[3])
    if token < sequence.end and token + config.box > sequence.begin:
        page = shape.lengths.pages[b, number]
    return page, row // config.box


@cute.jit
def load_box(
    source: tma.Tma, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, i: Constexpr[int], row: Int32,
    head: Int32, entry: Int32, dim: Constexpr[int], config: Constexpr[Config],
):  # fmt: skip
    """Box `row` of an entry into the i-th place of a stage."""
    box = const_expr((config.rows_of_box, columns(dim)))
    for c in range_constexpr(dim // box[1]):
        to = cute.local_tile(sX[None, None, state.index], box, (i, c))
        gX = cute.local_tile(source.gmem[None, None, head, entry], box, (row, c))
        s, g = cpasync.tma_partition(source.atom, 0, cute.make_layout(1), cute.group_modes(to, 0, 2), cute.group_modes(gX, 0, 2))
        cute.copy(source.atom, g, s, tma_bar_ptr=pipe.producer_get_barrier(state))
