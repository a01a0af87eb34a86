"""Flash decode: one launch of one thread block a multiprocessor, with equal shares of all sequences' key tiles (scheduler.py).

Two warps load, one K and one V (loads.py), into a ring deep enough to keep memory busy while a warpgroup multiplies, takes the softmax, begins and
ends units. The rows of a tile are the query tokens of a sequence times the heads that share a key head. Q goes straight to registers, O straight
to memory, or where a unit lies in several blocks by way of merge.py. Nothing here depends on a number that the host would have to read.
Where rows are many, products decide: then two warpgroups multiply, and each has its softmax under products of its own (`overlapped_step`).
Predicted bottleneck of few rows: HBM; a tile of 128 keys at head_dim 128 takes 5,000 clocks to arrive, and half of that to be worked on.

Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from collections.abc import Callable
from typing import NamedTuple

from tilewise.backends.hopper.decode import beginning, loads, merge, rows, scheduler, widen
from tilewise.backends.hopper.decode.config import TILE_M, Config
from tilewise.backends.hopper.decode.operands import Lengths, Prior, Tensors, Work
from tilewise.backends.hopper.decode.rows import Unit
from tilewise.backends.hopper.decode.scheduler import Piece, Place, Sequence, Shape, Start, clamped
from tilewise.backends.hopper.operands import Scores
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.tables.window import Window
from tilewise.sm90 import fragments, tma, wgmma
from tilewise.sm90.dsl import (
    Constexpr,
    CUstream,
    Float32,
    Int32,
    LayoutEnum,
    OperandMajorMode,
    SmemAllocator,
    arch,
    const_expr,
    cpasync,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    sm90,
    warpgroup,
)

THREADS, WARP = 128, 32
WARPS = THREADS // WARP


class Pipes(NamedTuple):
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Raw(NamedTuple):
    """K and V in 8 bits, as they come."""

    K: cute.Tensor  # (tile_n, head_dim, raw_stages)
    V: cute.Tensor
    scales: cute.Tensor  # (tile_n,) fp32
    pipes: Pipes


class Smem(NamedTuple):
    Q: cute.Tensor | None  # (tile_m, head_dim)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (head_dim_v, tile_n, kv_stages)
    V_by_token: cute.Tensor  # (tile_n, head_dim_v, kv_stages): the same memory
    broadcast: cute.Tensor  # (2,) int32: what one thread tells the others


class Shared(NamedTuple):
    """What units have in common."""

    tensors: Tensors
    shape: Shape
    work: Work
    prior: Prior | None
    changes: Scores
    mma: wgmma.Mma
    sm: Smem
    pipes: Pipes


@cute.jit
def launch(
    tensors: Tensors, lengths: Lengths, work: Work, window: Window, prior: Prior | None, changes: Scores, config: Constexpr[Config], stream: CUstream
):  # fmt: skip
    mK, mV = tensors.K, tensors.V
    tokens = [cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mK, mV)]
    loaded = [loads.describe(x, dim, config) for x, dim in zip(tokens, (config.head_dim, config.head_dim_v), strict=True)]
    shape = scheduler.shape_of(tensors, lengths, work, window, prior, config)
    dtype = tensors.Q.element_type
    layouts = [of(config, dtype) for of in (wgmma.layout_Q, wgmma.layout_K, wgmma.layout_V)]
    kernel(*loaded, tensors, shape, work, prior, changes, products(config, dtype), *layouts, config).launch(
        grid=(work.columns, work.blocks, 1),
        block=(3 * THREADS if config.three else THREADS + 2 * config.loaders * WARP, 1, 1),
        min_blocks_per_mp=config.blocks,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


def products(config, dtype) -> wgmma.Mma:
    """As those of the ladder, with Q from registers or from shared memory."""
    k, source = OperandMajorMode.K, warpgroup.OperandSource.SMEM if config.q_in_smem else warpgroup.OperandSource.RMEM
    qk = sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, (config.consumers, 1, 1), (64, config.tile_n), source)
    return wgmma.Mma(qk, wgmma.product_of(config, config.head_dim_v, dtype))


@cute.kernel
def kernel(
    load_K: tma.Tma, load_V: tma.Tma, tensors: Tensors, shape: Shape, work: Work, prior: Prior | None, changes: Scores, mma: wgmma.Mma,
    layout_Q: cute.ComposedLayout, layout_K: cute.ComposedLayout, layout_V: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = allocate(storage, tensors.Q.element_type, (layout_Q, layout_K, layout_V), config)
    for each in (load_K, load_V):
        cpasync.prefetch_descriptor(each.atom)
    bytes_of_stage = (config.dtype.itemsize * config.tile_n * dim for dim in (config.head_dim, config.head_dim_v))
    pipes = Pipes(*(tma.make_pipe(storage, config.kv_stages, size, config.threads // WARP) for size in bytes_of_stage))
    raw = allocate_raw(storage, tensors.K.element_type, config) if config.widens else None
    tma.barriers_ready()
    follow(prior, config)
    warp, begin = arch.make_warp_uniform(arch.warp_idx()), scheduler.start_of(shape, config)
    shared = Shared(tensors, shape, work, prior, changes, mma, sm, pipes)
    if const_expr(config.widens):
        if warp < WARPS:
            arch.setmaxregister_increase(config.registers[0])
            consume(attend, shared, begin, config)
        elif warp < 2 * WARPS:
            arch.setmaxregister_decrease(config.registers[1])
            load(load_K, load_V, tensors, (raw.K, raw.V), raw.pipes, shape, begin, warp - WARPS, config)
        else:
            arch.setmaxregister_decrease(config.registers[2])
            widen.widen(tensors, (raw.K, raw.V), (sm.K, sm.V_by_token), raw.pipes, pipes, raw.scales, shape, begin, config)
    elif warp < config.threads // WARP:
        if const_expr(config.consumers > 1):
            arch.setmaxregister_increase(config.registers[0])
        consume(attend, shared, begin, config)
    else:
        if const_expr(config.consumers > 1):
            arch.setmaxregister_decrease(config.registers[-1])
        load(load_K, load_V, tensors, (sm.K, sm.V_by_token), pipes, shape, begin, warp - config.threads // WARP, config)


@cute.jit
def follow(prior: Prior | None, config: Constexpr[Config]):
    """What kernels before this one wrote, it may read, and the next one may be launched.

    With a prefix all but its result may be read: the prefix's launch waited for the kernels before it, and only then had this one launched. Those
    that compute wait for that result (`consume`), without work too, so that no kernel ends before the one it follows; K and V come meanwhile.
    """
    if const_expr(not config.onto):
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
    elif prior.early == 0:
        arch.griddepcontrol_wait()


@cute.jit
def load(
    load_K: tma.Tma, load_V: tma.Tma, tensors: Tensors, to: tuple, pipes: Pipes, shape: Shape, begin: Start, warp: Int32, config: Constexpr[Config]
):  # fmt: skip
    """By the warp-th of those that load."""
    if warp < config.loaders:
        loads.produce(load_K, tensors.K, to[0], pipes.k, shape, begin, warp, 0, config.head_dim, config)
    elif warp < 2 * config.loaders:
        loads.produce(load_V, tensors.V, to[1], pipes.v, shape, begin, warp - config.loaders, 1, config.head_dim_v, config)


@cute.jit
def allocate_raw(storage: SmemAllocator, dtype, config: Constexpr[Config]) -> Raw:
    dims, stages = (config.head_dim, config.head_dim_v), config.raw_stages
    layouts = [cute.make_layout((config.tile_n, dim, stages), stride=(dim, 1, config.tile_n * dim)) for dim in dims]
    sK, sV = (storage.allocate_tensor(dtype, layout, 128) for layout in layouts)
    scales = storage.allocate_tensor(Float32, cute.make_layout(config.tile_n), 16)
    return Raw(sK, sV, scales, Pipes(*(tma.make_pipe(storage, stages, config.tile_n * dim, WARPS) for dim in dims)))


@cute.jit
def allocate(storage: SmemAllocator, dtype, layouts: tuple, config: Constexpr[Config]) -> Smem:
    sQ = None
    if const_expr(config.q_in_smem):
        sQ = storage.allocate_tensor(dtype, layouts[0].outer, 1024, swizzle=layouts[0].inner)[None, None, 0]
    sK, sV = (storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in layouts[1:])
    broadcast = storage.allocate_tensor(Int32, cute.make_layout(2), 16)
    by_token = sm90.make_smem_layout_b(wgmma.K_MAJOR, (config.tile_m, config.tile_n, config.head_dim_v), dtype, config.kv_stages)
    return Smem(sQ, sK, sV, cute.make_tensor(sV.iterator, by_token.outer), broadcast)


class Tile(NamedTuple):
    """What a thread holds of its unit from beginning to end."""

    mma: wgmma.Mma
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    b: Int32
    k_scale: Float32 | None  # of all keys
    P: cute.Tensor
    acc_O: cute.Tensor
    state: fragments.Rows
    unit: Unit
    slopes: cute.Tensor | None
    sequence: Sequence
    piece: Piece
    free: tuple[Int32, Int32]  # keys that all rows see
    Q: cute.Tensor


@cute.jit
def consume(attend: Constexpr[Callable], shared: Shared, begin: Start, config: Constexpr[Config]):
    """A warpgroup: unit after unit of the block's share. attend: what it does with a piece."""
    if const_expr(config.onto):
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
    state, shape = tma.at_first(config.kv_stages), shared.shape
    shares = begin.shares
    b, start, at = begin.place.sequence, begin.place.start, begin.place.at
    while at < shares.end:
        sequence = scheduler.sequence_of(b, shape, config)
        span = scheduler.span_of(sequence, shares, shape, config)
        if at - start >= span:
            b += 1
            start += span
        else:
            piece = scheduler.piece_of(Place(b, start, at), sequence, shares, shape, config)
            if const_expr(config.split):
                for i in cutlass.range(scheduler.parts_of(piece, shape), unroll=1):
                    found = scheduler.sequence_of(b, shape, config)  # anew, as registers are scarce; likewise the piece
                    held = scheduler.piece_of(Place(b, start, at), found, shares, shape, config)
                    state = attend(shared, state, b, scheduler.part_of(held, i, shape), found, config)
            elif piece.last > piece.first:
                state = attend(shared, state, b, piece, sequence, config)
            at = piece.next
    if const_expr(config.ragged):
        merge.store_nothing(shared.tensors, shape, config)


