"""D1: decoding. One new query a sequence, so the keys are cut over thread blocks (split-KV), and a second kernel adds the pieces up.

K5.1 gives a thread block 64 queries. Here a sequence has one, and the 64 rows are the query heads that share a key head: K and V are read once for
all of them. That leaves batch * heads_k blocks, too few to keep memory busy, so each sequence's tiles of keys are dealt to `splits` blocks. Each
writes its O, divided by its own sum, and its log-sum-exp; `combine` weighs them. Roles, ring and arithmetic are K5.1's.

Predicted bottleneck: HBM, at long caches; at short ones the start of two kernels.
Equations: those of FlashAttention-2's forward in docs/algorithm.md; pieces are merged as in tilewise.merge.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tilewise.sm90 import fragments, tma, wgmma
from tilewise.sm90.dsl import (
    BFloat16,
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
    warpgroup,
)

THREADS = 128  # of a warpgroup


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a problem is cut and scheduled."""

    head_dim: int = 128
    tile_m: int = 64
    tile_n: int = 64
    kv_stages: int = 5


def configure(**choice) -> Config:
    return Config(**choice)


class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim, 1)
    K: cute.Tensor  # (tile_n, head_dim, kv_stages)
    V: cute.Tensor  # (head_dim, tile_n, kv_stages)


class Pipes(NamedTuple):
    q: pipeline.PipelineTmaAsync
    kv: pipeline.PipelineTmaAsync  # a stage is full when both of its tiles are there


class Loads(NamedTuple):
    Q: tma.Tma
    K: tma.Tma
    V: tma.Tma


class Pieces(NamedTuple):
    """What blocks leave for each other; in a kernel O is (group, head_dim, splits, heads_k, batch) and L (group, splits, heads_k, batch)."""

    O: cute.Tensor  # (batch, heads_q, splits, head_dim) fp32
    L: cute.Tensor  # (batch, heads_q, splits) fp32


class Results(NamedTuple):
    O: cute.Tensor  # (group, head_dim, heads_k, batch) bf16
    L: cute.Tensor  # (group, heads_k, batch) fp32


class Walk(NamedTuple):
    """The tiles of keys [first, last) of a thread block, of a sequence of `length` tokens."""

    length: Int32
    first: Int32
    last: Int32


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor, lengths: cute.Tensor,
    pieces: Pieces, scale_log2: Float32, config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """mQ, mO: (batch, heads_q, head_dim) bf16; mK, mV: (batch, capacity, heads_k, head_dim) bf16; mL: (batch, heads_q) fp32; lengths: (batch,) int32.
    Scores are multiplied by `scale_log2` ln 2.
    """
    batch, heads_q, splits = pieces.L.shape
    heads_k = mK.shape[2]
    mQ, mO, mL, sums, lse = (by_group(x, heads_k) for x in (mQ, mO, mL, pieces.O, pieces.L))
    mK, mV = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=mode)) for x, mode in ((mK, [1, 3, 2, 0]), (mV, [3, 1, 2, 0])))
    mQ, mO = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 3, 1, 2])) for x in (mQ, mO))
    pieces = Pieces(
        cute.make_tensor(sums.iterator, cute.select(sums.layout, mode=[0, 4, 3, 1, 2])),
        cute.make_tensor(lse.iterator, cute.select(lse.layout, mode=[0, 3, 1, 2])),
    )
    layouts = wgmma.layout_Q(config), wgmma.layout_K(config), wgmma.layout_V(config)
    shapes = (config.tile_m, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim, config.tile_n)
    loads = Loads(*(tma.describe(*each) for each in zip((mQ, mK, mV), layouts, shapes, strict=True)))
    kernel(loads, pieces, lengths, scale_log2, wgmma.products(config), *layouts, config).launch(
        grid=(splits, heads_k, batch),
        block=(2 * THREADS, 1, 1),
        stream=stream,
    )
    combine(pieces, Results(mO, mL), config).launch(grid=(heads_q // heads_k, heads_k, batch), block=(config.head_dim, 1, 1), stream=stream)


@cute.jit
def by_group(x: cute.Tensor, heads_k: Int32) -> cute.Tensor:
    """(batch, heads_q, ...) as (group, heads_k, batch, ...): query head h reads key head h // group."""
    group, step = x.shape[1] // heads_k, x.stride[1]
    shape, stride = (group, heads_k, x.shape[0], *x.shape[2:]), (step, group * step, x.stride[0], *x.stride[2:])
    return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=stride))


