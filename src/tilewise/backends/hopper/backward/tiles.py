"""What the roles of the backward kernel on Hopper share: tiles in shared memory, pipes, products, and what a tile of scores goes through."""

from enum import IntEnum
from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.sm90 import fragments, tma
from tilewise.sm90.dsl import (
    Constexpr,
    Float32,
    Int32,
    Int64,
    OperandMajorMode,
    arch,
    const_expr,
    cute,
    pipeline,
    range_constexpr,
    sm90,
    warpgroup,
)

THREADS = 128  # of a warpgroup
WARP = 32
KEYS = 64  # of a warpgroup, where keys are split


class Barrier(IntEnum):
    """Named barriers; 0 is the whole block's."""

    DS = 1  # dS of all warpgroups is in shared memory
    DQ_EMPTY = 2  # one a warpgroup (2 to 4): its part of dQ may be written to shared memory; `direct`: may be added to the sum
    DQ_FULL = 5  # one for each adding warp (5 to 7): dQ is in shared memory; `direct`: one a warpgroup, its part is added
    P = 8  # P is in shared memory
    OWN = 9  # one a warpgroup (9 and 10): all of its threads have arrived
    END = 11  # the walk of all warpgroups has ended; apart from DS, where a warpgroup could meet its own earlier arrival
    S = 12  # S is computed
    READ = 13  # one a warpgroup (13 and 14): the other warpgroup has read dS


class Smem(NamedTuple):
    K: cute.Tensor  # (tile_n, head_dim, 1)
    V: cute.Tensor  # (tile_n, head_dim_v, 1)
    Q: cute.Tensor  # (tile_m, head_dim, stages)
    dO: cute.Tensor  # (tile_m, head_dim_v, stages)
    dS: cute.Tensor  # (tile_m, tile_n, ds_stages)
    P: cute.Tensor | None  # likewise, (tile_n, tile_m, ds_stages), where columns are split: P^T
    dQ: cute.Tensor | None  # (4, THREADS, dq_elements / 4, dq_consumers) fp32; None if it goes from registers
    first: cute.Tensor  # (dq_consumers,) int32: whether this block is the first to add to a tile of dQ
    lse: cute.Tensor  # (tile_m, stages) fp32
    minus_delta: cute.Tensor  # (tile_m, stages) fp32
    visits: cute.Tensor | None  # (queries.FIELDS, stages) int32


class Layouts(NamedTuple):
    """Of the tiles that products read."""

    K: cute.ComposedLayout
    V: cute.ComposedLayout
    Q: cute.ComposedLayout
    dO: cute.ComposedLayout
    dS: cute.ComposedLayout


class Pipes(NamedTuple):
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync  # with the tile's log-sum-exp
    do: pipeline.PipelineTmaAsync  # with its -delta


class Loads(NamedTuple):
    K: tma.Tma
    V: tma.Tma
    Q: tma.Tma
    dO: tma.Tma


class Mma(NamedTuple):
    """The products; the second word says where the left operand lies."""

    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T, shared memory
    dv: cute.TiledMma  # dV += P^T dO, registers
    dk: cute.TiledMma  # dK += dS^T Q, registers; `lean`: shared memory
    dq: cute.TiledMma  # dQ = dS K or dQ^T = K^T dS^T, shared memory


