"""The forward pass on Hopper in 8 bits: S = Q K^T of int8 or e4m3, O = P V of e4m3 or, with `wide_values`, of 16 bits. Read ../forward/kernel.py
first; this file says what differs.

- V of 8 bits comes with its tokens contiguous, in the order that P has in registers (sm90/eight_bits.py): products of 8 bits read no other operands;
- scores have a factor a row (Q's scale) and tile (K's); P in e4m3 is kept times 2^8, as that has nothing below 2^-9 (softmax.py);
- the tensor cores add products of e4m3 with 13 bits. So each tile's P V is a sum of its own, which is added to O in fp32 (`promote`). That takes no
  time: O has to be multiplied by its rescaling factor anyway, and O' = r O + P V is one instruction. r is that of the tile before, since P V is in
  the units of the maximum that P was made with;
- at head_dim_v 256 there are no registers for such a sum next to O and S. There it takes place in `pieces` of O's columns, while S is not there;
- O = scale O + centre for each channel at the end: V of 8 bits was divided by the one, after the other was subtracted.

Equations: those of FlashAttention-2's forward in docs/algorithm.md.
"""

from typing import NamedTuple

from tilewise.backends.hopper.eight_bits import softmax
from tilewise.backends.hopper.eight_bits.config import GROUP, Config
from tilewise.backends.hopper.eight_bits.operands import Scales, Tensors
from tilewise.backends.hopper.forward import epilogue, hidden, scheduler
from tilewise.backends.hopper.forward import kernel as forward
from tilewise.backends.hopper.forward.hidden import Screen
from tilewise.backends.hopper.forward.kernel import THREADS, Copies, How, Pipes, Smem
from tilewise.backends.hopper.forward.partials import Partials
from tilewise.backends.hopper.forward.scheduler import Block, Queue, Units
from tilewise.backends.hopper.operands import Band, Scores, Work
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.hopper.scores.logits import Statistics, Terms
from tilewise.backends.hopper.visible import keys as visible
from tilewise.backends.hopper.visible.keys import Seen, Walk
from tilewise.sm90 import eight_bits, fragments, tma, wgmma
from tilewise.sm90.dsl import (
    Constexpr,
    CUstream,
    Float8E4M3FN,
    Float32,
    Int8,
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

CHANNELS = 16  # of a thread's columns of O, scaled at once


@cute.jit
def launch(
    tensors: Tensors, scales: Scales, work: Work, band: Band, changes: Scores, config: Constexpr[Config], stream: CUstream
):  # fmt: skip
    mQ, mK, _, mO, _, _ = tensors
    dtype = dtype_of(config)
    rows = [
        cute.make_tensor(x, cute.select(y.layout, mode=[1, 3, 2, 0]))
        for x, y in ((cute.recast_ptr(mQ.iterator, dtype=dtype), mQ), (cute.recast_ptr(mK.iterator, dtype=dtype), mK), (mO.iterator, mO))
    ]  # (seqlen, head_dim, heads, batch)
    columns, layout_V = values_of(tensors, config)
    layouts = wgmma.layout_Q(config, dtype), wgmma.layout_K(config, dtype), layout_V
    shapes = (config.tile_m, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim_v, config.tile_n)
    sharers = 1, config.cluster, config.cluster
    loads = [tma.describe(*each) for each in zip((*rows[:2], columns), layouts, shapes, sharers, strict=True)]
    copies = Copies(*loads, epilogue.describe(rows[2], config))
    units, clusters = scheduler.cut(mO, mK, work, band.tables.order, config)
    found = Partials(work.sums, work.arrivals)
    mma = eight_bits.products(config, dtype, columns=config.head_dim_v // config.pieces)
    if const_expr(config.wide_values):
        mma = mma._replace(pv=wgmma.product_of(config, config.head_dim_v, mO.element_type))
    kernel(copies, tensors, scales, work.counter, found, units, band, changes, mma, Layouts(*layouts), config).launch(
        grid=(clusters * config.cluster, 1, 1),
        block=((1 + config.consumers) * THREADS, 1, 1),
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
        min_blocks_per_mp=1,
        stream=stream,
    )


class Layouts(NamedTuple):
    """In shared memory."""

    Q: cute.ComposedLayout
    K: cute.ComposedLayout
    V: cute.ComposedLayout


@cute.jit
def values_of(tensors: Tensors, config: Constexpr[Config]) -> tuple[cute.Tensor, cute.ComposedLayout]:
    """V in global memory, (head_dim_v, tokens, heads, batch), and its layout in shared memory."""
    if const_expr(config.wide_values):
        mV = tensors.values
        columns, layout = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0])), wgmma.layout_V(config, mV.element_type)
    else:
        mV = tensors.V
        of_values = cute.recast_ptr(mV.iterator, dtype=Float8E4M3FN)
        columns, layout = cute.make_tensor(of_values, cute.select(mV.layout, mode=[2, 3, 1, 0])), eight_bits.layout_V(config)
    return columns, layout


