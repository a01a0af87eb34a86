"""K and V on their way to shared memory, tile after tile of the block's share.

One warp each asks the copy engine for a box of a page, or of the cache, at a time. Page numbers are read a tile ahead. Boxes beyond the last key that
a row may see are asked for where there is no page, and come as zeros; so does a page with a number out of range. Pages that are too small or too
odd for boxes are gathered token by token, by two warps each, which likewise write zeros for what is not there.
"""

from tilewise.backends.hopper.decode import scheduler
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.scheduler import Piece, Place, Shape, Start
from tilewise.sm90 import tma
from tilewise.sm90.dsl import Constexpr, Int32, Int64, arch, const_expr, cpasync, cute, cutlass, pipeline, range_constexpr, sm90
from tilewise.sm90.pointers import known
from tilewise.sm90.wgmma import K_MAJOR

WARP = 32


def columns(dim: int) -> int:
    """Of a swizzled block in shared memory, which is how wide a box is."""
    return 64 if dim % 64 == 0 else 32


def place_of(token: Int32, piece: Int32, width: int, config) -> Int32:
    """Of the piece-th 16 bytes of a token, among all of a stage that a product reads: blocks of `width` pieces a token, swizzled."""
    block, place = piece // width, piece % width
    swizzle = token % 8 if width == 8 else token // 2 % 4
    return (block * config.tile_n + token) * width + (place ^ swizzle)


def box_of(dim: int, config) -> tuple[int, int]:
    """(tokens, columns) that the copy engine fetches at a time. What is to be widened lies in shared memory as in the cache."""
    return config.rows_of_box, dim if config.widens else columns(dim)


def describe(mX: cute.Tensor, dim: int, config) -> tma.Tma:
    """The descriptor for boxes of mX (tokens, dim, heads, entries)."""
    box = box_of(dim, config)
    layout = cute.make_layout(box, stride=(dim, 1))
    if not config.widens:
        layout = cute.select(sm90.make_smem_layout_b(K_MAJOR, (config.tile_m, *box), mX.element_type, 1), mode=[0, 1])
    return tma.Tma(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, layout, box))


def parts_of(pipe: pipeline.PipelineTmaAsync | tuple, dim: int, config) -> list[tuple]:
    """(pipe, columns [first, last)) of each part of a tile that is waited for alone: all of it, or of a latent cache the first half of V's columns,
    and the rest.
    """
    if not config.latent:
        return [(pipe, 0, dim)]
    return [(pipe[0], 0, config.columns_of_O), (pipe[1], config.columns_of_O, dim)]


@cute.jit
def produce(
    source: tma.Tma, mX: cute.Tensor, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, shape: Shape, begin: Start, warp: Int32,
    values: Constexpr[int], dim: Constexpr[int], config: Constexpr[Config],
):  # fmt: skip
    """The `warp`-th of those that load mX, which is K (values: 0) or V (1), (pages, page_size, heads_k, head_dim). sX: (tile_n, dim, kv_stages)."""
    state = tma.at_first_empty(config.load_stages)
    shares = begin.shares
    b, start, at = begin.place.sequence, begin.place.start, begin.place.at
    common = scheduler.owner_of(shape, config) if const_expr(config.common) else None
    while at < shares.end:
        sequence = scheduler.sequence_of(b, shape, config)
        span = scheduler.span_of(sequence, shares, shape, config)
        if at - start >= span:
            b += 1
            start += span
        else:
            piece = scheduler.piece_of(Place(b, start, at), sequence, shares, shape, config)
            owner = common if const_expr(config.common) else b
            if const_expr(config.gathers):
                state = gather_piece(mX, sX, pipe, state, owner, piece, shape, warp, values, dim, config)
            else:
                state = load_piece(source, sX, pipe, state, owner, piece, shape, dim, config)
            at = piece.next


