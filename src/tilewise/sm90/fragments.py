"""The registers of a warpgroup's matrix product: which thread holds what, softmax on them, and the way from S to P to O.

A warpgroup's accumulator of a 64 x N tile is spread over its 128 threads: a thread holds N / 2 elements of two rows, `lane // 4` and
`lane // 4 + 8` of its warp's 16, in the order (column pair, row, column / 8). Four neighbouring threads, a quad, share their rows. For bf16
that order is also the one in which a product takes its left operand from registers, so P needs no shuffle on its way to the second product.
"""

from typing import NamedTuple

from tilewise.sm90.dsl import (
    BFloat16,
    Constexpr,
    Float32,
    Int32,
    Int64,
    Value,
    arch,
    const_expr,
    cute,
    int_to_smem_descriptor,
    range_constexpr,
    smem_descriptor_to_int,
    warpgroup,
)

ROWS = 2  # of a 64-row tile that a thread holds
QUAD = 4  # threads that share them


class Rows(NamedTuple):
    """The state of online softmax for the rows a thread holds: maximum, and this thread's part of the denominator.

    m is in the units of the exponent, scale_log2 * score, and rounded once: O, l and the log-sum-exp then all refer to the same number, and its
    rounding drops out (recomputed at the end as part of a fused multiply-add, it put LSE beyond its tolerance).
    """

    m: cute.Tensor  # (ROWS,) fp32
    l: cute.Tensor  # (ROWS,) fp32


@cute.jit
def fresh_rows() -> Rows:
    rows = Rows(cute.make_rmem_tensor(ROWS, Float32), cute.make_rmem_tensor(ROWS, Float32))
    rows.m.fill(-Float32.inf)
    rows.l.fill(0.0)
    return rows


@cute.jit
def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator (or its coordinates) as (ROWS, columns)."""
    columns = cute.size(acc) // (2 * ROWS)
    order = cute.make_layout((ROWS, (2, columns)), stride=(2, (1, 2 * ROWS)))
    return cute.make_tensor(acc.iterator, cute.composition(acc.layout, order))


def column(c: int) -> int:
    """How far a thread's c-th column of a row is from its first: pairs of neighbours, eight columns apart."""
    return c // 2 * 8 + c % 2


@cute.jit
def product(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr[bool]):
    """Issue acc = a b, or acc += a b: asynchronous, one group. a: (., ., K / 16) fragments; b likewise."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    for k in range_constexpr(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@cute.jit
def lean_product(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr[bool]):
    """As `product`, with descriptors of `lean_slice`."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    for k in range_constexpr(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, acc, lean_slice(a, k), lean_slice(b, k), acc)
    warpgroup.commit_group()


def lean_slice(x: cute.Tensor, k: int) -> cute.Tensor:
    """x[None, None, k]; of an operand in shared memory, by one addition of 64 bits to the first descriptor.

    A descriptor's upper half is a constant. Where ptxas knows it, it adds the halves one by one and moves the constant about, five instructions
    between two products instead of two: which matters where there are sixteen. gridDim.z - 1 is 0, but ptxas cannot know.
    """
    part = x[None, None, k]
    if not isinstance(x.iterator, Value):  # registers
        return part
    first = smem_descriptor_to_int(x[None, None, 0].iterator)
    low, high = Int32(first), Int32(first >> 32) | (arch.grid_dim()[2] - 1)
    packed = arch.inline_ptx("mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high])
    return cute.make_tensor(int_to_smem_descriptor(packed + cute.crd2idx((0, 0, k), x.layout)), part.layout)


@cute.jit
def scores(tiled_mma: cute.TiledMma, tile: Constexpr[tuple], a: cute.Tensor, b: cute.Tensor) -> cute.Tensor:
    """Issue S = Q K^T (tile_m x tile_n) into fresh registers."""
    acc_S = cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile), Float32)
    product(tiled_mma, acc_S, a, b, accumulate=False)
    return acc_S


