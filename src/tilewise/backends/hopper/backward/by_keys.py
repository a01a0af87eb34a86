"""Consumers of the backward pass on Hopper, for heads up to 128, and of 192 with values of 128: each warpgroup has 64
keys of its own, with all columns of their dK and dV.

Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T lie in the registers from which dV += P^T dO and
dK += dS^T Q take their left operand. Only dS goes through shared memory, for dQ = dS K, which the warpgroups compute together.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from tilewise.backends.hopper.backward import epilogue, parts, shares
from tilewise.backends.hopper.backward import persistent as units
from tilewise.backends.hopper.backward.config import ADDERS, Config
from tilewise.backends.hopper.backward.epilogue import Stores, WideStores
from tilewise.backends.hopper.backward.order import Block, Order
from tilewise.backends.hopper.backward.parts import Shared, Tensors
from tilewise.backends.hopper.backward.shares import Partials
from tilewise.backends.hopper.backward.tiles import (
    THREADS,
    WARP,
    Barrier,
    Mma,
    Pipes,
    Smem,
    add_directly,
    as_left_operand,
    left_operand,
    thread_of,
    transposed,
)
from tilewise.backends.hopper.operands import Band
from tilewise.backends.hopper.scores import again as changed
from tilewise.backends.hopper.scores.again import exponentiate, per_query, probabilities, subtract
from tilewise.backends.hopper.scores.derivative import add_to_rows, differentiate, differentiate_kept, multiply_by_rounded
from tilewise.backends.hopper.visible.hiding import hide
from tilewise.backends.hopper.visible.queries import (
    Walk,
    heads_per_step,
    hide_in,
    next_in,
    queries_of_rows,
    visit_in,
    walk_of_head,
    walks_of,
)
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
    tSrK: cute.Tensor  # descriptors of the operands in shared memory
    tSrQ: cute.Tensor
    tPrV: cute.Tensor
    tPrdO: cute.Tensor
    tVrdO: cute.Tensor
    tKrQ: cute.Tensor
    tKrdS: cute.Tensor | None  # where `lean`
    tQrA: cute.Tensor  # dS and K, or K and dS, with the stages of both
    tQrB: cute.Tensor
    copy_dS: cute.TiledCopy
    tdSsdS: cute.Tensor
    tdQsdQ: cute.Tensor | None  # (4, dq_elements / 4)
    first: cute.Tensor
    tlse: cute.Tensor  # (2, tile_m / 8, stages)
    tdelta: cute.Tensor
    tScS: cute.Tensor  # (key, query) of each element of S^T
    begin: cute.Tensor  # (ROWS,): of the queries that see this thread's keys, the first
    end: cute.Tensor
    visits: cute.Tensor | None  # (FIELDS, stages)
    tensors: Tensors
    block: Block
    band: Band
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    scale: Float32
    scale_log2: Float32
    consumer: Int32
    thread: changed.Thread
    lse: cute.Tensor  # (tile_m / 4,): of the next tile, where they are read ahead


@cute.jit
def consume(
    shared: Shared, stores: Stores | WideStores, block: Block, walk: Walk, consumer: Int32, partials: Partials | None, has_dQ: Constexpr[bool],
    config: Constexpr[Config],
):  # fmt: skip
    """64 keys a warpgroup: the whole walk over the queries of the group, then dK and dV."""
    tensors, sm, pipes, mma, band, (scale, scale_log2) = shared
    thread = arch.thread_idx()[0] - THREADS
    tile = make_tile(tensors, sm, mma, block, band, scale, scale_log2, thread, consumer, has_dQ, config)
    tile.acc_dK.fill(0.0)
    tile.acc_dV.fill(0.0)
    pipes.k.consumer_wait(tma.at_first(1))
    pipes.v.consumer_wait(tma.at_first(1))
    visit_all(tile, pipes, tma.at_first(config.stages), walk, has_dQ, config)
    given = (tensors, stores, tile.acc_dK, tile.acc_dV, sm, mma, block, scale, config)
    write_once(epilogue.write, given, tile, partials, block, config)


@cute.jit
def consume_units(
    shared: Shared, stores: Stores | WideStores, partial: cute.Tensor | None, queue: units.Queue, order: Order, consumer: Int32,
    has_dQ: Constexpr[bool], config: Constexpr[Config],
):  # fmt: skip
    """Likewise for one block of keys after another."""
    tensors, sm, pipes, mma, band, (scale, scale_log2) = shared
    state, done, unit = tma.at_first(config.stages), Int32(0), units.consume(queue, Int32(0))
    while unit >= 0:
        block, walk = units.place_of(unit, tensors, band, order, config)
        tile = make_tile(tensors, sm, mma, block, band, scale, scale_log2, thread_of(config), consumer, has_dQ, config)
        tile.acc_dK.fill(0.0)
        tile.acc_dV.fill(0.0)
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)  # what the unit before left has left dS's place
        pipes.k.consumer_wait(tma.after(done, 1))
        pipes.v.consumer_wait(tma.after(done, 1))
        state = visit_all(tile, pipes, state, walk, has_dQ, config)
        pipes.k.consumer_release(tma.after(done, 1))
        if const_expr(epilogue.fit_in_dS(config)):
            pipes.v.consumer_release(tma.after(done, 1))
        unit = units.read(queue, done)
        block, _ = units.place_of(unit, tensors, band, order, config)
        given = (tensors, stores, tile.acc_dK, tile.acc_dV, *epilogue.places(sm, config), mma, block, scale, config)
        partials = None
        if const_expr(config.shares):
            blocks = units.blocks_of(tensors, config) * tensors.K.shape[2] * tensors.K.shape[0]
            partials = shares.partials_of(partial, queue.counter, unit, order, blocks)
        if const_expr(config.block_per_q_head):
            partials = shares.partials_of_group(partial, queue.counter, block, tensors, config)
        write_once(epilogue.write_through, given, tile, partials, block, config)
        if const_expr(not epilogue.fit_in_dS(config)):
            arch.cp_async_bulk_wait_group(1, read=True)  # dV has left V's place
            arch.sync_warp()  # whichever lane stored it
            pipes.v.consumer_release(tma.after(done, 1))
        units.release(queue, done)
        done += 1
        unit = units.consume(queue, done)
    arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def write_once(
    write: Constexpr[Callable], given: tuple, tile: Tile, partials: Partials | None, block: Block, config: Constexpr[Config]
):  # fmt: skip
    """dK and dV, by `write`, which takes what is `given`. Of a block of keys that is shared the last thread block writes those of all parts; of heads
    that are apart the last one writes those of the group.
    """
    if const_expr(config.block_per_q_head):
        if block.member < tile.tensors.Q.shape[2] // tile.tensors.K.shape[2] - 1:
            shares.pass_on(partials, tile.acc_dK, tile.acc_dV, block, config)
        else:
            shares.add_from(partials, partials.number, block.member, tile.acc_dK, tile.acc_dV, config)
            write(*given)
    elif const_expr(not config.shares):
        write(*given)
    elif block.share < block.shares - 1:
        shares.leave(partials, tile.acc_dK, tile.acc_dV, block, config)
    else:
        shares.add_others(partials, tile.acc_dK, tile.acc_dV, block, config)
        write(*given)


@cute.jit
def visit_all(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, walk: Walk, has_dQ: Constexpr[bool], config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """The whole walk, for every query head of the group."""
    tensors, block, band = tile.tensors, tile.block, tile.band
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    heads_interleaved = heads_per_step(group, config)
    begin, end = walks_of(block, group, config)
    for first in cutlass.range(begin, end, unroll=1):
        own = walk_of_head(walk, block, block.head_k * group + first, band, config)
        m_block, left = own.start, (own.last - own.first) * heads_interleaved
        ask_ahead(tile, pipes, state, left > 0, config)
        for _i in cutlass.range(own.last - own.first, unroll=1):
            masked = m_block < own.free_first or m_block >= own.free_last
            for g in cutlass.range(first, first + heads_interleaved, unroll=1):
                left -= 1
                if const_expr(config.lean):
                    state = step_lean(tile, pipes, state, g, m_block, masked, config)
                else:
                    state = step(tile, pipes, state, g, m_block, masked, left > 0, has_dQ, config)
            m_block = next_in(m_block, own, config)
    if const_expr(config.lean):
        warpgroup.wait_group(0)  # dK is there
    return state


@cute.jit
def make_tile(
    tensors: Tensors, sm: Smem, mma: Mma, block: Block, band: Band, scale: Float32, scale_log2: Float32, thread: Int32, consumer: Int32,
    has_dQ: Constexpr[bool], config: Constexpr[Config],
) -> Tile:  # fmt: skip
    s, dv, dk, dq = (x.get_slice(consumer * THREADS) for x in mma)
    copy_dS = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), sm.dS.element_type), mma.s)
    tScS = mma.s.get_slice(thread).partition_C(cute.make_identity_tensor((config.tile_n, config.tile_m)))
    at = fragments.by_rows(tScS)
    begin, end = queries_of_rows(tScS, block.n0, band, config)
    pairs = cute.make_layout((2, config.tile_m // 8, config.stages), stride=(1, 8, config.tile_m))
    left, right = sm.dS, transposed(sm.K)
    if const_expr(config.dq_transposed):
        left, right = right, left
    tlse, tdelta = (cute.make_tensor(x.iterator + at[0, 0][1], pairs) for x in (sm.lse, sm.minus_delta))
    return Tile(
        mma=mma,
        tSrK=s.make_fragment_A(s.partition_A(sm.K))[None, None, None, 0],
        tSrQ=s.make_fragment_B(s.partition_B(sm.Q)),
        tPrV=s.make_fragment_A(s.partition_A(sm.V))[None, None, None, 0],
        tPrdO=s.make_fragment_B(s.partition_B(sm.dO)),
        tVrdO=dv.make_fragment_B(dv.partition_B(transposed(sm.dO))),
        tKrQ=dk.make_fragment_B(dk.partition_B(transposed(sm.Q))),
        tKrdS=dk.make_fragment_A(dk.partition_A(transposed(sm.dS))) if const_expr(config.lean) else None,
        tQrA=dq.make_fragment_A(dq.partition_A(left)),
        tQrB=dq.make_fragment_B(dq.partition_B(right)),
        copy_dS=copy_dS,
        tdSsdS=copy_dS.get_slice(thread).partition_D(transposed(sm.dS)),
        tdQsdQ=sm.dQ[None, thread % THREADS, None, consumer if const_expr(has_dQ) else 0] if const_expr(config.staged) else None,
        first=sm.first,
        tlse=tlse,
        tdelta=tdelta,
        tScS=tScS,
        begin=begin,
        end=end,
        visits=sm.visits,
        tensors=tensors,
        block=block,
        band=band,
        acc_dK=cute.make_rmem_tensor(mma.dk.get_slice(thread).partition_shape_C((config.tile_n, config.head_dim)), Float32),
        acc_dV=cute.make_rmem_tensor(mma.dv.get_slice(thread).partition_shape_C((config.tile_n, config.head_dim_v)), Float32),
        scale=scale,
        scale_log2=scale_log2,
        consumer=consumer,
        thread=changed.thread_of(tensors, block, tScS, config),
        lse=cute.make_rmem_tensor(config.tile_m // 4, Float32),
    )


@cute.jit
def step(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, g: Int32, m_block: Int32, masked: Boolean,
    more: Boolean, has_dQ: Constexpr[bool], config: Constexpr[Config],
):  # fmt: skip
    """One tile of queries: S and dP, P and dS, and what they add to dV, dQ and dK. For "tiles" m_block is a visit, and says nothing of the tile.
    `more`: it is not the walk's last.
    """
    stage, shape, lse = state.index, (config.tile_n, config.tile_m), tile.lse
    if const_expr(not config.whole.asks_ahead):
        pipes.q.consumer_wait(state)
        lse = changed.lse_of(tile.tlse, stage, config)
    if const_expr(config.whole.delta_in):
        pipes.do.consumer_wait(state)
        acc_dP = beginning_with(tile.tdelta[None, None, stage], tile.tScS)
        acc_S = fragments.scores(tile.mma.s, shape, tile.tSrK, tile.tSrQ[None, None, None, stage])
        fragments.product(tile.mma.s, acc_dP, tile.tPrV, tile.tPrdO[None, None, None, stage], True)
    else:
        acc_S = fragments.scores(tile.mma.s, shape, tile.tSrK, tile.tSrQ[None, None, None, stage])
        pipes.do.consumer_wait(state)
        acc_dP = fragments.scores(tile.mma.s, shape, tile.tPrV, tile.tPrdO[None, None, None, stage])
    bits = None
    if const_expr(config.dropout):
        at = visit_in(tile.visits, stage).tile if const_expr(config.mask_kind == "tiles") else m_block
        bits = changed.kept_of(tile.thread, g, at * config.tile_m, tile.block.n0, config)
    warpgroup.wait_group(1)  # S is there, dP is not
    if const_expr(at_once(config)):
        probabilities(acc_S, lse, tile.scale_log2)
    minus_delta = per_query(tile.tdelta, stage) if const_expr(config.delta_ahead) else None
    P = weights(tile, acc_S, lse, g, stage, m_block, masked, bits, config)
    if const_expr(not (config.whole.delta_in or config.delta_ahead)):
        minus_delta = per_query(tile.tdelta, stage)
    warpgroup.wait_group(0)
    if const_expr(config.dropout):
        differentiate_kept(acc_dP, acc_S, minus_delta, tile.thread.changes.draw, bits, config)
    else:
        if const_expr(not config.whole.delta_in):
            add_to_rows(acc_dP, minus_delta)
        differentiate(acc_dP, acc_S)
    dS = left_operand(tile.mma.dk, (config.tile_n, config.tile_m))
    if const_expr(config.whole.pairwise):
        fragments.round_pairs_into(dS, acc_dP)
    else:
        fragments.round_into(dS, acc_dP)
    share_dS(tile, cute.make_tensor(dS.iterator, acc_dP.layout), stage, config)
    fragments.product(tile.mma.dv, tile.acc_dV, P, tile.tVrdO[None, None, None, stage], True)
    dS_is_there(config)
    if const_expr(has_dQ):
        acc_dQ = dQ_of(tile, stage, config)
    if const_expr(has_dQ):
        warpgroup.wait_group(1)  # dV is there, and dO read
        tma.release(pipes.do, state)
    fragments.product(tile.mma.dk, tile.acc_dK, dS, tile.tKrQ[None, None, None, stage], True)
    following = state.clone()
    following.advance()
    ask_ahead(tile, pipes, following, more, config)
    warpgroup.wait_group(1)  # dQ is there; without it, dV
    if const_expr(has_dQ):
        leave_dQ(tile, acc_dQ, g, m_block, stage, config)
    else:
        tma.release(pipes.do, state)
    warpgroup.wait_group(0)
    tma.release(pipes.q, state)
    return following


@cute.jit
def share_dS(tile: Tile, values: cute.Tensor, stage: Int32, config: Constexpr[Config]):
    """A warpgroup's dS to shared memory."""
    if const_expr(config.ds_stages == 1):
        arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)  # all have read the dS before this one
    ds_stage = stage if const_expr(config.ds_stages > 1) else 0
    cute.copy(tile.copy_dS, tile.copy_dS.get_slice(0).retile(values), tile.tdSsdS[None, None, None, ds_stage])


