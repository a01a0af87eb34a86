"""The forward pass on Hopper: the ladder's K6 for every shape. Read ladder/k6_pingpong.py first; this file says what is added.

- queries, keys, heads and batch of their own; a query head reads the key head of its group, where it lies;
- any mask (visible/): one band, where each row sees the keys [max(k0, row + lo), min(k1, row + hi + 1)), which is full, causal, window, first keys;
  packed documents, where each row has an interval of keys (documents.py); all others by runs of tiles with bands and bitmaps (tables.py);
- softcap, additive bias, ALiBi and a sink, between the product and the softmax (scores/); dropout behind it (../dropout.py);
- fp16; head_dim_v != head_dim; heads smaller than the tile, which the copy engine fills up with zeros and cuts off again;
- persistent thread blocks, which fetch tiles from a work queue, so that one tile's loads begin under the end of the tile before (scheduler.py);
- O leaves by way of shared memory and the copy engine, and what the mask hides does not reach it, NaN and infinities included (epilogue.py).

Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.forward import epilogue, hidden, partials, scheduler
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.hidden import Screen
from tilewise.backends.hopper.forward.partials import Partials
from tilewise.backends.hopper.forward.scheduler import Block, Queue, Units
from tilewise.backends.hopper.operands import Band, Scores, Tensors, Work
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.hopper.scores.logits import Statistics, Terms
from tilewise.backends.hopper.visible import keys as visible
from tilewise.backends.hopper.visible.keys import Seen, Walk
from tilewise.sm90 import fragments, tma, wgmma
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    CUstream,
    Float32,
    Int32,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    warpgroup,
)

THREADS = 128  # of a warpgroup
WARP = 32
WARPS = THREADS // WARP
FEW = 2  # tiles of keys left to load when the loader fetches its next unit


class Barrier(IntEnum):
    """Named barriers; 0 is the whole block's."""

    TURN = 1  # and the following: one a consumer
    OUTPUT = 4  # likewise
    AGREE = 7  # likewise


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim, q_stages)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (head_dim_v, tile_n, kv_stages)
    O: cute.Tensor  # (tile_m, head_dim_v), or a piece of its columns; Q's memory, where there is no room for its own


class Pipes(NamedTuple):
    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Copies(NamedTuple):
    Q: tma.Tma
    K: tma.Tma
    V: tma.Tma
    O: tma.Tma


class Shared(NamedTuple):
    """What the consumers of a thread block have in common."""

    copies: Copies
    tensors: Tensors
    found: Partials
    sm: Smem
    pipes: Pipes
    queue: Queue
    screen: Screen | None
    agreed: cute.Tensor | None
    band: Band
    changes: Scores
    mma: wgmma.Mma


@cute.jit
def launch(
    tensors: Tensors, work: Work, band: Band, changes: Scores, config: Constexpr[Config], stream: CUstream
):  # fmt: skip
    mQ, mK, mV, mO, _ = tensors
    rows = [
        cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mQ, mK, mO)
    ]  # (seqlen, head_dim, heads, batch)
    columns = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))  # (head_dim_v, seqlen_k, heads, batch)
    dtype = mQ.element_type
    layouts = wgmma.layout_Q(config, dtype), wgmma.layout_K(config, dtype), wgmma.layout_V(config, dtype)
    shapes = (config.tile_m, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim_v, config.tile_n)
    sharers = 1, config.cluster, config.cluster
    loads = [tma.describe(*each) for each in zip((*rows[:2], columns), layouts, shapes, sharers, strict=True)]
    copies = Copies(*loads, epilogue.describe(rows[2], config))
    units, clusters = scheduler.cut(mO, mK, work, band.tables.order, config)
    found = Partials(work.sums, work.arrivals)
    kernel(copies, tensors, work.counter, found, units, band, changes, wgmma.products(config, dtype), *layouts, config).launch(
        grid=(clusters * config.cluster, 1, 1),
        block=((1 + config.consumers) * THREADS, 1, 1),
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
        min_blocks_per_mp=config.blocks,
        preferred_smem_carveout=100 if config.blocks > 1 else None,
        stream=stream,
    )