@cute.kernel
def kernel(
    loads: Loads, pieces: Pieces, lengths: cute.Tensor, scale_log2: Float32, mma: wgmma.Mma,
    layout_Q: cute.ComposedLayout, layout_K: cute.ComposedLayout, layout_V: cute.ComposedLayout, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    sm = Smem(*(storage.allocate_tensor(BFloat16, x.outer, 1024, swizzle=x.inner) for x in (layout_Q, layout_K, layout_V)))
    pipes = make_pipes(storage, config)
    split, head_k, b = arch.block_idx()
    walk = walk_of(split, pieces.L.shape[1], lengths[b], loads.K.gmem.shape[0], config)
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp < THREADS // 32:
        if warp == 0:
            produce(loads, sm, pipes, walk, head_k, b, config)
    else:
        consume(pieces.O[None, None, split, head_k, b], pieces.L[None, split, head_k, b], sm, pipes, mma, walk, scale_log2, config)


@cute.jit
def walk_of(split: Int32, splits: Int32, length: Int32, capacity: Int32, config: Constexpr[Config]) -> Walk:
    """Equal parts of a sequence's tiles; those of the last splits may be empty."""
    length = min(max(length, 0), capacity)
    tiles = cute.ceil_div(length, config.tile_n)
    each = cute.ceil_div(tiles, splits)
    first = min(split * each, tiles)
    return Walk(length, first, min(first + each, tiles))


@cute.jit
def make_pipes(storage: SmemAllocator, config: Constexpr[Config]) -> Pipes:
    warps, row = THREADS // 32, config.head_dim * BFloat16.width // 8
    pipes = Pipes(
        tma.make_pipe(storage, 1, config.tile_m * row, warps),
        tma.make_pipe(storage, config.kv_stages, 2 * config.tile_n * row, warps),
    )
    tma.barriers_ready()
    return pipes


@cute.jit
def produce(loads: Loads, sm: Smem, pipes: Pipes, walk: Walk, head_k: Int32, b: Int32, config: Constexpr[Config]):
    """One warp asks for Q, where rows behind the group's arrive as zeros, then for K and V of every tile, the last first."""
    state = tma.at_first_empty(config.kv_stages)
    pipes.q.producer_acquire(tma.at_first_empty(1))
    tma.load(loads.Q, sm.Q, pipes.q, tma.at_first_empty(1), (config.tile_m, config.head_dim), (0, 0, head_k, b))
    for i in cutlass.range(walk.last - walk.first, unroll=1):
        n_block = walk.last - 1 - i
        pipes.kv.producer_acquire(state)
        tma.load(loads.K, sm.K, pipes.kv, state, (config.tile_n, config.head_dim), (n_block, 0, head_k, b))
        tma.load(loads.V, sm.V, pipes.kv, state, (config.head_dim, config.tile_n), (0, n_block, head_k, b))
        state.advance()


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
    length: Int32
    scale_log2: Float32


@cute.jit
def consume(
    gO: cute.Tensor, gL: cute.Tensor, sm: Smem, pipes: Pipes, mma: wgmma.Mma, walk: Walk, scale_log2: Float32, config: Constexpr[Config]
):
    """The rows of a group: the walk over the block's keys, the last first, then its piece. gO: (group, head_dim), gL: (group,)."""
    thread = arch.thread_idx()[0] - THREADS
    qk, pv = mma.qk.get_slice(thread), mma.pv.get_slice(thread)
    all_qk, all_pv = wgmma.of_warpgroup(mma.qk, 0), wgmma.of_warpgroup(mma.pv, 0)
    tile = Tile(
        mma=mma,
        tSrQ=all_qk.make_fragment_A(all_qk.partition_A(sm.Q))[None, None, None, 0],
        tSrK=all_qk.make_fragment_B(all_qk.partition_B(sm.K)),
        tOrV=all_pv.make_fragment_B(all_pv.partition_B(sm.V)),
        tScS=qk.partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n))),
        P=pv.make_fragment_A(pv.partition_shape_A((config.tile_m, config.tile_n))),
        acc_O=cute.make_rmem_tensor(pv.partition_shape_C((config.tile_m, config.head_dim)), Float32),
        rows=fragments.fresh_rows(),
        length=walk.length,
        scale_log2=scale_log2,
    )
    tile.acc_O.fill(0.0)
    state, masked = tma.at_first(config.kv_stages), min(walk.last - walk.first, 1)
    pipes.q.consumer_wait(tma.at_first(1))
    for i in cutlass.range(masked, unroll=1):
        state = step(tile, pipes, state, walk.last - 1 - i, True, config)
    for i in cutlass.range(masked, walk.last - walk.first, unroll=1):
        state = step(tile, pipes, state, walk.last - 1 - i, False, config)
    lse = fragments.finish(tile.acc_O, tile.rows)
    tOcO = pv.partition_C(cute.make_identity_tensor((config.tile_m, config.head_dim)))
    fragments.store_rows(gO, gL, tile.acc_O, lse, tOcO, Int32(0), gO.shape[0])


