"""Holes: the elements of an entry that are NaN, a bit each; found, closed where NaN is right, and written.

Each warp has a word of bits for each of its lanes and each STEP columns, in shared memory, so that loops over columns are no longer code.
"""

from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.repair.elements import (
    EIGHT,
    Matrix,
    address_of,
    column_of,
    either_number,
    four,
    is_nan,
    row_of,
    signed,
    words_of,
)
from tilewise.backends.hopper.backward.repair.entries import OF_DQ, WARPS, Entry
from tilewise.backends.hopper.stand_ins import dsl
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr

FP32_BYTES = 4


@cute.jit
def find_holes(entry: Entry, holes: cute.Tensor, config: Constexpr[RepairConfig]) -> Boolean:
    """The holes of this lane into `holes`, (columns / STEP,) int32: in a step's word, bits 0 to 7 are the EIGHT columns of its first row, bits 8 to
    15 those of its second row. Returns whether any lane of the warp has one.
    """
    any_bits = Int32(0)
    for step in cutlass.range(cute.size(holes), unroll=1):
        bits = Int32(0)
        for half in range_constexpr(2):
            row, column = row_of(entry.row0, half), column_of(entry.column0, step)
            if row < entry.gX.rows and column < entry.last:
                bits |= holes_in(entry, row, column, config) << EIGHT * half
        holes[step] = bits
        any_bits |= bits
    return arch.vote_any_sync(any_bits != 0)


