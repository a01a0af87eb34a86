"""NaN and infinities of V that some rows of a tile see and others do not: kept out of the others' O.

A hidden pair has P = 0, and on matrix units 0 times NaN is NaN. The loader's idle warps therefore look over V of each tile that is not seen whole by
all rows, before it is multiplied, and put 0 in the place of what is not finite (`screen`). A unit in which they found something gets it back
when its O has been stored (`restore`): every row from the keys that it sees. No weight is needed for that: a sum with a visible NaN is NaN,
one with an infinity is infinite, and one with both signs of it is NaN.
"""

from functools import cache
from typing import NamedTuple

from tilewise.backends.hopper import dropout
from tilewise.backends.hopper.forward import scheduler
from tilewise.backends.hopper.forward.scheduler import AHEAD, Block, Queue
from tilewise.backends.hopper.operands import Band, Draw, Tensors
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.hopper.visible import keys as visible
from tilewise.backends.hopper.visible.keys import Run
from tilewise.sm90 import tma
from tilewise.sm90.dsl import (
    BFloat16,
    Boolean,
    Constexpr,
    Float16,
    Float32,
    Int32,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    pipeline,
    range_constexpr,
)

WARP, ROWS = 32, 16  # of a tile that a warp holds
WARPS = 3  # that screen: those of the loader's warpgroup that do not load
WIDE, WORDS, READ_BYTES = 8, 4, 16  # elements of 16 bits, words of 32, and bytes that a lane reads at a time; of 8 bits WIDE elements, too
SLOT = 2 * WORDS  # words for a unit, of which 2 * WARPS are used
TILES = 32  # bits of a word: tile n of the keys has bit n % TILES
AT_ONCE = 4  # reads that do not wait for each other
NONE = 0
LOWEST = {16: 0x10001, 8: 0x1010101}  # bits of a word's elements, by their width


class Screen(NamedTuple):
    """In shared memory. `found` has for each slot of the queue, and in it for each warp, the number, from 1 on, of the last unit in which it found
    something; then, WORDS further, the tiles in which it did.
    """

    done: cute.Pointer  # (kv_stages) mbarriers, on which each of WARPS arrives when V of the stage may be multiplied
    found: cute.Tensor  # (SLOT, AHEAD) int32


@cute.jit
def make_screen(storage: SmemAllocator, config: Constexpr) -> Screen:
    """Initialised, and visible after `tma.barriers_ready`."""
    made = Screen(storage.allocate_array(cute.Int64, config.kv_stages), storage.allocate_tensor(Int32, cute.make_layout((SLOT, AHEAD)), 16))
    if arch.thread_idx()[0] == 0:
        for i in range_constexpr(config.kv_stages):
            arch.mbarrier_init(made.done + i, WARPS)
        for i in range_constexpr(SLOT * AHEAD):
            made.found[i] = Int32(NONE)
    return made


class Pattern(NamedTuple):
    """Of the elements in a word: their exponents' bits, in e4m3 all but the sign's, which are 1 where an element is not finite; what added to these
    sets the signs' where they are; the signs', as an int32.
    """

    exponents: int
    carry: int
    signs: int
    width: int  # bits of an element


@cache
def pattern(dtype) -> Pattern:
    """Elements of 8 bits are e4m3, whatever the type that they come in."""
    exponent = {BFloat16: 0x7F80, Float16: 0x7C00}.get(dtype, 0x7F)
    width = 16 if exponent > 0x7F else 8
    every, low = LOWEST[width], exponent & -exponent
    return Pattern(exponent * every, low * every, (every << width - 1) - (1 << 32), width)


@cute.jit
def marks_of(word: Int32, dtype: Constexpr) -> Int32:
    """The sign bits of the word's elements: 1 where an element is not finite."""
    exponents, carry, signs, _ = const_expr(pattern(dtype))
    return ((word & exponents) + carry) & signs