@cute.kernel
def kernel(
    copies: Copies, tensors: Tensors, counter: cute.Tensor, found: Partials, units: Units, band: Band, changes: Scores, mma: wgmma.Mma,
    layout_Q: cute.ComposedLayout, layout_K: cute.ComposedLayout, layout_V: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = allocate(storage, tensors.Q.element_type, (layout_Q, layout_K, layout_V), config)
    queue = scheduler.make_queue(storage, counter, readers(config), config)
    screen = hidden.make_screen(storage, config) if const_expr(config.hides) else None
    agreed = None
    if const_expr(config.from_zero):
        agreed = storage.allocate_tensor(Int32, cute.make_layout((WARPS, config.consumers, scheduler.AHEAD)), 16)
    pipes = make_pipes(storage, config)
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp < THREADS // WARP:
        arch.setmaxregister_decrease(config.registers[0])
        if warp == 0:
            produce(copies, tensors, sm, pipes, queue, units, band, config)
        elif const_expr(config.hides):
            hidden.screen(sm.V, tensors.O.shape[1], tensors.K.shape[1], pipes.v, queue, screen, band, config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consume(Shared(copies, tensors, found, sm, pipes, queue, screen, agreed, band, changes, mma), config)
    if const_expr(config.cluster > 1):
        tma.meet_cluster()  # no block leaves while another may still write into it


@cute.jit
def allocate(storage: SmemAllocator, dtype, layouts: tuple, config: Constexpr[Config]) -> Smem:
    sQ, sK, sV = (storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in layouts)
    layout_O = wgmma.layout_O(config, dtype)
    if const_expr(config.pieces_of_O > 0):
        sO = storage.allocate_tensor(dtype, layout_O.outer, 1024, swizzle=layout_O.inner)
    else:
        sO = cute.make_tensor(sQ.iterator, layout_O.outer)
    return Smem(sQ, sK, sV, sO[None, None, 0])


def readers(config) -> int:
    """Warps of a thread block, other than the one that loads, that go through units and tiles of V."""
    return config.consumers * THREADS // WARP + hidden.WARPS * config.hides


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps = config.consumers * THREADS // WARP
    pipes = Pipes(
        tma.make_pipe(storage, config.q_stages, config.dtype.itemsize * config.tile_m * config.head_dim, warps),
        tma.make_pipe(storage, config.kv_stages, config.dtype.itemsize * config.tile_n * config.head_dim, warps, config.cluster),
        tma.make_pipe(storage, config.kv_stages, config.value_bytes * config.tile_n * config.head_dim_v, readers(config), config.cluster),
    )
    tma.barriers_ready(config.cluster)
    return pipes


@cute.jit
def produce(copies: Copies, tensors: Tensors, sm: Smem, pipes: Pipes, queue: Queue, units: Units, band: Band, config: Constexpr[Config]):
    """The producer: one warp loads Q, then K and V of every tile, the last first; unit after unit."""
    state, done = tma.at_first_empty(config.kv_stages), Int32(0)
    scheduler.begin(queue, units, config)
    block = scheduler.consume(queue, done, config)
    while block.m0 >= 0:
        walk = walk_of(queue, done, block, tensors, band, config)
        load_queries(copies, sm, pipes, tma.after_empty(done, config.q_stages), block, config)
        early, late = parts(walk, config)
        state = load_keys(copies, sm, pipes, state, block, *early, band, config)
        unit = scheduler.fetch(queue, done + 1, config)
        state = load_keys(copies, sm, pipes, state, block, *late, band, config)
        scheduler.release(queue, done, config)
        done += 1
        scheduler.publish(queue, done, unit, units, config)
        block = scheduler.consume(queue, done, config)


@cute.jit
def walk_of(queue: Queue, done: Int32, block: Block, tensors: Tensors, band: Band, config: Constexpr[Config]) -> Walk:
    """Over the keys of the unit after `done` others, or of this block's piece of it."""
    walk = visible.walk_of(block, band, tensors.O.shape[1], tensors.K.shape[1], config)
    if const_expr(config.shares):
        span = scheduler.span(queue, done)
        walk = visible.within(walk, span.first, span.last)
    return walk


@cute.jit
def load_queries(copies: Copies, sm: Smem, pipes: Pipes, state: pipeline.PipelineState, block: Block, config: Constexpr[Config]):
    pipes.q.producer_acquire(state)
    at = block.m0 // config.tile_m, 0, block.head, block.batch
    tma.load(copies.Q, sm.Q, pipes.q, state, (config.tile_m, config.head_dim), at)


@cute.jit
def parts(walk: Walk, config: Constexpr[Config]):
    """The walk over the keys in two, between which the loader fetches its next unit: all but the last run, or all but the last FEW tiles."""
    first, last = walk.loaded_first, walk.loaded_last
    if const_expr(config.mask_kind == "tiles"):
        middle = max(last - 1, first)
        return (first, middle), (middle, last)
    middle = min(first + FEW, last)
    return (middle, last), (first, middle)


@cute.jit
def load_keys(
    copies: Copies, sm: Smem, pipes: Pipes, state: pipeline.PipelineState, block: Block, first: Int32, last: Int32, band: Band,
    config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """A part of the walk over the keys."""
    if const_expr(config.mask_kind == "tiles"):
        for r in cutlass.range(first, last, unroll=1):
            run = visible.run_of(r, band)
            state = load_tiles(copies, sm, pipes, state, block, run.first, run.last, config)
    else:
        state = load_tiles(copies, sm, pipes, state, block, first, last, config)
    return state


@cute.jit
def load_tiles(
    copies: Copies, sm: Smem, pipes: Pipes, state: pipeline.PipelineState, block: Block, first: Int32, last: Int32,
    config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """K and V of the tiles [first, last), the last one first."""
    for i in cutlass.range(last - first, unroll=1):
        n_block = last - 1 - i
        pipes.k.producer_acquire(state)
        at = n_block, 0, block.head_k, block.batch
        load_tile(copies.K, sm.K, pipes.k, state, (config.tile_n, config.head_dim), at, config)
        pipes.v.producer_acquire(state)
        at = 0, n_block, block.head_k, block.batch
        load_tile(copies.V, sm.V, pipes.v, state, (config.head_dim_v, config.tile_n), at, config)
        state.advance()
    return state


@cute.jit
def load_tile(
    source: tma.Tma, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, tile: Constexpr[tuple], at: tuple,
    config: Constexpr[Config],
):  # fmt: skip
    if const_expr(config.cluster == 1):
        tma.load(source, sX, pipe, state, tile, at)
    else:
        tma.load_share(source, sX, pipe, state, tile, at, config.cluster)


class Tile(NamedTuple):
    """What a consumer's thread holds of its tile from beginning to end."""

    mma: wgmma.Mma
    tSrQ: cute.Tensor  # descriptors of the operands in shared memory
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    tScS: cute.Tensor  # (row, column) of each element of S
    P: cute.Tensor
    acc_O: cute.Tensor
    rows: fragments.Rows
    rescale: cute.Tensor  # what O is still to be multiplied with, where that waits for the next product
    m0: Int32
    band: Band
    seen: Seen
    changes: Scores
    terms: Terms
    consumer: Int32
    screen: Screen | None


@cute.jit
def consume(shared: Shared, config: Constexpr[Config]):
    """64 rows a warpgroup, unit after unit."""
    queue = shared.queue
    consumer = arch.make_warp_uniform((arch.thread_idx()[0] - THREADS) // THREADS)
    state, done = tma.at_first(config.kv_stages), Int32(0)
    if consumer == config.consumers - 1:
        pass_turn(consumer, config)  # the first turn is the first warpgroup's
    block = scheduler.consume(queue, done, config)
    while block.m0 >= 0:
        state = attend(shared, done, state, block, consumer, config)
        done += 1
        block = scheduler.consume(queue, done, config)
    if const_expr(config.pieces_of_O > 0):
        arch.cp_async_bulk_wait_group(0, read=True)  # shared memory ends with the thread block


@cute.jit
def attend(
    shared: Shared, done: Int32, state: pipeline.PipelineState, block: Block, consumer: Int32, config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """A unit: the whole walk over the keys, then O and its log-sum-exp."""
    copies, tensors, found, sm, pipes, queue, screen, agreed, band, changes, mma = shared
    once = tma.after(done, config.q_stages)
    walk = walk_of(queue, done, block, tensors, band, config)
    thread = arch.thread_idx()[0] - THREADS
    qk, pv = mma.qk.get_slice(thread), mma.pv.get_slice(thread)
    all_qk, all_pv = wgmma.of_warpgroup(mma.qk, consumer), wgmma.of_warpgroup(mma.pv, consumer)
    tScS = qk.partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n)))
    tile = Tile(
        mma=mma,
        tSrQ=all_qk.make_fragment_A(all_qk.partition_A(sm.Q))[None, None, None, once.index],
        tSrK=all_qk.make_fragment_B(all_qk.partition_B(sm.K)),
        tOrV=all_pv.make_fragment_B(all_pv.partition_B(sm.V)),
        tScS=tScS,
        P=pv.make_fragment_A(pv.partition_shape_A((config.tile_m, config.tile_n))),
        acc_O=cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.head_dim_v)), Float32),
        rows=fragments.fresh_rows(),
        rescale=cute.make_rmem_tensor(fragments.ROWS, Float32),
        m0=block.m0,
        band=band,
        seen=visible.rows_of(band, tScS, block.m0, config),
        changes=changes,
        terms=scores.terms_of(changes, tScS, block, config),
        consumer=consumer,
        screen=screen,
    )
    tile.acc_O.fill(0.0)
    tile.rescale.fill(1.0)
    if const_expr(config.cluster > 1):
        state = leave_out(pipes, state, walk.loaded_last - walk.last)
    pipes.q.consumer_wait(once)
    if const_expr(config.mask_kind == "tiles"):
        state = walk_runs(tile, pipes, state, walk, PASSES, config)
    else:
        mine = agreed[None, consumer, tma.after(done, scheduler.AHEAD).index] if const_expr(config.from_zero) else None
        state = walk_tiles(tile, pipes, state, walk, mine, PASSES, config)
    if const_expr(config.pieces_of_O > 0):
        pipes.q.consumer_release(once)
    ends = last_product(tile, pipes, state, config)
    state.advance()
    if const_expr(config.cluster > 1):
        state = leave_out(pipes, state, walk.first - walk.loaded_first)
    block, span = scheduler.consume(queue, done, config), None
    if const_expr(config.shares):
        span = scheduler.span(queue, done)
    cleared = hidden.cleared_tiles(screen, done) if const_expr(config.hides) else None
    scheduler.release(queue, done, config)
    store(copies, tensors, found, sm, tile, ends, block, span, cleared, config)
    if const_expr(config.pieces_of_O == 0):
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        pipes.q.consumer_release(once)
    return state


