"""The gradient of an additive bias on Hopper: dB = dS, summed over what B is broadcast over (Eq. 32). One thread block a tile of dB.

S and dP of a tile are computed once more, for one head and batch entry after the other, and P (dP - delta) is summed up in registers: every element
of dB has one owner and one order, and there is no memory but dB's own. A bias that is broadcast over queries has its owners sum over these,
too, of each head and batch entry. Where there are too few tiles to occupy the machine, each sum is cut into parts, which the host adds up.

Operands come by 64 columns at a time. P is computed while dP is under way; what a thread reads of the bias is the same for all that it sums up, so
it lies in shared memory in the order in which it is wanted. Equations: 21, 24, 25, 29, 31.
Predicted bottleneck: tensor cores, or what two warpgroups leave idle of them.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.bias.call import COLUMNS, Config
from tilewise.backends.hopper.forward.scheduler import Block
from tilewise.backends.hopper.operands import Band, BiasTensors, Changes
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.hopper.scores.again import Head, kept_of_rows, weight_of
from tilewise.backends.hopper.scores.derivative import differentiate_rows, drop
from tilewise.backends.hopper.visible.bands import band_of, interval, tiles_seen, transposed
from tilewise.backends.hopper.visible.hiding import bit_in, hide
from tilewise.backends.hopper.visible.queries import UNMASKED, keys_of, visit_of
from tilewise.backends.tables.runs import NOTHING
from tilewise.sm90 import fragments, tma, wgmma
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    CUstream,
    Float32,
    Int32,
    OperandMajorMode,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    sm90,
    warpgroup,
)

THREADS = 128  # of a warpgroup
WARP = 32
ALL = 1  # the named barrier of all consumers
NONE = -1 - NOTHING


class Loads(NamedTuple):
    Q: tma.Tma
    K: tma.Tma
    dO: tma.Tma
    V: tma.Tma


class Smem(NamedTuple):
    A: cute.Tensor  # (tile_m, COLUMNS, stages): of Q or dO
    B: cute.Tensor  # (tile_n, COLUMNS, stages): of K or V
    bias: cute.Tensor  # (elements of a vector, vectors of a thread, threads): what this thread alone reads of it
    sums: cute.Tensor | None  # (tile_n, warps of the consumers): where dB has no rows, each warp's over its queries


class Sum(NamedTuple):
    """What a thread block sums up: items [first, last), each a tile of queries of one head; one head's are one after another."""

    part: Int32
    batch: Int32  # of dB
    head: Int32
    m_block: Int32  # of dB; without rows: a head's first
    tiles: Int32  # of a head
    n0: Int32
    heads: Int32  # summed over, in each of the batch entries
    first: Int32
    last: Int32


class Place(NamedTuple):
    """Of an item."""

    batch: Int32
    head: Int32
    tile: Int32  # one of the head's


class Item(NamedTuple):
    block: Block
    ref: Int32  # for "tiles": how it is masked, as in queries.Visit; NONE where no query sees a key


class Rows(NamedTuple):
    """(ROWS,) each, of this thread's queries in an item."""

    lse: cute.Tensor  # +inf for one that sees nothing, or does not exist
    minus_delta: cute.Tensor
    begin: cute.Tensor  # of the keys that it sees, less n0; not for "tiles"
    end: cute.Tensor


class Operands(NamedTuple):
    """Of the products, in the stages of the ring."""

    A: cute.Tensor
    B: cute.Tensor


class Own(NamedTuple):
    """What a consumer's thread has from beginning to end."""

    pipe: pipeline.PipelineTmaAsync
    operands: Operands
    tScS: cute.Tensor  # (row, column) of each element of S
    bias: cute.Tensor
    mma: cute.TiledMma


