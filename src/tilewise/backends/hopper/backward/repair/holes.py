"""Holes: the elements of an entry that are NaN, a bit each; found, closed where NaN is right, and written."""

from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.repair.elements import EIGHT, STEP, Matrix, column_of, four, is_nan, row_of, signed, words_of
from tilewise.backends.hopper.backward.repair.entries import WARPS, Entry
from tilewise.backends.hopper.changes import dsl
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, range_constexpr


@cute.jit
def holes_in(entry: Entry, config: Constexpr[RepairConfig]) -> cute.Tensor:
    """The holes of this lane, (columns / STEP,) int32: in a step's word, bits 0 to 7 are the EIGHT columns of its first row, bits 8 to 15 those
    of its second row.
    """
    bits = cute.make_rmem_tensor(config.columns // STEP, Int32)
    bits.fill(0)
    for step in range_constexpr(cute.size(bits)):
        for half in range_constexpr(2):
            row, column = row_of(entry.row0, half), column_of(entry.column0, step)
            if row < entry.gX.rows and column < entry.last:
                bits[step] |= nan_bits(entry.gX, row, column, config) << EIGHT * half
    return bits


@cute.jit
def nan_bits(gX: Matrix, row: Int32, column: Int32, config: Constexpr[RepairConfig]) -> Int32:
    """A bit for each of EIGHT elements of a row, from a column on: whether it is NaN."""
    words, found = words_of(gX, row, column), Int32(0)
    numbers = cute.recast_tensor(words, dsl(config.dtype))
    for x in range_constexpr(EIGHT):
        if is_nan(numbers[x].to(Float32)):
            found |= 1 << x
    return found


@cute.jit
def any_hole(holes: cute.Tensor) -> Boolean:
    """Whether any lane of the warp has a hole."""
    found = Int32(0)
    for i in range_constexpr(cute.size(holes)):
        found |= holes[i]
    return arch.vote_any_sync(found != 0)


@cute.jit
def close_row(holes: cute.Tensor, half: Constexpr[int]):
    """Clear the holes of one of this lane's two rows: they are NaN by right."""
    for i in range_constexpr(cute.size(holes)):
        holes[i] &= 0xFF << EIGHT * (1 - half)


@cute.jit
def is_settled(total: cute.Tensor, holes: cute.Tensor) -> Boolean:
    """Whether the sum of each hole is an infinity or NaN, by a warp: the sum is final if only finite terms follow."""
    settled = Boolean(True)
    for step in range_constexpr(cute.size(holes)):
        found = infinities_in(total, step)
        settled = settled and holes[step] & ~(found | found >> 2 * EIGHT) == 0
    return arch.vote_all_sync(settled)


@cute.jit
def is_lost(total: cute.Tensor, holes: cute.Tensor, lost: cute.Tensor) -> Boolean:
    """Whether each hole is NaN by the sums of all warps so far: a NaN, or infinities of both signs.

    lost: (columns / STEP, WARP) int32 in shared memory, `infinities_in` of all warps so far.
    """
    settled = Boolean(True)
    for step in range_constexpr(cute.size(holes)):
        found = infinities_in(total, step)
        before = arch.inline_ptx(
            "atom.relaxed.cta.shared.or.b32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int32],
            read_only_args=[cute.domain_offset((step, arch.lane_idx()), lost).iterator.toint(), found],
        )
        found |= before
        settled = settled and holes[step] & ~(found & found >> 2 * EIGHT) == 0
    return arch.vote_all_sync(settled)


@cute.jit
def infinities_in(total: cute.Tensor, step: Constexpr[int]) -> Int32:
    """Bits of this lane in a step: 0 to 15 for sums that are inf, in the order of `holes_in`, 16 to 31 for those that are -inf. NaN sets both."""
    found = Int32(0)
    for half in range_constexpr(2):
        for x in range_constexpr(EIGHT):
            number, place = total[place_of(step, half, x)], const_expr(EIGHT * half + x)
            if not number < Float32.inf:
                found |= 1 << place
            if not number > -Float32.inf:
                found |= const_expr(signed(1 << (2 * EIGHT + place)))
    return found


def place_of(step: int, half: int, x: int) -> int:
    """Index in this lane's sums of column x of its EIGHT, in a row's half: a product holds two columns of either row."""
    return 4 * (4 * step + x // 2) + 2 * half + x % 2


@cute.jit
def write(total: cute.Tensor, entry: Entry, holes: cute.Tensor, factor: Float32, warp: Int32, config: Constexpr[RepairConfig]):
    """Write factor * total into the holes, in the gradient's dtype; the warps divide the steps of columns."""
    dtype = dsl(config.dtype)
    for step in range_constexpr(cute.size(holes)):
        if warp == step % WARPS:
            for half in range_constexpr(2):
                if (holes[step] >> EIGHT * half) & 0xFF != 0:
                    row, column = row_of(entry.row0, half), column_of(entry.column0, step)
                    words = words_of(entry.gX, row, column)
                    numbers = cute.make_rmem_tensor(EIGHT, dtype)
                    cute.autovec_copy(cute.recast_tensor(words, dtype), numbers)
                    for x in range_constexpr(EIGHT):
                        if (holes[step] >> (EIGHT * half + x)) & 1 != 0:
                            numbers[x] = (total[place_of(step, half, x)] * factor).to(dtype)
                    cute.autovec_copy(cute.recast_tensor(numbers, Int32), four(entry.gX, row, column))
