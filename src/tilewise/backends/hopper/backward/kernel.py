"""The backward pass on Hopper: dQ, dK and dV from Q, K, V, O, the log-sum-exp and dO. One thread block a tile of keys.

A block keeps its K and V in shared memory and dK and dV in registers, and walks over the tiles of queries that see its keys (those of every
query head of its group). dQ is summed up over the blocks in fp32, in global memory, in one order (order.py). How the consumers share
the work: by_keys.py for heads up to 128, by_columns.py beyond.

Equations: 20 to 28 of docs/algorithm.md. What comes before and after this kernel: prepare.py, parts.py.
Predicted bottleneck: shared memory; with its operands, dS and dQ it moves 1.1 times what it can under five products (head_dim 128).
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward import by_columns, by_keys, by_queries, finish, parts, prepare
from tilewise.backends.hopper.backward import persistent as units
from tilewise.backends.hopper.backward.config import ADDERS, Config
from tilewise.backends.hopper.backward.epilogue import Stores, WideStores, describe_store
from tilewise.backends.hopper.backward.order import (
    Block,
    Order,
    Visits,
    block_of,
    heads_of,
    last_visits,
    order_of,
    settled_order,
    turn_of,
    walk_of,
)
from tilewise.backends.hopper.backward.parts import Scales, Shared, Tensors
from tilewise.backends.hopper.backward.repair.pieces import pieces_of
from tilewise.backends.hopper.backward.shares import lent, partials_of, partials_of_group
from tilewise.backends.hopper.backward.tiles import (
    THREADS,
    WARP,
    Barrier,
    Loads,
    Mma,
    Pipes,
    Smem,
    layouts_of,
    load_row,
    products,
    shares_of,
    swizzled,
)
from tilewise.backends.hopper.operands import Band, Changes, Given, Gradients, Scalars, Scratch, Turns
from tilewise.backends.hopper.visible.queries import FIELDS, Walk, heads_per_step, next_in, tile_at, walk_of_head, walks_of
from tilewise.sm90 import tma
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    CUstream,
    Float32,
    Int32,
    Int64,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
)

LINE = 128  # bytes of the L2 cache's


class Layouts(NamedTuple):
    """Of tiles in shared memory."""

    K: cute.ComposedLayout
    V: cute.ComposedLayout
    Q: cute.ComposedLayout
    dO: cute.ComposedLayout
    dS: cute.ComposedLayout


@cute.jit
def launch(
    given: Given, gradients: Gradients, scratch: Scratch, turns: Turns, scalars: Scalars, band: Band, changes: Changes | None,
    config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    (mQ, mK, mV, _, _, mdO, _), (mdQ, mdK, mdV), (scale, scale_log2, _, last_q, last_k) = given, gradients, scalars
    own, changed = mdQ if const_expr(config.one_block) else None, Changes() if const_expr(changes is None) else changes
    tensors = Tensors(mQ, mK, mV, mdO, *scratch[:4], own, changed, scratch.spoiled)
    dtype = mQ.element_type
    layouts, mma = layouts_of(config, dtype), products(config, dtype)
    shapes = (
        (config.tile_n, config.head_dim),
        (config.tile_n, config.head_dim_v),
        (config.tile_m, config.head_dim),
        (config.tile_m, config.head_dim_v),
    )
    rows = [up_to(x, last) for x, last in ((mK, last_k), (mV, last_k), (mQ, last_q), (mdO, last_q))]
    loads = Loads(*(tma.describe(*each) for each in zip(rows, layouts[:4], shapes, strict=True)))
    gradients = [cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mdK, mdV)]
    stores = WideStores(*gradients)
    if const_expr(not config.wide_keys):
        stores = Stores(*(describe_store(x, share) for x, share in zip(gradients, shares_of(config), strict=True)))
    queries = (scratch.sum_dQ.shape[2], mQ.shape[2], mQ.shape[0])
    known = 2 * (pieces_of(mQ) + pieces_of(mK))
    prepare.prepare(
        prepare.Read(given.O, mdO, given.L, given.dL, scalars.has_dL, changed.draw.kept if const_expr(config.dropout) else None),
        band,
        prepare.Written(*scratch[:4], scratch.counter, scratch.spoiled),
        known,
        config,
    ).launch(grid=queries, block=(prepare.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)
    blocks = cute.ceil_div(mK.shape[1], config.tile_n) * heads_of(mQ, mK, config) * mK.shape[0]
    if const_expr(config.shares):
        blocks += (blocks - turns.shared_from) * (turns.shares - 1)
    kernel(
        tensors,
        scratch.counter,
        scratch.partial,
        describe_store(cute.make_tensor(mdQ.iterator, cute.select(mdQ.layout, mode=[1, 3, 2, 0])), finish.COLUMNS)
        if const_expr(config.finishes)
        else None,
        stores,
        loads,
        band,
        order_of(turns, cute.ceil_div(mK.shape[1], config.tile_n), mQ, mK, config),
        Scales(scale, scale_log2),
        mma,
        Layouts(*layouts),
        config,
    ).launch(
        grid=(min(blocks, turns.num_sms) if const_expr(config.persistent) else blocks, 1, 1),
        block=((1 + config.consumers) * THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )
    tiles = queries[0] * queries[1] * queries[2]
    if const_expr(config.separate_dq_kernel):
        launch_dQ(tensors, mdQ, rows, band, turns.queries_together, scale, scale_log2, config, stream)
    elif const_expr(not config.one_block or config.repairs):  # otherwise all tiles are written
        parts.finish(tensors, mdQ, band, scale, mma.dq, config).launch(
            grid=(min(tiles, parts.LOOKING * turns.num_sms), 1, 1) if const_expr(config.only_looks) else queries,
            block=(config.dq_consumers * THREADS, 1, 1),
            min_blocks_per_mp=config.least_blocks,
            stream=stream,
            use_pdl=True,
        )


def up_to(mX: cute.Tensor, last: Int32) -> cute.Tensor:
    """(last, dim, heads, batch) of (batch, seqlen, heads, dim)."""
    batch, _, heads, dim = mX.shape
    return cute.make_tensor(mX.iterator, cute.make_layout((last, dim, heads, batch), stride=tuple(mX.stride[i] for i in (1, 3, 2, 0))))


@cute.jit
def launch_dQ(
    tensors: Tensors, mdQ: cute.Tensor, rows: list, band: Band, heads_interleaved: Int32, scale: Float32, scale_log2: Float32,
    config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """rows: K, V, Q and dO as (seqlen, dim, heads, batch)."""
    dtype, K, V, Q, dO = tensors.Q.element_type, *rows
    layouts = by_queries.layouts_of(config, dtype)
    shapes = [tuple(cute.size(x, mode=[i]) for i in (0, 1)) for x in layouts]
    loads = by_queries.Loads(*(tma.describe(*each) for each in zip((Q, dO, K, V), layouts, shapes, strict=True)))
    blocks = cute.ceil_div(tensors.Q.shape[1], by_queries.ROWS) * tensors.Q.shape[2] * tensors.Q.shape[0]
    mma = by_queries.products(config, dtype)
    by_queries.kernel(
        tensors, mdQ, loads, band, heads_interleaved, Scales(scale, scale_log2), mma, by_queries.Layouts(*layouts), config
    ).launch(
        grid=(blocks, 1, 1),
        block=((1 + by_queries.CONSUMERS) * THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


@cute.kernel
def kernel(
    tensors: Tensors, counter: cute.Tensor | None, partial: cute.Tensor | None, store_dQ: tma.Tma | None,
    stores: Stores | WideStores, loads: Loads, band: Band, order: Order,
    scales: Scales, mma: Mma, layouts: Layouts, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    dtype = tensors.Q.element_type
    sK, sV, sQ, sdO, sdS = (storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in layouts)
    sP, sdQ = None, None
    if const_expr(not config.by_keys):
        layout_P = swizzled(dtype, config.tile_n, config.tile_m, config.ds_stages, config.tile_m)
        sP = storage.allocate_tensor(dtype, layout_P.outer, 1024, swizzle=layout_P.inner)
    if const_expr(config.staged):
        sdQ = storage.allocate_tensor(Float32, cute.make_layout((4, THREADS, config.dq_elements // 4, config.dq_consumers)), 1024)
    first = storage.allocate_tensor(Int32, cute.make_layout(config.dq_consumers), 16)
    visits = None
    if const_expr(config.mask_kind == "tiles"):
        visits = storage.allocate_tensor(Int32, cute.make_layout((FIELDS, config.stages)), 16)
    statistics = cute.make_layout((config.tile_m, config.stages))
    sm = Smem(
        sK,
        sV,
        sQ,
        sdO,
        sdS,
        sP,
        sdQ,
        first,
        storage.allocate_tensor(Float32, statistics, 128),
        storage.allocate_tensor(Float32, statistics, 128),
        visits,
    )
    finisher = None
    if const_expr(config.finishes):
        finisher = finish.make_finisher(storage, store_dQ, dtype, config)
    if const_expr(config.persistent):
        queue = units.make_queue(storage, counter, config.consumers * THREADS // WARP + (ADDERS if const_expr(config.staged) else 0))
        pipes = make_pipes(storage, config)
        stay(Shared(tensors, sm, pipes, mma, band, scales), stores, partial, loads, queue, finisher, order, config)
        return
    pipes = make_pipes(storage, config)
    n_blocks = cute.ceil_div(tensors.K.shape[1], config.tile_n)
    heads = heads_of(tensors.Q, tensors.K, config) * tensors.K.shape[0]
    block = block_of(arch.block_idx()[0], n_blocks, heads, settled_order(order, band, heads, config), config)
    walk = walk_of(block, band, tensors.Q.shape[1], tensors.K.shape[1], config)
    warp_idx = arch.make_warp_uniform(arch.warp_idx())
    if warp_idx < THREADS // WARP:
        arch.setmaxregister_decrease(config.registers[0])
        if warp_idx == 0:
            produce(tensors, loads, sm, pipes, block, band, walk, config)
        elif warp_idx <= (config.dq_consumers if const_expr(config.direct) else ADDERS):
            if const_expr(config.staged):
                begin_adding(warp_idx, config)
                add_up_dQ(tensors, sm, block, band, walk, Int32(0), warp_idx - 1, config)
            elif const_expr(config.direct and config.ordered and not config.separate_dq_kernel):
                arch.griddepcontrol_wait()
                take_turns(tensors, sm, block, band, walk, warp_idx - 1, config)
        elif const_expr(config.finishes):
            finish.finish_earlier(tensors, finisher, order, band, scales.plain, warp_idx, config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consumer = arch.make_warp_uniform(arch.thread_idx()[0] // THREADS - 1)
        given = (Shared(tensors, sm, pipes, mma, band, scales), stores, block, walk, consumer)
        if const_expr(config.by_keys):
            partials = None
            if const_expr(config.shares):
                partials = partials_of(partial, counter, arch.block_idx()[0], order, n_blocks * heads)
            if const_expr(config.block_per_q_head):
                partials = partials_of_group(partial, counter, block, tensors, config)
            given = (*given, partials)
        if const_expr(not config.by_keys):
            if consumer == 0:
                by_columns.consume(*given, True, config)
            else:
                by_columns.consume(*given, False, config)
        elif const_expr(config.dq_consumers == config.consumers) or consumer < config.dq_consumers:
            by_keys.consume(*given, True, config)
        else:
            by_keys.consume(*given, False, config)


@cute.jit
def stay(
    shared: Shared, stores: Stores | WideStores, partial: cute.Tensor | None, loads: Loads, queue: units.Queue, finisher: finish.Finisher | None,
    order: Order, config: Constexpr[Config],
):  # fmt: skip
    """The same roles, for one block of keys after another."""
    tensors, sm, pipes, _, band, (scale, _) = shared
    warp_idx = arch.make_warp_uniform(arch.warp_idx())
    if warp_idx < THREADS // WARP:
        arch.setmaxregister_decrease(config.registers[0])
        if warp_idx == 0:
            produce_units(tensors, loads, sm, pipes, queue, band, order, config)
        elif warp_idx <= ADDERS:
            if const_expr(config.staged):
                begin_adding(warp_idx, config)
                add_up_units(tensors, sm, queue, band, order, warp_idx - 1, config)
        elif const_expr(config.finishes):
            queries = lent(partial, tensors) if const_expr(config.shares) else None
            finish.finish_all(tensors, finisher, queue, order, queries, band, scale, warp_idx, config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consumer = arch.make_warp_uniform(arch.thread_idx()[0] // THREADS - 1)
        given = (shared, stores, partial, queue, order, consumer)
        if const_expr(config.dq_consumers == config.consumers) or consumer < config.dq_consumers:
            by_keys.consume_units(*given, True, config)
        else:
            by_keys.consume_units(*given, False, config)


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps = config.consumers * THREADS // WARP
    statistics = 4 * config.tile_m
    visit = 4 * FIELDS if config.mask_kind == "tiles" else 0
    pipes = Pipes(
        tma.make_pipe(storage, 1, config.dtype.itemsize * config.tile_n * config.head_dim, warps),
        tma.make_pipe(storage, 1, config.dtype.itemsize * config.tile_n * config.head_dim_v, warps),
        tma.make_pipe(storage, config.stages, config.dtype.itemsize * config.tile_m * config.head_dim + statistics + visit, warps),
        tma.make_pipe(storage, config.stages, config.dtype.itemsize * config.tile_m * config.head_dim_v + statistics, warps),
    )
    tma.barriers_ready()
    return pipes


@cute.jit
def produce(tensors: Tensors, loads: Loads, sm: Smem, pipes: Pipes, block: Block, band: Band, walk: Walk, config: Constexpr[Config]):
    """The producer: one warp loads K and V, then Q and dO of every tile, with the statistics of their rows."""
    load_keys(tensors, loads, sm, pipes, tma.at_first_empty(1), block, config)
    arch.griddepcontrol_wait()  # what `prepare` writes is there
    if const_expr(config.separate_dq_kernel or config.only_looks):
        arch.griddepcontrol_launch_dependents()  # which need that too, and nothing of this kernel
    load_queries(tensors, loads, sm, pipes, tma.at_first_empty(config.stages), None, block, band, walk, config)


@cute.jit
def produce_units(
    tensors: Tensors, loads: Loads, sm: Smem, pipes: Pipes, queue: units.Queue, band: Band, order: Order, config: Constexpr[Config]
):  # fmt: skip
    """Likewise for one block of keys after another; the next is fetched when two tiles of this one are still to be computed."""
    arch.griddepcontrol_wait()  # what `prepare` writes is there: the counter is 0
    if const_expr(config.only_looks):
        arch.griddepcontrol_launch_dependents()
    count = units.blocks_of(tensors, config) * heads_of(tensors.Q, tensors.K, config) * tensors.K.shape[0]
    if const_expr(config.shares):
        count += (count - order.shared_from) * (order.shares - 1)
    state, done, unit = tma.at_first_empty(config.stages), Int32(0), units.fetch(queue)
    while unit < count:
        units.publish(queue, done, unit)
        block, walk = units.place_of(unit, tensors, band, order, config)
        fetch_keys(tensors, block, config)
        state = load_queries(tensors, loads, sm, pipes, state, tma.after_empty(done, 1), block, band, walk, config)
        done += 1
        unit = units.fetch(queue)
    units.publish(queue, done, Int32(units.END))


@cute.jit
def fetch_keys(tensors: Tensors, block: Block, config: Constexpr[Config]):
    """Prefetch K and V of a block of keys into the L2 cache, where they may not be yet, while the consumers are at another one."""
    for x in (tensors.K, tensors.V):
        rows = x[block.batch, None, block.head_k, None]
        lines = const_expr(-(-2 * (config.head_dim if x is tensors.K else config.head_dim_v) // LINE))
        for i in cutlass.range(lines * config.tile_n // WARP, unroll=1):
            number = i * WARP + arch.lane_idx()
            row, column = block.n0 + number // lines, number % lines * (LINE // 2)
            if row < rows.shape[0] and column < rows.shape[1]:
                arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[(rows.iterator + rows.layout((row, column))).toint()])


@cute.jit
def load_keys(
    tensors: Tensors, loads: Loads, sm: Smem, pipes: Pipes, state: pipeline.PipelineState, block: Block, config: Constexpr[Config]
):  # fmt: skip
    """K and V of a block of keys. Where dQ is summed up, no other block reads them, but those of a group's other heads."""
    n_block, policy = block.n0 // config.tile_n, None
    if const_expr(config.sums and not config.block_per_q_head):
        policy = Int64(tma.FIRST)
    pipes.k.producer_acquire(state)
    tma.load(loads.K, sm.K, pipes.k, state, (config.tile_n, config.head_dim), (n_block, 0, block.head_k, block.batch), policy)
    pipes.v.producer_acquire(state)
    tma.load(loads.V, sm.V, pipes.v, state, (config.tile_n, config.head_dim_v), (n_block, 0, block.head_k, block.batch), policy)