def dtype_of(config):
    """Of Q and K."""
    return Int8 if softmax.is_integer(config) else Float8E4M3FN


@cute.kernel
def kernel(
    copies: Copies, tensors: Tensors, scales: Scales, counter: cute.Tensor, found: Partials, units: Units, band: Band, changes: Scores,
    mma: wgmma.Mma, layouts: Layouts, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = allocate(storage, tensors.O.element_type, layouts, config)
    queue = scheduler.make_queue(storage, counter, forward.readers(config), config)
    screen = hidden.make_screen(storage, config) if const_expr(config.hides) else None
    nowhere = storage.allocate_tensor(Float32, cute.make_layout(1), 16).iterator.toint() if const_expr(config.hold) else None
    pipes = forward.make_pipes(storage, config)
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp < THREADS // forward.WARP:
        arch.setmaxregister_decrease(config.registers[0])
        if warp == 0:
            forward.produce(copies, tensors, sm, pipes, queue, units, band, config)
        elif const_expr(config.hides):
            hidden.screen(sm.V, tensors.O.shape[1], tensors.K.shape[1], pipes.v, queue, screen, band, config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consume(Shared(copies, tensors, scales, found, sm, pipes, queue, screen, nowhere, band, changes, mma), config)
    if const_expr(config.cluster > 1):
        tma.meet_cluster()  # no block leaves while another may still write into it


@cute.jit
def allocate(storage: SmemAllocator, dtype, layouts: tuple, config: Constexpr[Config]) -> Smem:
    qk = dtype_of(config)
    of_operands = zip((qk, qk, dtype if const_expr(config.wide_values) else Float8E4M3FN), layouts, strict=True)
    sQ, sK, sV = (storage.allocate_tensor(each, x.outer, 1024, swizzle=x.inner) for each, x in of_operands)
    layout_O = wgmma.layout_O(config, dtype)
    sO = storage.allocate_tensor(dtype, layout_O.outer, 1024, swizzle=layout_O.inner)
    return Smem(sQ, sK, sV, sO[None, None, 0])


class Shared(NamedTuple):
    """What the consumers of a thread block have in common."""

    copies: Copies
    tensors: Tensors
    scales: Scales
    found: Partials
    sm: Smem
    pipes: Pipes
    queue: Queue
    screen: Screen | None
    nowhere: Int32 | None
    band: Band
    changes: Scores
    mma: wgmma.Mma


class Keys(NamedTuple):
    """Of a head's keys, fp32 in global memory: as `Scales` have them."""

    factors: cute.Tensor  # (groups,)
    units: cute.Tensor | None  # likewise V's; or what all tiles have
    whole: cute.Tensor | None
    lost: cute.Tensor | None  # (groups * GROUP,)
    columns: cute.Tensor | None  # likewise
    weights: cute.Tensor | None


@cute.jit
def keys_of(scales: Scales, block: Block, config: Constexpr[Config]) -> Keys:
    of_head = (scales.k, scales.v, scales.whole, scales.lost, scales.columns, scales.weights)
    return Keys(*(None if const_expr(x is None) else x[block.batch, block.head_k, None] for x in of_head))


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
    rescale: cute.Tensor  # (ROWS,) fp32: what O is still to be multiplied with, where each tile is promoted
    row_factors: cute.Tensor  # (ROWS,) fp32
    shift: cute.Tensor | None
    unit: cute.Tensor | None  # (1,) fp32: of O's sums, the scale of the last tile of V, where each has one
    keys: "Keys"
    m0: Int32
    band: Band
    seen: Seen
    changes: Scores
    terms: Terms
    consumer: Int32
    screen: Screen | None
    nowhere: Int32 | None  # a word of shared memory that nobody reads


@cute.jit
def consume(shared: Shared, config: Constexpr[Config]):
    """64 rows a warpgroup, unit after unit."""
    queue = shared.queue
    consumer = arch.make_warp_uniform((arch.thread_idx()[0] - THREADS) // THREADS)
    state, done = tma.at_first(config.kv_stages), Int32(0)
    if consumer == config.consumers - 1:
        forward.pass_turn(consumer, config)  # the first turn is the first warpgroup's
    block = scheduler.consume(queue, done, config)
    while block.m0 >= 0:
        state = attend(shared, done, state, block, consumer, config)
        done += 1
        block = scheduler.consume(queue, done, config)
    arch.cp_async_bulk_wait_group(0, read=True)  # shared memory ends with the thread block


@cute.jit
def attend(
    shared: Shared, done: Int32, state: pipeline.PipelineState, block: Block, consumer: Int32, config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """A unit: the whole walk over the keys, then O and its log-sum-exp."""
    copies, tensors, scales, found, sm, pipes, queue, screen, nowhere, band, changes, mma = shared
    once = tma.after(done, config.q_stages)
    walk = forward.walk_of(queue, done, block, tensors, band, config)
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
        row_factors=row_factors_of(scales, changes, tScS, block, config),
        shift=shift_of_products(scales, changes, tScS, block, config),
        unit=cute.make_rmem_tensor(1, Float32) if const_expr(config.tiles_of_values) else None,
        keys=keys_of(scales, block, config),
        m0=block.m0,
        band=band,
        seen=visible.rows_of(band, tScS, block.m0, config),
        changes=changes,
        terms=scores.terms_of(changes, tScS, block, config),
        consumer=consumer,
        screen=screen,
        nowhere=nowhere,
    )
    tile.acc_O.fill(0.0)
    tile.rescale.fill(1.0)
    if const_expr(config.pieces > 1 and config.tiles_of_values):
        tile.unit.fill(1.0)
    if const_expr(config.cluster > 1):
        state = forward.leave_out(pipes, state, walk.loaded_last - walk.last)
    pipes.q.consumer_wait(once)
    if const_expr(config.pieces > 1):
        state = walk_in_pieces(tile, pipes, state, walk, config)
    elif const_expr(config.mask_kind == "tiles"):
        state = forward.walk_runs(tile, pipes, state, walk, PASSES, config)
    else:
        state = forward.walk_tiles(tile, pipes, state, walk, None, PASSES, config)
    pipes.q.consumer_release(once)
    ends = last_product(tile, pipes, state, scales, block, config)
    if const_expr(config.pieces == 1):
        state.advance()
    if const_expr(config.cluster > 1):
        state = forward.leave_out(pipes, state, walk.first - walk.loaded_first)
    block, span = scheduler.consume(queue, done, config), None
    if const_expr(config.shares):
        span = scheduler.span(queue, done)
    cleared = hidden.cleared_tiles(screen, done) if const_expr(config.hides) else None
    scheduler.release(queue, done, config)
    given = tensors._replace(V=tensors.values)
    forward.store(copies, given, found, sm, tile, ends, block, span, cleared, config)
    return state


@cute.jit
def row_factors_of(scales: Scales, changes: Scores, tScS: cute.Tensor, block: Block, config: Constexpr[Config]) -> cute.Tensor:
    """(ROWS,) fp32, in the exponent of 2; where scores are changed, Q's scales alone."""
    of_head = scales.q[block.batch, block.head, None]
    factors, at = cute.make_rmem_tensor(fragments.ROWS, Float32), fragments.by_rows(tScS)
    for r in range_constexpr(fragments.ROWS):
        row = min(block.m0 + at[r, 0][0], of_head.shape[0] - 1)
        factors[r] = of_head[row]
        if const_expr(not config.modified):
            factors[r] *= changes.scale_log2
    return factors


@cute.jit
def first_scores(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, ref: Int32, config: Constexpr[Config]):
    of_keys, tokens = factor_of(tile, n_block, True, config), tokens_of(tile, n_block, config)
    pipes.k.consumer_wait(state)
    acc_S = issue_scores(tile, state, config)
    factors = factors_of(tile, of_keys, True)
    seen = forward.seen_of(tile, n_block, ref, config)
    warpgroup.wait_group(0)
    release(pipes.k, state, config)
    weigh(tile, acc_S, n_block, factors, tokens, seen, True, config)
    if const_expr(config.tiles_of_values):
        tile.unit[0] = unit_for(acc_S, n_block, Float32(1.0), tile, config)
    round_into(tile, acc_S, config)


@cute.jit
def step(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, ref: Int32, how: Constexpr[How], config: Constexpr[Config]
):
    """S of tile n_block and P V of the tile before it, both in flight at once; softmax of the one under the other."""
    masked = const_expr(how == How.MASKED)
    of_keys, tokens = factor_of(tile, n_block, masked, config), tokens_of(tile, n_block, config)
    before = state.clone()
    state.advance()
    pipes.k.consumer_wait(state)
    forward.take_turn(tile.consumer, config)
    acc_S = issue_scores(tile, state, config)
    forward.wait_for_values(tile, pipes, before, config)
    acc_N = issue_output(tile, before, config)
    forward.pass_turn(tile.consumer, config)
    factors = factors_of(tile, of_keys, masked)
    seen = forward.seen_of(tile, n_block, ref, config) if const_expr(masked) else None
    warpgroup.wait_group(1)  # S is there, P V is not
    release(pipes.k, state, config)
    rescale = weigh(tile, acc_S, n_block, factors, tokens, seen, masked, config)
    if const_expr(config.tiles_of_values):
        to_units_of(tile, acc_S, n_block, rescale, config)
    if const_expr(config.hold):
        hold(tile)
    warpgroup.wait_group(0)
    release(pipes.v, before, config)
    join(tile, acc_N, config)
    if const_expr(config.promote):
        tile.rescale.store(rescale.load())
    else:
        fragments.scale_rows(tile.acc_O, rescale)
    round_into(tile, acc_S, config)
    return state


PASSES = forward.Passes(first_scores, step)


@cute.jit
def step_in_pieces(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, ref: Int32, how: Constexpr[How], config: Constexpr[Config]
):
    """S, softmax and P V of tile n_block, one after another: there are no registers for two at once. The other warpgroup multiplies meanwhile."""
    masked = const_expr(how == How.MASKED)
    of_keys, tokens = factor_of(tile, n_block, masked, config), tokens_of(tile, n_block, config)
    pipes.k.consumer_wait(state)
    acc_S = issue_scores(tile, state, config)
    factors = factors_of(tile, of_keys, masked)
    seen = forward.seen_of(tile, n_block, ref, config) if const_expr(masked) else None
    warpgroup.wait_group(0)
    release(pipes.k, state, config)
    rescale = weigh(tile, acc_S, n_block, factors, tokens, seen, masked, config)
    if const_expr(config.tiles_of_values):
        to_units_of(tile, acc_S, n_block, rescale, config)
    round_into(tile, acc_S, config)
    add_pieces(tile, pipes, state, rescale, config)
    state.advance()
    return state


IN_PIECES = forward.Passes(None, step_in_pieces)


@cute.jit
def walk_in_pieces(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, walk: Walk, config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    """As `forward.walk_tiles`, but the last tile is in the loop of those to be masked: apart, its code would have O in registers of its own."""
    if const_expr(config.mask_kind == "tiles"):
        state = runs_in_pieces(tile, pipes, state, walk.first, walk.free_first, How.MASKED, config)
        return runs_in_pieces(tile, pipes, state, walk.free_first, walk.free_last, How.WHOLE, config)
    masked, unmasked = walk.first, walk.last - 1
    if const_expr(config.mask_kind != "full"):
        masked, unmasked = forward.seams(walk, unmasked)
    state = forward.steps(tile, pipes, state, unmasked, walk.last, How.MASKED, IN_PIECES, config)
    state = forward.steps(tile, pipes, state, masked, unmasked, How.WHOLE, IN_PIECES, config)
    if const_expr(config.mask_kind not in ("full", "causal")):
        state = forward.steps(tile, pipes, state, walk.first, masked, How.MASKED, IN_PIECES, config)
    return state


@cute.jit
def runs_in_pieces(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, first: Int32, last: Int32, how: Constexpr[How], config: Constexpr[Config]
) -> pipeline.PipelineState:  # fmt: skip
    for r in cutlass.range(first, last, unroll=1):
        run = visible.run_of(r, tile.band)
        for i in cutlass.range(run.last - run.first, unroll=1):
            state = step_in_pieces(tile, pipes, state, run.last - 1 - i, run.ref, how, config)
    return state


@cute.jit
def factor_of(tile: Tile, n_block: Int32, masked: Constexpr[bool], config: Constexpr[Config]) -> Float32:
    """The scale of a tile of keys; asked for ahead of its products, under which it comes."""
    of_groups = tile.keys.factors if const_expr(masked or not config.loses) else tile.keys.whole
    return of_groups[n_block * config.tile_n // GROUP]


class Tokens(NamedTuple):
    """Factors of the thread's keys of a tile, (tile_n / 4,) fp32 in registers."""

    columns: cute.Tensor | None  # of the scores
    weights: cute.Tensor | None  # of P


@cute.jit
def tokens_of(tile: Tile, n_block: Int32, config: Constexpr[Config]) -> Tokens:
    """Likewise asked for ahead."""
    first = n_block * config.tile_n + fragments.by_rows(tile.tScS)[0, 0][1]
    return Tokens(*(None if const_expr(x is None) else pairs_of(x, first, config) for x in (tile.keys.columns, tile.keys.weights)))


@cute.jit
def pairs_of(of_head: cute.Tensor, first: Int32, config: Constexpr[Config]) -> cute.Tensor:
    """What the thread's keys have, two neighbours at a time, from its first on."""
    found = cute.make_rmem_tensor(config.tile_n // fragments.QUAD, Float32)
    pairs = cute.make_tensor(found.iterator, cute.make_layout((2, cute.size(found) // 2)))
    for i in range_constexpr(cute.size(pairs, mode=[1])):
        place = (of_head.iterator + first + fragments.column(2 * i)).align(8)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), pairs[None, i])
    return found


@cute.jit
def factors_of(tile: Tile, of_keys: Float32, masked: Constexpr[bool]) -> cute.Tensor:
    """(ROWS,) fp32: of the scores of a tile of keys, in the exponent of 2; not 0 where some are hidden, which 0 would make NaN of."""
    factors = cute.make_rmem_tensor(fragments.ROWS, Float32)
    for r in range_constexpr(fragments.ROWS):
        factors[r] = tile.row_factors[r] * of_keys
        if const_expr(masked):
            factors[r] = Float32(softmax.LEAST_FACTOR) if factors[r] < softmax.LEAST_FACTOR else factors[r]
    return factors


@cute.jit
def issue_scores(tile: Tile, state: pipeline.PipelineState, config: Constexpr[Config]) -> cute.Tensor:
    """Issue S = Q K^T, into fresh registers, for the tile of keys in the stage of `state`; fp32, of integers with MAGIC."""
    shape = tile.mma.qk.partition_shape_C((config.tile_m, config.tile_n))
    tSrK = tile.tSrK[None, None, None, state.index]
    if const_expr(softmax.is_integer(config)):
        sums = cute.make_rmem_tensor(shape, Int32)
        sums.fill(softmax.MAGIC_BITS)
        forward.product(tile.mma.qk, sums, tile.tSrQ, tSrK, True, config)
        return cute.recast_tensor(sums, Float32)
    acc_S = cute.make_rmem_tensor(shape, Float32)
    forward.product(tile.mma.qk, acc_S, tile.tSrQ, tSrK, False, config)
    return acc_S


@cute.jit
def issue_output(tile: Tile, state: pipeline.PipelineState, config: Constexpr[Config]) -> cute.Tensor:
    """Issue P V for the tile of values in the stage of `state`: a sum of its own or, without `promote`, O's."""
    acc = tile.acc_O
    if const_expr(config.promote):
        acc = cute.make_rmem_tensor_like(tile.acc_O)
    forward.product(tile.mma.pv, acc, tile.P, tile.tOrV[None, None, None, state.index], not config.promote, config)
    return acc


@cute.jit
def add_pieces(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, rescale: cute.Tensor, config: Constexpr[Config]):
    """O' = r O + P V for the tile of values in the stage of `state`, a piece of O's columns after another, through the same registers.

    The branch is always taken, which ptxas does not know: it would multiply the next piece before it has added this one. The sums of both would
    then need registers at a time.
    """
    forward.wait_for_values(tile, pipes, state, config)
    for piece in range_constexpr(config.pieces):
        acc = issue_piece(tile, state, piece, config)
        warpgroup.wait_group(0)
        O = cute.make_tensor(tile.acc_O.iterator + piece * cute.size(acc), acc.layout)
        if const_expr(piece < config.pieces - 1):
            if arch.grid_dim()[2] == 1:
                eight_bits.add_scaled(O, rescale, acc)
        else:
            release(pipes.v, state, config)
            eight_bits.add_scaled(O, rescale, acc)


@cute.jit
def issue_piece(tile: Tile, state: pipeline.PipelineState, piece: Constexpr[int], config: Constexpr[Config]) -> cute.Tensor:
    """Issue P V for a piece of the columns, into fresh registers."""
    V = tile.tOrV[None, piece, None, state.index]
    layout = cute.make_layout((V.shape[0], 1, V.shape[1]), stride=(V.stride[0], 0, V.stride[1]))
    acc = cute.make_rmem_tensor(tile.mma.pv.partition_shape_C((config.tile_m, config.head_dim_v // config.pieces)), Float32)
    forward.product(tile.mma.pv, acc, tile.P, cute.make_tensor(V.iterator, layout), False, config)
    return acc


@cute.jit
def round_into(tile: Tile, acc_S: cute.Tensor, config: Constexpr[Config]):
    """P as the left operand of the next P V."""
    put = const_expr(fragments.round_into if config.wide_values else eight_bits.round_into)
    put(tile.P, acc_S)


@cute.jit
def join(tile: Tile, acc_N: cute.Tensor, config: Constexpr[Config]):
    """O' = r O + N, where N is apart."""
    if const_expr(config.promote):
        eight_bits.add_scaled(tile.acc_O, tile.rescale, acc_N)


@cute.jit
def hold(tile: Tile):
    """The maxima are found before what stands behind: ptxas takes waits for free and would sink them below the next, which is for P V. On them
    depends a store that seldom takes place, and then does no harm, of which ptxas knows neither.
    """
    ptx = "{ .reg .pred p; setp.gt.f32 p, {$r1}, 0f7F7FFFFF; @p st.volatile.shared.f32 [{$r0}], {$r1}; }"
    arch.inline_ptx(ptx, read_only_args=[tile.nowhere, tile.rows.m[0] + tile.rows.m[1]])


@cute.jit
def unit_for(P: cute.Tensor, n_block: Int32, before: Float32, tile: Tile, config: Constexpr[Config]) -> Float32:
    """The scale of a tile of V. Where it is 0, by which O cannot be divided, the one `before` is kept and P is 0."""
    unit = tile.keys.units[n_block * config.tile_n // GROUP]
    if unit == 0.0:
        P.fill(0.0)
    return before if unit == 0.0 else unit


@cute.jit
def to_units_of(tile: Tile, P: cute.Tensor, n_block: Int32, rescale: cute.Tensor, config: Constexpr[Config]):
    """Rescale so that O is in the units of the tile's values, to which they are added as they are."""
    unit = unit_for(P, n_block, tile.unit[0], tile, config)
    ratio = tile.unit[0] / unit
    for r in range_constexpr(fragments.ROWS):
        rescale[r] *= ratio
    tile.unit[0] = unit


@cute.jit
def release(pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, config: Constexpr[Config]):
    if const_expr(config.cluster == 1):
        tma.release(pipe, state)
    else:
        pipe.consumer_release(state)


@cute.jit
def weigh(
    tile: Tile, acc_S: cute.Tensor, n_block: Int32, factors: cute.Tensor, tokens: Tokens, seen: Seen | None, masked: Constexpr[bool],
    config: Constexpr[Config],
) -> cute.Tensor:  # fmt: skip
    """S becomes P; returns the factors by which O must be rescaled. seen: what the rows see of the tile, None where that is everything."""
    if const_expr(masked and config.loses):
        spoil(tile, acc_S, n_block, config)
    if const_expr(config.tokens_k):
        softmax.scale_columns(acc_S, tokens.columns, config)
    if const_expr(config.modified):
        softmax.dequantise(acc_S, factors, tile.shift, config)
        forward.change(tile, acc_S, n_block, seen, config)
        rescale = scores.online_softmax(acc_S, tile.rows, tile.changes, False, config)
        softmax.give_headroom(acc_S, config)
    else:
        if const_expr(config.hides and config.nan_scales and masked):
            move_nan(acc_S, factors)
        if const_expr(seen is not None):
            visible.hide(acc_S, tile.tScS, tile.m0, n_block * config.tile_n, tile.band, seen, config)
        rescale = softmax.online_softmax(acc_S, tile.rows, factors, masked, config)
    if const_expr(config.tokens_v):
        softmax.weigh_columns(acc_S, tokens.weights, masked)
    return rescale


@cute.jit
def spoil(tile: Tile, acc_S: cute.Tensor, n_block: Int32, config: Constexpr[Config]):
    """NaN for the scores of keys that were not finite. (Where all rows see the whole tile, its scale is NaN.)"""
    whole = tile.keys.whole[n_block * config.tile_n // GROUP]
    if arch.vote_any_sync(whole != whole):
        S, first = fragments.by_rows(acc_S), n_block * config.tile_n + fragments.by_rows(tile.tScS)[0, 0][1]
        of_thread = cute.make_tensor(tile.keys.lost.iterator + first, cute.make_layout(config.tile_n))
        for c in range_constexpr(cute.size(S, mode=[1])):
            lost = of_thread[fragments.column(c)]
            for r in range_constexpr(fragments.ROWS):
                S[r, c] += lost


@cute.jit
def move_nan(acc_S: cute.Tensor, factors: cute.Tensor):
    """From factors of rows to their scores, of which some are about to be hidden. factors: (ROWS,) fp32."""
    if arch.vote_any_sync(factors[0] != factors[0] or factors[1] != factors[1]):
        S = fragments.by_rows(acc_S)
        for r in range_constexpr(fragments.ROWS):
            nan = factors[r] * 0.0
            factors[r] = factors[r] if nan == 0.0 else Float32(softmax.LEAST_FACTOR)
            for c in range_constexpr(cute.size(S, mode=[1])):
                S[r, c] += nan


@cute.jit
def last_product(
    tile: Tile, pipes: Pipes, state: pipeline.PipelineState, scales: Scales, block: Block, config: Constexpr[Config]
) -> Statistics:
    """The last P V (in pieces it is behind), under which the rows are summed up, and what makes O of the sums."""
    if const_expr(config.pieces == 1):
        forward.wait_for_values(tile, pipes, state, config)
        acc_N = issue_output(tile, state, config)
    if const_expr(not config.modified):
        softmax.take_headroom(tile.rows.l, config)
        if const_expr(config.centred):
            shift_maxima(tile, scales, block)
    lse, inverse = scores.close(tile.rows, tile.terms, config)
    row_max = scores.largest(tile.rows, config)
    shares = shares_of(tile.rows, inverse) if const_expr(config.sink and config.channels) else None
    softmax.take_headroom(inverse, config)
    early = None  # or there are no registers for it
    if const_expr(config.promote and config.channels and config.pieces == 1):
        early = channels_of(scales, block, 0, config)
    if const_expr(config.pieces == 1):
        warpgroup.wait_group(0)
        release(pipes.v, state, config)
        join(tile, acc_N, config)
    finish(tile, early, scales, block, Ends(inverse, lse, shares), config)
    return Statistics(lse, row_max)


class Ends(NamedTuple):
    """Of a thread's rows, (ROWS,) fp32."""

    inverse: cute.Tensor  # 1 / l, without P's headroom
    lse: cute.Tensor
    shares: cute.Tensor | None  # what the sink leaves of a row


class Channels(NamedTuple):
    """Of up to CHANNELS of the thread's columns of O, fp32 in registers."""

    scale: cute.Tensor
    centre: cute.Tensor


@cute.jit
def channels_of(scales: Scales, block: Block, part: Constexpr[int], config: Constexpr[Config]) -> Channels:
    return Channels(*(read_channels(x[block.batch, block.head_k, None], part, config) for x in (scales.v, scales.centre)))


# Two neighbours that lie @offset bytes behind an address, 0 unless @at < columns. A branch for each would move the products' descriptors to vector
# registers, an address for each would take two.
READ = (
    "{ .reg .pred p; setp.gt.s32 p, {$r1}, @at; mov.f32 {$w0}, 0f00000000; mov.f32 {$w1}, 0f00000000; "
    "@p ld.global.v2.f32 {{$w0}, {$w1}}, [{$r0}+@offset]; }"
)


@cute.jit
def read_channels(of_head: cute.Tensor, part: Constexpr[int], config: Constexpr[Config]) -> cute.Tensor:
    """0 for those that do not exist."""
    columns, first = const_expr(min(config.head_dim_v // fragments.QUAD, CHANNELS)), 2 * (arch.lane_idx() % fragments.QUAD)
    found = cute.make_rmem_tensor(columns, Float32)
    address, left = (of_head.iterator + first).toint(), of_head.shape[0] - first
    for c in range_constexpr(0, columns, 2):
        at = const_expr(fragments.column(part * CHANNELS + c))
        code = const_expr(READ.replace("@at", str(at)).replace("@offset", str(4 * at)))
        found[c], found[c + 1] = arch.inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[address, left])
    return found


@cute.jit
def finish(
    tile: Tile, early: Channels | None, scales: Scales, block: Block, ends: Ends, config: Constexpr[Config]
):  # fmt: skip
    """O from its sums; 0 in rows that see nothing. early: of the first CHANNELS columns, where they were read before."""
    O, (inverse, lse, shares) = fragments.by_rows(tile.acc_O), ends
    if const_expr(config.channels):
        for part in range_constexpr(cute.ceil_div(cute.size(O, mode=[1]), CHANNELS)):
            arch.sync_warp()  # or what is read for all parts at once spills
            scale, centre = early if const_expr(part == 0 and early is not None) else channels_of(scales, block, part, config)
            for c in range_constexpr(cute.size(scale)):
                for r in range_constexpr(fragments.ROWS):
                    at = const_expr(part * CHANNELS + c)
                    of_centre = centre[c] if const_expr(shares is None) else centre[c] * shares[r]
                    O[r, at] = O[r, at] * inverse[r] * scale[c] + of_centre
        if const_expr(config.mask_kind != "full"):
            fragments.clear_rows(tile.acc_O, lse)
    else:
        if const_expr(not config.wide_values):
            scale = tile.keys.units[0] if const_expr(tile.unit is None) else tile.unit[0]
            for r in range_constexpr(fragments.ROWS):
                inverse[r] *= scale
        fragments.scale_rows(tile.acc_O, inverse)


@cute.jit
def shift_maxima(tile: Tile, scales: Scales, block: Block):
    """By what all scores of a row lack, since K was centred."""
    shift = shift_of(scales, tile.tScS, block)
    for r in range_constexpr(fragments.ROWS):
        m = tile.rows.m[r]
        tile.rows.m[r] = m if m == -Float32.inf else m + shift[r] * fragments.LOG2_E


@cute.jit
def shift_of(scales: Scales, tScS: cute.Tensor, block: Block) -> cute.Tensor:
    """(ROWS,) fp32, in natural units."""
    of_head, at = scales.shift[block.batch, block.head, None], fragments.by_rows(tScS)
    shift = cute.make_rmem_tensor(fragments.ROWS, Float32)
    for r in range_constexpr(fragments.ROWS):
        shift[r] = of_head[min(block.m0 + at[r, 0][0], of_head.shape[0] - 1)]
    return shift


@cute.jit
def shift_of_products(scales: Scales, changes: Scores, tScS: cute.Tensor, block: Block, config: Constexpr[Config]) -> cute.Tensor | None:
    """(ROWS,) fp32, in units of products of Q and K, where scores are changed afterwards."""
    shift = None
    if const_expr(config.modified and config.centred):
        shift = shift_of(scales, tScS, block)
        scale = changes.factor if const_expr(config.natural) else changes.scale_log2 * fragments.LN2  # the softmax's, or softcap
        if const_expr(config.softcap):
            scale *= changes.inner
        for r in range_constexpr(fragments.ROWS):
            shift[r] /= scale
    return shift


@cute.jit
def shares_of(rows: fragments.Rows, inverse: cute.Tensor) -> cute.Tensor:
    """(ROWS,) fp32: what a sink leaves of each row."""
    shares = cute.make_rmem_tensor(fragments.ROWS, Float32)
    for r in range_constexpr(fragments.ROWS):
        shares[r] = arch.warp_reduction_sum(rows.l[r], threads_in_group=fragments.QUAD) * inverse[r]
    return shares
