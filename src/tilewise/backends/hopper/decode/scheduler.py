"""Which thread block computes what: shares of all key tiles, equal or of whole units, found by every warp for itself from lengths in global memory.

A unit is a sequence, a key head and a tile of rows (query tokens times heads of a group). All units' tiles of keys lie in one row, sequence after
sequence; where units are many, each has `fixed` places before its tiles that stand for what else it costs. Block g of G takes the g-th part
of the row. A unit may thus lie in many blocks: its pieces. In a block the unit that began in an earlier one keeps its piece in slot 2 g, the one
that goes on in a later one in slot 2 g + 1.

Where it is done sooner, shares are whole units instead: then a unit has one place in the row, and each block takes the next one or the next few.

A token's key heads lie side by side in memory. So there may be several columns, each with a row of its own that has its part of the key heads alone,
and G blocks: then the blocks that share a g, which start one after another, read the same tokens at the same time. What is said of g and slots
above then holds for (column) G + g. Of a latent cache, which has one key head, each of n columns has every n-th tile of rows instead.

Where a sequence has many rows (`causal_tiles`), what later ones see begins and ends later. Tiles of rows are taken in steps, from one to the next of
which that is by a whole number of tiles; so sums over them have a closed form, by which every warp finds the unit that a place belongs to.

With a fixed split a unit's pieces begin at multiples of `split` tiles, whatever else there is to do, and a block takes those that begin in its
share. Each has a slot of its own: then no bit of a sequence depends on the other sequences.
"""

from typing import NamedTuple

from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import Lengths, Prior, Tensors, Work
from tilewise.backends.tables.window import Window
from tilewise.problem import Share
from tilewise.sm90.dsl import Boolean, Constexpr, Int32, Int64, Uint32, arch, const_expr, cute, cutlass, range_constexpr

WARP, FAR = 32, 2**31 - 1
FARTHEST = (1 << 30) - 1  # position; with what a window adds it still has 32 bits


class Turns(NamedTuple):
    """In which caches hold the tokens of a sequence, where others hold the rest: `problem.Share`."""

    run: object  # divisor: tokens in a row
    all: object  # divisor: tokens of a turn of all ranks
    first: Int32  # of these, that the caches hold
    most: Int32  # tokens that the caches have room for


class Shape(NamedTuple):
    """Sizes of a launch, and where it finds lengths."""

    batch: Int32
    queries: Int32  # of every sequence, at most where they are ragged
    total: Int32  # queries of an entry
    by_blocks: object  # divisor: thread blocks of a column
    capacity: Int32
    heads_k: Int32
    heads: Int32  # of them, of a column
    columns: Int32  # of tiles of rows, where those are side by side
    group: Int32
    by_group: object  # divisor
    by_rows: object  # divisor: rows of a unit, at most
    least: Int32  # tiles of a block's share
    solo_speedup_x4: Int32  # quarters, as `Config.solo_speedup_x4`; 0: shares are always equal
    page_size: object  # divisor; None: no pages
    split: object  # divisor: tiles of a piece; None: as many as a block's share holds
    most_pieces: Int32  # of a unit, with a split
    step: object  # divisor: tiles of rows
    rise: Int32  # logarithm of the tiles of keys, by which what these see moves on
    window: Window
    lengths: Lengths
    prefix: object  # Int32: keys that are another launch's business; None: none
    turns: Turns | None  # None: the caches hold all tokens


def shape_of(tensors: Tensors, lengths: Lengths, work: Work, window: Window, prior: Prior | None, config) -> Shape:
    """In a launch function."""
    mQ, mK = tensors.Q, tensors.K
    (_, page_size, heads_k, _), group = mK.shape, mQ.shape[2] // mK.shape[2]
    capacity = page_size * lengths.pages.shape[1] if config.box else page_size
    return Shape(
        batch=lengths.seqlens.shape[0],
        queries=work.queries if config.ragged else mQ.shape[1],
        total=mQ.shape[1],
        by_blocks=cute.fast_divmod_create_divisor_v2(work.blocks),
        capacity=capacity,
        heads_k=heads_k,
        heads=heads_k if config.latent else heads_k // work.columns,
        columns=work.columns,
        group=group,
        by_group=cute.fast_divmod_create_divisor_v2(group),
        by_rows=cute.fast_divmod_create_divisor_v2(work.sums.shape[1]),
        least=work.least,
        solo_speedup_x4=work.solo_speedup_x4,
        page_size=cute.fast_divmod_create_divisor_v2(page_size) if config.box else None,
        split=cute.fast_divmod_create_divisor_v2(work.split) if config.split else None,
        most_pieces=work.most_pieces,
        step=cute.fast_divmod_create_divisor_v2(work.step) if config.causal_tiles else None,
        rise=work.rise,
        window=window,
        lengths=lengths,
        prefix=prior.tokens if config.onto else None,
        turns=turns_of(lengths.share, capacity) if config.share else None,
    )


