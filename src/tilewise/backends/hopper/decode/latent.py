"""Flash decode of a latent cache, as MLA's absorbed form has it: V is the first columns of K, so a tile is read once and multiplied twice.

As kernel.py, with one ring of tiles of K (64 tokens x 576, 72 KB: two stages), Q in shared memory, and two warpgroups. O of 64 rows is 64 x 512, for
which a thread has 128 registers in each of them: the left one has the first half of O's columns, the right one the second. The left one computes S,
the softmax and P, and hands P and the factors of O's rows over through shared memory; then both multiply P with their half of the tile's columns.
In clocks of a multiprocessor: Q K^T 1,152, P V 1,024, softmax and exchange about 500; were S computed by both, products alone would take 3,328.
The tile takes 5,670 to arrive from memory. With two tiles of rows (128 heads) two thread blocks read it side by side, one from the L2 cache.

Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from enum import IntEnum
from typing import NamedTuple

from tilewise.backends.hopper.decode import beginning, loads, merge, rows, scheduler
from tilewise.backends.hopper.decode import kernel as decode
from tilewise.backends.hopper.decode.config import WARPGROUP, Config
from tilewise.backends.hopper.decode.operands import Lengths, Prior, Tensors, Work
from tilewise.backends.hopper.decode.rows import Unit
from tilewise.backends.hopper.decode.scheduler import Piece, Sequence, Shape
from tilewise.backends.hopper.operands import Scores
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.tables.window import Window
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
from tilewise.sm90.pointers import known

WARP, COMPUTING = 32, 2 * WARPGROUP  # threads
LEFT, RIGHT, LOADER = 248, 208, 48  # registers of a thread
WIDE, BYTES = 8, 16  # elements that a thread moves at a time, and their bytes
ABREAST = 9  # pieces of Q that a thread has on their way at a time, at most


class Barrier(IntEnum):
    """Named barriers; rows.py and arrivals.py have those before."""

    HANDED = 5  # the left warpgroup has handed over what the right one reads
    TAKEN = 6  # which has read it
    QUERIES = 7


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: tuple  # of both halves: (head_dim_v / 2, tile_n, kv_stages), of the same memory
    P: cute.Tensor  # (tile_m, tile_n)
    factors: cute.Tensor  # (2, tile_m) fp32: of O's rows; at the end also their log-sum-exp
    broadcast: cute.Tensor  # (2,) int32: what one thread tells the others
    unit: cute.Tensor  # (fields, warps) int32: of a unit, what registers are too few for


class Mma(NamedTuple):
    qk: cute.TiledMma
    left: cute.TiledMma  # P from registers
    right: cute.TiledMma  # P from shared memory


class Pipes(NamedTuple):
    """Of the columns that the left warpgroup multiplies with, which it alone reads, and of the others."""

    left: pipeline.PipelineTmaAsync
    rest: pipeline.PipelineTmaAsync


class Shared(NamedTuple):
    """What units have in common."""

    tensors: Tensors
    shape: Shape
    work: Work
    prior: Prior | None
    changes: Scores
    mma: Mma
    sm: Smem
    pipes: Pipes


@cute.jit
def launch(
    tensors: Tensors, lengths: Lengths, work: Work, window: Window, prior: Prior | None, changes: Scores, config: Constexpr[Config], stream: CUstream
):  # fmt: skip
    mK = tensors.K
    dtype, tokens = mK.element_type, cute.make_tensor(mK.iterator, cute.select(mK.layout, mode=[1, 3, 2, 0]))
    loaded = loads.describe(tokens, config.head_dim, config)
    shape = scheduler.shape_of(tensors, lengths, work, window, prior, config)
    layouts = wgmma.layout_Q(config, dtype), wgmma.layout_K(config, dtype), layout_P(config, dtype)
    kernel(loaded, tensors, shape, work, prior, changes, products(config, dtype), *layouts, config).launch(
        grid=(work.columns, work.blocks, 1), block=(COMPUTING + WARPGROUP, 1, 1), stream=stream, use_pdl=True
    )


def layout_P(config, dtype) -> cute.ComposedLayout:
    """(tile_m, tile_n, 1)"""
    return sm90.make_smem_layout_a(wgmma.K_MAJOR, (config.tile_m, config.tile_n, config.tile_n), dtype, 1)


def products(config, dtype) -> Mma:
    k, mn, smem = OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.SMEM
    one, half = (1, 1, 1), (64, config.columns_of_O)
    return Mma(
        sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, one, (64, config.tile_n), smem),
        sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, one, half, warpgroup.OperandSource.RMEM),
        sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, one, half, smem),
    )


@cute.kernel
def kernel(
    load_K: tma.Tma, tensors: Tensors, shape: Shape, work: Work, prior: Prior | None, changes: Scores, mma: Mma, layout_Q: cute.ComposedLayout,
    layout_K: cute.ComposedLayout, layout_P: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = allocate(storage, tensors.K.element_type, (layout_Q, layout_K, layout_P), config)
    cpasync.prefetch_descriptor(load_K.atom)
    bytes_of_columns = config.dtype.itemsize * config.tile_n
    pipes = Pipes(
        tma.make_pipe(storage, config.kv_stages, bytes_of_columns * config.columns_of_O, WARPGROUP // WARP),
        tma.make_pipe(storage, config.kv_stages, bytes_of_columns * (config.head_dim - config.columns_of_O), COMPUTING // WARP),
    )
    tma.barriers_ready()
    decode.follow(prior, config)
    warp, begin = arch.make_warp_uniform(arch.warp_idx()), scheduler.start_of(shape, config)
    shared = Shared(tensors, shape, work, prior, changes, mma, sm, pipes)
    if warp < WARPGROUP // WARP:
        arch.setmaxregister_increase(LEFT)
        decode.consume(attend_left, shared, begin, config)
    elif warp < COMPUTING // WARP:
        arch.setmaxregister_increase(RIGHT)
        decode.consume(attend_right, shared, begin, config)
    else:
        arch.setmaxregister_decrease(LOADER)
        if warp == COMPUTING // WARP:
            loads.produce(load_K, tensors.K, sm.K, pipes, shape, begin, Int32(0), 0, config.head_dim, config)


@cute.jit
def allocate(storage: SmemAllocator, dtype, layouts: tuple, config: Constexpr[Config]) -> Smem:
    sQ, sK, sP = (storage.allocate_tensor(dtype, x.outer, 1024, swizzle=x.inner) for x in layouts)
    factors = storage.allocate_tensor(Float32, cute.make_layout((2, config.tile_m), stride=(config.tile_m, 1)), 16)
    broadcast = storage.allocate_tensor(Int32, cute.make_layout(2), 16)
    numbers = len(Sequence._fields) + len(Piece._fields)
    unit = storage.allocate_tensor(Int32, cute.make_layout((numbers, COMPUTING // WARP)), 16)
    return Smem(sQ[None, None, 0], sK, halves_of(sK, config), sP[None, None, 0], factors, broadcast, unit)


def halves_of(sK: cute.Tensor, config) -> tuple:
    """V's, in K's memory: blocks of 64 columns, each a token after another, which is how a product reads a half with its columns as N."""
    tile = config.tile_m, config.columns_of_O, config.tile_n
    half = sm90.make_smem_layout_b(wgmma.MN_MAJOR, tile, sK.element_type, 1).outer
    stages = cute.make_layout(config.kv_stages, stride=config.tile_n * config.head_dim)
    layout = cute.append(cute.select(half, mode=[0, 1]), stages)
    return tuple(cute.make_tensor(sK.iterator + i * config.columns_of_O * config.tile_n, layout) for i in range(2))


class Left(NamedTuple):
    """What a thread of the left warpgroup holds of its unit from beginning to end."""

    mma: Mma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    b: Int32
    P: cute.Tensor
    acc_O: cute.Tensor
    state: fragments.Rows
    slopes: cute.Tensor | None
    kept: cute.Tensor  # this warp's
    there: tuple[Int32, Int32]  # keys that some row sees
    free: tuple[Int32, Int32]  # and that all do


@cute.jit
def attend_left(
    shared: Shared, state: pipeline.PipelineState, b: Int32, piece: Piece, sequence: Sequence, config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """A piece of a unit: scores and probabilities of its tiles, and the first half of O."""
    shape, changes, mma, sm = shared.shape, shared.changes, shared.mma, shared.sm
    unit = rows.unit_of(b, piece, sequence, shape, config)
    pv, all_qk, all_pv = mma.left.get_slice(arch.thread_idx()[0]), wgmma.of_warpgroup(mma.qk, 0), wgmma.of_warpgroup(mma.left, 0)
    tile = Left(
        mma=mma,
        tSrQ=all_qk.make_fragment_A(all_qk.partition_A(sm.Q)),
        tSrK=all_qk.make_fragment_B(all_qk.partition_B(sm.K)),
        tOrV=all_pv.make_fragment_B(all_pv.partition_B(sm.V[0])),
        b=b,
        P=pv.make_fragment_A(pv.partition_shape_A((config.tile_m, config.tile_n))),
        acc_O=cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.columns_of_O)), Float32),
        state=fragments.fresh_rows(),
        slopes=rows.slopes_of(changes, b, unit, config) if const_expr(config.alibi) else None,
        kept=sm.unit[None, arch.warp_idx()],
        there=(piece.begin, piece.end),
        free=rows.free_of(sequence, unit, shape, config),
    )
    keep(tile.kept, sequence, piece)
    load_queries(sm.Q, shared.tensors, unit, config)
    beginning.of_piece(tile.acc_O, tile.state, shared.prior, piece, unit, config)
    for n in cutlass.range(piece.first, piece.last, unroll=1):
        step_left(tile, shared, state, n * config.tile_n, config)
        state.advance()
    lse, inverse = scores.close(tile.state, scores.Terms(None, None, None, None), config)
    hand_over((inverse, lse), None, sm, config)
    fragments.scale_rows(tile.acc_O, inverse)
    end(tile.acc_O, lse, shared, b, tile.kept, 0, config)
    return state


@cute.jit
def step_left(tile: Left, shared: Shared, state: pipeline.PipelineState, n0: Int32, config: Constexpr[Config]):
    """S = Q K^T of a tile, softmax, O += P V of the left half."""
    (begin, last), (free_begin, free_last), changes, sm, shape = tile.there, tile.free, shared.changes, shared.sm, shared.shape
    acc_S, pipes = cute.make_rmem_tensor(tile.mma.qk.partition_shape_C((config.tile_m, config.tile_n)), Float32), shared.pipes
    tSrK, half, steps = tile.tSrK[None, None, None, state.index], const_expr(config.columns_of_O // 16), const_expr(config.head_dim // 16)
    pipes.left.consumer_wait(state)
    multiply(tile.mma.qk, acc_S, tile.tSrQ, tSrK, 0, half)
    pipes.rest.consumer_wait(state)
    multiply(tile.mma.qk, acc_S, tile.tSrQ, tSrK, half, steps)
    warpgroup.wait_group(0)
    if const_expr(config.modified):
        of_sequence, unit, _ = kept_of(tile.kept, tile.b, shape, config)
        rows.modify(acc_S, n0, rows.keys_of(of_sequence, unit, shape, config), tile.slopes, changes, shape.turns, config)
    if n0 < free_begin or n0 + config.tile_n > free_last:
        hide(acc_S, n0, tile, shape, config)
    rescale = scores.online_softmax(acc_S, tile.state, changes, False, config)
    fragments.round_into(tile.P, acc_S)
    if n0 < begin or n0 + config.tile_n > last:
        clear(sm.K[None, None, state.index], n0, tile, shape, config)
    hand_over((rescale,), tile.P, sm, config)
    tma.release(pipes.rest, state)
    fragments.scale_rows(tile.acc_O, rescale)
    fragments.product(tile.mma.left, tile.acc_O, tile.P, tile.tOrV[None, None, None, state.index], True)
    warpgroup.wait_group(0)
    tma.release(pipes.left, state)


@cute.jit
def multiply(mma: cute.TiledMma, acc_S: cute.Tensor, a: cute.Tensor, b: cute.Tensor, first: Constexpr[int], last: Constexpr[int]):
    """The steps [first, last) of `fragments.product`, so that a part of a tile is multiplied while the rest is on its way."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in range_constexpr(first, last):
        atom.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(atom, acc_S, a[None, None, k], b[None, None, k], acc_S)
    warpgroup.commit_group()