@dataclass(frozen=True)
class Passes:
    """What is done with the first tile of a walk, and with each of the others."""

    first: Callable
    step: Callable


@cute.jit
def walk_tiles(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, walk: Walk, agreed: cute.Tensor | None, passes: Constexpr[Passes],
    config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """From the last tile to the first: those to be masked at the end, those that are seen whole, those to be masked at the beginning."""
    passes.first(tile, pipes, state, walk.last - 1, Int32(0), config)
    last = walk.last - 1  # the first tile is done
    if const_expr(config.mask_kind == "full"):
        return whole_steps(tile, pipes, state, walk.first, last, agreed, passes, config)
    masked, unmasked = seams(walk, last)
    if const_expr(not config.pingpong):  # the code as it runs, which ptxas schedules 2 to 4 % better without turns
        state = steps(tile, pipes, state, unmasked, last, How.MASKED, passes, config)
        state = steps(tile, pipes, state, masked, unmasked, How.WHOLE, passes, config)
        if const_expr(config.mask_kind != "causal"):
            state = steps(tile, pipes, state, walk.first, masked, How.MASKED, passes, config)
        return state
    for end in cutlass.range(2, unroll=1):
        low = unmasked if end == 0 else masked
        high = unmasked
        state = steps(tile, pipes, state, low, high, How.WHOLE, passes, config)
        high = last if end == 0 else masked
        low = unmasked if end == 0 else walk.first
        state = steps(tile, pipes, state, low, high, How.MASKED, passes, config)
    return state


@cute.jit
def seams(walk: Walk, last: Int32) -> tuple[Int32, Int32]:
    """Of the tiles [walk.first, last): those in [masked, unmasked) need no mask."""
    unmasked = min(max(walk.free_last, walk.first), last)
    return min(walk.free_first, unmasked), unmasked


@cute.jit
def whole_steps(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, first: Int32, last: Int32, agreed: cute.Tensor | None,
    passes: Constexpr[Passes], config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """The tiles [first, last), seen whole; with `from_zero` by the shorter softmax, if it serves all rows of the warpgroup."""
    if const_expr(config.from_zero):
        middle = first if all_from_zero(tile, agreed) else last
        state = steps(tile, pipes, state, middle, last, How.FROM_ZERO, passes, config)
        last = middle
    return steps(tile, pipes, state, first, last, How.WHOLE, passes, config)


@cute.jit
def all_from_zero(tile: Tile, agreed: cute.Tensor) -> Boolean:
    """Whether no row's maximum is below 0. The warpgroup's warps agree, for only together can they multiply. agreed: (WARPS,) int32, this unit's."""
    mine = arch.vote_all_sync(tile.rows.m[0] >= 0.0 and tile.rows.m[1] >= 0.0)
    if arch.lane_idx() == 0:
        agreed[arch.warp_idx() % WARPS] = Int32(mine)
    arch.barrier(barrier_id=Barrier.AGREE + tile.consumer, number_of_threads=THREADS)
    return arch.vote_all_sync(agreed[arch.lane_idx() % WARPS] != 0)


class How(IntEnum):
    """The softmax of a tile: with a mask; as it is; as it is, where no row's maximum so far is below 0."""

    MASKED = 0
    WHOLE = 1
    FROM_ZERO = 2


@cute.jit
def steps(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, first: Int32, last: Int32, how: Constexpr[How], passes: Constexpr[Passes],
    config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """The tiles [first, last), the last one first."""
    for i in cutlass.range(last - first, unroll=1):
        state = passes.step(tile, pipes, state, last - 1 - i, Int32(0), how, config)
    return state


@cute.jit
def walk_runs(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, walk: Walk, passes: Constexpr[Passes], config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """Run after run, each from its last tile to its first: the runs to be masked, then those that are seen whole."""
    run = visible.run_of(walk.first, tile.band)
    passes.first(tile, pipes, state, run.last - 1, run.ref, config)
    for r in cutlass.range(walk.first, walk.free_first, unroll=1):
        run = visible.run_of(r, tile.band)
        last = run.last - Int32(r == walk.first)  # the first tile is done
        for i in cutlass.range(last - run.first, unroll=1):
            state = passes.step(tile, pipes, state, last - 1 - i, run.ref, How.MASKED, config)
    for r in cutlass.range(walk.free_first, walk.free_last, unroll=1):
        run = visible.run_of(r, tile.band)
        last = run.last - Int32(r == walk.first)
        for i in cutlass.range(last - run.first, unroll=1):
            state = passes.step(tile, pipes, state, last - 1 - i, run.ref, How.WHOLE, config)
    return state


@cute.jit
def leave_out(pipes: Pipes, state: pipeline.PipelineState, tiles: Int32) -> pipeline.PipelineState:
    """Tiles that came for other blocks of the cluster."""
    for _ in cutlass.range(tiles, unroll=1):
        pipes.k.consumer_wait(state)
        pipes.k.consumer_release(state)
        pipes.v.consumer_wait(state)
        pipes.v.consumer_release(state)
        state.advance()
    return state


@cute.jit
def store(
    copies: Copies, tensors: Tensors, found: Partials, sm: Smem, tile: Tile, ends: Statistics, block: Block, span: scheduler.Span | None,
    cleared: Int32 | None, config: Constexpr[Config],
):  # fmt: skip
    thread = arch.thread_idx()[0] - THREADS
    if const_expr(config.pieces_of_O == 0):
        arch.barrier(barrier_id=Barrier.OUTPUT + tile.consumer, number_of_threads=THREADS)  # all have read their part of Q
    warp = arch.make_warp_uniform(thread // WARP)
    if const_expr(not config.shares) or arch.vote_any_sync(partials.together(tile.acc_O, ends, found, span, warp, config)):
        store_rows(copies, tensors, sm, tile, ends, block, thread, cleared, config)


@cute.jit
def store_rows(
    copies: Copies, tensors: Tensors, sm: Smem, tile: Tile, ends: Statistics, block: Block, thread: Int32, cleared: Int32 | None,
    config: Constexpr[Config],
):  # fmt: skip
    """A warp's."""
    epilogue.store(tile.acc_O, sm.O, copies.O, thread, block, config)
    tOcO = tile.mma.pv.get_slice(thread).partition_C(cute.make_identity_tensor((config.tile_m, config.head_dim_v)))
    epilogue.store_statistic(tensors.L[block.batch, block.head, None], ends.lse, tOcO, block.m0)
    if const_expr(config.row_max):
        epilogue.store_statistic(tile.changes.row_max[block.batch, block.head, None], ends.row_max, tOcO, block.m0)
    if const_expr(config.hides):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
        if arch.vote_any_sync(cleared != 0):
            warp = arch.make_warp_uniform(thread // WARP)
            hidden.restore(tensors, block, tile.band, tile.changes, cleared, warp, config)


@cute.jit
def first_scores(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, ref: Int32, config: Constexpr[Config]):
    seen = seen_of(tile, n_block, ref, config)
    pipes.k.consumer_wait(state)
    acc_S = issue_scores(tile, state, config)
    bits = kept_of(tile, n_block, config)
    warpgroup.wait_group(0)
    pipes.k.consumer_release(state)
    change(tile, acc_S, n_block, seen, config)
    scores.online_softmax(acc_S, tile.rows, tile.changes, False, config)
    weigh(tile, acc_S, bits)


@cute.jit
def seen_of(tile: Tile, n_block: Int32, ref: Int32, config: Constexpr[Config]) -> Seen:
    if const_expr(config.mask_kind == "tiles"):
        return visible.bits_of(tile.band, ref, tile.tScS, tile.m0, n_block * config.tile_n, config)
    return tile.seen


@cute.jit
def step(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, ref: Int32, how: Constexpr[How], config: Constexpr[Config]
):
    """S of tile n_block and O += P V of the tile before it, both in flight at once; softmax of the one under the other.

    O is rescaled while the other warpgroup multiplies or, `late`, under the next product of its own.
    """
    before = state.clone()
    state.advance()
    pipes.k.consumer_wait(state)
    take_turn(tile.consumer, config)
    acc_S = issue_scores(tile, state, config)
    if const_expr(config.late):
        fragments.scale_rows(tile.acc_O, tile.rescale)
    wait_for_values(tile, pipes, before, config)
    product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, before.index], True, config)
    pass_turn(tile.consumer, config)
    bits = kept_of(tile, n_block, config)
    seen = seen_of(tile, n_block, ref, config) if const_expr(how == How.MASKED) else None
    warpgroup.wait_group(1)  # S is there, O is not
    pipes.k.consumer_release(state)
    change(tile, acc_S, n_block, seen, config)
    rescale = scores.online_softmax(acc_S, tile.rows, tile.changes, const_expr(how == How.FROM_ZERO), config)
    warpgroup.wait_group(0)
    pipes.v.consumer_release(before)
    weigh(tile, acc_S, bits)
    if const_expr(config.late):
        tile.rescale.store(rescale.load())
    else:
        fragments.scale_rows(tile.acc_O, rescale)
    return state


PASSES = Passes(first_scores, step)


@cute.jit
def kept_of(tile: Tile, n_block: Int32, config: Constexpr[Config]) -> cute.Tensor | None:
    """Which of a thread's pairs dropout keeps; worked out under products."""
    bits = None
    if const_expr(config.dropout):
        row, column = fragments.by_rows(tile.tScS)[0, 0]
        key = n_block * config.tile_n + column
        bits = dropout.of_rows(tile.changes.draw, tile.terms.head, tile.m0 + row, key, const_expr(config.tile_n // 4))
    return bits


@cute.jit
def weigh(tile: Tile, acc_S: cute.Tensor, bits: cute.Tensor | None):
    """P as the left operand of O += P V."""
    if const_expr(bits is not None):
        dropout.drop(acc_S, bits)
    fragments.round_into(tile.P, acc_S)


@cute.jit
def issue_scores(tile: Tile, state: pipeline.PipelineState, config: Constexpr[Config]) -> cute.Tensor:
    """Issue S = Q K^T, into fresh registers, for the tile of keys in the stage of `state`."""
    acc_S = cute.make_rmem_tensor(tile.mma.qk.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    product(tile.mma.qk, acc_S, tile.tSrQ, tile.tSrK[None, None, None, state.index], False, config)
    return acc_S


@cute.jit
def product(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr[bool], config: Constexpr[Config]
):  # fmt: skip
    issue = const_expr(fragments.lean_product if config.lean else fragments.product)
    issue(mma, acc, a, b, accumulate)


@cute.jit
def change(tile: Tile, acc_S: cute.Tensor, n_block: Int32, seen: Seen | None, config: Constexpr[Config]):
    """What is done to the scores of a tile before the softmax; `seen`: what its rows see, None where that is everything."""
    n0 = n_block * config.tile_n
    scores.modify(acc_S, tile.tScS, tile.m0, n0, tile.changes, tile.terms, seen is not None, config)
    if const_expr(seen is not None):
        visible.hide(acc_S, tile.tScS, tile.m0, n0, tile.band, seen, config)


@cute.jit
def last_product(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, config: Constexpr[Config]) -> Statistics:
    """The last O += P V, under which the rows are summed up."""
    if const_expr(config.late):
        fragments.scale_rows(tile.acc_O, tile.rescale)
    wait_for_values(tile, pipes, state, config)
    product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, state.index], True, config)
    lse, inverse = scores.close(tile.rows, tile.terms, config)
    if const_expr(config.dropout):
        for r in range_constexpr(fragments.ROWS):
            inverse[r] *= tile.changes.draw.rescale
    row_max = scores.largest(tile.rows, config)
    warpgroup.wait_group(0)
    pipes.v.consumer_release(state)
    fragments.scale_rows(tile.acc_O, inverse)
    if const_expr(config.bias is not None):
        fragments.clear_rows(tile.acc_O, lse)  # 0 times NaN is NaN, also where biases leave a row nothing to see
    return Statistics(lse, row_max)


@cute.jit
def wait_for_values(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, config: Constexpr[Config]):
    """Until V of the stage is there, and has been looked over where it has to be."""
    pipes.v.consumer_wait(state)
    if const_expr(config.hides):
        hidden.wait(tile.screen, state)


@cute.jit
def take_turn(consumer: Int32, config: Constexpr[Config]):
    if const_expr(config.pingpong):
        arch.barrier(barrier_id=Barrier.TURN + consumer, number_of_threads=2 * THREADS)


@cute.jit
def pass_turn(consumer: Int32, config: Constexpr[Config]):
    """To the next warpgroup: its barrier counts these threads and its own."""
    if const_expr(config.pingpong):
        arch.barrier_arrive(barrier_id=Barrier.TURN + (consumer + 1) % config.consumers, number_of_threads=2 * THREADS)
