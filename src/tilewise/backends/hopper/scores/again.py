"""Softcap, additive bias and ALiBi in the backward pass on Hopper: P again, and by what dP - delta is multiplied (Eq. 24, 25, 29 to 31).

Changes of a score are in logits.py. Here scores come transposed, a thread holds elements of two keys, and under a softcap dS is
P (1 - t^2) (dP - delta): the factor joins P as soon as P is rounded for dV, so that nothing else has to be kept. What is off leaves no
trace in the generated code.
"""

from typing import NamedTuple

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.operands import Changes, Draw
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.hopper.scores.logits import READ
from tilewise.backends.hopper.visible.queries import place_in_tile
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import BFloat16, Constexpr, Float32, Int32, Int64, arch, const_expr, cute, range_constexpr
from tilewise.sm90.fragments import LOG2_E

NEXT_KEY = 8  # the second of a thread's keys, from its first
SOME = 4  # of a row's elements, which `weigh_rows` does at a time


class Head(NamedTuple):
    """Of the queries; what logits.py looks biases and slopes up by."""

    batch: Int32
    head: Int32


class Thread(NamedTuple):
    """What a consumer's thread changes its scores by, from beginning to end."""

    changes: Changes
    first: Head | None = None  # of the group
    key: Int32 | None = None  # its first key
    column: Int32 | None = None  # its first column of a tile of queries
    seqlen_q: Int32 | None = None
    seqlen_k: Int32 | None = None


class Terms(NamedTuple):
    """Those of one query head."""

    bias: cute.Tensor | None  # (seqlen_q or 1, seqlen_k)
    slope: Float32 | None


@cute.jit
def per_query(pairs: cute.Tensor, stage: Int32) -> cute.Tensor:
    """The values for this thread's columns, (tile_m / 4,)."""
    found = cute.make_rmem_tensor(pairs[None, None, 0].shape, Float32)
    cute.autovec_copy(pairs[None, None, stage], found)
    return cute.make_tensor(found.iterator, cute.make_layout(cute.size(found)))


@cute.jit
def probabilities(acc_S: cute.Tensor, lse: cute.Tensor, scale_log2: Float32):
    """S becomes P = exp(S - LSE) (Eq. 24)."""
    subtract(acc_S, lse, scale_log2)
    exponentiate(acc_S)


@cute.jit
def probabilities_of_rows(acc_S: cute.Tensor, lse: cute.Tensor, scale_log2: Float32):
    """Likewise where rows are queries. lse: (ROWS,)."""
    S = fragments.by_rows(acc_S)
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = cute.math.exp2(S[r, c] * scale_log2 - lse[r], fastmath=True)


@cute.jit
def subtract(acc_S: cute.Tensor, lse: cute.Tensor, scale_log2: Float32):
    """S becomes the exponents of P, in powers of two."""
    S = fragments.by_rows(acc_S)
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = S[r, c] * scale_log2 - lse[c]


@cute.jit
def exponentiate(acc_S: cute.Tensor, first: Constexpr[int] = 0, last: Constexpr[int] = 0):
    S = fragments.by_rows(acc_S)
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(first, last or cute.size(S, mode=[1])):
            S[r, c] = cute.math.exp2(S[r, c], fastmath=True)