def turns_of(share: Share, capacity: Int32) -> Turns:
    run, world = share.interleave, share.world
    return Turns(*map(cute.fast_divmod_create_divisor_v2, (run, run * world)), share.rank * run, capacity)


@cute.jit
def held(tokens: Int32, turns: Turns) -> Int32:
    """How many of a sequence's first tokens are in the caches."""
    turn, rest = divmod(max(tokens, 0), turns.all)
    return min(turn * turns.run.divisor + clamped(rest - turns.first, 0, turns.run.divisor), turns.most)


@cute.jit
def position_of(key: Int32, turns: Turns) -> Int32:
    """In its sequence, of a key of the caches."""
    turn, rest = divmod(key, turns.run)
    return turn * turns.all.divisor + turns.first + rest


class Sequence(NamedTuple):
    """What a sequence gives to do. Lengths are of whole sequences, and tokens positions there; keys are counted as the caches have them."""

    first_query: Int32  # in its entry of Q
    queries: Int32
    length: Int32
    begin: Int32  # keys [begin, end) that any of its rows may see
    end: Int32
    left: Int32  # the first token that any query may see
    first: Int32  # tile of keys
    tiles: Int32  # at least 1, so that a unit is some block's
    row_tiles: Int32  # of the block's column
    joins: Boolean  # whether the prefix has been computed for it


class Shares(NamedTuple):
    """The row of tiles, and this block's part of it."""

    whole: Boolean  # a place is a unit, else a tile of one
    fixed: Int32
    share: Int32  # places of a block, and one more for the first `more`
    more: Int32
    begin: Int32
    end: Int32


class Place(NamedTuple):
    """In the row: where a sequence starts, and where this warp is."""

    sequence: Int32
    start: Int32
    at: Int32


class Start(NamedTuple):
    """What every warp of a block begins with."""

    shares: Shares
    place: Place


class Piece(NamedTuple):
    """The tiles of keys [first, last) of a unit: its piece `number` of `count`, or with a split also some that follow."""

    head_k: Int32
    row0: Int32
    first: Int32
    last: Int32
    begin: Int32  # keys [begin, end) that any row of the unit may see
    end: Int32
    number: Int32
    count: Int32
    most: Int32  # pieces of a unit that sees all that its sequence's rows see
    origin: Int32  # the block of the first piece, or with a split the unit
    next: Int32  # the place in the row behind the unit; FAR with a split, where the block has nothing else to do


@cute.jit
def number(x: cute.Tensor, i: Int32) -> Int32:
    """x[i] of int32 or int64 (n,). What does not fit into 32 bits stays as far out of every range."""
    found = x[i]
    if const_expr(x.element_type is Int64):
        found = Int32(min(max(found, Int64(-FAR)), Int64(FAR)))
    return found


@cute.jit
def owner_of(shape: Shape, config: Constexpr[Config]) -> Int32:
    """The sequence that has a prefix's keys: the longest one of those with queries. All lanes of a warp ask."""
    lengths, owner, longest = shape.lengths, Int32(0), Int32(-1)
    batch = lengths.all_seqlens.shape[0]
    for first in cutlass.range(0, batch, WARP, unroll=1):
        b = first + arch.lane_idx()
        if b < batch:
            length = number(lengths.all_seqlens, b)
            if const_expr(config.common == "packed"):
                asks = number(lengths.all_cu_seqlens_q, b + 1) > number(lengths.all_cu_seqlens_q, b)
                length = length if asks else Int32(-1)
            owner = b if length > longest else owner
            longest = max(length, longest)
    most = arch.warp_redux_sync(longest, "max")
    return arch.warp_redux_sync(owner if longest == most else Int32(0), "max")


