"""Changes of the scores before the softmax: softcap, additive bias, ALiBi, and the learnable sink that joins it. Eq. 2 of docs/algorithm.md.

What is off leaves no trace in the generated code. A bias or ALiBi makes logits, in natural units: in those the largest bias of its dtype
still is a finite number, and so is the log-sum-exp of a row that has nothing else. Softcap alone leaves tanh(scale s / softcap) in the
registers and goes on as a plain score does, with softcap in place of the scale.
"""

from typing import NamedTuple

import torch

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.operands import Scores
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Constexpr, Float32, Int32, arch, const_expr, cute, range_constexpr
from tilewise.sm90.fragments import LN2, LOG2_E


class Terms(NamedTuple):
    """What a thread needs of the operands for one unit."""

    bias: cute.Tensor | None  # (seqlen_q or 1, seqlen_k) of this batch entry and head
    slope: Float32 | None
    origin: cute.Tensor | None  # (ROWS,) fp32: the key at distance 0 from each row, less the thread's first column
    sink: Float32 | None
    head: Int32 | None = None  # for dropout, of `dropout.head_of`


class Statistics(NamedTuple):
    """Of a thread's rows, at the end of a unit: the log-sum-exp and, where it is wanted, the largest score, in natural units. (ROWS,) fp32 each."""

    lse: cute.Tensor
    row_max: cute.Tensor | None


@cute.jit
def terms_of(scores: Scores, tScS: cute.Tensor, block, config: Constexpr) -> Terms:
    """tScS: (row, column) of each element of S."""
    bias, slope, origin, sink, head = None, None, None, None, None
    at = fragments.by_rows(tScS)
    if const_expr(config.bias is not None):
        bias = bias_of(scores, block)
    if const_expr(config.alibi):
        slope = slope_of(scores, block)
        origin = cute.make_rmem_tensor(fragments.ROWS, Float32)
        for r in range_constexpr(fragments.ROWS):
            origin[r] = (centre(scores, block.m0 + at[r, 0][0], config) - at[r, 0][1]).to(Float32)
    if const_expr(config.sink):
        sink = scores.sink[block.head]
    if const_expr(config.dropout):
        head = dropout.head_of(scores.draw, block.batch, block.head)
    return Terms(bias, slope, origin, sink, head)


@cute.jit
def bias_of(scores: Scores, block) -> cute.Tensor:
    """block: of a batch entry and a head."""
    batch, head = min(block.batch, scores.bias.shape[0] - 1), min(block.head, scores.bias.shape[1] - 1)
    return scores.bias[batch, head, None, None]


@cute.jit
def slope_of(scores: Scores, block) -> Float32:
    return scores.slopes[min(block.batch, scores.slopes.shape[0] - 1), block.head]


@cute.jit
def centre(scores: Scores, row: Int32, config: Constexpr) -> Int32:
    """The key at distance 0 from a row. Rows that do not exist get one too."""
    shift = scores.shift
    if const_expr(config.diagonal):
        shift = scores.diagonal[min(row, scores.diagonal.shape[0] - 1)].to(Int32)
    return row + shift


@cute.jit
def modify(
    acc_S: cute.Tensor, tScS: cute.Tensor, m0: Int32, n0: Int32, scores: Scores, terms: Terms, edge: Constexpr[bool], config: Constexpr
):
    """S = Q K^T of the tile at (m0, n0) becomes what the softmax takes. `edge`: some keys of the tile may not exist."""
    if const_expr(config.modified):
        S, at = fragments.by_rows(acc_S), fragments.by_rows(tScS)
        for r in range_constexpr(fragments.ROWS):
            gBias, keys, place = None, Int32(0), Float32(0.0)
            if const_expr(config.bias is not None):
                gBias = bias_row(terms.bias, m0 + at[r, 0][0], n0 + at[r, 0][1])
                keys = terms.bias.shape[1] - n0 - at[r, 0][1] if edge else Int32(config.tile_n)
            if const_expr(config.alibi):
                place = terms.origin[r] - n0.to(Float32)
            for c in range_constexpr(0, cute.size(S, mode=[1]), 2):  # two neighbouring columns
                biases = (Float32(0.0), Float32(0.0))
                if const_expr(config.bias is not None):
                    biases = read(gBias, fragments.column(c), keys, config)
                for i in range_constexpr(2):
                    distance = place - float(fragments.column(c + i)) if const_expr(config.alibi) else Float32(0.0)
                    S[r, c + i] = logit(S[r, c + i], biases[i], distance, scores, terms.slope, config)


