"""What the rungs of the backward pass share: the operands of its five products, delta, the mask as a tile of keys sees it, and the ways out.

Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T: a warpgroup has 64 keys for rows, and queries for columns. An accumulator lies in
the order in which a product takes its left operand from registers (fragments.py), so that P^T and dS^T, rounded in place, are the left operands
of dV += P^T dO and dK += dS^T Q. What belongs to a query, its log-sum-exp and its delta, belongs to a column then. Only dQ = dS K needs dS as it
is, and dS goes through shared memory for that.
"""

from typing import NamedTuple

from tilewise.sm90 import fragments
from tilewise.sm90.dsl import (
    BFloat16,
    Constexpr,
    Float32,
    Int32,
    OperandMajorMode,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
    sm90,
    warp,
    warpgroup,
)
from tilewise.sm90.pointers import known

WARPS = 4  # of a thread block of `prepare`
LANES = 32


class Given(NamedTuple):
    """What a launch function is given: (heads, seqlen, head_dim) bf16, but for L."""

    Q: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    O: cute.Tensor
    dO: cute.Tensor
    L: cute.Tensor  # (heads, seqlen) fp32: the log-sum-exp of O


class Mma(NamedTuple):
    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T, both operands from shared memory
    dkv: cute.TiledMma  # dV += P^T dO and dK += dS^T Q, the left one from registers
    dq: cute.TiledMma  # dQ = dS K, from shared memory


def products(config, dtype=BFloat16) -> Mma:
    """64 keys a warpgroup, of S^T, dP^T, dK and dV. dQ is cut into 64 rows, and where these are too few into columns."""
    warpgroups, rows, columns = config.tile_n // 64, config.tile_m // 64, columns_of_dQ(config)
    k, mn = OperandMajorMode.K, OperandMajorMode.MN
    smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    return Mma(
        sm90.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, (warpgroups, 1, 1), (64, config.tile_m), smem),
        sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, (warpgroups, 1, 1), (64, config.head_dim), rmem),
        sm90.make_trivial_tiled_mma(dtype, dtype, k, mn, Float32, (rows, warpgroups // rows, 1), (64, columns), smem),
    )


class Layouts(NamedTuple):
    """Of the tiles in shared memory."""

    K: cute.ComposedLayout  # (tile_n, head_dim, 1)
    V: cute.ComposedLayout
    Q: cute.ComposedLayout  # (tile_m, head_dim, stages)
    dO: cute.ComposedLayout
    dS: cute.ComposedLayout  # (tile_m, tile_n, stages)


def layouts(config, dtype=BFloat16) -> Layouts:
    """The second dimension lies contiguously, in swizzled blocks of 64; of K in blocks that no warpgroup's columns of dQ begin amid. Products that
    sum over the first dimension read the tile `transposed`.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    usual, of_K = kinds.K_SW128, kinds.K_SW128 if columns_of_dQ(config) % 64 == 0 else kinds.K_SW64
    keys, queries = (config.tile_n, config.head_dim, 1), (config.tile_m, config.head_dim, config.stages)
    shapes = (of_K, keys), (usual, keys), (usual, queries), (usual, queries), (usual, (config.tile_m, config.tile_n, config.stages))
    return Layouts(*(cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=(0, 1, 2)) for kind, shape in shapes))


def columns_of_dQ(config) -> int:
    """Of a warpgroup: all, or its part of them where a tile has more keys than queries."""
    return config.head_dim * config.tile_m // config.tile_n


def transposed(sX: cute.Tensor) -> cute.Tensor:
    """The same bytes with the first two dimensions the other way round."""
    return cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, 2]))


class Rows(NamedTuple):
    """What the pass needs of each query, of whole tiles: (heads, rows) fp32."""

    lse: cute.Tensor  # the log-sum-exp in powers of two; +inf behind the last query, so that P = 0 there
    minus_delta: cute.Tensor  # -rowsum(dO O), Eq. 23; 0 behind the last query


@cute.kernel
def prepare(given: Given, rows: Rows, config: Constexpr):
    """A block a tile of queries, a warp a row at a time."""
    m_block, head, _ = arch.block_idx()
    width = const_expr(config.head_dim // LANES)
    for i in cutlass.range(config.tile_m // WARPS, unroll=4):
        row = m_block * config.tile_m + i * WARPS + arch.warp_idx()
        lse, delta = Float32.inf, Float32(0.0)
        if row < given.O.shape[1]:
            o, d_o = (part(x[head, row, None], width) for x in (given.O, given.dO))
            delta = (o * d_o).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            lse = given.L[head, row] * fragments.LOG2_E
        delta = arch.warp_reduction_sum(delta)
        if arch.lane_idx() == 0:
            rows.lse[head, row] = lse
            rows.minus_delta[head, row] = -delta


@cute.jit
def part(gRow: cute.Tensor, width: Constexpr[int]) -> cute.TensorSSA:
    """This lane's elements of a row, in fp32."""
    held = cute.make_rmem_tensor(width, gRow.element_type)
    cute.autovec_copy(cute.make_tensor(known(gRow.iterator + arch.lane_idx() * width, 2 * width), cute.make_layout(width)), held)
    return held.load().to(Float32)


def layout_of_rows(config) -> cute.Layout:
    """Of a tile's part of `Rows` in shared memory: (tile_m, stages) fp32."""
    return cute.make_layout((config.tile_m, config.stages))


@cute.jit
def load_row(gX: cute.Tensor, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, m_block: Int32):
    """Ask for a tile's part of `Rows`, as `tma.load` asks for tiles. gX: (rows of whole tiles,) of this head; sX: (tile_m, stages)."""
    numbers = const_expr(cute.size(sX, mode=[0]))
    with arch.elect_one():
        arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                sX[None, state.index].iterator.toint(),
                (gX.iterator + m_block * numbers).toint(),
                Int32(4 * numbers),
                pipe.producer_get_barrier(state).toint(),
            ],
        )


