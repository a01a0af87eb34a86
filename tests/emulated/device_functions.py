"""Kernels that are nothing but a function of another one's."""

from dataclasses import dataclass
from typing import NamedTuple

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.backward.finish import share_before
from tilewise.backends.hopper.decode import kernel as decode
from tilewise.backends.hopper.decode import scheduler
from tilewise.backends.hopper.decode.operands import Lengths, Tensors, Work
from tilewise.backends.hopper.decode.scheduler import Piece, Sequence, Shape
from tilewise.backends.hopper.operands import Draw
from tilewise.backends.tables.window import Window
from tilewise.sm90 import eight_bits, fragments, tma, wgmma
from tilewise.sm90.dsl import (
    Constexpr,
    CUstream,
    Float8E4M3FN,
    Int8,
    Int32,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    pipeline,
    range_constexpr,
    warpgroup,
)


@cute.jit
def launch(found: cute.Tensor, m_blocks: Int32, n_blocks: Int32, config: Constexpr, stream: CUstream):
    kernel(found, m_blocks, n_blocks).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def kernel(found: cute.Tensor, m_blocks: Int32, n_blocks: Int32):
    """What the last 32 of n_blocks thread blocks finish begins there."""
    i = arch.thread_idx()[0]
    found[i] = share_before(n_blocks - i, m_blocks, n_blocks)


@cute.jit
def launch_draws(found: cute.Tensor, draw: Draw, batch: Int32, head: Int32, query: Int32, key: Int32, config: Constexpr, stream: CUstream):
    kernel_of_draws(found, draw, batch, head, query, key, config).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def kernel_of_draws(found: cute.Tensor, draw: Draw, batch: Int32, head: Int32, query: Int32, key: Int32, config: Constexpr):
    """found: (lane, 2 words of rows, 2 of columns, whether a pair on the diagonal is kept). config: numbers of a row, of queries or of keys."""
    lane, number = arch.thread_idx()[0], dropout.head_of(draw, batch, head)
    keys, queries = const_expr(config[0]), const_expr(config[1])
    rows = dropout.of_rows(draw, number, query + lane // 4, key + lane % 4 * 2, keys)
    columns = dropout.of_columns(draw, number, query + lane % 4 * 2, key + lane // 4, queries)
    for i in range_constexpr(2):
        found[lane, i], found[lane, 2 + i] = rows[i], columns[i]
    found[lane, 4] = Int32(dropout.is_kept(draw, number, query + lane, key + lane))


@cute.jit
def launch_pieces(found: cute.Tensor, tensors: Tensors, lengths: Lengths, work: Work, window: Window, config: Constexpr, stream: CUstream):
    shape = scheduler.shape_of(tensors, lengths, work, window, None, config)
    kernel_of_pieces(found, shape, config).launch(grid=(work.columns, work.blocks, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def kernel_of_pieces(found: cute.Tensor, shape: Shape, config: Constexpr):
    """found: (columns, blocks, pieces, 10): the pieces of each thread block of a decode launch, as its warpgroups go through them."""
    begin = scheduler.start_of(shape, config)
    decode.consume(record, Recorder(shape, found, Int32(begin.shares.whole)), begin, config)


class Recorder(NamedTuple):
    """What `decode.consume` has in place of what units have in common."""

    shape: Shape
    found: cute.Tensor
    whole: Int32


@cute.jit
def record(recorder: Recorder, state: pipeline.PipelineState, b: Int32, piece: Piece, sequence: Sequence, config: Constexpr):
    """A piece, at the place of which the state is."""
    column, g, _ = arch.block_idx()
    slot = scheduler.slot_of(piece.number, piece, recorder.shape, config)
    numbers = b, piece.head_k, piece.row0, piece.first, piece.last, piece.number, piece.count, piece.origin, slot, recorder.whole
    for n in range_constexpr(len(numbers)):
        recorder.found[column, g, state.count, n] = numbers[n]
    state.advance()
    return state


@dataclass(frozen=True)
class Products:
    """Of one warpgroup: S = Q K^T, and O = P V with P = S rounded where S is fp32."""

    head_dim: int
    tile_n: int
    integers: bool
    tile_m: int = 64
    kv_stages: int = 1

    @property
    def kind(self) -> type:
        return Int8 if self.integers else Float8E4M3FN


@cute.jit
def launch_products(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mS: cute.Tensor, mO: cute.Tensor, config: Constexpr, stream: CUstream
):
    """mQ: (1, 64, head_dim), mK: (1, tile_n, head_dim), mV: (1, head_dim, tile_n) in 8 bits; mS: (64, tile_n), mO: (64, head_dim) fp32 or int32."""
    mQ, mK, mV = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 2, 0])) for x in (mQ, mK, mV))
    layouts = wgmma.layout_Q(config, config.kind), wgmma.layout_K(config, config.kind), eight_bits.layout_V(config, config.kind)
    shapes = (64, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim, config.tile_n)
    loads = tuple(tma.describe(*each) for each in zip((mQ, mK, mV), layouts, shapes, strict=True))
    mma = eight_bits.products(config, config.kind, config.kind)
    kernel_of_products(loads, mS, mO, mma, layouts, config).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