@cute.jit
def sequence_of(b: Int32, shape: Shape, config: Constexpr[Config]) -> Sequence:
    lengths, window = shape.lengths, shape.window
    length = min(max(number(lengths.seqlens, b), 0), FARTHEST if const_expr(config.share) else shape.capacity)
    first_query, queries, left = Int32(0), shape.queries, Int32(0)
    if const_expr(config.ragged):
        first_query = min(max(number(lengths.cu_seqlens_q, b), 0), shape.total)
        queries = min(max(number(lengths.cu_seqlens_q, b + 1) - first_query, 0), min(shape.queries, shape.total - first_query))
    if const_expr(config.leftpad):
        left = min(max(number(lengths.leftpad, b), 0), length)
    joins = Boolean(False)
    if const_expr(config.onto):  # where not every row sees the whole prefix, all is computed here
        seen = length - lengths.tree.shape[2] if const_expr(config.tree) else length  # by each row, as far as its place allows
        joins = min(seen, length - queries + window.hi + 1) >= shape.prefix
        left = shape.prefix if joins else left
    begin = max(left, length - queries + window.lo)
    end = max(min(length, length + window.hi), 0)
    begin = min(begin, end)
    if const_expr(config.share):
        begin, end = held(begin, shape.turns), held(end, shape.turns)
    first = begin // config.tile_n
    tiles = max(cute.ceil_div(end, config.tile_n) - first, 1)
    row_tiles = units_of(queries, shape)
    if const_expr(config.latent):
        column, _, _ = arch.block_idx()
        row_tiles = cute.ceil_div(max(row_tiles - column, 0), shape.columns)
    return Sequence(first_query, queries, length, begin, end, left, first, tiles, row_tiles, joins)