@cute.jit
def dS_is_there(config: Constexpr[Config]):
    """Of all warpgroups."""
    arch.fence_proxy("async.shared", space="cta")
    arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)


@cute.jit
def dQ_of(tile: Tile, stage: Int32, config: Constexpr[Config]) -> cute.Tensor:
    """Issue dQ = dS K, or its transpose; this warpgroup's part."""
    stage_A, stage_B, shape = stage if const_expr(config.ds_stages > 1) else 0, 0, (config.tile_m, config.head_dim)
    if const_expr(config.dq_transposed):
        stage_A, stage_B, shape = stage_B, stage_A, (config.head_dim, config.tile_m)
    return fragments.scores(tile.mma.dq, shape, tile.tQrA[None, None, None, stage_A], tile.tQrB[None, None, None, stage_B])


@cute.jit
def ask_ahead(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, more: Boolean, config: Constexpr[Config]):
    """For the log-sum-exps of the tile that comes into this stage, under the tile before: products leave shared memory little time for them. If there
    are no more tiles, what is read is not used; to keep the last ones instead would take registers.
    """
    if const_expr(config.whole.asks_ahead):
        if more:
            pipes.q.consumer_wait(state)
        tile.lse.store(per_query(tile.tlse, state.index).load())


@cute.jit
def step_lean(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, g: Int32, m_block: Int32, masked: Boolean, config: Constexpr[Config]
):  # fmt: skip
    """As `step`, with S or dP in registers next to dK and dV, but not both: S is P, rounded, before dP is issued, or half way there, and dS is
    computed from that. dK takes dS from shared memory, so that dS need not stay in registers under dQ, and runs on under the next tile's S.
    """
    stage, shape = state.index, (config.tile_n, config.tile_m)
    pipes.q.consumer_wait(state)
    lse = per_query(tile.tlse, stage)
    acc_S = fragments.scores(tile.mma.s, shape, tile.tSrK, tile.tSrQ[None, None, None, stage])
    warpgroup.wait_group(1)  # dK of the tile before is there
    if state.count > 0:
        tma.release(pipes.q, tma.after(state.count - 1, config.stages))
        arch.barrier_arrive(barrier_id=Barrier.READ + 1 - tile.consumer, number_of_threads=2 * THREADS)
    warpgroup.wait_group(0)
    if const_expr(config.enlarged != 1.0):
        for c in range_constexpr(cute.size(lse)):
            lse[c] -= math.log2(config.enlarged)
    subtract(acc_S, lse, tile.scale_log2)
    P, columns = left_operand(tile.mma.dv, (config.tile_n, config.tile_m)), const_expr(cute.size(acc_S) // fragments.ROWS)
    cut = const_expr(int(columns * config.ahead) // 2 * 2)
    weigh_columns(tile, acc_S, P, m_block, masked, 0, cut, config)
    pipes.do.consumer_wait(state)
    acc_dP = fragments.scores(tile.mma.s, shape, tile.tPrV, tile.tPrdO[None, None, None, stage])
    weigh_columns(tile, acc_S, P, m_block, masked, cut, columns, config)
    fragments.product(tile.mma.dv, tile.acc_dV, P, tile.tVrdO[None, None, None, stage], True)
    minus_delta = per_query(tile.tdelta, stage)
    warpgroup.wait_group(1)  # dP is there, dV is not
    add_to_rows(acc_dP, minus_delta)
    multiply_by_rounded(acc_dP, P, config)
    dS = left_operand(tile.mma.dv, (config.tile_n, config.tile_m))
    fragments.round_pairs_into(dS, acc_dP)
    if state.count > 0:
        arch.barrier(barrier_id=Barrier.READ + tile.consumer, number_of_threads=2 * THREADS)  # the other has read the dS before this one
    values = cute.make_tensor(dS.iterator, acc_dP.layout)
    cute.copy(tile.copy_dS, tile.copy_dS.get_slice(0).retile(values), tile.tdSsdS[None, None, None, 0])
    arch.fence_proxy("async.shared", space="cta")
    warpgroup.wait_group(0)  # dV is there, and dO read
    tma.release(pipes.do, state)
    arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)  # dS of both warpgroups is there
    shape_dQ = config.tile_m, config.head_dim
    acc_dQ = fragments.scores(tile.mma.dq, shape_dQ, tile.tQrA[None, None, None, 0], tile.tQrB[None, None, None, 0])
    fragments.product(tile.mma.dk, tile.acc_dK, tile.tKrdS[None, None, None, 0], tile.tKrQ[None, None, None, stage], True)
    warpgroup.wait_group(1)  # dQ is there
    leave_dQ(tile, acc_dQ, g, m_block, stage, config)
    state.advance()
    return state


@cute.jit
def weigh_columns(
    tile: Tile, acc_S: cute.Tensor, P: cute.Tensor, m_block: Int32, masked: Boolean, first: Constexpr[int], last: Constexpr[int],
    config: Constexpr[Config],
):  # fmt: skip
    """P of some of a thread's columns from their exponents, rounded."""
    if const_expr(last > first):
        if masked:
            hide(tile, acc_S, tile.tScS, m_block * config.tile_m, config.mask_kind, -float("inf"), first, last)
        exponentiate(acc_S, first, last)
        part = cute.make_layout(2 * (last - first))
        into, numbers = (cute.make_tensor(x.iterator + 2 * first, part) for x in (P, acc_S))
        fragments.round_pairs_into(into, numbers)


@cute.jit
def beginning_with(pairs: cute.Tensor, like: cute.Tensor) -> cute.Tensor:
    """-delta in every row of an accumulator, to which dP is then added: a subtraction less for each element of S.

    pairs: (2, tile_m / 8) in shared memory. Each register is read on its own: copies of one for the other row would come to lie between the
    products, and ptxas then waits for the first before it issues the second (C7517, DSL 4.8.1).
    """
    acc_dP = cute.make_rmem_tensor(like.shape, Float32)
    dP = fragments.by_rows(acc_dP)
    for c in range_constexpr(cute.size(pairs, mode=[1])):
        for r in range_constexpr(fragments.ROWS):
            dP[r, 2 * c], dP[r, 2 * c + 1] = arch.inline_ptx(
                "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                write_only_types=[Float32, Float32],
                read_only_args=[pairs[None, c].iterator.toint()],
            )
    return acc_dP


@cute.jit
def weights(
    tile: Tile, acc_S: cute.Tensor, lse: cute.Tensor, g: Int32, stage: Int32, m_block: Int32, masked: Boolean, bits: cute.Tensor | None,
    config: Constexpr[Config],
) -> cute.Tensor:  # fmt: skip
    """P, or S where it is changed, becomes what hidden pairs leave of P, or what stands in for it in `differentiate`; returns P, rounded, as the
    left operand of dV, 0 where dropout drops it. g: of the group's heads.
    """
    if const_expr(not config.modified):
        if const_expr(at_once(config)):
            hide_in(tile, acc_S, tile.block.n0, stage, m_block, masked, 0.0, config)
        else:
            subtract(acc_S, lse, tile.scale_log2)
            exponentiate_in_two(tile, acc_S, m_block, masked, config)
        if const_expr(config.dropout):
            P = left_operand(tile.mma.dv, (config.tile_n, config.tile_m))
            changed.round_kept(P, acc_S, bits)
            return P
        return as_left_operand(tile.mma.dv, acc_S, (config.tile_n, config.tile_m))
    at = visit_in(tile.visits, stage).tile if const_expr(config.mask_kind == "tiles") else m_block
    rest = changed.change(acc_S, tile.thread, g, at * config.tile_m, config)
    hide_in(tile, acc_S, tile.block.n0, stage, m_block, masked, -float("inf"), config)
    P = left_operand(tile.mma.dv, (config.tile_n, config.tile_m))
    changed.weigh(acc_S, rest, P, lse, tile.scale_log2, bits, config)
    return P


def at_once(config: Config) -> bool:
    """Whether all of P is computed ahead of what hides some of it."""
    return not config.modified and (config.ahead == 1 or config.mask_kind == "tiles")


@cute.jit
def exponentiate_in_two(tile: Tile, acc_S: cute.Tensor, m_block: Int32, masked: Boolean, config: Constexpr[Config]):
    """What is ahead of the second branch is computed under dP; the rest may wait for dP, and goes on while dS is computed: ptxas puts it there."""
    columns = const_expr(cute.size(acc_S) // fragments.ROWS)
    cut = const_expr(int(columns * config.ahead) // 2 * 2)
    if const_expr(cut > 0):
        if masked:
            hide(tile, acc_S, tile.tScS, m_block * config.tile_m, config.mask_kind, -float("inf"), 0, cut)
        exponentiate(acc_S, 0, cut)
    if masked:
        hide(tile, acc_S, tile.tScS, m_block * config.tile_m, config.mask_kind, -float("inf"), cut, columns)
    exponentiate(acc_S, cut, columns)


@cute.jit
def leave_dQ(tile: Tile, acc_dQ: cute.Tensor, g: Int32, m_block: Int32, stage: Int32, config: Constexpr[Config]):
    """dQ of this warpgroup to the warp that adds it up; `one_block`: to the gradient. While dK is being computed."""
    tensors, batch = tile.tensors, tile.block.batch
    head = tile.block.head_k * (tensors.Q.shape[2] // tensors.K.shape[2]) + g
    if const_expr(config.one_block):
        at = visit_in(tile.visits, stage).tile if const_expr(config.mask_kind == "tiles") else m_block
        thread = arch.thread_idx()[0] - THREADS
        parts.write_at_once(tensors, acc_dQ, tile.mma.dq, thread, batch, head, at, tile.scale, config)
    else:
        hand_over(tile, acc_dQ, tensors.sum_dQ[batch, head, m_block, None], stage % ADDERS, config)


@cute.jit
def hand_over(tile: Tile, acc_dQ: cute.Tensor, gSum: cute.Tensor, adder: Int32, config: Constexpr[Config]):
    """dQ of this warpgroup to the warp that adds it up, or to global memory. gSum: of this tile."""
    flat = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, config.dq_elements // 4)))
    if const_expr(config.direct):
        add_directly(tile, flat, gSum, config)
    else:
        arch.barrier(barrier_id=Barrier.DQ_EMPTY + tile.consumer, number_of_threads=THREADS + WARP)
        cute.autovec_copy(flat, tile.tdQsdQ)  # the warp that sends it fences: here all would wait, as products keep shared memory busy
        arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + adder, number_of_threads=config.dq_consumers * THREADS + WARP)