@cute.jit
def screen(sV: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, pipe: pipeline.PipelineTmaAsync, queue: Queue, made: Screen, band: Band,
           config: Constexpr):  # fmt: skip
    """Three warps, unit after unit as those that compute. They release every tile of V, so that they are never more than a ring behind."""
    warp = arch.make_warp_uniform(arch.warp_idx()) - 1
    state, done = tma.at_first(config.kv_stages), Int32(0)
    block = scheduler.consume(queue, done, config)
    while block.m0 >= 0:
        walk = visible.walk_of(block, band, seqlen_q, seqlen_k, config)
        found, tiles = made.found.iterator + tma.after(done, AHEAD).index * SLOT + warp, Int32(NONE)
        if const_expr(config.mask_kind == "tiles"):
            for r in cutlass.range(walk.first, walk.last, unroll=1):
                run = visible.run_of(r, band)
                free = (run.first, run.last) if r >= walk.free_first else (run.last, run.last)
                state, tiles = screen_tiles(sV, pipe, state, made, found, tiles, done, warp, (run.first, run.last), free, config)
        else:
            loaded, free = (walk.loaded_first, walk.loaded_last), (walk.free_first, walk.free_last)
            state, tiles = screen_tiles(sV, pipe, state, made, found, tiles, done, warp, loaded, free, config)
        scheduler.release(queue, done, config)
        done += 1
        block = scheduler.consume(queue, done, config)


@cute.jit
def screen_tiles(
    sV: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, made: Screen, found: cute.Pointer, tiles: Int32,
    done: Int32, warp: Int32, loaded: tuple[Int32, Int32], free: tuple[Int32, Int32], config: Constexpr,
):  # fmt: skip
    """The tiles [first, last) that are loaded, the last one first; those that are free are seen whole, and left as they are.

    Returns the ring's state and the bits of the unit's tiles where this warp has found something: `tiles`, and more.
    """
    first, last = loaded
    for i in cutlass.range(last - first, unroll=1):
        n_block = last - 1 - i
        pipe.consumer_wait(state)
        if n_block < free[0] or n_block >= free[1]:
            if clear(sV[None, None, state.index].iterator.toint(), warp, sV.element_type, config):
                tiles = tiles | 1 << n_block % TILES
                if arch.lane_idx() == 0:
                    (found + WORDS).store(tiles)
                    found.store(done + 1)
            arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        if arch.lane_idx() == 0:
            arch.mbarrier_arrive(made.done + state.index)
        pipe.consumer_release(state)
        state.advance()
    return state, tiles


