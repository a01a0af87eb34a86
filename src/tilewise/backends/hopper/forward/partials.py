"""A unit of work that several thread blocks share, each with some of the keys: split-KV. The block that is done last merges the pieces.

Each warp keeps its 16 rows of O, divided by their own sums, and their `Statistics`, in memory; then it counts itself. The last of those that have
the same rows adds up all parts, weighted by exp(lse_i - lse), in the order of the keys: the same bits whichever comes last.
"""

from typing import NamedTuple

from tilewise.backends.hopper.forward.scheduler import Span
from tilewise.backends.hopper.scores.logits import Statistics
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr

WARP, ROWS = 32, 16  # of a tile that a warp holds
WIDE = 4  # elements that a lane reads or writes at a time
LSE, ROW_MAX = (Statistics._fields.index(name) for name in ("lse", "row_max"))


class Partials(NamedTuple):
    """Both in global memory; arrivals 0 before and after."""

    sums: cute.Tensor  # (slots * Config.partial_elements,) fp32
    arrivals: cute.Tensor  # (slots * warps,) int32


@cute.jit
def together(acc_O: cute.Tensor, ends: Statistics, partials: Partials, span: Span, warp: Int32, config: Constexpr) -> Boolean:
    """Whether this warp is the one to store its rows. Their O and statistics are then those of all keys."""
    begin, end = span.slots
    mine = Boolean(True)
    if arch.vote_any_sync(end - begin > 1):
        keep(acc_O, ends, of_warp(partials, span.slot, warp, config), config)
        arrived = partials.arrivals.iterator + begin * warps(config) + number_of(warp, config)
        mine = arrive(arrived) == end - begin - 1
        if arch.vote_any_sync(mine):
            if arch.lane_idx() == 0:
                arrived.store(Int32(0))
            add_up(acc_O, ends, partials, begin, end, warp, config)
    return mine


def warps(config) -> int:
    return config.cluster * config.tile_m // ROWS


@cute.jit
def number_of(warp: Int32, config: Constexpr) -> Int32:
    """Of a warp among those of the cluster."""
    if const_expr(config.cluster > 1):
        warp += arch.block_idx_in_cluster() * (config.tile_m // ROWS)
    return warp


@cute.jit
def of_warp(partials: Partials, slot: Int32, warp: Int32, config: Constexpr) -> cute.Tensor:
    """(WIDE, wide reads of a lane): O's first, then those of LSE, and of row_max."""
    size = config.partial_elements // warps(config)
    begin = (slot * warps(config) + number_of(warp, config)) * size + WIDE * arch.lane_idx()
    wide = cute.make_layout((WIDE, ROWS * config.head_dim_v // (WARP * WIDE)), stride=(1, WARP * WIDE))
    return cute.make_tensor((partials.sums.iterator + begin).align(16), wide)


@cute.jit
def statistic_of_warp(x: cute.Tensor, field: Constexpr[int], config: Constexpr) -> cute.Tensor:
    """(ROWS,) of this lane, behind O; x: of `of_warp`; field: of `Statistics`."""
    at = ROWS * config.head_dim_v + fragments.ROWS * WARP * field + (fragments.ROWS - WIDE) * arch.lane_idx()
    return cute.make_tensor((x.iterator + at).align(8), cute.make_layout(fragments.ROWS))


@cute.jit
def keep(acc_O: cute.Tensor, ends: Statistics, target: cute.Tensor, config: Constexpr):
    numbers = cute.make_tensor(acc_O.iterator, cute.make_layout((WIDE, cute.size(acc_O) // WIDE)))
    for i in range_constexpr(cute.size(target, mode=[1])):
        cute.autovec_copy(numbers[None, i], target[None, i])
    cute.autovec_copy(ends.lse, statistic_of_warp(target, LSE, config))
    if const_expr(config.row_max):
        cute.autovec_copy(ends.row_max, statistic_of_warp(target, ROW_MAX, config))


@cute.jit
def arrive(counter: cute.Pointer) -> Int32:
    """How many arrived before this warp; what they have written, it may read."""
    arch.inline_ptx("fence.acq_rel.gpu;")
    arch.sync_warp()
    before = Int32(0)
    if arch.lane_idx() == 0:
        before = arch.atomic_add(counter, Int32(1))
    before = arch.shuffle_sync(before, 0)
    arch.inline_ptx("fence.acq_rel.gpu;")
    return before


@cute.jit
def add_up(acc_O: cute.Tensor, ends: Statistics, partials: Partials, begin: Int32, end: Int32, warp: Int32, config: Constexpr):
    """acc_O and statistics from the slots [begin, end)."""
    top, total = cute.make_rmem_tensor(fragments.ROWS, Float32), cute.make_rmem_tensor(fragments.ROWS, Float32)
    part = cute.make_rmem_tensor(fragments.ROWS, Float32)
    top.fill(-Float32.inf)
    total.fill(0.0)
    acc_O.fill(0.0)
    for slot in cutlass.range(begin, end, unroll=1):
        cute.autovec_copy(statistic_of_warp(of_warp(partials, slot, warp, config), LSE, config), part)
        for r in range_constexpr(fragments.ROWS):
            top[r] = arch.fmax(top[r], part[r])
    for r in range_constexpr(fragments.ROWS):
        top[r] = 0.0 if top[r] == -Float32.inf else top[r]  # where no key counts
    O = fragments.by_rows(acc_O)
    piece = cute.make_rmem_tensor((WIDE, cute.size(acc_O) // WIDE), Float32)
    numbers = fragments.by_rows(cute.make_tensor(piece.iterator, acc_O.layout))
    for slot in cutlass.range(begin, end, unroll=1):
        source = of_warp(partials, slot, warp, config)
        cute.autovec_copy(statistic_of_warp(source, LSE, config), part)
        for i in range_constexpr(cute.size(source, mode=[1])):
            cute.autovec_copy(source[None, i], piece[None, i])
        for r in range_constexpr(fragments.ROWS):
            weight = cute.math.exp2((part[r] - top[r]) * fragments.LOG2_E, fastmath=True)
            total[r] += weight
            O[r, None].store(O[r, None].load() + numbers[r, None].load() * weight)
    if const_expr(config.row_max):
        largest(ends.row_max, total, partials, begin, end, warp, config)
    for r in range_constexpr(fragments.ROWS):
        empty = total[r] == 0.0
        ends.lse[r] = -Float32.inf if empty else top[r] + cute.math.log2(total[r]) * fragments.LN2
        total[r] = 1.0 if empty else 1.0 / total[r]
    fragments.scale_rows(acc_O, total)


@cute.jit
def largest(row_max: cute.Tensor, total: cute.Tensor, partials: Partials, begin: Int32, end: Int32, warp: Int32, config: Constexpr):
    """The largest of the slots' [begin, end); NaN for rows with a total of NaN."""
    part = cute.make_rmem_tensor(fragments.ROWS, Float32)
    for slot in cutlass.range(begin, end, unroll=1):
        cute.autovec_copy(statistic_of_warp(of_warp(partials, slot, warp, config), ROW_MAX, config), part)
        for r in range_constexpr(fragments.ROWS):
            row_max[r] = arch.fmax(row_max[r], part[r])
    for r in range_constexpr(fragments.ROWS):
        row_max[r] = row_max[r] if total[r] == total[r] else total[r]