@cute.jit
def hide(acc_S: cute.Tensor, tScS: cute.Tensor, m0: Int32, n0: Int32, seqlen: Int32, causal: Constexpr[bool]):
    """-inf for the keys that do not exist and, under the causal mask, for those after the query. tScS: coordinates of acc_S in its tile."""
    S, at = by_rows(acc_S), by_rows(tScS)
    for r in range_constexpr(ROWS):
        end = seqlen - n0
        if const_expr(causal):
            end = min(end, m0 + at[r, 0][0] + 1 - n0)
        for c in range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = -Float32.inf if at[r, c][1] >= end else S[r, c]


@cute.jit
def online_softmax(
    acc_S: cute.Tensor, rows: Rows, scale_log2: Float32 | cute.Tensor, from_zero: Constexpr[bool] = False, headroom: Constexpr[float] = 0.0
) -> cute.Tensor:
    """S becomes P = exp(scale (S - m)), m and l move on; returns the factors by which O must be rescaled (Eq. 12).

    scale_log2: one number, or one of each row. from_zero: no row's m is below 0, so that a maximum below it need not be known. headroom: m is the
    maximum less so much, so that P's largest element is 2^headroom, and l as many times larger.
    """
    S = by_rows(acc_S)
    scales = [scale_log2[r] if const_expr(isinstance(scale_log2, cute.Tensor)) else scale_log2 for r in range(ROWS)]
    rescale, base = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(2))
    for r in range_constexpr(ROWS):
        values = [S[r, c] for c in range(cute.size(S, mode=[1]))]
        top = largest_from_zero(values) if const_expr(from_zero) else largest(values)
        top = quad_max(top) * scales[r] - headroom if const_expr(headroom) else quad_max(top) * scales[r]
        m = arch.fmax(top, rows.m[r])
        base[r] = 0.0 if m == -Float32.inf else m  # a row that has seen no key yet
        rescale[r] = cute.math.exp2(rows.m[r] - base[r], fastmath=True)
        rows.m[r] = m
    for r in range_constexpr(ROWS):
        p = cute.math.exp2(S[r, None].load() * scales[r] - base[r], fastmath=True)
        rows.l[r] = p.reduce(cute.ReductionOp.ADD, rows.l[r] * rescale[r], 0)  # a tile's sum apart would spill at head_dim 64
        S[r, None].store(p)
    return rescale


def largest(values: list[Float32]) -> Float32:
    """Their maximum, as a tree: neighbours first. The DSL's own reduction carries NaN along, and its shuffles take three instructions more."""
    while len(values) > 1:
        values = [arch.fmax(*pair) if len(pair) > 1 else pair[0] for pair in batched(values, 2)]
    return values[0]


def largest_from_zero(values: list[Float32]) -> Float32:
    """Their maximum where it is at least 0, else some number below 0: in the order of integers, of which three are compared by one instruction."""
    values = [arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]) for x in values]
    while len(values) > 1:
        values = [largest_integer(*each) for each in batched(values, 3)]
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=values)


def largest_integer(a: Int32, b: Int32 | None = None, c: Int32 | None = None) -> Int32:
    if b is None:
        return a
    ptx = "max.s32 {$w0}, {$r0}, {$r1};" if c is None else "{ .reg .s32 x; max.s32 x, {$r0}, {$r1}; max.s32 {$w0}, x, {$r2}; }"
    return arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[x for x in (a, b, c) if x is not None])


def quad_max(x: Float32) -> Float32:
    """The maximum over the four threads that share a row."""
    for distance in (2, 1):
        x = arch.fmax(x, arch.shuffle_sync_bfly(x, distance))
    return x


def batched(values: list, n: int) -> list[list]:
    return [values[i : i + n] for i in range(0, len(values), n)]