@cute.kernel
def kernel_of_products(loads: tuple, mS: cute.Tensor, mO: cute.Tensor, mma: wgmma.Mma, layouts: tuple, config: Constexpr):
    storage, one = SmemAllocator(), tma.at_first(1)
    sQ, sK, sV = (storage.allocate_tensor(config.kind, x.outer, 1024, swizzle=x.inner) for x in layouts)
    shapes = (64, config.head_dim), (config.tile_n, config.head_dim), (config.head_dim, config.tile_n)
    pipes = tuple(tma.make_pipe(storage, 1, rows * row, 4) for rows, row in shapes)
    tma.barriers_ready()
    if arch.make_warp_uniform(arch.warp_idx()) == 0:
        for load, sX, pipe, shape in zip(loads, (sQ, sK, sV), pipes, shapes, strict=True):
            pipe.producer_acquire(tma.at_first_empty(1))
            tma.load(load, sX, pipe, tma.at_first_empty(1), shape, (0, 0, 0))
    for pipe in pipes:
        pipe.consumer_wait(one)
    thread = arch.thread_idx()[0]
    qk, pv = mma.qk.get_slice(thread), mma.pv.get_slice(thread)
    tSrQ, tSrK = mma.qk.get_slice(0).make_fragment_A(qk.partition_A(sQ)), mma.qk.get_slice(0).make_fragment_B(qk.partition_B(sK))
    tOrV = mma.pv.get_slice(0).make_fragment_B(pv.partition_B(sV))
    acc_S = cute.make_rmem_tensor(qk.partition_shape_C((64, config.tile_n)), eight_bits.sum_of(config.kind))
    fragments.product(mma.qk, acc_S, tSrQ[None, None, None, 0], tSrK[None, None, None, 0], False)
    warpgroup.wait_group(0)
    cute.autovec_copy(acc_S, qk.partition_C(mS))
    P = pv.make_fragment_A(pv.partition_shape_A((64, config.tile_n)))
    acc_O = cute.make_rmem_tensor(pv.partition_shape_C((64, config.head_dim)), eight_bits.sum_of(config.kind))
    if const_expr(config.integers):
        words = cute.recast_tensor(P, Int32)
        for i in range_constexpr(cute.size(words)):
            words[i] = thread * 7919 + i * 104729
    else:
        eight_bits.round_into(P, acc_S)
    fragments.product(mma.pv, acc_O, P, tOrV[None, None, None, 0], False)
    warpgroup.wait_group(0)
    cute.autovec_copy(acc_O, pv.partition_C(mO))
