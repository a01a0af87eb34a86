"""Consumers of the backward pass on Hopper, for heads beyond 128: two warpgroups have the same 64 keys, and half of the columns each.

dK and dV of 64 keys and 256 columns fill the registers of two warpgroups, so S^T = K Q^T and P belong to the first, dP^T = V dO^T and dS to the
second. P goes through shared memory to the second, and both P and dS come from there for dV += P^T dO, dK += dS^T Q and dQ = dS K, of which each
warpgroup computes its columns.

The products of the next tile's scores are issued ahead of those for this tile's gradients, so that exponentials run under these.
"""

import math
from typing import NamedTuple

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.backward import epilogue
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.epilogue import Stores, WideStores
from tilewise.backends.hopper.backward.order import Block
from tilewise.backends.hopper.backward.parts import Shared, Tensors
from tilewise.backends.hopper.backward.tiles import (
    THREADS,
    WARP,
    Barrier,
    Mma,
    Pipes,
    Smem,
    add_vectors,
    place_of_sum,
    transposed,
)
from tilewise.backends.hopper.operands import Band
from tilewise.backends.hopper.scores import again as changed
from tilewise.backends.hopper.scores.again import per_query, probabilities
from tilewise.backends.hopper.scores.derivative import differentiate_by, subtract_delta
from tilewise.backends.hopper.visible.queries import Walk, hide_in, queries_of_rows, visit_in, walk_of_head
from tilewise.sm90 import fragments, tma
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    Float32,
    Int32,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    warp,
    warpgroup,
)


class Tile(NamedTuple):
    """What a consumer's thread holds of its tile from beginning to end."""

    mma: Mma
    tSrA: cute.Tensor  # descriptors: of K and Q in the first warpgroup, of V and dO in the second
    tSrB: cute.Tensor
    tVrP: cute.Tensor
    tVrdO: cute.Tensor
    tKrdS: cute.Tensor
    tKrQ: cute.Tensor
    tQrdS: cute.Tensor
    tQrK: tuple  # a piece each
    store: cute.TiledCopy  # of P in the first warpgroup, of dS in the second
    tOut: cute.Tensor
    load: cute.TiledCopy  # of P in the second, or of what stands in for it in dS
    tIn: cute.Tensor
    store_factor: cute.TiledCopy  # of that in the first, where it is not P
    tFactor: cute.Tensor
    statistics: cute.Tensor  # (2, tile_m / 8, stages): log-sum-exp in the first, -delta in the second
    tScS: cute.Tensor  # (key, query) of each element of S^T
    begin: cute.Tensor  # (ROWS,): of the queries that see this thread's keys, the first
    end: cute.Tensor
    visits: cute.Tensor | None  # (FIELDS, stages)
    n0: Int32
    band: Band
    acc_S: cute.Tensor  # or dP
    acc_dQ: cute.Tensor  # a piece
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    first: cute.Tensor
    sums: cute.Tensor  # of dQ: (heads of the group, m_blocks, .), from this thread's first element on
    scale_log2: Float32
    consumer: Int32
    thread: changed.Thread


class Place(NamedTuple):
    """A tile of queries. For "tiles" m_block is the number of visits of this head from here to the last, until the visit is there (`located`)."""

    head: Int32  # in the group
    m_block: Int32


@cute.jit
def consume(
    shared: Shared, stores: Stores | WideStores, block: Block, walk: Walk, consumer: Int32, scores: Constexpr[bool], config: Constexpr[Config]
):  # fmt: skip
    """`scores`: the first warpgroup, which has S and P; the other one has dP and dS."""
    tensors, sm, pipes, mma, band, (scale, scale_log2) = shared
    thread = arch.thread_idx()[0] - THREADS
    tile = make_tile(tensors, sm, mma, block, band, scale_log2, thread, consumer, scores, config)
    tile.acc_dK.fill(0.0)
    tile.acc_dV.fill(0.0)
    pipes.k.consumer_wait(tma.at_first(1))
    pipes.v.consumer_wait(tma.at_first(1))
    tiles, place = beginning(tensors, block, band, walk, config)
    if const_expr(config.separate_dq_kernel):
        state = before = tma.at_first(config.stages)
        for i in cutlass.range(tiles, unroll=1):
            before = step_apart(tile, pipes, state, before, i > 0, place, walk, scores, config)
            state.advance()
            place = next_place(place, tensors, block, band, walk, config)
        warpgroup.wait_group(0)
    elif tiles > 0:
        state = tma.at_first(config.stages)
        (pipes.q if const_expr(scores) else pipes.do).consumer_wait(state)
        issue_scores(tile, state)
        warpgroup.wait_group(0)
        pass_on(tile, state, place, walk, scores, config)
        for _i in cutlass.range(tiles - 1, unroll=1):
            after = next_place(place, tensors, block, band, walk, config)
            state = step(tile, pipes, state, place, after, walk, scores, True, config)
            place = after
        step(tile, pipes, state, place, place, walk, scores, False, config)
    epilogue.write(tensors, stores, tile.acc_dK, tile.acc_dV, sm, mma, block, scale, config)