@cute.jit
def launch(
    mV: cute.Tensor, mdO: cute.Tensor, tensors: BiasTensors, band: Band, changes: Changes, config: Constexpr[Config], stream: CUstream
):  # fmt: skip
    """tensors.lse and minus_delta are what prepare.py leaves; changes.shift is there without ALiBi, too."""
    mQ, mK, _, _, mB = tensors
    dtype, k_major = mQ.element_type, OperandMajorMode.K
    tile = config.tile_m, config.tile_n, COLUMNS
    layouts = (
        sm90.make_smem_layout_a(wgmma.K_MAJOR, tile, dtype, config.stages),
        sm90.make_smem_layout_b(wgmma.K_MAJOR, tile, dtype, config.stages),
    )
    mma = sm90.make_trivial_tiled_mma(
        dtype, dtype, k_major, k_major, Float32, (config.consumers, 1, 1), (64, config.tile_n), warpgroup.OperandSource.SMEM
    )
    rows = [cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0])) for x in (mQ, mK, mdO, mV)]
    shapes = ((config.tile_m, COLUMNS), (config.tile_n, COLUMNS)) * 2
    loads = Loads(*(tma.describe(*each) for each in zip(rows, layouts * 2, shapes, strict=True)))
    tiles = cute.ceil_div(mK.shape[1], config.tile_n)
    if const_expr(config.rows):
        tiles = tiles * cute.ceil_div(mQ.shape[1], config.tile_m)
    kernel(
        tensors, loads, band, changes, mma, *layouts, config
    ).launch(
        grid=(tiles * mB.shape[0] * mB.shape[1] * mB.shape[2], 1, 1), block=((1 + config.consumers) * THREADS, 1, 1),
        min_blocks_per_mp=1, stream=stream,
    )  # fmt: skip