@cute.jit
def load_piece(
    source: tma.Tma, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, b: Int32, piece: Piece,
    shape: Shape, dim: Constexpr[int], config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    if const_expr(config.box == 0):
        entry = b
        if const_expr(config.entries):
            entry = scheduler.number(shape.lengths.entries, b)
        for n in cutlass.range(piece.first, piece.last, unroll=1):
            for part in parts_of(pipe, dim, config):
                part[0].producer_acquire(state)
                load_box(source, sX, part, state, 0, n, piece.head_k, entry, dim, config)
            state.advance()
    else:
        boxes = const_expr(config.tile_n // config.box)
        page, row = page_of(b, piece.first, source, piece, shape, config)
        for n in cutlass.range(piece.first, piece.last, unroll=1):
            next_page, next_row = page_of(b, n + 1, source, piece, shape, config)
            for part in parts_of(pipe, dim, config):
                part[0].producer_acquire(state)
                for i in range_constexpr(boxes):
                    load_box(source, sX, part, state, i, arch.shuffle_sync(row, i), piece.head_k, arch.shuffle_sync(page, i), dim, config)
            page, row = next_page, next_row
            state.advance()
    return state


@cute.jit
def page_of(b: Int32, n: Int32, source: tma.Tma, piece: Piece, shape: Shape, config: Constexpr[Config]):
    """(page, box in it) of this lane's box of tile n; of boxes that no row sees a page that does not exist."""
    token = n * config.tile_n + arch.lane_idx() * config.box
    number, row = divmod(token, shape.page_size)
    page = Int32(source.gmem.shape[3])
    if token < piece.end and token + config.box > piece.begin:
        page = scheduler.number(shape.lengths.pages[b, None], number)
    return page, row // config.box


@cute.jit
def load_box(
    source: tma.Tma, sX: cute.Tensor, part: tuple, state: pipeline.PipelineState, i: Constexpr[int], row: Int32, head: Int32, entry: Int32,
    dim: Constexpr[int], config: Constexpr[Config],
):  # fmt: skip
    """Box `row` of an entry, as much as the part (`parts_of`) has of it, into the i-th place of a stage."""
    pipe, first, last = part
    box = const_expr(box_of(dim, config))
    for c in range_constexpr(first // box[1], last // box[1]):
        to = cute.local_tile(sX[None, None, state.index], box, (i, c))
        gX = cute.local_tile(source.gmem[None, None, head, entry], box, (row, c))
        s, g = cpasync.tma_partition(source.atom, 0, cute.make_layout(1), cute.group_modes(to, 0, 2), cute.group_modes(gX, 0, 2))
        policy = Int64(tma.FIRST) if const_expr(config.evict_first) else None
        cute.copy(source.atom, g, s, tma_bar_ptr=pipe.producer_get_barrier(state), cache_policy=policy)


FILLED = 3  # and the following: named barriers of those that load K, and V
BYTES = 16  # that a lane fetches at a time
ABREAST = 16  # fetches of a lane on their way at a time, at most


@cute.jit
def gather_piece(
    mX: cute.Tensor, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, b: Int32, piece: Piece,
    shape: Shape, warp: Int32, values: Constexpr[int], dim: Constexpr[int], config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    gX = mX[None, None, piece.head_k, None]
    pages = pages_of(b, piece.first, gX, piece, shape, config)
    for n in cutlass.range(piece.first, piece.last, unroll=1):
        ahead = pages_of(b, n + 1, gX, piece, shape, config)
        pipe.sync_object_empty.wait(state.index, state.phase)
        gather_tile(gX, sX[None, None, state.index].iterator.toint(), pages, warp, dim, config)
        hand_on(pipe, state, FILLED + values, warp, config.loaders * WARP)
        for part in range_constexpr(2):
            pages[part].store(ahead[part].load())
        state.advance()
    return state


@cute.jit
def hand_on(pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, barrier: Int32, warp: Int32, threads: Constexpr[int]):
    """`threads` threads, of warps 0 to ., have written their parts of a stage, for the tensor cores to read."""
    arch.fence_proxy("async.shared", space="cta")
    arch.barrier(barrier_id=barrier, number_of_threads=threads)
    if warp == 0:
        with arch.elect_one():
            arch.mbarrier_arrive(pipe.producer_get_barrier(state))


@cute.jit
def pages_of(b: Int32, n: Int32, gX: cute.Tensor, piece: Piece, shape: Shape, config: Constexpr[Config]):
    """(page, row in it) of this lane's tokens of tile n, every 32nd; page -1 where no row sees the token, or there is no such page."""
    turns = const_expr(-(-config.tile_n // WARP))
    pages, rows = cute.make_rmem_tensor(turns, Int32), cute.make_rmem_tensor(turns, Int32)
    for i in range_constexpr(turns):
        token = n * config.tile_n + i * WARP + arch.lane_idx()
        number, row = divmod(token, shape.page_size)
        page = Int32(-1)
        if token < piece.end and token >= piece.begin:
            page = scheduler.number(shape.lengths.pages[b, None], number)
        pages[i], rows[i] = (page if page < gX.shape[0] else Int32(-1)), row
    return pages, rows


@cute.jit
def gather_tile(gX: cute.Tensor, address: Int32, pages: tuple, warp: Int32, dim: Constexpr[int], config: Constexpr[Config]):
    """This warp's half of a tile, piece after piece of a token. gX: (pages, page_size, head_dim); address: of the stage."""
    wide = const_expr(BYTES * 8 // gX.element_type.width)  # elements
    lanes, of_token = const_expr(config.loaders * WARP), const_expr(dim // wide)
    width = const_expr(columns(dim) // wide)  # pieces of a token in a block of columns
    turns = const_expr(config.tile_n * of_token // lanes)
    at_once = const_expr(max(n for n in range(1, ABREAST + 1) if turns % n == 0))
    fetched = cute.make_rmem_tensor((wide, at_once), gX.element_type)
    for batch in range_constexpr(turns // at_once):
        fetched.fill(0.0)
        for i in range_constexpr(at_once):
            which = (batch * at_once + i) * lanes + warp * WARP + arch.lane_idx()
            token, column = which // of_token, which % of_token * wide
            page, row = (of_lane(x, token) for x in pages)
            if page >= 0 and column < gX.shape[2]:
                source = known(gX[page, row, None].iterator + column, BYTES)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(wide)), fetched[None, i])
        words = cute.recast_tensor(fetched, Int32)
        for i in range_constexpr(at_once):
            which = (batch * at_once + i) * lanes + warp * WARP + arch.lane_idx()
            token, piece = which // of_token, which % of_token
            to = address + (which if const_expr(config.widens) else place_of(token, piece, width, config)) * BYTES
            values = [words[w, i] for w in range(4)]
            arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[to, *values])


@cute.jit
def of_lane(x: cute.Tensor, token: Int32) -> Int32:
    """A token's number, of which lane token % 32 has the (token // 32)-th. All lanes ask, for a token of their own each."""
    found = Int32(0)
    for i in range_constexpr(cute.size(x)):
        there = arch.shuffle_sync(x[i], token % WARP)
        found = there if token // WARP == i else found
    return found