@cute.jit
def make_tile(
    tensors: Tensors, sm: Smem, mma: Mma, block: Block, band: Band, scale_log2: Float32, thread: Int32, consumer: Int32,
    scores: Constexpr[bool], config: Constexpr[Config],
) -> Tile:  # fmt: skip
    s, (dv, dk, dq) = mma.s.get_slice(0), (x.get_slice(consumer * THREADS) for x in (mma.dv, mma.dk, mma.dq))
    store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(not scores, 4), sm.dS.element_type), mma.s)
    store_factor = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), sm.dS.element_type), mma.s)
    load = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(config.own_factor, 4), sm.dS.element_type), mma.s)
    own = thread % THREADS
    tScS = mma.s.get_slice(own).partition_C(cute.make_identity_tensor((config.tile_n, config.tile_m)))
    at = fragments.by_rows(tScS)
    begin, end = queries_of_rows(tScS, block.n0, band, config)
    pairs = cute.make_layout((2, config.tile_m // 8, config.stages), stride=(1, 8, config.tile_m))
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    sums = tensors.sum_dQ[block.batch, None, None, None]
    sums = cute.domain_offset((block.head_k * group, 0, own * 4), sums)
    shape_dQ = (64, config.dq_width * config.dq_grid[1])
    pieces = [cute.local_tile(transposed(sm.K)[None, None, 0], (shape_dQ[1], config.tile_n), (p, 0)) for p in range(config.dq_pieces)]
    pieces_of_K = tuple(dq.make_fragment_B(dq.partition_B(piece)) for piece in pieces)
    return Tile(
        mma=mma,
        tSrA=s.make_fragment_A(s.partition_A(sm.K if const_expr(scores) else sm.V))[None, None, None, 0],
        tSrB=s.make_fragment_B(s.partition_B(sm.Q if const_expr(scores) else sm.dO)),
        tVrP=dv.make_fragment_A(dv.partition_A(sm.P)),
        tVrdO=dv.make_fragment_B(dv.partition_B(transposed(sm.dO))),
        tKrdS=dk.make_fragment_A(dk.partition_A(transposed(sm.dS))),
        tKrQ=dk.make_fragment_B(dk.partition_B(transposed(sm.Q))),
        tQrdS=dq.make_fragment_A(dq.partition_A(sm.dS)),
        tQrK=pieces_of_K,
        store=store,
        tOut=store.get_slice(own).partition_D(sm.P if const_expr(scores) else transposed(sm.dS)),
        load=load,
        tIn=load.get_slice(own).partition_S(transposed(sm.dS) if const_expr(config.own_factor) else sm.P),
        store_factor=store_factor,
        tFactor=store_factor.get_slice(own).partition_D(transposed(sm.dS)),
        statistics=cute.make_tensor((sm.lse if const_expr(scores) else sm.minus_delta).iterator + at[0, 0][1], pairs),
        tScS=tScS,
        begin=begin,
        end=end,
        visits=sm.visits,
        n0=block.n0,
        band=band,
        acc_S=cute.make_rmem_tensor(s.partition_shape_C((config.tile_n, config.tile_m)), Float32),
        acc_dQ=cute.make_rmem_tensor(dq.partition_shape_C(shape_dQ), Float32),
        acc_dK=cute.make_rmem_tensor(dk.partition_shape_C((config.tile_n, config.head_dim)), Float32),
        acc_dV=cute.make_rmem_tensor(dv.partition_shape_C((config.tile_n, config.head_dim_v)), Float32),
        first=sm.first,
        sums=sums,
        scale_log2=scale_log2,
        consumer=consumer,
        thread=changed.thread_of(tensors, block, tScS, config),
    )


@cute.jit
def beginning(tensors: Tensors, block: Block, band: Band, walk: Walk, config: Constexpr[Config]) -> tuple[Int32, Place]:
    """How many tiles of queries the block visits, in all heads of the group, and the first of them."""
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    if const_expr(config.mask_kind != "tiles"):
        return (walk.last - walk.first) * group, Place(Int32(0), walk.start)
    tiles = Int32(0)
    for g in cutlass.range(group, unroll=1):
        own = walk_of_head(walk, block, block.head_k * group + g, band, config)
        tiles += own.last - own.first
    place = Place(Int32(-1), Int32(1))
    if tiles > 0:
        place = next_place(place, tensors, block, band, walk, config)
    return tiles, place


@cute.jit
def next_place(place: Place, tensors: Tensors, block: Block, band: Band, walk: Walk, config: Constexpr[Config]) -> Place:
    """The one after; after the last there may be any, which is none."""
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    head, m_block = place.head, place.m_block
    if const_expr(config.mask_kind == "tiles"):
        m_block -= 1
        while m_block == 0 and head + 1 < group:
            head += 1
            own = walk_of_head(walk, block, block.head_k * group + head, band, config)
            m_block = own.last - own.first
    else:
        head += 1
        if head == group:
            head, m_block = Int32(0), m_block + walk.step
    return Place(head, m_block)


@cute.jit
def located(tile: Tile, place: Place, stage: Int32, config: Constexpr[Config]) -> Place:
    """The place with its tile of queries, once Q is in its stage."""
    if const_expr(config.mask_kind == "tiles"):
        return Place(place.head, visit_in(tile.visits, stage).tile)
    return place


@cute.jit
def issue_scores(tile: Tile, state: pipeline.PipelineState):
    fragments.product(tile.mma.s, tile.acc_S, tile.tSrA, tile.tSrB[None, None, None, state.index], False)


@cute.jit
def pass_on(tile: Tile, state: pipeline.PipelineState, place: Place, walk: Walk, scores: Constexpr[bool], config: Constexpr[Config]):
    """S becomes P, or dP becomes dS, and goes to shared memory; then the other warpgroup is notified.

    A factor of dP - delta that is not the rounded P lies where each warp of the second warpgroup will put dS in its place.
    """
    shape = tile.acc_S.layout
    rounded = cute.make_rmem_tensor(shape, tile.tOut.element_type)
    if const_expr(scores):
        weights(tile, rounded, state.index, place, walk, config)
    else:
        statistics = per_query(tile.statistics, state.index)
        if const_expr(not config.dropout):
            subtract_delta(tile.acc_S, statistics, config)
        arch.barrier(barrier_id=Barrier.P, number_of_threads=2 * THREADS)  # P of this tile is there
        factor = received(tile, state.index)
        differentiate_by(tile.acc_S, factor, statistics, tile.thread.changes.draw, config)
        fragments.round_into(rounded, tile.acc_S)
    cute.copy(tile.store, tile.store.get_slice(0).retile(rounded), tile.tOut[None, None, None, state.index])
    arch.fence_proxy("async.shared", space="cta")
    arch.barrier(barrier_id=Barrier.OWN + tile.consumer, number_of_threads=THREADS)
    arch.barrier_arrive(barrier_id=Barrier.P if const_expr(scores) else Barrier.DS, number_of_threads=2 * THREADS)


@cute.jit
def received(tile: Tile, stage: Int32) -> cute.Tensor:
    """The factor of dP - delta that the first warpgroup left in shared memory, in the inputs' dtype: bf16 has the range that far keys take."""
    factor = cute.make_rmem_tensor(tile.acc_S.layout, tile.tOut.element_type)
    cute.copy(tile.load, tile.tIn[None, None, None, stage], tile.load.get_slice(0).retile(factor))
    return factor


@cute.jit
def weights(tile: Tile, rounded: cute.Tensor, stage: Int32, place: Place, walk: Walk, config: Constexpr[Config]):
    """S becomes P, enlarged and rounded; a factor of dP - delta that is not the rounded P goes to shared memory, enlarged too, and with dropout
    negative where it drops.
    """
    lse, m0, bits = changed.lse_of(tile.statistics, stage, config), Int32(0), None
    if const_expr(config.modified or config.dropout):
        m0 = located(tile, place, stage, config).m_block * config.tile_m
        if const_expr(config.dropout):
            bits = changed.kept_of(tile.thread, place.head, m0, tile.n0, config)
    if const_expr(config.modified):
        rest = changed.change(tile.acc_S, tile.thread, place.head, m0, config)
        hide_in(tile, tile.acc_S, tile.n0, stage, place.m_block, is_masked(place, walk), -float("inf"), config)
        changed.weigh(tile.acc_S, rest, rounded, lse, tile.scale_log2, bits, config)
    else:
        if const_expr(config.enlarged != 1.0):
            for c in range_constexpr(cute.size(lse)):
                lse[c] -= math.log2(config.enlarged)
        probabilities(tile.acc_S, lse, tile.scale_log2)
        hide_in(tile, tile.acc_S, tile.n0, stage, place.m_block, is_masked(place, walk), 0.0, config)
        if const_expr(config.dropout):
            changed.round_kept(rounded, tile.acc_S, bits)
        else:
            fragments.round_into(rounded, tile.acc_S)
    if const_expr(config.own_factor):
        factor = cute.make_rmem_tensor_like(rounded)
        for i in range_constexpr(cute.size(tile.acc_S)):
            if const_expr(config.modified):  # otherwise it is enlarged
                tile.acc_S[i] = changed.enlarge(tile.acc_S[i], config)
            if const_expr(config.dropout):
                tile.acc_S[i] = dropout.with_sign(tile.acc_S[i], dropout.in_columns(bits, i))
        fragments.round_into(factor, tile.acc_S)
        cute.copy(tile.store_factor, tile.store_factor.get_slice(0).retile(factor), tile.tFactor[None, None, None, stage])


@cute.jit
def is_masked(place: Place, walk: Walk) -> Boolean:
    return place.m_block < walk.free_first or place.m_block >= walk.free_last


@cute.jit
def step(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, place: Place, after: Place, walk: Walk,
    scores: Constexpr[bool], has_next: Constexpr[bool], config: Constexpr[Config],
):  # fmt: skip
    """The gradients of one tile of queries, and under their products the scores of the next. A stage is that of Q, dO, P and dS."""
    stage, upcoming = state.index, state.clone()
    upcoming.advance()
    if const_expr(has_next):
        (pipes.q if const_expr(scores) else pipes.do).consumer_wait(upcoming)
        issue_scores(tile, upcoming)
    (pipes.do if const_expr(scores) else pipes.q).consumer_wait(state)
    place = located(tile, place, stage, config)
    fragments.product(tile.mma.dv, tile.acc_dV, tile.tVrP[None, None, None, stage], tile.tVrdO[None, None, None, stage], True)
    if const_expr(scores):
        arch.barrier(barrier_id=Barrier.DS, number_of_threads=2 * THREADS)  # dS of this tile is there
    issue_dQ(tile, stage, 0)
    fragments.product(tile.mma.dk, tile.acc_dK, tile.tKrdS[None, None, None, stage], tile.tKrQ[None, None, None, stage], True)
    if const_expr(has_next):
        warpgroup.wait_group(3)
        pass_on(tile, upcoming, after, walk, scores, config)
    warpgroup.wait_group(1)  # dV is there, and the first piece of dQ
    pipes.do.consumer_release(state)
    add(tile, place, 0, config)
    for piece in range_constexpr(1, config.dq_pieces):
        issue_dQ(tile, stage, piece)
        warpgroup.wait_group(0)
        if const_expr(piece == config.dq_pieces - 1):
            pipes.q.consumer_release(state)
        add(tile, place, piece, config)
    if const_expr(config.dq_pieces == 1):
        warpgroup.wait_group(0)
        pipes.q.consumer_release(state)
    return upcoming


@cute.jit
def step_apart(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, before: pipeline.PipelineState, has_before: Boolean, place: Place, walk: Walk,
    scores: Constexpr[bool], config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """dV and dK of one tile of queries, without dQ: the products follow each other as S, dP, dV, dK. P is computed under dP, dS under dV; S is queued
    behind the last tile's dK.
    """
    stage = state.index
    (pipes.q if const_expr(scores) else pipes.do).consumer_wait(state)
    if const_expr(not scores):
        arch.barrier(barrier_id=Barrier.S, number_of_threads=2 * THREADS)  # S has been computed: dP is next
    issue_scores(tile, state)
    warpgroup.wait_group(0)
    if const_expr(scores):
        arch.barrier_arrive(barrier_id=Barrier.S, number_of_threads=2 * THREADS)
    if has_before:
        pipes.q.consumer_release(before)  # dK of the tile before is there too
    rounded = cute.make_rmem_tensor(tile.acc_S.layout, tile.tOut.element_type)
    if const_expr(scores):
        weights(tile, rounded, stage, place, walk, config)
        hand_on(tile, rounded, stage, Barrier.P)
        pipes.do.consumer_wait(state)
        issue_dV(tile, stage)
        arch.barrier(barrier_id=Barrier.DS, number_of_threads=2 * THREADS)  # dS of this tile is there
    else:
        statistics = per_query(tile.statistics, stage)
        arch.barrier(barrier_id=Barrier.P, number_of_threads=2 * THREADS)  # P of this tile is there
        issue_dV(tile, stage)
        factor = received(tile, stage)
        if const_expr(not config.dropout):
            subtract_delta(tile.acc_S, statistics, config)
        differentiate_by(tile.acc_S, factor, statistics, tile.thread.changes.draw, config)
        fragments.round_into(rounded, tile.acc_S)
        hand_on(tile, rounded, stage, Barrier.DS)
        pipes.q.consumer_wait(state)
    issue_dK(tile, stage)
    warpgroup.wait_group(1)
    pipes.do.consumer_release(state)
    return state.clone()


@cute.jit
def hand_on(tile: Tile, rounded: cute.Tensor, stage: Int32, ready: Constexpr[Barrier]):
    """P or dS to shared memory; then the other warpgroup is notified."""
    cute.copy(tile.store, tile.store.get_slice(0).retile(rounded), tile.tOut[None, None, None, stage])
    arch.fence_proxy("async.shared", space="cta")
    arch.barrier(barrier_id=Barrier.OWN + tile.consumer, number_of_threads=THREADS)
    arch.barrier_arrive(barrier_id=ready, number_of_threads=2 * THREADS)


@cute.jit
def issue_dV(tile: Tile, stage: Int32):
    fragments.product(tile.mma.dv, tile.acc_dV, tile.tVrP[None, None, None, stage], tile.tVrdO[None, None, None, stage], True)


@cute.jit
def issue_dK(tile: Tile, stage: Int32):
    fragments.product(tile.mma.dk, tile.acc_dK, tile.tKrdS[None, None, None, stage], tile.tKrQ[None, None, None, stage], True)


@cute.jit
def issue_dQ(tile: Tile, stage: Int32, piece: Constexpr[int]):
    fragments.product(tile.mma.dq, tile.acc_dQ, tile.tQrdS[None, None, None, stage], tile.tQrK[piece], False)


@cute.jit
def add(tile: Tile, place: Place, piece: Constexpr[int], config: Constexpr[Config]):
    """A piece of dQ to the sum in global memory; all of a tile within one turn."""
    gSum = tile.sums[place.head, place.m_block, None]
    begin, vectors = place_of_sum(gSum, tile.consumer, piece, config)
    flat = cute.make_tensor(tile.acc_dQ.iterator, cute.make_layout((4, config.dq_elements // (4 * config.dq_pieces))))
    if const_expr(config.ordered and piece == 0):
        arch.barrier(barrier_id=Barrier.DQ_EMPTY + tile.consumer, number_of_threads=THREADS + WARP)
    add_vectors(tile, flat, vectors, (gSum.iterator + begin).toint(), config)
    if const_expr(config.ordered and piece == config.dq_pieces - 1):
        arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + tile.consumer, number_of_threads=THREADS + WARP)