@cute.jit
def load_queries(
    tensors: Tensors, loads: Loads, sm: Smem, pipes: Pipes, state: pipeline.PipelineState, keys: pipeline.PipelineState | None, block: Block,
    band: Band, walk: Walk, config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """Q and dO of every tile, with the statistics of their rows. Where K and V are still to come, into the place that `keys` says, they come behind
    the first tile, as its place is free earlier.
    """
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    missing, last = Boolean(keys is not None), None
    if const_expr(config.marks_last_visits):
        last = last_visits(block, band, tensors.Q.shape[1], tensors.K.shape[1], config)
    begin, end = walks_of(block, group, config)
    for first in cutlass.range(begin, end, unroll=1):
        own = walk_of_head(walk, block, block.head_k * group + first, band, config)
        place = own.start
        for _i in cutlass.range(own.last - own.first, unroll=1):
            m_block = tile_at(place, band, config)
            for g in cutlass.range(first, first + heads_per_step(group, config), unroll=1):
                head = block.head_k * group + g
                lse, minus_delta = (x[block.batch, head, None] for x in (tensors.lse, tensors.minus_delta))
                policy = policy_at(place, last)
                pipes.q.producer_acquire(state)
                tma.load(loads.Q, sm.Q, pipes.q, state, (config.tile_m, config.head_dim), (m_block, 0, head, block.batch), policy)
                load_rows(lse, sm.lse, pipes.q, state, m_block, config)
                if const_expr(config.mask_kind == "tiles"):
                    load_row(band.tables.visits[place, None], sm.visits, pipes.q, state, FIELDS)
                pipes.do.producer_acquire(state)
                tma.load(loads.dO, sm.dO, pipes.do, state, (config.tile_m, config.head_dim_v), (m_block, 0, head, block.batch), policy)
                load_rows(minus_delta, sm.minus_delta, pipes.do, state, m_block, config)
                state.advance()
                if const_expr(keys is not None):
                    if missing:
                        load_keys(tensors, loads, sm, pipes, keys, block, config)
                    missing = Boolean(False)
            place = next_in(place, own, config)
    if const_expr(keys is not None):  # noqa: SIM102
        if missing:
            load_keys(tensors, loads, sm, pipes, keys, block, config)
    return state


@cute.jit
def policy_at(place: Int32, last: Visits | None) -> Int64 | None:
    """The L2 cache policy for what is read at a place of the walk; `last`: the visits after which no block reads it."""
    if const_expr(last is None):
        return None
    return Int64(tma.FIRST) if last.first <= place and place < last.last else Int64(tma.NORMAL)


@cute.jit
def load_rows(
    gX: cute.Tensor, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, m_block: Int32,
    config: Constexpr[Config],
):  # fmt: skip
    """One value for each row of tile m_block."""
    load_row(cute.domain_offset((m_block * config.tile_m,), gX), sX, pipe, state, config.tile_m)


@cute.jit
def begin_adding(warp_idx: Int32, config: Constexpr[Config]):
    """Of warps 1 to ADDERS. There is room for the first tile, as if the last one had sent a tile before it; and what `prepare` writes is there."""
    if warp_idx == ADDERS:
        make_room(config)
    arch.griddepcontrol_wait()


@cute.jit
def add_up_dQ(
    tensors: Tensors, sm: Smem, block: Block, band: Band, walk: Walk, count: Int32, adder: Int32, config: Constexpr[Config]
) -> Int32:  # fmt: skip
    """One of the warps that take turns at adding tiles of dQ to the sum in global memory; `count`: tiles of this thread block so far."""
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    begin, end = walks_of(block, group, config)
    for first in cutlass.range(begin, end, unroll=1):
        own = walk_of_head(walk, block, block.head_k * group + first, band, config)
        place = own.start
        for _i in cutlass.range(own.last - own.first, unroll=1):
            for g in cutlass.range(first, first + heads_per_step(group, config), unroll=1):
                if count % ADDERS == adder:
                    add_tile(tensors, sm, block, band, place, block.head_k * group + g, adder, config)
                count += 1
            place = next_in(place, own, config)
    return count


@cute.jit
def add_tile(
    tensors: Tensors, sm: Smem, block: Block, band: Band, place: Int32, head: Int32, adder: Int32, config: Constexpr[Config]
):  # fmt: skip
    """A tile of dQ, when it is computed; `ordered`: and when it is this block's turn, which it then gives on. The first writes instead of adding.

    By the time that its sum is there and the next block's turn has come, the consumers have computed the next tile, which is another warp's.
    """
    m_block, turn = visit_at(place, block, band, tensors.K.shape[1], config)
    counter = parts.counter_of(tensors, block.batch, head, m_block, 0)
    if const_expr(config.ordered) and arch.lane_idx() == 0:
        while parts.now_at(counter) != turn:
            pass
    arch.sync_warp()
    arch.barrier(barrier_id=Barrier.DQ_FULL + adder, number_of_threads=config.dq_consumers * THREADS + WARP)
    arch.fence_proxy("async.shared", space="cta")  # between what the consumers wrote and the copy engine
    if arch.lane_idx() == 0:
        arch.fence_proxy("async.global")  # between the turn's having come and what the copy engine adds
        gSum = tensors.sum_dQ[block.batch, head, m_block, None]
        if turn == 0:
            bulk("cp.async.bulk.global.shared::cta.bulk_group", gSum, sm, config)
        else:
            bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", gSum, sm, config)
        arch.cp_async_bulk_commit_group()
        arch.cp_async_bulk_wait_group(0, read=True)
    arch.sync_warp()
    make_room(config)
    if arch.lane_idx() == 0:
        arch.cp_async_bulk_wait_group(0)
        if const_expr(config.ordered):
            give_turn(counter)
    arch.sync_warp()


@cute.jit
def make_room(config: Constexpr[Config]):
    """The consumers may write the next tile of dQ."""
    for consumer in range_constexpr(config.dq_consumers):
        arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + consumer, number_of_threads=THREADS + WARP)