@cute.jit
def columns_of(sX: cute.Tensor, tScS: cute.Tensor) -> cute.Tensor:
    """Where the values for this thread's columns of S^T are, (2, tile_m / 8, stages): pairs, eight columns apart. sX: (tile_m, stages)."""
    tile_m, stages = const_expr(sX.shape[0]), const_expr(sX.shape[1])
    first = fragments.by_rows(tScS)[0, 0][1]
    return cute.make_tensor(sX.iterator + first, cute.make_layout((2, tile_m // 8, stages), stride=(1, 8, tile_m)))


@cute.jit
def beginning_with(pairs: cute.Tensor, tScS: cute.Tensor) -> cute.Tensor:
    """An accumulator of S^T's shape that has a query's value in its column. pairs: (2, tile_m / 8) in shared memory.

    Every register is read for itself. A copy for the other row would come to lie between two products, and ptxas then waits for the first (C7517).
    """
    acc = cute.make_rmem_tensor(tScS.shape, Float32)
    rows = fragments.by_rows(acc)
    for c in range_constexpr(cute.size(pairs, mode=[1])):
        for r in range_constexpr(fragments.ROWS):
            rows[r, 2 * c], rows[r, 2 * c + 1] = arch.inline_ptx(
                "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                write_only_types=[Float32, Float32],
                read_only_args=[pairs[None, c].iterator.toint()],
            )
    return acc


@cute.jit
def hide(acc_S: cute.Tensor, tScS: cute.Tensor, n0: Int32, m0: Int32, seqlen: Int32, causal: Constexpr[bool]):
    """-inf for the keys that do not exist and, under the causal mask, for the queries before a key. tScS: (key, query) of acc_S in its tile."""
    S, at = fragments.by_rows(acc_S), fragments.by_rows(tScS)
    for r in range_constexpr(fragments.ROWS):
        key = n0 + at[r, 0][0]
        begin = Int32(0)
        if const_expr(causal):
            begin = key - m0
        if key >= seqlen:
            begin = Int32(fragments.QUAD * cute.size(S, mode=[1]))  # all of the tile
        for c in range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = -Float32.inf if at[r, c][1] < begin else S[r, c]


@cute.jit
def weigh(acc_S: cute.Tensor, pairs: cute.Tensor, scale_log2: Float32):
    """S becomes P = exp(scale S - L), Eq. 24. pairs: the columns' L in powers of two, (2, tile_m / 8) in shared memory."""
    held = cute.make_rmem_tensor(pairs.shape, Float32)
    cute.autovec_copy(pairs, held)
    S, lse = fragments.by_rows(acc_S), cute.make_tensor(held.iterator, cute.make_layout((pairs.shape,)))
    for r in range_constexpr(fragments.ROWS):
        S[r, None].store(cute.math.exp2(S[r, None].load() * scale_log2 - lse.load(), fastmath=True))


@cute.jit
def differentiate(acc_dP: cute.Tensor, P: cute.Tensor):
    """dP - delta becomes dS = P (dP - delta), Eq. 25."""
    flat = cute.make_layout(cute.size(acc_dP))
    dP, P = (cute.make_tensor(x.iterator, flat) for x in (acc_dP, P))
    dP.store(P.load() * dP.load())


@cute.jit
def as_left_operand(tiled_mma: cute.TiledMma, acc: cute.Tensor, shape: Constexpr[tuple]) -> cute.Tensor:
    """An accumulator's elements, rounded, as the left operand of a product, in registers."""
    mma = tiled_mma.get_slice(0)
    rounded = mma.make_fragment_A(mma.partition_shape_A(shape))
    fragments.round_into(rounded, acc)
    return rounded


def copy_of_dS(tiled_mma: cute.TiledMma) -> cute.TiledCopy:
    """From the registers of dS^T to dS in shared memory, 8 x 8 elements at a time, each of them transposed."""
    return cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16), tiled_mma)


@cute.jit
def put_dS(copy: cute.TiledCopy, dS: cute.Tensor, like: cute.Tensor, tdSsdS: cute.Tensor):
    """dS: rounded; like: the accumulator that it was. What threads write the tensor cores see behind this fence, and a barrier."""
    cute.copy(copy, copy.get_slice(0).retile(cute.make_tensor(dS.iterator, like.layout)), tdSsdS)
    arch.fence_proxy("async.shared", space="cta")


@cute.jit
def add_rows(gSum: cute.Tensor, acc_dQ: cute.Tensor, tQcQ: cute.Tensor, m0: Int32):
    """The rows that exist, to the sum in global memory, by atomic additions of two fp32 elements. gSum: (seqlen, head_dim) of this head."""
    dQ, at = fragments.by_rows(acc_dQ), fragments.by_rows(tQcQ)
    for r in range_constexpr(fragments.ROWS):
        row = m0 + at[r, 0][0]
        if row < gSum.shape[0]:
            first = (gSum[row, None].iterator + at[r, 0][1]).toint()
            for c in range_constexpr(0, cute.size(dQ, mode=[1]), 2):
                arch.inline_ptx(
                    "red.relaxed.gpu.global.add.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                    read_only_args=[first + 4 * fragments.column(c), dQ[r, c], dQ[r, c + 1]],
                )


@cute.jit
def wait_until(turns: cute.Tensor, at: Int32, turn: Int32):
    """Until a counter has come to `turn`. What others wrote before they counted is there for this thread, and for who meets it at a barrier."""
    counter, now = (turns.iterator + cute.crd2idx(at, turns.layout)).toint(), Int32(-1)
    while now != turn:
        now = arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[counter])


@cute.jit
def give_turn(turns: cute.Tensor, at: Int32):
    """Count. What this thread, and who met it at a barrier, added is there before the next one's turn is."""
    counter = (turns.iterator + cute.crd2idx(at, turns.layout)).toint()
    arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[counter])


@cute.jit
def store_rows(gX: cute.Tensor, acc: cute.Tensor, scale: Float32, tXcX: cute.Tensor, n0: Int32):
    """scale times dK or dV, rounded: the rows that exist. gX: (seqlen, head_dim) of this head; tXcX: coordinates of acc in its tile."""
    X, at = fragments.by_rows(acc), fragments.by_rows(tXcX)
    pair = cute.make_rmem_tensor(2, gX.element_type)
    for r in range_constexpr(fragments.ROWS):
        row = n0 + at[r, 0][0]
        if row < gX.shape[0]:
            for c in range_constexpr(0, cute.size(X, mode=[1]), 2):
                pair[0], pair[1] = ((X[r, c + i] * scale).to(gX.element_type) for i in range(2))
                cute.autovec_copy(pair, cute.make_tensor(known(gX[row, None].iterator + at[r, c][1], 4), cute.make_layout(2)))