@cute.jit
def round_into(P: cute.Tensor, acc_S: cute.Tensor):
    """P in the inputs' dtype, in the registers from which the second product reads it."""
    numbers = cute.size(P)
    if const_expr(numbers & (numbers - 1) == 0):
        flat = cute.make_layout(numbers)
        cute.make_tensor(P.iterator, flat).store(cute.make_tensor(acc_S.iterator, flat).load().to(P.element_type))
    else:
        round_pairs_into(P, acc_S)


@cute.jit
def round_pairs_into(P: cute.Tensor, acc_S: cute.Tensor):
    """Where tile_n is no power of two, the DSL's conversion of a whole fragment takes twice the instructions, and ptxas serialises the product
    that follows (SASS at tile_n 112 and 80, DSL 4.8.1). Pair by pair it does not; but where both work this one costs registers (head_dim 64
    with three warpgroups spills).
    """
    pairs = cute.recast_tensor(P, Int32)
    kind = const_expr("bf16x2" if P.element_type is BFloat16 else "f16x2")
    for i in range_constexpr(cute.size(pairs)):
        pairs[i] = arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[acc_S[2 * i + 1], acc_S[2 * i]]
        )


@cute.jit
def scale_rows(acc_O: cute.Tensor, factors: cute.Tensor):
    O = by_rows(acc_O)
    for r in range_constexpr(ROWS):
        O[r, None].store(O[r, None].load() * factors[r])


@cute.jit
def clear_rows(acc_O: cute.Tensor, lse: cute.Tensor):
    """0 in the rows that see nothing."""
    O = by_rows(acc_O)
    for r in range_constexpr(ROWS):
        for c in range_constexpr(cute.size(O, mode=[1])):
            O[r, c] = 0.0 if lse[r] == -Float32.inf else O[r, c]


@cute.jit
def close(rows: Rows) -> tuple[cute.Tensor, cute.Tensor]:
    """(log-sum-exp, 1 / l) of each row: natural logarithm, -inf for a row without keys; its O is 0 and stays so."""
    lse, inverse = cute.make_rmem_tensor(ROWS, Float32), cute.make_rmem_tensor(ROWS, Float32)
    for r in range_constexpr(ROWS):
        l = arch.warp_reduction_sum(rows.l[r], threads_in_group=QUAD)
        inverse[r] = 1.0 if l == 0.0 else 1.0 / l
        lse[r] = -Float32.inf if l == 0.0 else (rows.m[r] + cute.math.log2(l)) * LN2
    return lse, inverse


@cute.jit
def finish(acc_O: cute.Tensor, rows: Rows, scale: Float32 | None = None) -> cute.Tensor:
    """O /= l, times `scale`; returns the log-sum-exp of each row."""
    lse, inverse = close(rows)
    if const_expr(scale is not None):
        for r in range_constexpr(ROWS):
            inverse[r] *= scale
    scale_rows(acc_O, inverse)
    return lse


LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


@cute.jit
def store_rows(gO: cute.Tensor, gL: cute.Tensor, acc_O: cute.Tensor, lse: cute.Tensor, tOcO: cute.Tensor, m0: Int32, seqlen: Int32):
    """Write the rows that exist. gO: (seqlen, head_dim), gL: (seqlen,) of this head; tOcO: coordinates of acc_O in its tile."""
    O, at = by_rows(acc_O), by_rows(tOcO)
    pair = cute.make_rmem_tensor(2, gO.element_type)
    for r in range_constexpr(ROWS):
        row = m0 + at[r, 0][0]
        if row < seqlen:
            gRow = gO[row, None]
            for c in range_constexpr(0, cute.size(O, mode=[1]), 2):
                pair[0], pair[1] = O[r, c].to(gO.element_type), O[r, c + 1].to(gO.element_type)
                if at[r, c][1] < gO.shape[1]:
                    target = cute.make_tensor((gRow.iterator + at[r, c][1]).align(4), cute.make_layout(2))
                    cute.autovec_copy(pair, target)
            if at[r, 0][1] == 0:
                gL[row] = lse[r]