@cute.jit
def holes_in(entry: Entry, row: Int32, column: Int32, config: Constexpr[RepairConfig]) -> Int32:
    """`nan_bits` of the gradient, in a row and columns that exist."""
    found = Int32(0)
    if const_expr(not config.wide_keys) or entry.of == OF_DQ:
        found = nan_bits(entry.gX, row, column, config)
    else:
        words = cute.make_rmem_tensor((4, EIGHT // 4), Int32)
        for i in range_constexpr(EIGHT // 4):
            cute.autovec_copy(four(address_of(entry.gX, row, column + 4 * i, FP32_BYTES)), words[None, i])
        numbers = cute.recast_tensor(words, Float32)
        for x in range_constexpr(EIGHT):
            found |= bit(is_nan(numbers[x]), x)
    return found


@cute.jit
def nan_bits(gX: Matrix, row: Int32, column: Int32, config: Constexpr[RepairConfig]) -> Int32:
    """A bit for each of EIGHT elements of a row, from a column on: whether it is NaN."""
    words, found = words_of(gX, row, column), Int32(0)
    numbers = cute.recast_tensor(words, dsl(config.dtype))
    for x in range_constexpr(EIGHT):
        found |= bit(is_nan(numbers[x].to(Float32)), x)
    return found


def bit(there: Boolean, place: int) -> Int32:
    """1 << place, or 0."""
    return Int32(cutlass.select_(there, Int32(signed(1 << place)), Int32(0)))


@cute.jit
def any_hole(holes: cute.Tensor) -> Boolean:
    """Whether any lane of the warp has a hole."""
    found = Int32(0)
    for i in cutlass.range(cute.size(holes), unroll=1):
        found |= holes[i]
    return arch.vote_any_sync(found != 0)


@cute.jit
def keep(holes: cute.Tensor, bits: Int32):
    """Clear this lane's holes but those among `bits`, in all of its words: they are NaN by right."""
    for i in cutlass.range(cute.size(holes), unroll=1):
        holes[i] = holes[i] & bits


@cute.jit
def is_settled(total: cute.Tensor, lost: cute.Tensor, holes: cute.Tensor) -> Boolean:
    """Whether the sum of each hole is an infinity or NaN, by a warp: the sum is final if only finite terms follow. total: this lane's sums, in shared
    memory; lost: (columns / STEP,), this lane's of `is_lost`.
    """
    settled = Boolean(True)
    for step in cutlass.range(cute.size(holes), unroll=1):
        found = infinities_in(total, step) | lost[step]
        settled = settled & (holes[step] & ~(found | found >> 2 * EIGHT) == 0)
    return arch.vote_all_sync(settled)


@cute.jit
def is_lost(total: cute.Tensor, holes: cute.Tensor, lost: cute.Tensor) -> Boolean:
    """Whether each hole is NaN by the sums of all warps so far: a NaN, or infinities of both signs.

    total: this lane's sums, in shared memory; lost: (columns / STEP,) int32 of this lane, what all warps have found by `infinities_in` or `join`.
    """
    settled = Boolean(True)
    for step in cutlass.range(cute.size(holes), unroll=1):
        found = infinities_in(total, step)
        found |= join(lost, step, found)
        settled = settled & (holes[step] & ~(found & found >> 2 * EIGHT) == 0)
    return arch.vote_all_sync(settled)


@cute.jit
def join(lost: cute.Tensor, step: Int32, bits: Int32) -> Int32:
    """Add bits to a step's word, which other warps may do at the same time; returns what it was before."""
    return arch.inline_ptx(
        "atom.relaxed.cta.shared.or.b32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[cute.domain_offset((step,), lost).iterator.toint(), bits],
    )


@cute.jit
def infinities_in(total: cute.Tensor, step: Int32) -> Int32:
    """Bits of this lane in a step: 0 to 15 for sums that are inf, in the order of `find_holes`, 16 to 31 for those that are -inf. NaN sets both."""
    found = Int32(0)
    for half in range_constexpr(2):
        for x in range_constexpr(EIGHT):
            number, place = total[place_of(step, half, x)], const_expr(EIGHT * half + x)
            found |= bit(~(number < Float32.inf), place) | bit(~(number > -Float32.inf), 2 * EIGHT + place)
    return found


def place_of(step, half, x: int) -> tuple:
    """Of this lane's sums, (4, columns / EIGHT), column x of its EIGHT of a step, in a row's half: a product holds two columns of either row."""
    return 2 * half + x % 2, 4 * step + x // 2


@cute.jit
def write(
    total: cute.Tensor, lost: cute.Tensor, entry: Entry, holes: cute.Tensor, factor: Float32, warp: Int32, config: Constexpr[RepairConfig]
):  # fmt: skip
    """Write factor * total into the holes, in the gradient's dtype; the warps divide rows and steps of columns.

    total: this lane's sums; lost: the infinities to be added to these; both in shared memory.
    """
    dtype = dsl(config.dtype)
    for i in cutlass.range(warp, 2 * cute.size(holes), WARPS, unroll=1):
        step, half = i // 2, i % 2
        own, infinite = holes[step] >> EIGHT * half, lost[step] >> EIGHT * half
        if own & 0xFF != 0:
            row, column = row_of(entry.row0, half), column_of(entry.column0, step)
            if const_expr(not config.wide_keys) or entry.of == OF_DQ:
                words = words_of(entry.gX, row, column)
                numbers = cute.make_rmem_tensor(EIGHT, dtype)
                cute.autovec_copy(cute.recast_tensor(words, dtype), numbers)
                for x in range_constexpr(EIGHT):
                    number = with_infinities(total, infinite, step, half, x)
                    numbers[x] = either_number((own >> x) & 1 != 0, number * factor, numbers[x].to(Float32)).to(dtype)
                cute.autovec_copy(cute.recast_tensor(numbers, Int32), four(address_of(entry.gX, row, column)))
            else:
                for x in range_constexpr(EIGHT):
                    if (own >> x) & 1 != 0:
                        address = address_of(entry.gX, row, column + x, FP32_BYTES)
                        number = with_infinities(total, infinite, step, half, x) * factor
                        arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, number])


def with_infinities(total: cute.Tensor, infinite: Int32, step: Int32, half: Int32, x: int) -> Float32:
    """A sum of this lane's, (4, columns / EIGHT), with its infinities added."""
    number = total[place_of(step, half, x)]
    for sign, place in ((1.0, x), (-1.0, 2 * EIGHT + x)):
        number = either_number((infinite >> place) & 1 != 0, number + sign * Float32.inf, number)
    return number
