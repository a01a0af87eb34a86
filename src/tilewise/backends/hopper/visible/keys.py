"""Of the forward pass: which keys a row sees, and which tiles of keys a block of rows visits."""

from typing import NamedTuple

from tilewise.backends.hopper.operands import Band
from tilewise.backends.hopper.visible.bands import all_of, band_of, interval, some_of
from tilewise.backends.hopper.visible.hiding import WORD, bit_in
from tilewise.backends.tables.runs import WORDS
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, range_constexpr


class Walk(NamedTuple):
    """Tiles of keys [first, last) that a block of queries visits; those in [free_first, free_last) need no mask.

    For "tiles" these are runs of tiles, and they are visited from the first on; otherwise tiles, from the last on.

    The blocks of a cluster load the same tiles, [loaded_first, loaded_last), and each leaves out those that are the others' alone.
    """

    first: Int32
    last: Int32
    free_first: Int32
    free_last: Int32
    loaded_first: Int32
    loaded_last: Int32


class Run(NamedTuple):
    """The tiles [first, last), the last one first; `ref` says how they are masked, as in tables.py."""

    first: Int32
    last: Int32
    ref: Int32


class Seen(NamedTuple):
    """What a thread knows of its two rows: for "varlen" the keys of each, [begin, end); for "tiles" what they see of the tile at hand."""

    begin: cute.Tensor | None  # (ROWS,) int32
    end: cute.Tensor | None
    bits: cute.Tensor | None  # (ROWS,) int32: a bit for each of the thread's elements of a row