@cute.jit
def hide(acc_S: cute.Tensor, n0: Int32, tile: Left, shape: Shape, config: Constexpr[Config]):
    sequence, unit, _ = kept_of(tile.kept, tile.b, shape, config)
    rows.hide(acc_S, n0, tile.b, sequence, unit, shape, config)


@cute.jit
def clear(sK: cute.Tensor, n0: Int32, tile: Left, shape: Shape, config: Constexpr[Config]):
    _, _, piece = kept_of(tile.kept, tile.b, shape, config)
    rows.clear_values(sK.iterator.toint(), n0, piece, config)


@cute.jit
def hand_over(factors: tuple, P: cute.Tensor | None, sm: Smem, config: Constexpr[Config]):
    """Factors of this thread's rows, (ROWS,) fp32 each, and P, as the product reads it from registers: words of two elements, in the order (row, 8
    columns). Rows of 128 bytes lie in shared memory with their pieces of 16 bytes swizzled by the row's number, so no two lanes meet in a bank.
    """
    arch.barrier(barrier_id=Barrier.TAKEN, number_of_threads=COMPUTING)
    lane = arch.lane_idx() % fragments.QUAD
    for r in range_constexpr(fragments.ROWS):
        row = rows.row_of(r, config)
        if const_expr(P is not None):
            words, first = cute.recast_tensor(P, Int32), sm.P.iterator.toint() + row * (8 * BYTES) + lane * 4
            for c in range_constexpr(cute.size(words) // fragments.ROWS):
                address = first + (c ^ (row % 8)) * BYTES
                arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, words[r + fragments.ROWS * c]])
        if lane == 0:
            for i in range_constexpr(len(factors)):
                sm.factors[i, row] = factors[i][r]
    arch.fence_proxy("async.shared", space="cta")
    arch.barrier_arrive(barrier_id=Barrier.HANDED, number_of_threads=COMPUTING)