@cute.jit
def quotient(a: Int32, b: Int32) -> Int32:
    """a // b of numbers that are not negative: half the instructions that signs take."""
    return Int32(Uint32(a) // Uint32(b))


@cute.jit
def quotient_up(a: Int32, b: Int32) -> Int32:
    """Likewise ceil(a / b)."""
    return quotient(a + b - 1, b)


@cute.jit
def units_of(queries: Int32, shape: Shape) -> Int32:
    """Of `queries` queries and a key head."""
    return (queries * shape.group + shape.by_rows.divisor - 1) // shape.by_rows


@cute.jit
def shares_of(shape: Shape, config: Constexpr[Config]) -> Shares:
    tiles, units, longest = Int32(0), Int32(0), Int32(0)
    for first in cutlass.range(0, shape.batch, WARP, unroll=1):
        b = first + arch.lane_idx()
        found = sequence_of(min(b, shape.batch - 1), shape, config)
        mine = found.row_tiles * shape.heads if b < shape.batch else Int32(0)
        units += mine
        tiles += shape.heads * tiles_of(found.row_tiles, found, shape, config) if b < shape.batch else Int32(0)
        longest = max(longest, found.tiles) if mine > 0 else longest
    units, tiles = (arch.warp_redux_sync(x, "add") for x in (units, tiles))
    _, g, _ = arch.block_idx()
    few = units < shape.by_blocks.divisor  # then most are cut, and a unit costs no more than a piece
    fixed = Int32(0) if few else min((tiles >> 2) // shape.by_blocks, config.fixed)
    places, whole = tiles + fixed * units, Boolean(False)
    share, more = divmod(places, shape.by_blocks)
    if share < shape.least:  # then fewer blocks have any
        blocks = max(quotient(places, shape.least), 1)
        share = quotient(places, blocks)
        more = places - share * blocks
    if const_expr(config.alike):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
        if shape.solo_speedup_x4 > 0 and units > 1:
            turns = (units + shape.by_blocks.divisor - 1) // shape.by_blocks
            whole = sooner_whole(turns, tiles, units, arch.warp_redux_sync(longest, "max"), shape, config)
            if whole:
                fixed, places, share, more = Int32(0), units, turns, Int32(0)
    begin = g * share + min(g, more)
    return Shares(whole, fixed, share, more, min(begin, places), min(begin + share + (1 if g < more else 0), places))


@cute.jit
def sooner_whole(turns: Int32, tiles: Int32, units: Int32, longest: Int32, shape: Shape, config: Constexpr[Config]) -> Boolean:
    """Whether whole units, `turns` of them a block, are done sooner than equal shares.

    Time is counted in tiles as a block without others goes through them. No way takes less than memory takes to bring everything. Equal shares have
    a block begin and end one unit more, which counts as `fixed` tiles, and add pieces up, which counts as that and `least`; unless they end with
    units anyway.
    """
    blocks, readers = shape.by_blocks.divisor, max(units_of(shape.queries, shape), 1)
    even = max((tiles + blocks - 1) // shape.by_blocks, shape.least)
    memory = max(quotient(((shape.solo_speedup_x4 * tiles) >> 2) // shape.by_blocks, readers), even)
    soonest, most = memory + 2 * config.fixed + shape.least, turns * longest
    sooner = most < soonest and not (units == turns * blocks and units * longest == tiles and longest >= shape.least)
    if sooner:  # before anything is divided
        sooner = time_of(most, quotient_up(units, turns), tiles, even, memory, shape) < soonest
    return sooner


@cute.jit
def time_of(most: Int32, busy: Int32, tiles: Int32, even: Int32, memory: Int32, shape: Shape) -> Int32:
    """At most, until `busy` blocks are through, which share memory; the one with the most tiles has `most`.

    The fewer are left the less memory is asked for: what that takes longer is bounded by how much more that one has than a block on average. And what
    blocks are idle from the beginning on lose: with half of them memory takes an eighth longer.
    """
    uneven = max(min(memory - even, most - quotient(tiles, busy)), 0)
    return max(memory, most) + uneven + (memory >> 2) * (shape.by_blocks.divisor - busy) // shape.by_blocks


@cute.jit
def block_of(place: Int32, shares: Shares) -> Int32:
    """The block that has a place in the row in its share: g."""
    large = shares.more * (shares.share + 1)
    early = place < large
    before, size = (Int32(0), shares.share + 1) if early else (large, max(shares.share, 1))
    return quotient(place - before, size) + (Int32(0) if early else shares.more)


@cute.jit
def locate(shares: Shares, shape: Shape, config: Constexpr[Config]) -> Place:
    """The sequence in which this block's share begins."""
    lane, at, before = arch.lane_idx(), Int32(0), Int32(0)
    b, start, going = Int32(0), Int32(0), shape.batch > 1 and shares.begin < shares.end
    while going:
        found = sequence_of(min(at + lane, shape.batch - 1), shape, config)
        cost = span_of(found, shares, shape, config) if at + lane < shape.batch else Int32(0)
        sums = scan(cost)
        passed = arch.popc(arch.vote_ballot_sync(before + sums <= shares.begin))
        b = at + passed
        start = before + arch.shuffle_sync(sums - cost, passed % WARP)
        going = passed == WARP
        before += arch.shuffle_sync(sums, WARP - 1)
        at += WARP
    return Place(b, start, shares.begin)


@cute.jit
def start_of(shape: Shape, config: Constexpr[Config]) -> Start:
    """By every warp before their ways part, so that the code is there once."""
    shares = shares_of(shape, config)
    return Start(shares, locate(shares, shape, config))


@cute.jit
def scan(x: Int32) -> Int32:
    """Sums of the lanes up to and with each."""
    lane = arch.lane_idx()
    for step in range_constexpr(WARP.bit_length() - 1):
        other = arch.shuffle_sync(x, (lane - (1 << step)) % WARP)
        x += other if lane >= 1 << step else Int32(0)
    return x


@cute.jit
def span_of(sequence: Sequence, shares: Shares, shape: Shape, config: Constexpr[Config]) -> Int32:
    """Places of a sequence in the row."""
    return shape.heads * places_of(sequence.row_tiles, sequence, shares, shape, config)


@cute.jit
def places_of(n: Int32, sequence: Sequence, shares: Shares, shape: Shape, config: Constexpr[Config]) -> Int32:
    """Of the first n units of a key head."""
    if const_expr(config.alike):
        return n * places_of_unit(sequence, shares)
    return tiles_of(n, sequence, shape, config) + n * shares.fixed


@cute.jit
def places_of_unit(sequence: Sequence, shares: Shares) -> Int32:
    """Where none of a sequence sees less than another."""
    return Int32(1) if shares.whole else sequence.tiles + shares.fixed


@cute.jit
def tiles_of(n: Int32, sequence: Sequence, shape: Shape, config: Constexpr[Config]) -> Int32:
    """Likewise tiles of keys."""
    if const_expr(not config.causal_tiles):
        return n * sequence.tiles
    steps, rest = divmod(n, shape.step)
    (first, begins), (last, ends) = edges_of(sequence, shape, config)
    end = sequence.first + sequence.tiles
    of_steps = sum_of_steps(last, ends, (sequence.first + 1, end), steps, shape) - sum_of_steps(
        first, begins, (sequence.first, end - 1), steps, shape
    )
    low, high = tiles_at(steps, sequence, shape, config)
    return shape.step.divisor * of_steps + rest * (high - low)


@cute.jit
def edges_of(sequence: Sequence, shape: Shape, config: Constexpr[Config]) -> tuple:
    """Where the first step's tiles of keys begin and end, if there were no ends of the sequence; and whether later steps' do so later.

    With a fixed split all units begin at the same tile, so that the order in which pieces are added up does not depend on the unit.
    """
    oldest, size = sequence.length - sequence.queries, const_expr(config.tile_n.bit_length() - 1)
    last = ((oldest + shape.window.hi + config.tile_n - 1) >> size) + (1 << shape.rise)
    if const_expr(config.split):
        return (sequence.first, False), (last, True)
    return ((oldest + shape.window.lo) >> size, True), (last, True)


@cute.jit
def tiles_at(step: Int32, sequence: Sequence, shape: Shape, config: Constexpr[Config]) -> tuple[Int32, Int32]:
    """The tiles of keys [first, last) of a step's units, one at least."""
    (first, begins), (last, _) = edges_of(sequence, shape, config)
    end = sequence.first + sequence.tiles
    low = first + (step << shape.rise) if const_expr(begins) else first
    return clamped(low, sequence.first, end - 1), clamped(last + (step << shape.rise), sequence.first + 1, end)


@cute.jit
def sum_of_steps(at: Int32, moves: Constexpr[bool], limits: tuple, n: Int32, shape: Shape) -> Int32:
    """Of at + (s << rise), clamped to the limits, over the steps s in [0, n)."""
    if const_expr(not moves):
        return n * at
    low, high = limits
    below = clamped((low - at + (1 << shape.rise) - 1) >> shape.rise, 0, n)
    above = clamped((high - at + (1 << shape.rise) - 1) >> shape.rise, below, n)
    between = (above - below) * at + (((above - below) * (above + below - 1) >> 1) << shape.rise)
    return below * low + between + (n - above) * high


@cute.jit
def clamped(x: Int32, low: Int32, high: Int32) -> Int32:
    return min(max(x, low), high)


@cute.jit
def unit_at(place: Int32, sequence: Sequence, shares: Shares, shape: Shape, config: Constexpr[Config]) -> tuple[Int32, Int32]:
    """The unit of a key head that has a place among the head's, and where it begins there: the warp's lanes look at 32 units at a time."""
    unit, size = Int32(0), sequence.row_tiles
    while size > 1:
        stride = cute.ceil_div(size, WARP)
        there = unit + arch.lane_idx() * stride
        begins = arch.lane_idx() * stride < size and places_of(there, sequence, shares, shape, config) <= place
        passed = (arch.popc(arch.vote_ballot_sync(begins)) - 1) * stride
        unit += passed
        size = min(stride, size - passed)
    return unit, places_of(unit, sequence, shares, shape, config)


@cute.jit
def piece_of(place: Place, sequence: Sequence, shares: Shares, shape: Shape, config: Constexpr[Config]) -> Piece:
    """Of the unit at a place. It may have no tiles: then others compute the unit's."""
    each, of_unit, end_of_unit = places_of_unit(sequence, shares), sequence.first, sequence.first + sequence.tiles
    if const_expr(config.causal_tiles):
        of_head = places_of(sequence.row_tiles, sequence, shares, shape, config)
        head_k = quotient(place.at - place.start, of_head)
        begin = place.start + head_k * of_head
        row_tile, before = unit_at(place.at - begin, sequence, shares, shape, config)
        begin += before
        of_unit, end_of_unit = tiles_at(row_tile // shape.step, sequence, shape, config)
        each = end_of_unit - of_unit + shares.fixed
    else:
        unit = Int32(0)
        if shape.heads * sequence.row_tiles > 1:  # divisions take time, and this is what the first load waits for
            unit = quotient(place.at - place.start, each)
        begin = place.start + unit * each
        head_k, row_tile = unit, Int32(0)
        if sequence.row_tiles > 1:
            head_k = quotient(unit, sequence.row_tiles)
            row_tile = unit - head_k * sequence.row_tiles
    tiles = begin + shares.fixed
    first = max(place.at, tiles)
    last = max(min(shares.end, begin + each), first)
    first, last = first - tiles, last - tiles
    if const_expr(config.alike):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
        if shares.whole:
            first, last = Int32(0), sequence.tiles
    first, last = of_unit + first, of_unit + last
    column, g, _ = arch.block_idx()
    if const_expr(config.latent):
        row_tile = row_tile * shape.columns + column
    else:
        head_k += column * shape.heads
    if const_expr(config.split):
        first, last = (begin_of_piece(x, of_unit, end_of_unit, shape) for x in (first, last))
        low, row_tiles = of_unit // shape.split, units_of(shape.queries, shape)
        number, count, most = (x // shape.split - low for x in (first, end_of_unit - 1, sequence.first + sequence.tiles - 1))
        count, most = count + 1, most + 1
        origin = (place.sequence * shape.heads_k + head_k) * row_tiles + row_tile
    else:
        of_first = block_of(tiles, shares)
        number, count = g - of_first, block_of(begin + each - 1, shares) - of_first + 1
        most = count
        origin = column * shape.by_blocks.divisor + of_first
    row0, (begin_of_keys, end_of_keys) = row_tile * shape.by_rows.divisor, (sequence.begin, sequence.end)
    if const_expr(config.causal_tiles):
        oldest, rows = sequence.length - sequence.queries, min(row0 + shape.by_rows.divisor, sequence.queries * shape.group)
        end_of_keys = min(end_of_keys, oldest + (rows - 1) // shape.by_group + shape.window.hi + 1)
        begin_of_keys = min(max(begin_of_keys, oldest + row0 // shape.by_group + shape.window.lo), end_of_keys)
    behind = begin + each
    if const_expr(config.split):
        behind = behind if behind < shares.end else Int32(FAR)
    return Piece(head_k, row0, first, last, begin_of_keys, end_of_keys, number, count, most, origin, behind)


@cute.jit
def begin_of_piece(tile: Int32, begin: Int32, end: Int32, shape: Shape) -> Int32:
    """The first tile from `tile` on at which a piece begins, or the unit of the tiles [begin, end) ends."""
    size = shape.split.divisor
    later = min((tile + size - 1) // shape.split * size, end)
    return later if tile > begin else tile


@cute.jit
def part_of(piece: Piece, i: Int32, shape: Shape) -> Piece:
    """With a split: the i-th of the pieces that a Piece holds."""
    size = shape.split.divisor
    begin = (piece.first // shape.split + i) * size
    first, last = max(piece.first, begin), min(piece.last, begin + size)
    rest = piece.count, piece.most, piece.origin, piece.next if last == piece.last else Int32(0)
    return Piece(piece.head_k, piece.row0, first, last, piece.begin, piece.end, piece.number + i, *rest)


@cute.jit
def ends_with(piece: Piece, config: Constexpr[Config]) -> Boolean:
    """Whether the block has nothing else to do. Without a split that is said of all but the unit's last piece: to know more would cost a register."""
    if const_expr(config.split):
        return piece.next == FAR
    return piece.number < piece.count - 1


@cute.jit
def parts_of(piece: Piece, shape: Shape) -> Int32:
    """How many there are."""
    held = (piece.last - 1) // shape.split - piece.first // shape.split + 1
    return held if piece.last > piece.first else Int32(0)


@cute.jit
def slot_of(j: Int32, piece: Piece, shape: Shape, config: Constexpr[Config]) -> Int32:
    """Where piece j of the unit is kept."""
    if const_expr(config.split):
        return piece.origin * shape.most_pieces + j
    return 2 * (piece.origin + j) + (1 if j == 0 else 0)


def counter_of(piece: Piece) -> Int32:
    """Where the pieces of a unit count themselves: the first of two words (arrivals.py)."""
    return 2 * piece.origin


@cute.jit
def counter_of_group(first: Int32, piece: Piece, shape: Shape, config: Constexpr[Config]) -> Int32:
    """Where those of a group do, with a split: one word. first: the group's first piece."""
    groups, units = cute.ceil_div(shape.most_pieces, config.group), shape.batch * shape.heads_k * units_of(shape.queries, shape)
    return 2 * units + piece.origin * groups + first // config.group