def products(config, dtype) -> Mma:
    smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    k, mn = OperandMajorMode.K, OperandMajorMode.MN
    by_keys = config.by_keys
    alone, shared = (config.consumers if by_keys else 1, 1, 1), (config.consumers, 1, 1) if by_keys else (1, config.consumers, 1)

    def product(left, right, grid, columns, source=smem):
        return sm90.make_trivial_tiled_mma(dtype, dtype, left, right, Float32, grid, (64, columns), source)

    return Mma(
        product(k, k, alone, config.tile_m),
        product(k, mn, shared, config.head_dim_v // shared[1], rmem if by_keys else smem),
        product(k, mn, shared, config.head_dim, rmem)
        if by_keys and not config.lean
        else product(mn, mn, shared, config.head_dim // shared[1]),
        product(mn if config.dq_transposed else k, k if config.dq_transposed else mn, (*config.dq_grid, 1), config.dq_width),
    )


def layouts_of(config, dtype) -> Layouts:
    """Every tile has the dimension contiguous that memory has; products that sum over the other one read it transposed.

    The columns that a warpgroup computes begin where a swizzled block of columns does.
    """

    dim, dim_v = config.head_dim, config.head_dim_v
    of_K, of_V = shares_of(config)
    return Layouts(
        swizzled(dtype, config.tile_n, dim, 1, of_K),
        swizzled(dtype, config.tile_n, dim_v, 1, of_V),
        swizzled(dtype, config.tile_m, dim, config.stages, dim // config.column_parts),
        swizzled(dtype, config.tile_m, dim_v, config.stages, of_V),
        swizzled(dtype, config.tile_m, config.tile_n, config.ds_stages, config.tile_n),
    )


def shares_of(config) -> tuple[int, int]:
    """Columns of K and of V that no swizzled block reaches beyond: what a warpgroup has of dK and dV, or computes of dQ at a time."""
    of_dK, of_dV = config.head_dim // config.column_parts, config.head_dim_v // config.column_parts
    return of_dK if config.dq_transposed or config.dq_width % 64 == 0 else config.dq_width, of_dV


def swizzled(dtype, rows: int, columns: int, stages: int, share: int) -> cute.ComposedLayout:
    """Columns contiguous; blocks of them do not reach from one part of `share` columns into the next."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW64 if box_columns(share) == 32 else warpgroup.SmemLayoutAtomKind.K_SW128
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, columns, stages), order=(0, 1, 2))


@cute.jit
def load_row(
    gX: cute.Tensor, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, numbers: Constexpr[int]
):  # fmt: skip
    """`numbers` elements of 32 bits from the first of gX on; both sides lie at multiples of 16 bytes."""
    with arch.elect_one():
        arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                sX[None, state.index].iterator.toint(),
                gX.iterator.toint(),
                Int32(4 * numbers),
                pipe.producer_get_barrier(state).toint(),
            ],
        )


@cute.jit
def thread_of(config: Constexpr[Config]) -> Int32:
    """A consumer's thread number. Where blocks are persistent, read again at every call: what follows from it would otherwise be kept from unit to
    unit, and spill.
    """
    thread = arch.thread_idx()[0]
    if const_expr(config.persistent):
        thread = arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[thread])
    return thread - THREADS


def box_columns(share: int) -> int:
    """Of a swizzled block: as wide as parts of `share` columns can have theirs to themselves."""
    return 32 if share % 64 else 64


def transposed(sX: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, 2]))


@cute.jit
def as_left_operand(tiled_mma: cute.TiledMma, acc: cute.Tensor, shape: Constexpr[tuple]) -> cute.Tensor:
    """The elements of an accumulator, rounded, in the registers of a product's left operand: the same order."""
    rounded = left_operand(tiled_mma, shape)
    fragments.round_into(rounded, acc)
    return rounded


def left_operand(tiled_mma: cute.TiledMma, shape: tuple[int, int]) -> cute.Tensor:
    mma = tiled_mma.get_slice(0)
    return mma.make_fragment_A(mma.partition_shape_A(shape))


@cute.jit
def place_of_sum(gSum: cute.Tensor, consumer: Int32, piece: Constexpr[int], config: Constexpr[Config]):
    """Where a piece of what a warpgroup computes of a tile of dQ begins in the tile's sum, and how many vectors a thread has of it: each belongs to
    eight columns. `narrow`: a block of rows has all columns of dQ side by side, and none beyond them; there may be none left, or fewer.
    """
    vectors = const_expr(config.dq_elements // (4 * config.dq_pieces))
    if const_expr(not config.narrow):
        return THREADS * (consumer * config.dq_elements + 4 * vectors * piece), vectors
    over_rows, over_columns = config.dq_grid
    columns = cute.size(gSum) // (8 * config.tile_m)
    before = (piece * over_columns + consumer // over_rows) * vectors
    return 4 * THREADS * (consumer % over_rows * columns + before), columns - before


@cute.jit
def add_directly(tile, flat: cute.Tensor, gSum: cute.Tensor, config: Constexpr[Config]):
    """A warpgroup's part of a tile of dQ to the sum in global memory, when it is its turn."""
    begin, vectors = place_of_sum(gSum, tile.consumer, 0, config)
    address = (gSum.iterator + begin + arch.thread_idx()[0] % THREADS * 4).toint()
    if const_expr(config.ordered):
        arch.barrier(barrier_id=Barrier.DQ_EMPTY + tile.consumer, number_of_threads=THREADS + WARP)
    add_vectors(tile, flat, vectors, address, config)
    if const_expr(config.ordered):
        arch.barrier_arrive(barrier_id=Barrier.DQ_FULL + tile.consumer, number_of_threads=THREADS + WARP)


@cute.jit
def add_vectors(tile, flat: cute.Tensor, vectors: Int32, address: Int64, config: Constexpr[Config]):
    """flat: (4, .), of which the first `vectors` of 16 bytes count; a warp's lie side by side. The first block writes instead of adding."""
    first = Int32(0)
    if const_expr(config.ordered):
        first = tile.first[tile.consumer]
    if first != 0:
        each_vector("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", flat, vectors, address)
    else:
        each_vector("red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", flat, vectors, address)


@cute.jit
def each_vector(instruction: Constexpr[str], flat: cute.Tensor, vectors: Int32, address: Int64):
    for i in range_constexpr(cute.size(flat, mode=[1])):
        if i < vectors:
            arch.inline_ptx(instruction, read_only_args=[address + 16 * THREADS * i, *(flat[j, i] for j in range(4))])