@cute.jit
def visit_at(place: Int32, block: Block, band: Band, seqlen_k: Int32, config: Constexpr[Config]) -> tuple[Int32, Int32]:
    """The tile of queries at a place of the walk, and this block's turn there."""
    turn = Int32(-1)
    if const_expr(config.ordered):
        turn = turn_of(place, block, band, seqlen_k, config)
    return tile_at(place, band, config), turn


@cute.jit
def add_up_units(
    tensors: Tensors, sm: Smem, queue: units.Queue, band: Band, order: Order, adder: Int32, config: Constexpr[Config]
):  # fmt: skip
    """Likewise for one block of keys after another."""
    done, count, unit = Int32(0), Int32(0), units.consume(queue, Int32(0))
    while unit >= 0:
        block, walk = units.place_of(unit, tensors, band, order, config)
        count = add_up_dQ(tensors, sm, block, band, walk, count, adder, config)
        units.release(queue, done)
        done += 1
        unit = units.consume(queue, done)


@cute.jit
def take_turns(tensors: Tensors, sm: Smem, block: Block, band: Band, walk: Walk, consumer: Int32, config: Constexpr[Config]):
    """Where a warpgroup adds its part of dQ by itself: one warp waits for its turns, and passes them on."""
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    before = Int64(0)
    begin, end = walks_of(block, group, config)
    for first in cutlass.range(begin, end, unroll=1):
        own = walk_of_head(walk, block, block.head_k * group + first, band, config)
        place = own.start
        for _i in cutlass.range(own.last - own.first, unroll=1):
            m_block = tile_at(place, band, config)
            turn = turn_of(place, block, band, tensors.K.shape[1], config)
            for g in cutlass.range(first, first + heads_per_step(group, config), unroll=1):
                counter = parts.counter_of(tensors, block.batch, block.head_k * group + g, m_block, consumer)
                now = Int32(0)
                if arch.lane_idx() == 0:
                    now = parts.now_at(counter)
                if before != 0:
                    arch.barrier(barrier_id=Barrier.DQ_FULL + consumer, number_of_threads=THREADS + WARP)
                if arch.lane_idx() == 0:
                    if before != 0:
                        give_turn(before)
                    while now != turn:
                        now = parts.now_at(counter)
                    sm.first[consumer] = Int32(turn == 0)
                arch.sync_warp()
                arch.barrier_arrive(barrier_id=Barrier.DQ_EMPTY + consumer, number_of_threads=THREADS + WARP)
                before = counter
            place = next_in(place, own, config)
    if before != 0:
        arch.barrier(barrier_id=Barrier.DQ_FULL + consumer, number_of_threads=THREADS + WARP)
        if arch.lane_idx() == 0:
            give_turn(before)


@cute.jit
def bulk(instruction: Constexpr[str], gSum: cute.Tensor, sm: Smem, config: Constexpr[Config]):
    """A tile of dQ from shared to global memory, by one thread; `narrow`: of each block of rows the columns that dQ has, which are its first."""
    blocks = const_expr(config.dq_grid[0] if config.narrow else 1)
    numbers = cute.size(gSum) // blocks
    for block in range_constexpr(blocks):
        source = sm.dQ.iterator + block * (config.tile_m * config.head_dim // blocks)
        arch.inline_ptx(
            f"{instruction} [{{$r0}}], [{{$r1}}], {{$r2}};",
            read_only_args=[(gSum.iterator + block * numbers).toint(), source.toint(), Int32(4 * numbers)],
        )


@cute.jit
def give_turn(counter: Int64):
    """What was added is there before the next one's turn is. Without the fence (relaxed) parts of what the second block adds are lost: the first
    one's bulk copy says that it is complete before its last elements are where additions are made.
    """
    arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[counter])