@cute.jit
def attend_right(
    shared: Shared, state: pipeline.PipelineState, b: Int32, piece: Piece, sequence: Sequence, config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """The second half of O."""
    sm, mma = shared.sm, shared.mma.right
    unit, kept = rows.unit_of(b, piece, sequence, shared.shape, config), sm.unit[None, arch.warp_idx()]
    pv, all_pv = mma.get_slice(arch.thread_idx()[0] - WARPGROUP), wgmma.of_warpgroup(mma, 0)
    tOrP, tOrV = all_pv.make_fragment_A(all_pv.partition_A(sm.P)), all_pv.make_fragment_B(all_pv.partition_B(sm.V[1]))
    acc_O = cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.columns_of_O)), Float32)
    load_queries(sm.Q, shared.tensors, unit, config)
    keep(kept, sequence, piece)
    beginning.of_piece(acc_O, None, shared.prior, piece, unit, config, config.columns_of_O)
    arch.barrier_arrive(barrier_id=Barrier.TAKEN, number_of_threads=COMPUTING)
    for _ in cutlass.range(piece.first, piece.last, unroll=1):
        (rescale,) = take(1, sm, config)
        fragments.scale_rows(acc_O, rescale)
        shared.pipes.rest.consumer_wait(state)
        fragments.product(mma, acc_O, tOrP, tOrV[None, None, None, state.index], True)
        warpgroup.wait_group(0)
        arch.barrier_arrive(barrier_id=Barrier.TAKEN, number_of_threads=COMPUTING)
        tma.release(shared.pipes.rest, state)
        state.advance()
    inverse, lse = take(2, sm, config)
    fragments.scale_rows(acc_O, inverse)
    end(acc_O, lse, shared, b, kept, config.columns_of_O, config)
    return state