@cute.jit
def clear(address: Int32, warp: Int32, dtype: Constexpr, config: Constexpr) -> Boolean:
    """0 for all that is not finite in this warp's part of a stage of V; whether there was any."""
    width = const_expr(pattern(dtype).width)
    reads = const_expr(config.tile_n * config.head_dim_v * width // (8 * READ_BYTES))  # of all lanes together
    place = address + (warp * WARP + arch.lane_idx()) * READ_BYTES
    turns, rest = const_expr(divmod(reads, WARPS * WARP))
    products = (Int32(0), Int32(0))  # of what was read and 0: 0, or NaN where an element is not finite
    for i in cutlass.range(turns, unroll=4):
        products = times_zero(read(place + i * (WARPS * WARP * READ_BYTES)), products, dtype)
    if const_expr(rest > 0) and warp * WARP + arch.lane_idx() < rest:
        products = times_zero(read(place + turns * (WARPS * WARP * READ_BYTES)), products, dtype)
    if const_expr(width == 16):
        products = (marks_of(products[0], dtype), marks_of(products[1], dtype))
    found = arch.vote_any_sync(products[0] | products[1] != NONE)
    if found:
        for i in cutlass.range(-(-reads // (WARPS * WARP)), unroll=1):
            if (i * WARPS + warp) * WARP + arch.lane_idx() < reads:
                there = place + i * (WARPS * WARP * READ_BYTES)
                words = read(there)
                kept = [word & ~(((marks_of(word, dtype) >> width - 1) & LOWEST[width]) * const_expr((1 << width) - 1)) for word in words]
                arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[there, *kept])
    return found


def read(address: Int32, how: str = "") -> list[Int32]:
    """WORDS from shared memory on. Only what is volatile stays behind the waits that it stands behind."""
    ptx = f"ld.{how}shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];"
    return arch.inline_ptx(ptx, write_only_types=[Int32] * WORDS, read_only_args=[address])


def times_zero(words: list[Int32], products: tuple[Int32, Int32], dtype) -> tuple[Int32, Int32]:
    """0 times each element, added to one of two chains; of elements of 8 bits, which are not multiplied so, what `marks_of` sees."""
    found = list(products)
    if pattern(dtype).width == 8:
        for i, word in enumerate(words):
            found[i % 2] = found[i % 2] | marks_of(word, dtype)
        return tuple(found)
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    for i, word in enumerate(words):
        ptx = f"{{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.{kind} {{$w0}}, {{$r0}}, zero, {{$r1}}; }}"
        found[i % 2] = arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[word, found[i % 2]])
    return tuple(found)


@cute.jit
def wait(made: Screen, state: pipeline.PipelineState):
    """Until V of the stage has been looked over."""
    arch.mbarrier_wait(made.done + state.index, state.phase)


@cute.jit
def cleared_tiles(made: Screen, done: Int32) -> Int32:
    """Bits of the tiles out of which something was taken, of the unit after `done` others; once its last tile was waited for."""
    address, tiles = (made.found.iterator + tma.after(done, AHEAD).index * SLOT).toint(), Int32(NONE)
    units, found = read(address, "volatile."), read(address + 4 * WORDS, "volatile.")
    for w in range_constexpr(WARPS):
        tiles = tiles | (found[w] if units[w] == done + 1 else Int32(NONE))
    return tiles


class Unit(NamedTuple):
    """What `restore` works on, in global memory, and where its warp's rows begin."""

    V: cute.Tensor  # (seqlen_k, head_dim_v)
    O: cute.Tensor  # (seqlen_q, head_dim_v)
    L: cute.Tensor  # (seqlen_q,)
    row0: Int32
    block: Block
    band: Band
    bias: cute.Tensor | None  # (seqlen_q or 1, seqlen_k)
    draw: Draw | None


def lanes_a_key(config) -> int:
    """Lanes that read one key's values, a power of two."""
    return 1 << (config.head_dim_v // WIDE - 1).bit_length()


@cute.jit
def restore(tensors: Tensors, block: Block, band: Band, changes: scores.Scores, tiles: Int32, warp: Int32, config: Constexpr):
    """To O of this warp's 16 rows, which has been stored, what they see of V's NaN and infinities in the `tiles` that were cleared, a bit each.

    A lane has WIDE columns, and for each of them a bit for every row that sees +inf there, or NaN, and another 16 bits up for -inf, or NaN.
    """
    arch.cp_async_bulk_wait_group(0)  # the rows' O is written
    arch.sync_warp()
    bias = scores.bias_of(changes, block) if const_expr(config.bias is not None) else None
    mV, mO, mL = tensors.V[block.batch, None, block.head_k, None], tensors.O[block.batch, None, block.head, None], tensors.L
    unit = Unit(mV, mO, mL[block.batch, block.head, None], block.m0 + warp * ROWS, block, band, bias, changes.draw)
    marks = cute.make_rmem_tensor(WIDE, Int32)
    marks.fill(NONE)
    walk = visible.walk_of(block, band, mO.shape[0], mV.shape[0], config)
    if const_expr(config.mask_kind == "tiles"):
        for r in cutlass.range(walk.first, walk.free_first, unroll=1):
            run = visible.run_of(r, band)
            mark_tiles(marks, run.first, run.last, tiles, run, unit, config)
    else:
        for end in cutlass.range(2, unroll=1):
            first = walk.first if end == 0 else walk.free_last
            last = walk.free_first if end == 0 else walk.last
            mark_tiles(marks, first, last, tiles, None, unit, config)
    lanes = const_expr(lanes_a_key(config))
    for i in range_constexpr(WIDE):
        for step in range_constexpr((WARP // lanes).bit_length() - 1):
            marks[i] = marks[i] | arch.shuffle_sync_bfly(marks[i], lanes << step)
    put(marks, unit, config)


@cute.jit
def mark_tiles(marks: cute.Tensor, first: Int32, last: Int32, tiles: Int32, run: Run | None, unit: Unit, config: Constexpr):
    """What rows see of those of the tiles [first, last) that were cleared."""
    lanes, column = const_expr(lanes_a_key(config)), arch.lane_idx() % lanes_a_key(config) * WIDE
    keys = const_expr(WARP // lanes)  # that the warp reads at a time
    numbers = cute.make_rmem_tensor((WIDE, AT_ONCE), unit.V.element_type)
    for n_block in cutlass.range(first, last, unroll=1):
        if (tiles >> n_block % TILES) & 1 != NONE:
            end = min((n_block + 1) * config.tile_n, unit.V.shape[0])
            for j in cutlass.range(n_block * config.tile_n, end, AT_ONCE * keys, unroll=1):
                numbers.fill(0.0)
                for t in range_constexpr(AT_ONCE):
                    read_key(numbers[None, t], j + t * keys + arch.lane_idx() // lanes, column, end, unit.V)
                left = Int32(NONE)  # a bit for each read that has something
                for t in range_constexpr(AT_ONCE):
                    found = Int32(NONE)
                    for w in range_constexpr(WIDE * pattern(unit.V.element_type).width // 32):
                        found = found | marks_of(cute.recast_tensor(numbers[None, t], Int32)[w], unit.V.element_type)
                    left = left | cutlass.select_(found != NONE, Int32(1 << t), Int32(NONE))
                left = arch.warp_redux_sync(left, "or")
                while left != NONE:  # read once more, as a loop cannot index registers
                    t = WARP - 1 - Int32(arch.clz(left))
                    left = left & ~(1 << t)
                    numbers[None, 0].fill(0.0)
                    read_key(numbers[None, 0], j + t * keys + arch.lane_idx() // lanes, column, end, unit.V)
                    mark_numbers(marks, numbers[None, 0], j + t * keys, end, run, unit, config)


@cute.jit
def read_key(numbers: cute.Tensor, key: Int32, column: Int32, end: Int32, mV: cute.Tensor):
    """WIDE elements of a key before `end`, from a column on, where there are any."""
    if key < end and column < mV.shape[1]:
        cute.autovec_copy(wide(mV, key, column), numbers)


def wide(mX: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """WIDE elements of a row, which are aligned."""
    return cute.make_tensor((mX[row, None].iterator + column).align(WIDE * mX.element_type.width // 8), cute.make_layout(WIDE))


@cute.jit
def mark_numbers(marks: cute.Tensor, numbers: cute.Tensor, first: Int32, end: Int32, run: Run | None, unit: Unit, config: Constexpr):
    """numbers: (WIDE,) elements, a lane's of the keys that the warp has read, from `first` on."""
    words, kind = cute.recast_tensor(numbers, Int32), const_expr(pattern(numbers.element_type))
    width, size_bits = const_expr(kind.width), const_expr((1 << kind.width - 1) - 1)
    least = const_expr(kind.exponents & size_bits)  # of what is not finite
    rounded = const_expr(config.value_bytes == 1)  # to e4m3, which has no infinity
    most, infinite = const_expr(least - rounded), const_expr(-1 if rounded else least)  # most: of what is no NaN
    negative = const_expr(infinite | size_bits + 1)
    rows, lost = rows_that_see(first, end, run, unit, config)
    for i in range_constexpr(WIDE):
        bits = (words[i * width // 32] >> width * i % 32) & const_expr((1 << width) - 1)
        size = bits & size_bits
        nan = size > most
        above = cutlass.select_(nan | (bits == infinite), rows, Int32(NONE))
        below = cutlass.select_(nan | (bits == negative), rows, Int32(NONE))
        both = cutlass.select_(size >= least, lost, Int32(NONE))
        marks[i] = marks[i] | both | above | (both | below) << ROWS


@cute.jit
def rows_that_see(first: Int32, end: Int32, run: Run | None, unit: Unit, config: Constexpr):
    """Of this lane's key the rows that see it, a bit each, and those of them in which it weighs 0, which makes NaN of an infinity."""
    lane, lanes = arch.lane_idx(), const_expr(lanes_a_key(config))
    keys = const_expr(WARP // lanes)
    seen, lost = [], []
    for pair in range_constexpr(max(keys // 2, 1)):  # for two keys each of the 16 rows has a lane that says whether it sees it
        row, key = unit.row0 + lane % ROWS, first + (2 * pair + lane // ROWS) % keys
        mine = mask_kind(row, key, end, run, unit, config)
        seen.append(arch.vote_ballot_sync(mine))
        if const_expr(config.bias is not None or config.dropout):
            lost.append(arch.vote_ballot_sync(mine and weighs_nothing(row, key, unit, config)))
    which = lane // lanes
    return of_key(seen, which), of_key(lost, which) if const_expr(config.bias is not None or config.dropout) else Int32(NONE)


def of_key(ballots: list[Int32], which: Int32) -> Int32:
    """16 bits, a row each: two keys' a ballot."""
    found = ballots[0]
    for pair in range(1, len(ballots)):
        found = cutlass.select_(which // 2 == pair, ballots[pair], found)
    return (found >> which % 2 * ROWS) & 0xFFFF


@cute.jit
def mask_kind(row: Int32, key: Int32, end: Int32, run: Run | None, unit: Unit, config: Constexpr) -> Boolean:
    """Whether a row exists and sees a key, which is one of the run's where there are runs; no key from `end` on."""
    seen = row < unit.O.shape[0] and key < end
    at, place = min(row, unit.O.shape[0] - 1), min(key, end - 1)
    if const_expr(config.mask_kind == "tiles"):
        if run.ref >= 0:
            seen = seen and visible.shows(unit.band, run, row - unit.block.m0, place, config)
        else:
            begin, stop = visible.interval(at, visible.band_of(run.ref, unit.band.tables.bands))
            seen = seen and key >= begin and key < stop
    else:
        begin, stop = visible.keys_of(at, unit.band, config)
        seen = seen and key >= begin and key < stop
    if const_expr(config.bias is not None):
        seen = seen and unit.L[at] != -Float32.inf  # its bias leaves it nothing
    return seen


@cute.jit
def weighs_nothing(row: Int32, key: Int32, unit: Unit, config: Constexpr) -> Boolean:
    """Whether a bias or dropout makes P = 0 of a visible pair."""
    nothing = Boolean(False)
    if const_expr(config.bias is not None):
        nothing = bias_at(row, key, unit) == -Float32.inf
    if const_expr(config.dropout):
        head = dropout.head_of(unit.draw, unit.block.batch, unit.block.head)
        nothing = nothing or not dropout.is_kept(unit.draw, head, row, key)
    return nothing


@cute.jit
def bias_at(row: Int32, key: Int32, unit: Unit) -> Float32:
    return unit.bias[min(row, unit.bias.shape[0] - 1), min(key, unit.bias.shape[1] - 1)].to(Float32)


@cute.jit
def put(marks: cute.Tensor, unit: Unit, config: Constexpr):
    """Added to what is there, rows and columns that have no mark being left alone."""
    lane, lanes = arch.lane_idx(), const_expr(lanes_a_key(config))
    numbers = cute.make_rmem_tensor(WIDE, unit.O.element_type)
    anywhere = Int32(NONE)
    for c in range_constexpr(WIDE):
        anywhere = anywhere | marks[c]
    for i in cutlass.range(ROWS * lanes // WARP, unroll=1):
        row, column = i * (WARP // lanes) + lane // lanes, lane % lanes * WIDE
        if (anywhere >> row) & (1 | 1 << ROWS) != NONE:
            place = wide(unit.O, unit.row0 + row, column)
            cute.autovec_copy(place, numbers)
            for c in range_constexpr(WIDE):
                mine, value = marks[c] >> row, numbers[c].to(Float32)
                for sign, bit in ((1.0, mine), (-1.0, mine >> ROWS)):
                    value = Float32(cutlass.select_(bit & 1 != NONE, value + sign * Float32.inf, value))
                numbers[c] = value.to(unit.O.element_type)
            cute.autovec_copy(numbers, place)