@cute.jit
def bias_row(bias: cute.Tensor, row: Int32, key: Int32) -> cute.Tensor:
    """(keys,): a row from `key` on."""
    return cute.domain_offset((key,), bias[min(row, bias.shape[0] - 1), None])


# The element that lies @offset bytes behind an address, 0 unless @at < keys; and two neighbours by one load.
READ = {
    torch.bfloat16: (
        "{ .reg .pred p; .reg .b16 h, zero; mov.b16 zero, 0; mov.b16 h, 0; setp.gt.s32 p, {$r1}, @at; @p ld.global.b16 h, [{$r0}+@offset]; "
        "mov.b32 {$w0}, {zero, h}; }"
    ),
    torch.float16: (
        "{ .reg .pred p; .reg .b16 h; mov.b16 h, 0; setp.gt.s32 p, {$r1}, @at; @p ld.global.b16 h, [{$r0}+@offset]; cvt.f32.f16 {$w0}, h; }"
    ),
    torch.float32: "{ .reg .pred p; mov.f32 {$w0}, 0f00000000; setp.gt.s32 p, {$r1}, @at; @p ld.global.f32 {$w0}, [{$r0}+@offset]; }",
}
READ_PAIR = {
    torch.bfloat16: (
        "{ .reg .pred p; .reg .b32 w; .reg .b16 a, b, zero; mov.b16 zero, 0; mov.b32 w, 0; setp.gt.s32 p, {$r1}, @at; "
        "@p ld.global.b32 w, [{$r0}+@offset]; mov.b32 {a, b}, w; mov.b32 {$w0}, {zero, a}; mov.b32 {$w1}, {zero, b}; }"
    ),
    torch.float16: (
        "{ .reg .pred p; .reg .b32 w; .reg .b16 a, b; mov.b32 w, 0; setp.gt.s32 p, {$r1}, @at; @p ld.global.b32 w, [{$r0}+@offset]; "
        "mov.b32 {a, b}, w; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }"
    ),
}


def read(row: cute.Tensor, at: int, keys: Int32, config) -> tuple[Float32, Float32]:
    """row[at] and row[at + 1], 0 for those that are not below keys (both are, or neither, where they come in pairs).

    One address serves all places of a row; an index computed for each would take two registers each.
    """
    address = row.iterator.toint()

    def load(code: str, place: int, numbers: int):
        code = code.replace("@at", str(place)).replace("@offset", str(place * config.bias.itemsize))
        return arch.inline_ptx(code, write_only_types=[Float32] * numbers, read_only_args=[address, keys])

    if config.bias_pairs:
        return load(READ_PAIR[config.bias], at, 2)
    return load(READ[config.bias], at, 1), load(READ[config.bias], at + 1, 1)


@cute.jit
def logit(s: Float32, bias: Float32, distance: Float32, scores: Scores, slope: Float32 | None, config: Constexpr) -> Float32:
    x = s
    if const_expr(config.softcap):
        x = tanh(s * scores.inner)
    if const_expr(config.natural):
        x = x * scores.factor + bias
        if const_expr(config.alibi):
            x -= slope * cute.math.absf(distance)
    return x


@cute.jit
def logit_at(s: Float32, row: Int32, key: Int32, scores: Scores, block, config: Constexpr) -> Float32:
    """`modify` for one pair, anywhere."""
    bias, distance, slope = Float32(0.0), Float32(0.0), None
    if const_expr(config.bias is not None):
        bias = bias_of(scores, block)[min(row, scores.bias.shape[2] - 1), min(key, scores.bias.shape[3] - 1)].to(Float32)
    if const_expr(config.alibi):
        distance, slope = (centre(scores, row, config) - key).to(Float32), slope_of(scores, block)
    return logit(s, bias, distance, scores, slope, config)


SMALL = 0.55
# tanh(y) = y + y z (...) with z = y^2: relative error at most 4e-8 for |y| <= SMALL (least squares, reweighted to the minimax, in fp64).
TANH = -0.33332947, 0.13320725, -0.05267181, 0.01643758