@cute.jit
def take(count: Constexpr[int], sm: Smem, config: Constexpr[Config]) -> tuple:
    """`hand_over`'s factors."""
    arch.barrier(barrier_id=Barrier.HANDED, number_of_threads=COMPUTING)
    factors = tuple(cute.make_rmem_tensor(fragments.ROWS, Float32) for _ in range(count))
    for r in range_constexpr(fragments.ROWS):
        for i in range_constexpr(count):
            factors[i][r] = sm.factors[i, rows.row_of(r, config)]
    return factors


@cute.jit
def load_queries(sQ: cute.Tensor, tensors: Tensors, unit: Unit, config: Constexpr[Config]):
    """Q to shared memory, by both warpgroups, 0 in rows and columns that there are not: blocks of 64 columns, each row after row, swizzled as P.

    Nobody reads the queries of the unit before: the left warpgroup handed its last factors over when it had.
    """
    mQ, per_row = tensors.Q, const_expr(config.head_dim // WIDE)
    turns = const_expr(config.tile_m * per_row // COMPUTING)
    at_once = const_expr(max(n for n in range(1, ABREAST + 1) if turns % n == 0))
    fetched = cute.make_rmem_tensor((WIDE, at_once), mQ.element_type)
    for batch in cutlass.range(turns // at_once, unroll=1):
        fetched.fill(0.0)
        for i in range_constexpr(at_once):
            which = (batch * at_once + i) * COMPUTING + arch.thread_idx()[0]
            row, column = which // per_row, which % per_row * WIDE
            if row < unit.rows and column < mQ.shape[3]:
                token, head = rows.place_of(row, unit)
                source = known(mQ[unit.entry, unit.first_query + token, head, None].iterator + column, BYTES)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(WIDE)), fetched[None, i])
        words = cute.recast_tensor(fetched, Int32)
        for i in range_constexpr(at_once):
            which = (batch * at_once + i) * COMPUTING + arch.thread_idx()[0]
            row, piece = which // per_row, which % per_row
            to = sQ.iterator.toint() + ((piece // 8 * config.tile_m + row) * 8 + (piece % 8 ^ row % 8)) * BYTES
            arch.inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[to, *(words[w, i] for w in range(4))]
            )
    arch.fence_proxy("async.shared", space="cta")
    arch.barrier(barrier_id=Barrier.QUERIES, number_of_threads=COMPUTING)


@cute.jit
def keep(kept: cute.Tensor, sequence: Sequence, piece: Piece):
    """In shared memory, as registers are scarce. A thread reads what it wrote itself, or another one of its warp the same."""
    numbers = (*sequence[:-1], Int32(sequence.joins), *piece)
    arch.sync_warp()  # all have read those of the unit before
    for i in range_constexpr(len(numbers)):
        kept[i] = numbers[i]


@cute.jit
def kept_of(kept: cute.Tensor, b: Int32, shape: Shape, config: Constexpr[Config]) -> tuple[Sequence, Unit, Piece]:
    numbers, count = [kept[i] for i in range(cute.size(kept))], const_expr(len(Sequence._fields))
    sequence, piece = Sequence(*numbers[: count - 1], numbers[count - 1] != 0), Piece(*numbers[count:])
    return sequence, rows.unit_of(b, piece, sequence, shape, config), piece


@cute.jit
def end(
    acc_O: cute.Tensor, lse: cute.Tensor, shared: Shared, b: Int32, kept: cute.Tensor, column0: Constexpr[int], config: Constexpr[Config]
):
    """O of a piece, from column0 on, and its log-sum-exp."""
    tensors, shape, work, sink = shared.tensors, shared.shape, shared.work, shared.changes.sink
    _, unit, piece = kept_of(kept, b, shape, config)
    if piece.count == 1:
        merge.store(acc_O, lse, tensors, sink, unit, config, column0)
    else:
        merge.together(acc_O, lse, tensors, work, sink, shared.sm.broadcast, piece, unit, shape, config, column0)
