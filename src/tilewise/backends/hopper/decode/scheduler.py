"""Which thread block computes what: equal shares of all key tiles, found by every warp for itself from lengths in global memory.

A unit is a sequence, a key head and a tile of rows (query tokens times heads of a group). All units' tiles of keys lie in one row, sequence after
sequence; before its tiles each unit has `fixed` places that stand for what it costs beside them. Block g of G takes the g-th part of the row. A
unit may thus lie in many blocks: its pieces. In a block the unit that began in an earlier one keeps its piece in slot 2 g, the one that goes
on in a later one in slot 2 g + 1.
"""

from typing import NamedTuple

from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import Lengths, Window
from tilewise.sm90.dsl import Constexpr, Int32, arch, const_expr, cute, cutlass, range_constexpr

WARP = 32


class Shape(NamedTuple):
    """Numbers of a launch."""

    batch: Int32
    queries: Int32  # of every sequence, where they are not ragged
    capacity: Int32
    heads_k: Int32
    group: Int32
    by_group: object  # divisor
    page_size: object  # divisor; None: no pages
    window: Window
    lengths: Lengths


class Sequence(NamedTuple):
    """What a sequence gives to do."""

    first_query: Int32  # in its entry of Q
    queries: Int32
    length: Int32
    begin: Int32  # keys [begin, end) that any of its rows may see
    end: Int32
    left: Int32  # the first key that any query may see
    first: Int32  # tile of keys
    tiles: Int32  # at least 1, so that a unit is some block's
    row_tiles: Int32


class Shares(NamedTuple):
    """The row of tiles, and this block's part of it."""

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


class Piece(NamedTuple):
    """The tiles of keys [first, last) of a unit, and the blocks [blocks[0], blocks[1]] that have some."""

    head_k: Int32
    row0: Int32
    first: Int32
    last: Int32
    blocks: tuple[Int32, Int32]
    next: Int32  # the place in the row behind the unit


@cute.jit
def sequence_of(b: Int32, shape: Shape, config: Constexpr[Config]) -> Sequence:
    lengths, window = shape.lengths, shape.window
    length = min(max(lengths.seqlens[b], 0), shape.capacity)
    first_query, queries, left = Int32(0), shape.queries, Int32(0)
    if const_expr(config.ragged):
        first_query = lengths.cu_seqlens_q[b]
        queries = max(lengths.cu_seqlens_q[b + 1] - first_query, 0)
    if const_expr(config.leftpad):
        left = min(max(lengths.leftpad[b], 0), length)
    begin = max(left, length - queries + window.lo)
    end = max(min(length, length + window.hi), 0)
    begin = min(begin, end)
    first = begin // config.tile_n
    tiles = max(cute.ceil_div(end, config.tile_n) - first, 1)
    rows = queries * shape.group
    return Sequence(first_query, queries, length, begin, end, left, first, tiles, cute.ceil_div(rows, config.tile_m))


@cute.jit
def shares_of(shape: Shape, config: Constexpr[Config]) -> Shares:
    tiles, units = Int32(0), Int32(0)
    for first in cutlass.range(0, shape.batch, WARP, unroll=4):
        b = first + arch.lane_idx()
        found = sequence_of(min(b, shape.batch - 1), shape, config)
        mine = found.row_tiles * shape.heads_k if b < shape.batch else Int32(0)
        units += mine
        tiles += mine * found.tiles
    units, tiles = (arch.warp_redux_sync(x, "add") for x in (units, tiles))
    blocks, g = arch.grid_dim()[0], arch.block_idx()[0]
    fixed = min(tiles // (4 * blocks), config.fixed)  # where units are cut into many pieces, a unit costs no more than a piece
    total = tiles + fixed * units
    share, more = total // blocks, total % blocks
    begin = g * share + min(g, more)
    return Shares(fixed, share, more, begin, begin + share + (1 if g < more else 0))


@cute.jit
def block_of(place: Int32, shares: Shares) -> Int32:
    """Whose share a place in the row is."""
    large = shares.more * (shares.share + 1)
    late = shares.more + (place - large) // max(shares.share, 1)
    return place // (shares.share + 1) if place < large else late


@cute.jit
def locate(shares: Shares, shape: Shape, config: Constexpr[Config]) -> Place:
    """The sequence in which this block's share begins."""
    lane, at, before = arch.lane_idx(), Int32(0), Int32(0)
    b, start, going = Int32(0), Int32(0), shares.begin < shares.end
    while going:
        found = sequence_of(min(at + lane, shape.batch - 1), shape, config)
        cost = found.row_tiles * shape.heads_k * (found.tiles + shares.fixed) if at + lane < shape.batch else Int32(0)
        sums = scan(cost)
        passed = arch.popc(arch.vote_ballot_sync(before + sums <= shares.begin))
        b = at + passed
        start = before + arch.shuffle_sync(sums - cost, passed % WARP)
        going = passed == WARP
        before += arch.shuffle_sync(sums, WARP - 1)
        at += WARP
    return Place(b, start, shares.begin)


@cute.jit
def scan(x: Int32) -> Int32:
    """Sums of the lanes up to and with each."""
    lane = arch.lane_idx()
    for step in range_constexpr(WARP.bit_length() - 1):
        other = arch.shuffle_sync(x, (lane - (1 << step)) % WARP)
        x += other if lane >= 1 << step else Int32(0)
    return x


@cute.jit
def span_of(sequence: Sequence, shares: Shares, shape: Shape) -> Int32:
    """Places of a sequence in the row."""
    return sequence.row_tiles * shape.heads_k * (sequence.tiles + shares.fixed)


@cute.jit
def piece_of(place: Place, sequence: Sequence, shares: Shares, config: Constexpr[Config]) -> Piece:
    """Of the unit at a place. It may have no tiles: then this block's share ends before them."""
    each = sequence.tiles + shares.fixed
    unit = (place.at - place.start) // each
    begin = place.start + unit * each
    tiles = begin + shares.fixed
    first = max(place.at, tiles)
    last = max(min(shares.end, begin + each), first)
    blocks = block_of(tiles, shares), block_of(begin + each - 1, shares)
    row_tile = unit % sequence.row_tiles
    return Piece(
        unit // sequence.row_tiles,
        row_tile * config.tile_m,
        sequence.first + first - tiles,
        sequence.first + last - tiles,
        blocks,
        begin + each,
    )