@cute.jit
def tanh(y: Float32) -> Float32:
    """To a few units in the last place everywhere. The hardware's own, good to 2^-11, would put LSE beyond its tolerance."""
    z = y * y
    series = y + y * (z * (TANH[0] + z * (TANH[1] + z * (TANH[2] + z * TANH[3]))))
    rest = 1.0 - 2.0 * arch.rcp_approx(1.0 + cute.math.exp2(y * (2.0 * LOG2_E), fastmath=True))
    return series if cute.math.absf(y) < SMALL else rest


@cute.jit
def online_softmax(acc_S: cute.Tensor, rows: fragments.Rows, scores: Scores, from_zero: Constexpr[bool], config: Constexpr) -> cute.Tensor:
    """S becomes P, m and l move on; returns the factors by which O must be rescaled. from_zero: as `fragments.online_softmax` has it."""
    if const_expr(config.natural):
        return of_logits(acc_S, rows)
    return fragments.online_softmax(acc_S, rows, scores.scale_log2, from_zero)


@cute.jit
def of_logits(acc_S: cute.Tensor, rows: fragments.Rows) -> cute.Tensor:
    """As `fragments.online_softmax`, with m in natural units: log2(e) x overflows for the largest biases, log2(e) (x - m) does no harm."""
    S = fragments.by_rows(acc_S)
    rescale, base = (cute.make_rmem_tensor(fragments.ROWS, Float32) for _ in range(2))
    for r in range_constexpr(fragments.ROWS):
        largest = fragments.largest([S[r, c] for c in range(cute.size(S, mode=[1]))])
        m = arch.fmax(fragments.quad_max(largest), rows.m[r])
        base[r] = 0.0 if m == -Float32.inf else m
        rescale[r] = cute.math.exp2((rows.m[r] - base[r]) * LOG2_E, fastmath=True)
        rows.m[r] = m
    for r in range_constexpr(fragments.ROWS):
        p = cute.math.exp2((S[r, None].load() - base[r]) * LOG2_E, fastmath=True)
        rows.l[r] = p.reduce(cute.ReductionOp.ADD, rows.l[r] * rescale[r], 0)
        S[r, None].store(p)
    return rescale


@cute.jit
def close(rows: fragments.Rows, terms: Terms, config: Constexpr) -> tuple[cute.Tensor, cute.Tensor]:
    """(log-sum-exp, 1 / l) of each row, as `fragments.close`; with the sink, if there is one.

    The sink comes last: had it been in the maximum from the start, P would lose bits wherever it is much larger than the scores.
    """
    lse, inverse = fragments.close(rows)
    if const_expr(config.natural or config.sink):
        unit = const_expr(LOG2_E if config.natural else 1.0)  # of the exponent of 2, in a unit of m
        for r in range_constexpr(fragments.ROWS):
            m, l = rows.m[r], arch.warp_reduction_sum(rows.l[r], threads_in_group=fragments.QUAD)
            if const_expr(config.sink):
                sink = terms.sink * (LOG2_E / unit)
                top = arch.fmax(m, sink)
                base = 0.0 if top == -Float32.inf else top
                inverse[r] = 1.0 if m == -Float32.inf else 1.0 / (l + cute.math.exp2((sink - m) * unit, fastmath=True))
                l = l * cute.math.exp2((m - base) * unit, fastmath=True) + cute.math.exp2((sink - base) * unit, fastmath=True)
                m = top
            total = m + cute.math.log2(l) * LN2 if const_expr(config.natural) else (m + cute.math.log2(l)) * LN2
            lse[r] = -Float32.inf if l == 0.0 else total
    return lse, inverse


@cute.jit
def largest(rows: fragments.Rows, config: Constexpr) -> cute.Tensor | None:
    """The largest score of each row, -inf for a row without keys. m drops NaN, which l keeps; of +inf l is NaN, too."""
    row_max = None
    if const_expr(config.row_max):
        row_max = cute.make_rmem_tensor(fragments.ROWS, Float32)
        for r in range_constexpr(fragments.ROWS):
            l = arch.warp_reduction_sum(rows.l[r], threads_in_group=fragments.QUAD)
            m = rows.m[r] if const_expr(config.natural) else rows.m[r] * LN2
            row_max[r] = m if l == l else l
    return row_max
