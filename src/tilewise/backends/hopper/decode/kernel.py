"""Flash decode: one launch of one thread block a multiprocessor, whose shares of all sequences' key tiles are equal (scheduler.py).

Two warps load, one K and one V (loads.py), into a ring deep enough to keep memory busy while a warpgroup multiplies, takes the softmax, begins and
ends units. The rows of a tile are the query tokens of a sequence times the heads that share a key head. Q goes straight to registers, O straight
to memory, or where a unit lies in several blocks by way of merge.py. Nothing here depends on a number that the host would have to read.
Predicted bottleneck: HBM; a tile of 128 keys at head_dim 128 takes 5,000 clocks to arrive, and half of that to be worked on.

Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from collections.abc import Callable
from typing import NamedTuple

from tilewise.backends.hopper.decode import loads, merge, rows, scheduler, widen
from tilewise.backends.hopper.decode.config import TILE_M, Config
from tilewise.backends.hopper.decode.operands import Lengths, Prior, Tensors, Window, Work
from tilewise.backends.hopper.decode.rows import Unit
from tilewise.backends.hopper.decode.scheduler import Piece, Place, Sequence, Shape
from tilewise.backends.hopper.forward import scores
from tilewise.backends.hopper.operands import Scores
from tilewise.sm90 import fragments, tma, wgmma
from tilewise.sm90.dsl import (
    Constexpr,
    CUstream,
    Float32,
    Int32,
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
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (head_dim_v, tile_n, kv_stages)
    V_by_token: cute.Tensor  # (tile_n, head_dim_v, kv_stages): the same memory
    told: cute.Tensor  # (2,) int32: what one thread tells the others


class Shared(NamedTuple):
    """What units have in common."""

    tensors: Tensors
    shape: Shape
    work: Work
    ending: merge.Ending
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
    kernel(*loaded, tensors, shape, work, prior, changes, products(config, dtype), wgmma.layout_K(config, dtype), wgmma.layout_V(config, dtype),
           config).launch(
        grid=(work.columns, work.blocks, 1),
        block=(3 * THREADS if config.three else THREADS + 2 * config.loaders * WARP, 1, 1),
        min_blocks_per_mp=config.blocks,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


def products(config, dtype) -> wgmma.Mma:
    """As those of the ladder, with Q from registers."""
    k = OperandMajorMode.K
    qk = sm90.make_trivial_tiled_mma(
        dtype, dtype, k, k, Float32, (config.consumers, 1, 1), (64, config.tile_n), warpgroup.OperandSource.RMEM
    )
    return wgmma.Mma(qk, wgmma.product_of(config, config.head_dim_v, dtype))


@cute.kernel
def kernel(
    load_K: tma.Tma, load_V: tma.Tma, tensors: Tensors, shape: Shape, work: Work, prior: Prior | None, changes: Scores, mma: wgmma.Mma,
    layout_K: cute.ComposedLayout, layout_V: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = allocate(storage, tensors.Q.element_type, (layout_K, layout_V), config)
    for each in (load_K, load_V):
        cpasync.prefetch_descriptor(each.atom)
    bytes_of_stage = (config.dtype.itemsize * config.tile_n * dim for dim in (config.head_dim, config.head_dim_v))
    pipes = Pipes(*(tma.make_pipe(storage, config.kv_stages, size, config.threads // WARP) for size in bytes_of_stage))
    raw = allocate_raw(storage, tensors.K.element_type, config) if config.widens else None
    tma.barriers_ready()
    arch.griddepcontrol_wait()  # what kernels before this one wrote, it may read
    arch.griddepcontrol_launch_dependents()
    warp = arch.make_warp_uniform(arch.warp_idx())
    shared = Shared(tensors, shape, work, merge.Ending(changes.sink, prior), changes, mma, sm, pipes)
    if const_expr(config.widens):
        if warp < WARPS:
            arch.setmaxregister_increase(config.registers[0])
            consume(attend, shared, config)
        elif warp < 2 * WARPS:
            arch.setmaxregister_decrease(config.registers[1])
            load(load_K, load_V, tensors, (raw.K, raw.V), raw.pipes, shape, warp - WARPS, config)
        else:
            arch.setmaxregister_decrease(config.registers[2])
            widen.widen(tensors, (raw.K, raw.V), (sm.K, sm.V_by_token), raw.pipes, pipes, raw.scales, shape, config)
    elif warp < config.threads // WARP:
        if const_expr(config.consumers > 1):
            arch.setmaxregister_increase(config.registers[0])
        consume(attend, shared, config)
    else:
        if const_expr(config.consumers > 1):
            arch.setmaxregister_decrease(config.registers[-1])
        load(load_K, load_V, tensors, (sm.K, sm.V_by_token), pipes, shape, warp - config.threads // WARP, config)


@cute.jit
def load(
    load_K: tma.Tma, load_V: tma.Tma, tensors: Tensors, to: tuple, pipes: Pipes, shape: Shape, warp: Int32, config: Constexpr[Config]
):  # fmt: skip
    """By the warp-th of those that load."""
    if warp < config.loaders:
        loads.produce(load_K, tensors.K, to[0], pipes.k, shape, warp, 0, config.head_dim, config)
    elif warp < 2 * config.loaders:
        loads.produce(load_V, tensors.V, to[1], pipes.v, shape, warp - config.loaders, 1, config.head_dim_v, config)


@cute.jit
def allocate_raw(storage: SmemAllocator, dtype, config: Constexpr[Config]) -> Raw:
    dims, stages = (config.head_dim, config.head_dim_v), config.raw_stages
    layouts = [cute.make_layout((config.tile_n, dim, stages), stride=(dim, 1, config.tile_n * dim)) for dim in dims]
    sK, sV = (storage.allocate_tensor(dtype, layout, 128) for layout in layouts)
    scales = storage.allocate_tensor(Float32, cute.make_layout(config.tile_n), 16)
    return Raw(sK, sV, scales, Pipes(*(tma.make_pipe(storage, stages, config.tile_n * dim, WARPS) for dim in dims)))


@cute.jit
def allocate(storage: SmemAllocator, dtype, layouts: tuple, config: Constexpr[Config]) -> Smem:
    sK, sV = (storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in layouts)
    told = storage.allocate_tensor(Int32, cute.make_layout(2), 16)
    by_token = sm90.make_smem_layout_b(wgmma.K_MAJOR, (config.tile_m, config.tile_n, config.head_dim_v), dtype, config.kv_stages)
    return Smem(sK, sV, cute.make_tensor(sV.iterator, by_token.outer), told)


class Tile(NamedTuple):
    """What a thread holds of its unit from beginning to end."""

    mma: wgmma.Mma
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    b: Int32
    k_scale: Float32 | None  # of all keys
    Q: cute.Tensor
    P: cute.Tensor
    acc_O: cute.Tensor
    state: fragments.Rows
    unit: Unit
    slopes: cute.Tensor | None
    sequence: Sequence
    piece: Piece
    free: tuple[Int32, Int32]  # keys that all rows see


@cute.jit
def consume(attend: Constexpr[Callable], shared: Shared, config: Constexpr[Config]):
    """A warpgroup: unit after unit of the block's share. attend: what it does with a piece."""
    state, shape = tma.at_first(config.kv_stages), shared.shape
    shares = scheduler.shares_of(shape, config)
    b, start, at = scheduler.locate(shares, shape, config)
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
    tensors, shape, work, ending, changes, mma, sm, pipes = shared
    unit = rows.unit_of(b, piece, sequence, shape, config)
    qk, pv = (x.get_slice(arch.thread_idx()[0]) for x in mma)
    all_qk, all_pv = (wgmma.of_warpgroup(x, 0) for x in mma)
    tile = Tile(
        mma=mma,
        tSrK=all_qk.make_fragment_B(all_qk.partition_B(sm.K)),
        tOrV=all_pv.make_fragment_B(all_pv.partition_B(sm.V)),
        b=b,
        k_scale=tensors.k_scale[b, piece.head_k] if const_expr(config.scales[0] == "head") else None,
        Q=qk.make_fragment_A(qk.partition_shape_A((config.tile_m, config.head_dim))),
        P=pv.make_fragment_A(pv.partition_shape_A((config.tile_m, config.tile_n))),
        acc_O=cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.head_dim_v)), Float32),
        state=fragments.fresh_rows(),
        unit=unit,
        slopes=rows.slopes_of(changes, b, unit, config) if const_expr(config.alibi) else None,
        sequence=sequence,
        piece=piece,
        free=rows.free_of(sequence, unit, shape, config),
    )
    rows.load_queries(tile.Q, tensors, unit, sequence, config)
    tile.acc_O.fill(0.0)
    last = piece.last
    if const_expr(config.consumers > 1):  # the other warpgroup's rows may be all that there are
        last = piece.last if unit.rows > arch.make_warp_uniform(arch.warp_idx()) // WARPS * TILE_M else piece.first
    for n in cutlass.range(piece.first, last, unroll=1):
        step(tile, shared, state, n * config.tile_n, config)
        state.advance()
    if const_expr(config.consumers > 1):
        for _ in cutlass.range(last, piece.last, unroll=1):
            for pipe in pipes:
                pipe.consumer_wait(state)
                tma.release(pipe, state)
            state.advance()
    lse, inverse = scores.close(tile.state, scores.Terms(None, None, None, None), config)
    if const_expr(config.scales[1] == "head"):
        for r in range_constexpr(fragments.ROWS):
            inverse[r] *= tensors.v_scale[b, piece.head_k]
    fragments.scale_rows(tile.acc_O, inverse)
    if piece.count == 1:
        merge.store(tile.acc_O, lse, tensors, ending, unit, config)
    else:
        merge.together(tile.acc_O, lse, tensors, work, ending, sm.told, piece, unit, shape, config)
    return state