@cute.kernel
def kernel(
    tensors: BiasTensors, loads: Loads, band: Band, changes: Changes, mma: cute.TiledMma,
    layout_A: cute.ComposedLayout, layout_B: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    warps = config.consumers * THREADS // WARP
    operands = [storage.allocate_tensor(tensors.Q.element_type, x.outer, 1024, swizzle=x.inner) for x in (layout_A, layout_B)]
    threads, vector, vectors = config.consumers * THREADS, config.vector, config.vectors
    side_by_side = cute.make_layout((vector, vectors, threads), stride=(1, vector * threads, vector))
    bias, sums = storage.allocate_tensor(changes.bias.element_type, side_by_side, 16), None
    if const_expr(not config.rows):
        sums = storage.allocate_tensor(Float32, cute.make_layout((config.tile_n, warps)), 16)
    sm = Smem(*operands, bias, sums)
    pipe = tma.make_pipe(storage, config.stages, config.dtype.itemsize * COLUMNS * (config.tile_m + config.tile_n), warps)
    tma.barriers_ready()
    total = sum_of(arch.block_idx()[0], tensors, band, config)
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp < THREADS // WARP:
        arch.setmaxregister_decrease(config.registers[0])
        if warp == 0:
            produce(tensors, loads, sm, pipe, total, band, config)
    else:
        arch.setmaxregister_increase(config.registers[1])
        consume(tensors, loads, sm, pipe, total, band, changes, mma, config)


@cute.jit
def sum_of(number: Int32, tensors: BiasTensors, band: Band, config: Constexpr[Config]) -> Sum:
    """What thread block `number` does; nothing, where no query of its tile sees a key of it."""
    n_blocks, m_blocks = cute.ceil_div(tensors.K.shape[1], config.tile_n), cute.ceil_div(tensors.Q.shape[1], config.tile_m)
    n_block, number = number % n_blocks, number // n_blocks
    heads_b, batch_b = tensors.dB.shape[2], tensors.dB.shape[1]
    first, last = Int32(0), m_blocks
    if const_expr(config.mask_kind != "tiles"):
        first, last = visiting(n_block, band, config)
    m_block = first
    if const_expr(config.rows):
        m_block, number = number % m_blocks, number // m_blocks
        first, last = max(first, m_block), min(last, m_block + 1)
    head, rest = number % heads_b, number // heads_b
    batch, part = rest % batch_b, rest // batch_b
    heads, tiles = tensors.Q.shape[2] // heads_b, max(last - first, 0)
    items = heads * (tensors.Q.shape[0] // batch_b) * tiles
    some = cute.ceil_div(items, tensors.dB.shape[0])
    ends = min(part * some, items), min((part + 1) * some, items)
    return Sum(part, batch, head, m_block, tiles, n_block * config.tile_n, heads, *ends)


@cute.jit
def visiting(n_block: Int32, band: Band, config: Constexpr[Config]):
    """[first, last) of the tiles of queries, some of which see keys of a block."""
    if const_expr(config.mask_kind == "varlen"):
        first, last = band.tables.walks[n_block, 0], band.tables.walks[n_block, 1]
        return first, max(first, last)
    return tiles_seen(n_block * config.tile_n, config.tile_n, config.tile_m, transposed(band))


@cute.jit
def place_of(number: Int32, total: Sum) -> Place:
    of_head, tile = number // max(total.tiles, 1), number % max(total.tiles, 1)
    return Place(total.batch + of_head // total.heads, total.head + of_head % total.heads, tile)


@cute.jit
def next_place(place: Place, total: Sum) -> Place:
    """By counting: consumers would wait for a division."""
    batch, head, tile = place.batch, place.head, place.tile + 1
    if tile == total.tiles:
        head, tile = head + 1, Int32(0)
        if head == total.head + total.heads:
            batch, head = batch + 1, total.head
    return Place(batch, head, tile)


@cute.jit
def item(place: Place, total: Sum, tensors: BiasTensors, band: Band, config: Constexpr[Config]) -> Item:
    """The tile of queries, with its head and batch entry."""
    group = tensors.Q.shape[2] // tensors.K.shape[2]
    batch, head, m_block, ref = place.batch, place.head, total.m_block, Int32(UNMASKED)
    if const_expr(not config.rows):  # else it stays the same, and what follows from it need not be worked out again
        m_block += place.tile
    if const_expr(config.mask_kind == "tiles"):
        find = ref_of if const_expr(config.rows) else visit_at
        m_block, ref = find(m_block, total.n0 // config.tile_n, batch, head, band)
    return Item(Block(m_block * config.tile_m, head, head // group, batch), ref)


@cute.jit
def ref_of(m_block: Int32, n_block: Int32, batch: Int32, head: Int32, band: Band) -> tuple[Int32, Int32]:
    """A tile, and how it is masked."""
    tables, ref = band.tables, Int32(NONE)
    visited, there = visit_of(m_block, n_block, tables.planes[batch, head], tables)
    if visited:
        ref = tables.visits[there, 1]
    return m_block, ref


@cute.jit
def visit_at(number: Int32, n_block: Int32, batch: Int32, head: Int32, band: Band) -> tuple[Int32, Int32]:
    """A block of keys' visit of this number: its tile of queries, and how that is masked; behind the last visit nothing is seen."""
    tables, m_block, ref = band.tables, Int32(0), Int32(NONE)
    plane = tables.planes[batch, head]
    visit = tables.spans[plane, n_block, 0] + number
    if visit < tables.spans[plane, n_block, 1]:
        m_block, ref = tables.visits[visit, 0], tables.visits[visit, 1]
    return m_block, ref


@cute.jit
def produce(
    tensors: BiasTensors, loads: Loads, sm: Smem, pipe: pipeline.PipelineTmaAsync, total: Sum, band: Band, config: Constexpr[Config]
):  # fmt: skip
    """One warp loads Q and K, then dO and V of every item."""
    state, n_block = tma.at_first_empty(config.stages), total.n0 // config.tile_n
    place = place_of(total.first, total)
    for _i in cutlass.range(total.first, total.last, unroll=1):
        its = item(place, total, tensors, band, config)
        block = its.block
        chunks, chunks_v = Int32(config.chunks), Int32(config.chunks_v)
        if its.ref == NONE:
            chunks, chunks_v = Int32(0), Int32(0)
        for of_queries, of_keys, some in ((loads.Q, loads.K, chunks), (loads.dO, loads.V, chunks_v)):
            for c in cutlass.range(some, unroll=1):
                pipe.producer_acquire(state)
                at = block.m0 // config.tile_m, c, block.head, block.batch
                tma.load(of_queries, sm.A, pipe, state, (config.tile_m, COLUMNS), at)
                tma.load(of_keys, sm.B, pipe, state, (config.tile_n, COLUMNS), (n_block, c, block.head_k, block.batch))
                state.advance()
        place = next_place(place, total)


@cute.jit
def consume(
    tensors: BiasTensors, loads: Loads, sm: Smem, pipe: pipeline.PipelineTmaAsync, total: Sum, band: Band, changes: Changes,
    mma: cute.TiledMma, config: Constexpr[Config],
):  # fmt: skip
    """64 queries a warpgroup: S, dP and what they add to dB, item by item; then dB."""
    thread = arch.thread_idx()[0] - THREADS
    of_warpgroup = wgmma.of_warpgroup(mma, arch.make_warp_uniform(thread // THREADS))
    operands = Operands(of_warpgroup.make_fragment_A(of_warpgroup.partition_A(sm.A)),
                        of_warpgroup.make_fragment_B(of_warpgroup.partition_B(sm.B)))  # fmt: skip
    tScS = mma.get_slice(thread).partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n)))
    acc_dB = cute.make_rmem_tensor(tScS.shape, Float32)
    acc_dB.fill(0.0)
    own_bias = sm.bias[None, None, thread]
    if total.first < total.last:
        keep_bias(own_bias, tScS, changes, total, config)
    state = tma.at_first(config.stages)
    place = place_of(total.first, total)
    for _i in cutlass.range(total.first, total.last, unroll=1):
        its = item(place, total, tensors, band, config)
        if its.ref != NONE:
            state = add_item(acc_dB, its, total, state, tensors, Own(pipe, operands, tScS, own_bias, mma), band, changes, config)
        place = next_place(place, total)
    if const_expr(config.dropout):
        for i in range_constexpr(cute.size(acc_dB)):
            acc_dB[i] *= changes.draw.rest
    if const_expr(config.rows):
        store(tensors.dB[total.part, total.batch, total.head, None, None], acc_dB, tScS, total.m_block * config.tile_m, total.n0, config)
    else:
        store_sums(tensors.dB[total.part, total.batch, total.head, 0, None], acc_dB, tScS, sm.sums, thread, total.n0, config)


@cute.jit
def add_item(
    acc_dB: cute.Tensor, its: Item, total: Sum, state: pipeline.PipelineState, tensors: BiasTensors, own: Own, band: Band, changes: Changes,
    config: Constexpr[Config],
) -> pipeline.PipelineState:  # fmt: skip
    """dB += dS of an item. Its stages begin at `state`; returns where those of the next item begin."""
    pipe, operands, tScS, own_bias, mma = own
    rows = rows_of(its, total.n0, tScS, tensors, band, config)  # read ahead of the products
    acc_S, acc_dP = (cute.make_rmem_tensor(tScS.shape, Float32) for _ in range(2))
    done = state.clone()
    for g in range_constexpr(config.chunks + config.chunks_v):
        acc, first = (acc_S, 0) if const_expr(g < config.chunks) else (acc_dP, config.chunks)
        pipe.consumer_wait(state)
        A, B = (x[None, None, None, state.index] for x in operands)
        fragments.product(mma, acc, A, B, accumulate=g > first)
        state.advance()
        if const_expr(g >= config.behind):  # S is complete with the last of these: no more of dP's groups are under way
            warpgroup.wait_group(config.behind)
            tma.release(pipe, done)
            done.advance()
    bits = kept_of_rows(tScS, changes.draw, its.block, total.n0, config.tile_n, config)
    weigh(acc_S, tScS, own_bias, changes, its.block, total.n0, tensors.K.shape[1], rows.lse, config)
    dB, P, dP = (fragments.by_rows(x) for x in (acc_dB, acc_S, acc_dP))
    # A branch ahead of the wait keeps ptxas from computing P behind it. By vote: a thread's own would put the ring's stage into vector registers.
    if arch.vote_all_sync(sees_all(its, rows, tensors.K.shape[1] - total.n0, config)):
        done = finish_products(pipe, done, config)
        drop(dP, bits, changes.draw, config)
        for r in range_constexpr(fragments.ROWS):
            for c in range_constexpr(cute.size(P, mode=[1])):
                dB[r, c] += P[r, c] * (dP[r, c] + rows.minus_delta[r])
    else:
        done = finish_products(pipe, done, config)
        drop(dP, bits, changes.draw, config)
        differentiate_rows(P, P, dP, rows.minus_delta)
        hide_pairs(acc_S, tScS, its, total.n0, rows, band, config)
        for n in range_constexpr(cute.size(acc_dB)):
            acc_dB[n] += acc_S[n]
    return state


@cute.jit
def finish_products(pipe: pipeline.PipelineTmaAsync, done: pipeline.PipelineState, config: Constexpr[Config]) -> pipeline.PipelineState:
    """Wait for the last groups of dP."""
    warpgroup.wait_group(0)
    for _g in range_constexpr(config.behind):
        tma.release(pipe, done)
        done.advance()
    return done


@cute.jit
def keep_bias(own_bias: cute.Tensor, tScS: cute.Tensor, changes: Changes, total: Sum, config: Constexpr[Config]):
    """What this thread reads of the bias, the same for all items: elements of one row, then of the other, if they differ. 0 beyond the last key."""
    at, bias = fragments.by_rows(tScS), scores.bias_of(changes, Head(total.batch, total.head))
    some = cute.make_rmem_tensor(config.vector, own_bias.element_type)
    columns = const_expr(cute.size(at, mode=[1]))
    for i in range_constexpr(config.vectors):
        r, first = const_expr(divmod(i * config.vector, columns))
        key = total.n0 + at[r, 0][1]
        gBias = scores.bias_row(bias, total.m_block * config.tile_m + at[r, 0][0], key)
        for j in range_constexpr(0, config.vector, 2):
            pair = scores.read(gBias, fragments.column(first + j), bias.shape[1] - key, config)
            some[j], some[j + 1] = (x.to(some.element_type) for x in pair)
        cute.autovec_copy(some, vector_of(own_bias, i, config))


def vector_of(own_bias: cute.Tensor, i: int, config) -> cute.Tensor:
    return cute.make_tensor(own_bias[None, i].iterator.align(16), cute.make_layout(config.vector))


@cute.jit
def weigh(
    acc_S: cute.Tensor, tScS: cute.Tensor, own_bias: cute.Tensor, changes: Changes, block: Block, n0: Int32, seqlen_k: Int32,
    lse: cute.Tensor, config: Constexpr[Config],
):  # fmt: skip
    """S = Q K^T becomes P (Eq. 24); what hidden pairs get says nothing."""
    S, slope = fragments.by_rows(acc_S), None
    if const_expr(config.alibi):
        slope = scores.slope_of(changes, Head(block.batch, block.head))
    for first in range_constexpr(0, cute.size(S, mode=[1]), config.vector):
        if const_expr(config.softcap or config.alibi):
            if n0 + fragments.column(first) < seqlen_k:  # always, nearly; a branch between these parts keeps registers from running out
                weigh_some(S, tScS, first, own_bias, changes, slope, block.m0, n0, lse, config)
        else:
            weigh_some(S, tScS, first, own_bias, changes, slope, block.m0, n0, lse, config)


@cute.jit
def weigh_some(
    S: cute.Tensor, tScS: cute.Tensor, first: Constexpr[int], own_bias: cute.Tensor, changes: Changes, slope: Float32 | None, m0: Int32,
    n0: Int32, lse: cute.Tensor, config: Constexpr[Config],
):  # fmt: skip
    """A vector of columns, from `first` on."""
    at, columns = fragments.by_rows(tScS), const_expr(cute.size(S, mode=[1]))
    biases = cute.make_rmem_tensor(config.vector, own_bias.element_type)
    for r in range_constexpr(fragments.ROWS):
        if const_expr(config.rows or r == 0):
            cute.autovec_copy(vector_of(own_bias, (r * columns + first) // config.vector, config), biases)
        distance = Int32(0)
        if const_expr(config.alibi):
            distance = scores.centre(changes, m0 + at[r, 0][0], config) - n0 - at[r, 0][1]
        for i in range_constexpr(config.vector):
            c = first + i
            S[r, c] = weight_of(S[r, c], biases[i].to(Float32), distance, c, slope, lse[r], Float32(1.0), False, changes, config)


@cute.jit
def rows_of(its: Item, n0: Int32, tScS: cute.Tensor, tensors: BiasTensors, band: Band, config: Constexpr[Config]) -> Rows:
    at, block = fragments.by_rows(tScS), its.block
    rows = Rows(*(cute.make_rmem_tensor(fragments.ROWS, dtype) for dtype in (Float32, Float32, Int32, Int32)))
    for r in range_constexpr(fragments.ROWS):
        row = block.m0 + at[r, 0][0]
        rows.lse[r], rows.minus_delta[r], rows.begin[r], rows.end[r] = Float32.inf, Float32(0.0), Int32(0), Int32(0)
        if row < tensors.Q.shape[1]:
            rows.lse[r], rows.minus_delta[r] = tensors.lse[block.batch, block.head, row], tensors.minus_delta[block.batch, block.head, row]
        if const_expr(config.mask_kind != "tiles"):
            begin, end = keys_of(row, band, config)
            rows.begin[r], rows.end[r] = begin - n0, end - n0
    return rows


@cute.jit
def sees_all(its: Item, rows: Rows, keys: Int32, config: Constexpr[Config]) -> Boolean:
    """Whether both queries see all keys of the tile, of which there are as many."""
    seen = rows.lse[0] != Float32.inf and rows.lse[1] != Float32.inf
    if const_expr(config.mask_kind == "tiles"):
        return seen and its.ref == UNMASKED
    last = min(keys, config.tile_n)
    return seen and max(rows.begin[0], rows.begin[1]) <= 0 and min(rows.end[0], rows.end[1]) >= last


@cute.jit
def hide_pairs(acc_dS: cute.Tensor, tScS: cute.Tensor, its: Item, n0: Int32, rows: Rows, band: Band, config: Constexpr[Config]):
    """dS = 0 for the pairs that are hidden or do not exist."""
    dS, at, m0 = fragments.by_rows(acc_dS), fragments.by_rows(tScS), its.block.m0
    if const_expr(config.mask_kind != "tiles"):
        hide(rows, acc_dS, tScS, Int32(0))
    else:
        if its.ref >= 0:
            for r in range_constexpr(fragments.ROWS):
                row = at[r, 0][0]
                for c in range_constexpr(cute.size(dS, mode=[1])):
                    dS[r, c] = dS[r, c] if bit_in(band.tables.bitmaps, its.ref, at[r, c][1], row) else Float32(0.0)
        elif its.ref != UNMASKED:
            edges = band_of(its.ref, band.tables.bands)
            for c in range_constexpr(cute.size(dS, mode=[1])):
                begin, end = interval(n0 + at[0, c][1], edges)
                for r in range_constexpr(fragments.ROWS):
                    row = m0 + at[r, 0][0]
                    dS[r, c] = dS[r, c] if row >= begin and row < end else Float32(0.0)
    for r in range_constexpr(fragments.ROWS):
        if rows.lse[r] == Float32.inf:
            dS[r, None].fill(0.0)


@cute.jit
def store(gB: cute.Tensor, acc_dB: cute.Tensor, tScS: cute.Tensor, m0: Int32, n0: Int32, config: Constexpr[Config]):
    """gB: (seqlen_q, seqlen_k), dense; by twos where rows have an even length."""
    dB, at = fragments.by_rows(acc_dB), fragments.by_rows(tScS)
    pair = cute.make_rmem_tensor(2, gB.element_type)
    for r in range_constexpr(fragments.ROWS):
        row = m0 + at[r, 0][0]
        if row < gB.shape[0]:
            gRow, keys = gB[row, None], gB.shape[1] - n0
            if gB.shape[1] % 2 == 0:
                for c in range_constexpr(0, cute.size(dB, mode=[1]), 2):
                    pair[0], pair[1] = dB[r, c].to(gB.element_type), dB[r, c + 1].to(gB.element_type)
                    if at[r, c][1] < keys:
                        place = (gRow.iterator + (n0 + at[r, c][1])).align(2 * gB.element_type.width // 8)
                        cute.autovec_copy(pair, cute.make_tensor(place, cute.make_layout(2)))
            else:
                for c in range_constexpr(cute.size(dB, mode=[1])):
                    if at[r, c][1] < keys:
                        gRow[n0 + at[r, c][1]] = dB[r, c].to(gB.element_type)


@cute.jit
def store_sums(
    gB: cute.Tensor, acc_dB: cute.Tensor, tScS: cute.Tensor, sums: cute.Tensor, thread: Int32, n0: Int32, config: Constexpr[Config]
):  # fmt: skip
    """The sums over this thread block's queries: those of each warp, added up in one order. gB: (seqlen_k,)."""
    dB, at = fragments.by_rows(acc_dB), fragments.by_rows(tScS)
    for c in range_constexpr(cute.size(dB, mode=[1])):
        x = dB[0, c] + dB[1, c]
        for distance in (4, 8, 16):
            x += arch.shuffle_sync_bfly(x, distance)
        if arch.lane_idx() < fragments.QUAD:
            sums[at[0, c][1], thread // WARP] = x
    arch.barrier(barrier_id=ALL, number_of_threads=config.consumers * THREADS)
    if thread < config.tile_n and n0 + thread < gB.shape[0]:
        total = Float32(0.0)
        for warp in range_constexpr(config.consumers * THREADS // WARP):
            total += sums[thread, warp]
        gB[n0 + thread] = total.to(gB.element_type)