@cute.jit
def attend(
    shared: Shared, state: pipeline.PipelineState, b: Int32, piece: Piece, sequence: Sequence, config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """A piece of a unit: its tiles of keys, then O and its log-sum-exp."""
    tensors, shape, work, _, changes, mma, sm, pipes = shared
    unit = rows.unit_of(b, piece, sequence, shape, config)
    consumer = arch.make_warp_uniform(arch.warp_idx()) // WARPS if const_expr(config.consumers > 1) else Int32(0)
    pv, all_qk, all_pv = mma.pv.get_slice(arch.thread_idx()[0]), wgmma.of_warpgroup(mma.qk, 0), wgmma.of_warpgroup(mma.pv, 0)
    tile = Tile(
        mma=mma,
        tSrK=all_qk.make_fragment_B(all_qk.partition_B(sm.K)),
        tOrV=all_pv.make_fragment_B(all_pv.partition_B(sm.V)),
        b=b,
        k_scale=tensors.k_scale[b, piece.head_k] if const_expr(config.scales[0] == "head") else None,
        P=pv.make_fragment_A(pv.partition_shape_A((config.tile_m, config.tile_n))),
        acc_O=cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.head_dim_v)), Float32),
        state=fragments.fresh_rows(),
        unit=unit,
        slopes=rows.slopes_of(changes, b, unit, config) if const_expr(config.alibi) else None,
        sequence=sequence,
        piece=piece,
        free=rows.free_of(sequence, unit, shape, config),
        Q=queries(tensors, mma, sm, unit, sequence, consumer, config),
    )
    beginning.of_piece(tile.acc_O, tile.state, shared.prior, piece, unit, config)
    if const_expr(config.consumers == 1):  # noqa: SIM114 - with `or` the DSL builds what comes behind it all the same
        state = walk(tile, shared, state, config)
    elif unit.rows > consumer * TILE_M:
        state = walk(tile, shared, state, config)
    else:
        state = give_back(pipes, state, piece)
    lse, inverse = scores.close(tile.state, scores.Terms(None, None, None, None), config)
    if const_expr(config.scales[1] == "head"):
        for r in range_constexpr(fragments.ROWS):
            inverse[r] *= tensors.v_scale[b, piece.head_k]
    fragments.scale_rows(tile.acc_O, inverse)
    if piece.count == 1:
        merge.store(tile.acc_O, lse, tensors, changes.sink, unit, config)
    else:
        merge.together(tile.acc_O, lse, tensors, work, changes.sink, sm.broadcast, piece, unit, shape, config)
    return state