@cute.jit
def step(tile: Tile, shared: Shared, state: pipeline.PipelineState, n0: Int32, config: Constexpr[Config]):
    """S = Q K^T of a tile, softmax, O += P V."""
    sequence, free, pipes, changes = tile.sequence, tile.free, shared.pipes, shared.changes
    acc_S = cute.make_rmem_tensor(tile.mma.qk.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    pipes.k.consumer_wait(state)
    fragments.product(tile.mma.qk, acc_S, tile.Q, tile.tSrK[None, None, None, state.index], False)
    warpgroup.wait_group(0)
    tma.release(pipes.k, state)
    if const_expr(config.scales[0] == "head"):
        acc_S.store(acc_S.load() * tile.k_scale)
    if const_expr(config.modified):
        rows.modify(acc_S, n0, rows.keys_of(sequence, tile.unit, shared.shape, config), tile.slopes, changes, config)
    if n0 < free[0] or n0 + config.tile_n > free[1]:
        keys = rows.keys_of(sequence, tile.unit, shared.shape, config)  # anew: few tiles need them, and registers are scarce
        rows.hide(acc_S, keys, n0)
        if const_expr(config.tree):
            rows.hide_in_tree(acc_S, keys, n0, tile.b, sequence.length, shared.shape.lengths.tree)
    rescale = scores.online_softmax(acc_S, tile.state, changes, False, config)
    fragments.round_into(tile.P, acc_S)
    fragments.scale_rows(tile.acc_O, rescale)
    pipes.v.consumer_wait(state)
    if n0 < tile.piece.begin or n0 + config.tile_n > tile.piece.end:
        rows.clear_values(shared.sm.V_by_token[None, None, state.index].iterator.toint(), n0, tile.piece, config)
    fragments.product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, state.index], True)
    warpgroup.wait_group(0)
    tma.release(pipes.v, state)