@cute.jit
def thread_of(tensors, block, tScS: cute.Tensor, config: Constexpr) -> Thread:
    """tScS: (key, query) of each element of S^T."""
    changes = tensors.changes
    if const_expr(not (config.natural or config.dropout)):
        return Thread(changes)
    key, column = fragments.by_rows(tScS)[0, 0]
    head = block.head_k * (tensors.Q.shape[2] // tensors.K.shape[2])
    return Thread(changes, Head(block.batch, head), block.n0 + key, column, tensors.Q.shape[1], tensors.K.shape[1])


@cute.jit
def terms_of(thread: Thread, g: Int32, config: Constexpr) -> Terms:
    """Of query head g of the group."""
    bias, slope = None, None
    if const_expr(config.natural):
        head = Head(thread.first.batch, thread.first.head + g)
        if const_expr(config.bias is not None):
            bias = scores.bias_of(thread.changes, head)
        if const_expr(config.alibi):
            slope = scores.slope_of(thread.changes, head)
    return Terms(bias, slope)


@cute.jit
def kept_of(thread: Thread, g: Int32, m0: Int32, n0: Int32, config: Constexpr) -> cute.Tensor:
    """Which of a thread's pairs dropout keeps in the tile from query m0 and key n0 on, of query head g of the group: as `dropout.of_columns`."""
    draw, (row, column) = thread.changes.draw, place_in_tile()
    head = dropout.head_of(draw, thread.first.batch, thread.first.head + g)
    return dropout.of_columns(draw, head, m0 + column, n0 + row, const_expr(config.tile_m // 4))


@cute.jit
def round_kept(rounded: cute.Tensor, acc_P: cute.Tensor, bits: cute.Tensor):
    """P, 0 where it is dropped, as an operand of dV; NaN stays NaN."""
    pairs, kind = cute.recast_tensor(rounded, Int32), const_expr("bf16x2" if rounded.element_type is BFloat16 else "f16x2")
    for i in range_constexpr(cute.size(pairs)):
        pairs[i] = packed(*(acc_P[2 * i + x] * dropout.in_columns(bits, 2 * i + x) for x in range(2)), kind)


@cute.jit
def change(acc_S: cute.Tensor, thread: Thread, g: Int32, m0: Int32, config: Constexpr):
    """S = K Q^T of the tile of queries from m0 on becomes what the exponent takes: logits in natural units, or tanh alone.

    Returns 1 - tanh^2 where logits are not what it can be found from: two neighbouring columns a register, in fp16, as registers are short.
    """
    inner, rest = thread.changes.inner, None
    if const_expr(not config.natural):
        for i in range_constexpr(cute.size(acc_S)):
            acc_S[i] = scores.tanh(acc_S[i] * inner)
        return rest
    S, terms = fragments.by_rows(acc_S), terms_of(thread, g, config)
    if const_expr(config.softcap):
        rest = cute.make_rmem_tensor((fragments.ROWS, cute.size(S, mode=[1]) // 2), Int32)
        rest.fill(0)
    row0 = m0 + thread.column
    columns, address, step = Int32(0), Int64(0), Int64(0)
    if const_expr(config.bias is not None):
        columns = thread.seqlen_q - row0
        address, step = bias_at(terms.bias, row0, thread.key)
    some = const_expr(cute.size(S, mode=[1]) // config.change_parts)
    for part in range_constexpr(config.change_parts):
        if row0 + fragments.column(part * some) < thread.seqlen_q:  # for the others P = 0, whatever their score
            for c in range_constexpr(part * some, (part + 1) * some):
                column = fragments.column(c)
                biases = (Float32(0.0), Float32(0.0))
                if const_expr(config.bias is not None):
                    keys = thread.seqlen_k - thread.key if column < columns else Int32(0)
                    biases = read(address + column * step, keys, config)
                for r in range_constexpr(fragments.ROWS):
                    if const_expr(config.softcap and c % 2 == 0):
                        S[r, c], S[r, c + 1] = scores.tanh(S[r, c] * inner), scores.tanh(S[r, c + 1] * inner)
                        rest[r, c // 2] = packed(*(1.0 - t * t for t in (S[r, c], S[r, c + 1])), "f16x2")
                    x = S[r, c] * thread.changes.factor + biases[r]
                    if const_expr(config.alibi):
                        centre = scores.centre(thread.changes, row0 + column, config)
                        x -= terms.slope * cute.math.absf((centre - thread.key - NEXT_KEY * r).to(Float32))
                    S[r, c] = x
    return rest


@cute.jit
def bias_at(bias: cute.Tensor, row: Int32, key: Int32):
    """The address of an entry, which need not exist, and the bytes to the next row's."""
    size = const_expr(bias.element_type.width // 8)
    step = bias.stride[0] * size
    if bias.shape[0] == 1:
        step = Int64(0)
    return bias.iterator.toint() + row * step + key * size, step


def read(address: Int64, keys: Int32, config) -> tuple[Float32, Float32]:
    """Of a thread's two keys, from the first one's address."""
    return read_one(address, keys, 0, config), read_one(address, keys, NEXT_KEY, config)


def read_one(address: Int64, keys: Int32, place: int, config) -> Float32:
    """The element `place` behind an address; 0 where it is not among the `keys` that there are from there on."""
    code = READ[config.bias].replace("@at", str(place)).replace("@offset", str(place * config.bias.itemsize))
    return arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[address, keys])


@cute.jit
def weigh(
    acc_S: cute.Tensor, rest: cute.Tensor | None, rounded: cute.Tensor, lse: cute.Tensor, scale_log2: Float32, bits: cute.Tensor | None,
    config: Constexpr,
):  # fmt: skip
    """From what `change` made, -inf for hidden pairs: P into `rounded`, enlarged, in its dtype, and into acc_S the factor of dP - delta in dS.

    lse: as from `lse_of`; bits: of `kept_of`, P is 0 where it is dropped.
    """
    S, pairs = fragments.by_rows(acc_S), cute.recast_tensor(rounded, Int32)
    kind = const_expr("bf16x2" if rounded.element_type is BFloat16 else "f16x2")
    for c in range_constexpr(0, cute.size(S, mode=[1]), 2):  # two neighbouring columns
        of = shared_pair(lse[None, c // 2]) if const_expr(short_of_registers(config)) else (lse[c], lse[c + 1])
        for r in range_constexpr(fragments.ROWS):
            x = S[r, c], S[r, c + 1]
            p = tuple(weight(x[i], of[i], scale_log2, config) for i in range(2))
            of_dV = [enlarge(x, config) for x in p]
            if const_expr(config.dropout):
                of_dV = [x * dropout.in_columns(bits, 2 * (c + r) + i) for i, x in enumerate(of_dV)]
            pairs[fragments.ROWS * (c // 2) + r] = packed(*of_dV, kind)
            factor = (Float32(1.0), Float32(1.0))
            if const_expr(rest is not None):
                factor = unpacked(rest[r, c // 2])
            elif const_expr(config.softcap):
                factor = tuple(arch.fmax(1.0 - t * t, Float32(0.0)) for t in x)  # of a hidden pair 0 * 0
            if const_expr(config.softcap):
                S[r, c], S[r, c + 1] = p[0] * factor[0], p[1] * factor[1]
            else:
                S[r, c], S[r, c + 1] = p


@cute.jit
def lse_of(pairs: cute.Tensor, stage: Int32, config: Constexpr) -> cute.Tensor:
    """The log-sum-exps of a thread's columns: in registers, or, where these are short, in shared memory, (2, columns / 2)."""
    if const_expr(short_of_registers(config)):
        return pairs[None, None, stage]
    return per_query(pairs, stage)


def short_of_registers(config) -> bool:
    return config.natural or (config.softcap and config.mask_kind in ("varlen", "tiles"))


def weight(x: Float32, lse: Float32, scale_log2: Float32, config) -> Float32:
    """P (Eq. 24). A logit and a log-sum-exp may be so large that rounding puts the one above the other; then P is 1."""
    if config.natural:
        below = arch.inline_ptx("min.NaN.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Float32], read_only_args=[x - lse])
        return cute.math.exp2(below * LOG2_E, fastmath=True)
    return cute.math.exp2(x * scale_log2 - lse, fastmath=True)


def enlarge(p: Float32, config) -> Float32:
    """As it is rounded to an operand of products."""
    return p * config.enlarged if const_expr(config.enlarged != 1.0) else p


def packed(first: Float32, second: Float32, kind: str) -> Int32:
    """Two values, rounded."""
    return arch.inline_ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[second, first])


def unpacked(pair: Int32) -> tuple[Float32, Float32]:
    """Two values of fp16."""
    return arch.inline_ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def shared_pair(pair: cute.Tensor) -> tuple[Float32, Float32]:
    return arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32, Float32], read_only_args=[pair.iterator.toint()]
    )


@cute.jit
def weigh_rows(
    acc_S: cute.Tensor, tScS: cute.Tensor, changes: Changes, head: Head, m0: Int32, n0: Int32, seqlen_k: Int32, lse: cute.Tensor,
    scale_log2: Float32, capped: Constexpr[bool], config: Constexpr,
):  # fmt: skip
    """Where a thread has two queries instead: S = Q K^T becomes P, or, if `capped`, the factor of dP - delta in dS; what hidden pairs get says
    nothing.

    tScS: (query, key) of each element of S; lse: (ROWS,). Done in parts, so that fewer registers are taken at a time.
    """
    S, at = fragments.by_rows(acc_S), fragments.by_rows(tScS)
    bias = scores.bias_of(changes, head) if const_expr(config.bias is not None) else None
    slope = scores.slope_of(changes, head) if const_expr(config.alibi) else None
    parts = const_expr([(first, r) for first in range(0, cute.size(S, mode=[1]), SOME) for r in range(fragments.ROWS)])
    for first, r in parts:
        row, key = m0 + at[r, 0][0], n0 + at[r, 0][1]
        if key + fragments.column(first) < seqlen_k:  # the others are hidden, whatever they get
            gBias, keys, distance = None, Int32(0), Int32(0)
            if const_expr(config.bias is not None):
                gBias, keys = scores.bias_row(bias, row, key), seqlen_k - key
            if const_expr(config.alibi):
                distance = scores.centre(changes, row, config) - key
            for c in range_constexpr(first, first + SOME, 2):  # two neighbouring columns
                biases = (Float32(0.0), Float32(0.0))
                if const_expr(config.bias is not None):
                    biases = scores.read(gBias, fragments.column(c), keys, config)
                for i in range_constexpr(2):
                    S[r, c + i] = weight_of(S[r, c + i], biases[i], distance, c + i, slope, lse[r], scale_log2, capped, changes, config)


@cute.jit
def kept_of_rows(
    tScS: cute.Tensor, draw: Draw | None, block, n0: Int32 | None, columns: Constexpr[int], config: Constexpr
) -> cute.Tensor | None:
    """Which of a thread's pairs dropout keeps in a tile of `columns` columns, where rows are queries: as `dropout.of_rows`. block: of the queries."""
    bits = None
    if const_expr(config.dropout):
        row, column = fragments.by_rows(tScS)[0, 0]
        head = dropout.head_of(draw, block.batch, block.head)
        bits = dropout.of_rows(draw, head, block.m0 + row, n0 + column, const_expr(columns // 4))
    return bits


@cute.jit
def weight_of(
    s: Float32, bias: Float32, distance: Int32, c: Constexpr[int], slope: Float32 | None, lse: Float32, scale_log2: Float32,
    capped: Constexpr[bool], changes: Changes, config: Constexpr,
) -> Float32:  # fmt: skip
    """P, from a product of a query and a key, or, if `capped`, the factor of dP - delta in dS. distance: for ALiBi, of the first column; this is the
    thread's c-th.
    """
    x, rest = s, Float32(1.0)
    if const_expr(config.softcap):
        x = scores.tanh(x * changes.inner)
        rest = 1.0 - x * x
    if const_expr(config.natural):
        x = x * changes.factor + bias
    if const_expr(config.alibi):
        x -= slope * cute.math.absf((distance - fragments.column(c)).to(Float32))
    p = weight(x, lse, scale_log2, config)
    return p * rest if const_expr(config.softcap and capped) else p


@cute.jit
def pair_weights(s: Float32, row: Int32, key: Int32, lse: Float32, changes: Changes, head: Head, scale_log2: Float32, config: Constexpr):
    """`weigh` for one pair, anywhere: P, and the factor of dP - delta in dS."""
    p = weight(scores.logit_at(s, row, key, changes, head, config), lse, scale_log2, config)
    if const_expr(config.softcap):
        t = scores.tanh(s * changes.inner)
        return p, p * (1.0 - t * t)
    return p, p