@cute.jit
def step(tile: Tile, pipes: Pipes, state: pipeline.PipelineState, n_block: Int32, masked: Constexpr[bool], config: Constexpr[Config]):
    """O += softmax(S) V for one tile of keys."""
    pipes.kv.consumer_wait(state)
    acc_S = fragments.scores(tile.mma.qk, (config.tile_m, config.tile_n), tile.tSrQ, tile.tSrK[None, None, None, state.index])
    warpgroup.wait_group(0)
    if const_expr(masked):
        fragments.hide(acc_S, tile.tScS, Int32(0), n_block * config.tile_n, tile.length, False)
    rescale = fragments.online_softmax(acc_S, tile.rows, tile.scale_log2)
    fragments.round_into(tile.P, acc_S)
    fragments.scale_rows(tile.acc_O, rescale)
    fragments.product(tile.mma.pv, tile.acc_O, tile.P, tile.tOrV[None, None, None, state.index], True)
    warpgroup.wait_group(0)
    pipes.kv.consumer_release(state)
    state.advance()
    return state


@cute.kernel
def combine(pieces: Pieces, results: Results, config: Constexpr[Config]):
    """A thread block a row, a thread a column of O."""
    row, head_k, b = arch.block_idx()
    add_up(
        pieces.O[row, None, None, head_k, b], pieces.L[row, None, head_k, b], results.O[row, None, head_k, b], results.L, (row, head_k, b)
    )


@cute.jit
def add_up(parts: cute.Tensor, lse: cute.Tensor, gO: cute.Tensor, mL: cute.Tensor, at: tuple):
    """O = sum of exp(lse_i - lse) O_i: the pieces of a row, by a thread a column. parts: (head_dim, splits), lse: (splits,), gO: (head_dim,)."""
    column = arch.thread_idx()[0] % parts.shape[0]
    top, weight, total = -Float32.inf, Float32(0.0), Float32(0.0)
    for i in cutlass.range(lse.shape[0], unroll=4):
        top = arch.fmax(top, lse[i])
    base = Float32(0.0) if top == -Float32.inf else top  # no piece has a key
    for i in cutlass.range(lse.shape[0], unroll=4):
        mine = cute.math.exp2((lse[i] - base) * fragments.LOG2_E, fastmath=True)
        weight += mine
        total += mine * parts[column, i]
    gO[column] = (total / weight if weight > 0.0 else Float32(0.0)).to(gO.element_type)
    if column == 0:
        mL[at] = base + cute.math.log2(weight) * fragments.LN2 if weight > 0.0 else -Float32.inf