@cute.jit
def queries(
    tensors: Tensors, mma: wgmma.Mma, sm: Smem, unit: Unit, sequence: Sequence, consumer: Int32, config: Constexpr[Config]
) -> cute.Tensor:  # fmt: skip
    """Q as the first product reads it: registers, or descriptors of shared memory."""
    qk = mma.qk.get_slice(arch.thread_idx()[0])
    if const_expr(not config.q_in_smem):
        Q = qk.make_fragment_A(qk.partition_shape_A((config.tile_m, config.head_dim)))
        rows.load_queries(Q, tensors, unit, sequence, config)
        return Q
    dtype = tensors.Q.element_type
    as_O = wgmma.product_of(config, config.head_dim, dtype)  # its registers have the order of Q's
    held = cute.make_rmem_tensor(as_O.partition_shape_C((config.tile_m, config.head_dim)), dtype)
    rows.load_queries(held, tensors, unit, sequence, config)
    atom = sm90.get_smem_store_op(LayoutEnum.ROW_MAJOR, dtype, Float32)
    copy = cute.make_tiled_copy_C(atom, as_O).get_slice(arch.thread_idx()[0])
    rows.meet(config)  # all have read the unit's before
    cute.copy(atom, copy.retile(held), copy.partition_D(sm.Q))
    rows.hand_over(config)
    all_qk = wgmma.of_warpgroup(mma.qk, consumer)
    return all_qk.make_fragment_A(all_qk.partition_A(sm.Q))


