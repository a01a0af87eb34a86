"""What the backward pass on Hopper works out before its main kernel: delta = rowsum(dO O) - dLSE (Eq. 23, 28), the log-sum-exp in powers of two, and
zeros where dQ is summed up.

A warp of the main kernel that does this instead, while the others compute, gains 1 % at most, and loses where walks are short (lab/2026-11-22.md).
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.parts import vector
from tilewise.backends.hopper.operands import Band
from tilewise.backends.hopper.visible.queries import sees_any
from tilewise.sm90 import tma
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, Int64, arch, const_expr, cute, cutlass, range_constexpr

THREADS = 256  # of a block
VECTOR = 8  # 16-bit elements in a 16-byte read
AT_ONCE = 2  # rows that a thread reads at once: with more, its registers leave room for fewer threads
LOG2_E = 1.4426950408889634


class Read(NamedTuple):
    """As in operands.Given."""

    O: cute.Tensor
    dO: cute.Tensor
    L: cute.Tensor
    dL: cute.Tensor
    has_dL: Int32
    kept: Float32 | None  # of operands.Draw


class Written(NamedTuple):
    """As in operands.Scratch."""

    lse: cute.Tensor
    minus_delta: cute.Tensor
    sum_dQ: cute.Tensor
    turns: cute.Tensor
    counter: cute.Tensor | None
    spoiled: cute.Tensor | None


@cute.kernel
def prepare(read: Read, band: Band, written: Written, known: Int32, config: Constexpr[Config]):
    """A block a tile of queries. known: how many elements at the end of `spoiled` become 0."""
    sum_dQ, turns, counter, spoiled = written[2:]
    thread, (m_block, head, batch) = arch.thread_idx()[0], arch.block_idx()
    arch.griddepcontrol_launch_dependents()
    lanes = const_expr(16 if config.head_dim_v >= 128 else 8)  # that share a row
    rows = const_expr(config.tile_m * lanes // THREADS)  # of a thread
    at_once = const_expr(AT_ONCE if rows % AT_ONCE == 0 else rows)
    row0 = m_block * config.tile_m + thread // lanes
    for i in cutlass.range(0, rows, at_once, unroll=1):
        first = row0 + i * (THREADS // lanes)
        prepare_rows(read, band, written, first, head, batch, thread % lanes, lanes, at_once, config)
    if const_expr(config.counts):
        set_back(counter, counter.shape[0], thread, m_block + head + batch == 0)
    if const_expr(config.repairs):
        set_back(spoiled, 1, thread, m_block + head + batch == 0)
        if const_expr(config.looks):
            m_blocks, heads, batches = arch.grid_dim()
            block = (batch * heads + head) * m_blocks + m_block
            for i in cutlass.range(block * THREADS + thread, known, batches * heads * m_blocks * THREADS, unroll=1):
                spoiled[spoiled.shape[0] - 1 - i] = Int32(0)
    if const_expr(config.separate_dq_kernel):
        pass
    elif const_expr(config.ordered):
        if thread < config.counters:
            turns[batch, head, m_block, thread] = 0
    else:
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        gSum = sum_dQ[batch, head, m_block, None]
        for i in cutlass.range(thread, cute.size(gSum) // 4, THREADS, unroll=4):
            cute.autovec_copy(zeros, vector(gSum, i, 4))


@cute.jit
def prepare_rows(
    read: Read, band: Band, written: Written, first: Int32, head: Int32, batch: Int32, lane: Int32, lanes: Constexpr[int],
    rows: Constexpr[int], config: Constexpr[Config],
):  # fmt: skip
    """As many `rows` at once, from the `first` on; `lanes` threads share each."""
    (mO, mdO, mL, mdL, has_dL, kept), (lse, minus_delta, *_) = read, written
    gO, gdO = (x[batch, None, head, None] for x in (mO, mdO))
    totals, naturals = parts_of_delta(gO, gdO, mL[batch, head, None], first, lane, lanes, rows, config)
    for i in range_constexpr(rows):
        row = first + i * (THREADS // lanes)
        base, total = Float32.inf, arch.warp_reduction_sum(totals[i], threads_in_group=lanes)
        if row < gO.shape[0]:
            natural = naturals[i]
            if const_expr(config.mask_kind != "full"):
                total = total if sees_any(row, head, batch, band, config) else Float32(0.0)  # with a sink its log-sum-exp is finite
            if has_dL != 0:
                total -= mdL[batch, head, row]
            if natural == -Float32.inf:
                total = Float32(0.0)
            else:
                base = natural if const_expr(config.natural) else natural * LOG2_E
                if const_expr(config.bias is not None) and natural == Float32.inf:  # not a row that sees nothing
                    base = Float32.nan
        else:
            total = Float32(0.0)
        if lane == 0:
            lse[batch, head, row] = base
            minus_delta[batch, head, row] = -total * kept if const_expr(config.dropout) else -total


@cute.jit
def set_back(counters: cute.Tensor, first: Int32, thread: Int32, mine: Boolean):
    """The `first` of them to 0, by one thread block of all."""
    if mine:
        for i in cutlass.range(thread, first, THREADS, unroll=1):
            counters[i] = Int32(0)


@cute.jit
def parts_of_delta(
    gO: cute.Tensor, gdO: cute.Tensor, gL: cute.Tensor, first: Int32, lane: Int32, lanes: Constexpr[int], rows: Constexpr[int],
    config: Constexpr[Config],
):  # fmt: skip
    """This thread's part of rowsum(dO O), and the log-sum-exp, of each of these rows. All is loaded before any of it is used: reading row by row
    would wait for memory at every row. What lies beyond the last row or column is read at the last.
    """
    steps = const_expr(-(-config.head_dim_v // (VECTOR * lanes)))
    o, d_o = (cute.make_rmem_tensor((VECTOR, steps, rows), x.element_type) for x in (gO, gdO))
    totals, naturals = (cute.make_rmem_tensor(rows, Float32) for _ in range(2))
    vectors = gO.shape[1] // VECTOR
    for i in range_constexpr(rows):
        row = min(first + i * (THREADS // lanes), gO.shape[0] - 1)
        naturals[i] = gL[row]
        for j in range_constexpr(steps):
            at = min(lane + j * lanes, vectors - 1)
            read_last(vector(gO[row, None], at, VECTOR), o[None, j, i])
            cute.autovec_copy(vector(gdO[row, None], at, VECTOR), d_o[None, j, i])
    for i in range_constexpr(rows):
        totals[i] = Float32(0.0)
        for j in range_constexpr(steps):
            total = Float32(0.0)
            for x in range_constexpr(VECTOR):
                total += o[x, j, i].to(Float32) * d_o[x, j, i].to(Float32)
            totals[i] += total if lane + j * lanes < vectors else Float32(0.0)
    return totals, naturals


@cute.jit
def read_last(source: cute.Tensor, target: cute.Tensor):
    """16 bytes that are not read after this."""
    words = cute.recast_tensor(target, Int32)
    found = arch.inline_ptx(
        "ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};",
        write_only_types=[Int32] * 4,
        read_only_args=[source.iterator.toint(), Int64(tma.FIRST)],
    )
    for i in range_constexpr(4):
        words[i] = found[i]