@cute.jit
def walk_of(block, band: Band, seqlen_q: Int32, seqlen_k: Int32, config: Constexpr) -> Walk:
    """block: of queries, from m0 on, of a head and a batch entry."""
    m0 = block.m0
    if const_expr(config.mask_kind == "tiles"):
        span = band.tables.spans[band.tables.planes[block.batch, block.head], m0 // config.tile_m, None]
        return Walk(span[0], span[2], span[1], span[2], span[0], span[2])
    if const_expr(config.mask_kind == "varlen"):
        walks, m_block = band.tables.walks, m0 // config.tile_m
        walk = walks[min(m_block, walks.shape[0] - 1), None]
        loaded_first, loaded_last = walk[0], walk[1]
        for rank in range_constexpr(1, config.cluster):
            other = walks[min(m_block ^ rank, walks.shape[0] - 1), None]
            loaded_first, loaded_last = min(loaded_first, other[0]), max(loaded_last, other[1])
        return Walk(walk[0], walk[1], walk[2], walk[3], loaded_first, loaded_last)
    first, last = seen(m0, config.tile_m, band, seqlen_q, seqlen_k, config)
    free_first, free_last = seen_by_all(m0, band, seqlen_q, seqlen_k, config)
    free_first = min(max(free_first, first), last)
    loaded_first, loaded_last = first, last
    if const_expr(config.cluster > 1):
        rows = config.cluster * config.tile_m
        loaded_first, loaded_last = seen(m0 // rows * rows, rows, band, seqlen_q, seqlen_k, config)
    return Walk(first, last, free_first, min(max(free_last, free_first), last), loaded_first, loaded_last)


@cute.jit
def within(walk: Walk, first: Int32, last: Int32) -> Walk:
    """The part in the tiles [first, last), where every row sees every key; that of a block beyond the queries is one tile still."""
    visited = min(walk.last - walk.first, last - first)
    return Walk(first, first + visited, first, first + visited, first, last)


@cute.jit
def seen(m0: Int32, rows: Constexpr[int], band: Band, seqlen_q: Int32, seqlen_k: Int32, config):
    """Tiles of keys [first, last) that hold all that any of the rows from m0 on sees; at least one, so that all blocks walk alike."""
    tile_n = config.tile_n
    first, last = Int32(0), cute.ceil_div(seqlen_k, tile_n)
    if const_expr(config.mask_kind != "full"):
        top, bottom, begin, end = some_of(m0, rows, band)
        if top > bottom:
            end = begin
        if const_expr(config.mask_kind == "band"):
            first = min(max(begin, 0) // tile_n, last - 1)
        last = min(max(cute.ceil_div(max(end, 0), tile_n), first + 1), last)
    if const_expr(config.cluster > 1) and m0 >= seqlen_q:
        last = first + 1
    return first, last


@cute.jit
def seen_by_all(m0: Int32, band: Band, seqlen_q: Int32, seqlen_k: Int32, config):
    """Tiles of keys [first, last) of which every row of the tile from m0 on that exists sees everything; none where last <= first."""
    if const_expr(config.mask_kind == "full"):
        return Int32(0), seqlen_k // config.tile_n
    begin, end = all_of(m0, config.tile_m, band)
    if m0 < band.q0 or min(m0 + config.tile_m, seqlen_q) > band.q1:
        end = begin
    if const_expr(config.mask_kind == "causal"):
        return Int32(0), max(end, 0) // config.tile_n
    return cute.ceil_div(max(begin, 0), config.tile_n), max(end, 0) // config.tile_n


@cute.jit
def run_of(index: Int32, band: Band) -> Run:
    run = band.tables.runs[index, None]
    return Run(run[0], run[1], run[2])


@cute.jit
def rows_of(band: Band, tScS: cute.Tensor, m0: Int32, config) -> Seen:
    """For "varlen": what a unit's rows see. tScS: (row, column) of each element of S."""
    begin, end = None, None
    if const_expr(config.mask_kind == "varlen"):
        begin, end = (cute.make_rmem_tensor(fragments.ROWS, Int32) for _ in range(2))
        at = fragments.by_rows(tScS)
        for r in range_constexpr(fragments.ROWS):
            row = min(m0 + at[r, 0][0], band.tables.rows.shape[1] - 1)
            begin[r], end[r] = band.tables.rows[0, row], band.tables.rows[1, row]
    return Seen(begin, end, None)


@cute.jit
def bits_of(band: Band, ref: Int32, tScS: cute.Tensor, m0: Int32, n0: Int32, config) -> Seen:
    """For "tiles": what the tile's rows see."""
    bits = cute.make_rmem_tensor(fragments.ROWS, Int32)
    at = fragments.by_rows(tScS)
    if ref >= 0:
        words = cute.make_rmem_tensor(WORDS, Int32)
        for r in range_constexpr(fragments.ROWS):
            row = band.tables.bitmaps[ref, at[r, 0][0], None]
            cute.autovec_copy(cute.make_tensor(row.iterator.align(16), cute.make_layout(WORDS)), words)
            bits[r] = gathered([words[w] >> at[r, 0][1] for w in range(WORDS)])
    else:
        for r in range_constexpr(fragments.ROWS):
            begin, end = interval(m0 + at[r, 0][0], band_of(ref, band.tables.bands))
            first = n0 + at[r, 0][1]
            bits[r] = places_of(begin - first, end - first)
    return Seen(None, None, bits)


def gathered(words: list[Int32]) -> Int32:
    """The bits of the thread's elements out of words of 32 columns each, of which its first is the lowest bit (`fragments.column`)."""
    bits = Int32(0)
    for w, word in enumerate(words):
        pairs = word & 0x03030303
        pairs = pairs | pairs >> 6
        bits = bits | ((pairs | pairs >> 12) & 0xFF) << 8 * w
    return bits


@cute.jit
def mask_of(first: Int32, count: Int32) -> Int32:
    """`count` bits from bit `first` on, as far as there are 32."""
    return arch.inline_ptx("bmsk.clamp.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[first, count])


@cute.jit
def keys_of(row: Int32, band: Band, config):
    """The keys [begin, end) that a row sees, where they are an interval."""
    if const_expr(config.mask_kind == "full"):
        return Int32(0), band.k1
    if const_expr(config.mask_kind == "varlen"):
        return band.tables.rows[0, row], band.tables.rows[1, row]
    return interval(row, band)


@cute.jit
def shows(band: Band, run: Run, row: Int32, key: Int32, config) -> Boolean:
    """Whether the run's bitmap, if it has one, shows `key` to a row of its tile."""
    seen = Boolean(True)
    if run.ref >= 0:
        at = min(key - run.first * config.tile_n, WORD * WORDS - 1)
        seen = bit_in(band.tables.bitmaps, run.ref, row, at)
    return seen


@cute.jit
def hide(acc_S: cute.Tensor, tScS: cute.Tensor, m0: Int32, n0: Int32, band: Band, seen: Seen, config: Constexpr):
    """-inf for the keys that a row does not see, or that do not exist. tScS: (row, column) of each element of S."""
    S, at = fragments.by_rows(acc_S), fragments.by_rows(tScS)
    for r in range_constexpr(fragments.ROWS):
        bits = places_seen(r, m0 + at[r, 0][0], n0 + at[r, 0][1], band, seen, config)
        for c in range_constexpr(cute.size(S, mode=[1])):  # ptxas moves bits to predicates, seven at a time
            S[r, c] = S[r, c] if bits & (1 << c) != 0 else -Float32.inf


@cute.jit
def places_seen(r: Constexpr[int], row: Int32, first: Int32, band: Band, seen: Seen, config: Constexpr) -> Int32:
    """Which of the thread's elements of its row r are seen, a bit each; `first` is the key of its first."""
    if const_expr(config.mask_kind == "tiles"):
        return seen.bits[r]
    if const_expr(config.mask_kind == "full"):
        return places_of(None, band.k1 - first)
    if const_expr(config.mask_kind == "varlen"):
        return places_of(seen.begin[r] - first, seen.end[r] - first)
    begin, end = interval(row, band)
    return places_of(None if const_expr(config.mask_kind == "causal") else begin - first, end - first)


@cute.jit
def places_of(begin: Int32 | None, end: Int32) -> Int32:
    """Which of the thread's elements of a row are seen, where the distance from its first lies in [begin, end); None: from it on."""
    low = Int32(0) if const_expr(begin is None) else places_before(begin)
    return mask_of(low, max(places_before(end) - low, 0))


@cute.jit
def places_before(distance: Int32) -> Int32:
    """How many of the thread's elements of a row, of 32, lie within a distance from the first (`fragments.column`)."""
    return min(max((distance >> 3) * 2 + min(distance & 7, 2), 0), 32)