@cute.jit
def walk(tile: Tile, shared: Shared, state: pipeline.PipelineState, config: Constexpr[Config]) -> pipeline.PipelineState:
    """The piece's tiles of keys, of which there is one at least."""
    first, last = tile.piece.first, tile.piece.last
    if const_expr(config.overlap):
        free = tile.free
        masked = clamped(cute.ceil_div(max(free[0], 0), config.tile_n), first + 1, last)
        whole = clamped(max(free[1], 0) // config.tile_n, masked, last)
        first_scores(tile, shared, state, first * config.tile_n, config)
        state = steps(tile, shared, state, first + 1, masked, True, config)
        state = steps(tile, shared, state, masked, whole, False, config)
        state = steps(tile, shared, state, whole, last, True, config)
        shared.pipes.v.consumer_wait(state)
        issue_values(tile, state)
        warpgroup.wait_group(0)
        tma.release(shared.pipes.v, state)
        state.advance()
    else:
        for n in cutlass.range(first, last, unroll=1):
            step(tile, shared, state, n * config.tile_n, config)
            state.advance()
    return state


@cute.jit
def give_back(pipes: Pipes, state: pipeline.PipelineState, piece: Piece) -> pipeline.PipelineState:
    """The piece's tiles, unread: the other warpgroup's rows are all that there are."""
    for _ in cutlass.range(piece.first, piece.last, unroll=1):
        for pipe in pipes:
            pipe.consumer_wait(state)
            tma.release(pipe, state)
        state.advance()
    return state


@cute.jit
def step(tile: Tile, shared: Shared, state: pipeline.PipelineState, n0: Int32, config: Constexpr[Config]):
    """S = Q K^T of a tile, softmax, O += P V."""
    pipes = shared.pipes
    acc_S = issue_scores(tile, pipes, state, config)
    warpgroup.wait_group(0)
    tma.release(pipes.k, state)
    change(acc_S, tile, shared, n0, config)
    if n0 < tile.free[0] or n0 + config.tile_n > tile.free[1]:
        rows.hide(acc_S, n0, tile.b, tile.sequence, tile.unit, shared.shape, config)
    rescale = scores.online_softmax(acc_S, tile.state, shared.changes, False, config)
    fragments.round_into(tile.P, acc_S)
    fragments.scale_rows(tile.acc_O, rescale)
    clear_values(tile, shared, state, n0, config)
    issue_values(tile, state)
    warpgroup.wait_group(0)
    tma.release(pipes.v, state)


@cute.jit
def first_scores(tile: Tile, shared: Shared, state: pipeline.PipelineState, n0: Int32, config: Constexpr[Config]):
    """S of a piece's first tile, and its softmax."""
    acc_S = issue_scores(tile, shared.pipes, state, config)
    warpgroup.wait_group(0)
    tma.release(shared.pipes.k, state)
    change(acc_S, tile, shared, n0, config)
    if n0 < tile.free[0] or n0 + config.tile_n > tile.free[1]:
        rows.hide(acc_S, n0, tile.b, tile.sequence, tile.unit, shared.shape, config)
    rescale = scores.online_softmax(acc_S, tile.state, shared.changes, False, config)
    if const_expr(config.onto):  # otherwise O is 0
        fragments.scale_rows(tile.acc_O, rescale)
    fragments.round_into(tile.P, acc_S)
    clear_values(tile, shared, state, n0, config)


@cute.jit
def steps(
    tile: Tile, shared: Shared, state: pipeline.PipelineState, first: Int32, last: Int32, masked: Constexpr[bool], config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """The tiles [first, last), each begun under the end of the one before it."""
    for n in cutlass.range(first, last, unroll=1):
        state = overlapped_step(tile, shared, state, n * config.tile_n, masked, config)
    return state


@cute.jit
def overlapped_step(
    tile: Tile, shared: Shared, state: pipeline.PipelineState, n0: Int32, masked: Constexpr[bool], config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """S of the tile from key n0 on and O += P V of the tile before it, both in flight at once; softmax of the one under the other.

    Terms are added up in the order of `step`. A branch between the waits would have ptxas wait for O before the softmax.
    """
    before, pipes = state.clone(), shared.pipes
    state.advance()
    acc_S = issue_scores(tile, pipes, state, config)
    pipes.v.consumer_wait(before)
    issue_values(tile, before)
    warpgroup.wait_group(1)  # S is there, O is not
    tma.release(pipes.k, state)
    change(acc_S, tile, shared, n0, config)
    if const_expr(masked):
        rows.hide(acc_S, n0, tile.b, tile.sequence, tile.unit, shared.shape, config)
    rescale = scores.online_softmax(acc_S, tile.state, shared.changes, False, config)
    warpgroup.wait_group(0)
    tma.release(pipes.v, before)
    fragments.round_into(tile.P, acc_S)
    fragments.scale_rows(tile.acc_O, rescale)
    if const_expr(masked):
        clear_values(tile, shared, state, n0, config)
    return state


@cute.jit
def issue_scores(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, config: Constexpr[Config]) -> cute.Tensor:
    """Issue S = Q K^T, into fresh registers."""
    acc_S = cute.make_rmem_tensor(tile.mma.qk.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    pipes.k.consumer_wait(state)
    fragments.product(tile.mma.qk, acc_S, tile.Q, tile.tSrK[None, None, None, state.index], False)
    return acc_S


@cute.jit
def issue_values(tile: Tile, state: pipeline.PipelineState):
    """Issue O += P V; V is there."""
    fragments.product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, state.index], True)


@cute.jit
def change(acc_S: cute.Tensor, tile: Tile, shared: Shared, n0: Int32, config: Constexpr[Config]):
    """What is done to a tile's scores before the softmax, but for the mask."""
    if const_expr(config.scales[0] == "head"):
        acc_S.store(acc_S.load() * tile.k_scale)
    if const_expr(config.modified):
        keys = rows.keys_of(tile.sequence, tile.unit, shared.shape, config)
        rows.modify(acc_S, n0, keys, tile.slopes, shared.changes, shared.shape.turns, config)


@cute.jit
def clear_values(tile: Tile, shared: Shared, state: pipeline.PipelineState, n0: Int32, config: Constexpr[Config]):
    """When V is there: 0 for what no row sees."""
    shared.pipes.v.consumer_wait(state)
    if n0 < tile.piece.begin or n0 + config.tile_n > tile.piece.end:
        rows.clear_values(shared.sm.V_by_token[None, None, state.index].iterator.toint(), n0, tile.piece, config)
