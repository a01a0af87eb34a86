"""Which pairs of a tile are visible, and which tiles a row of tiles visits.

MASK is one of
- "band": each row sees an interval of columns, from six numbers (tables/band.py), lengths among them;
- "varlen": each row's interval is read from a table (documents.py);
- "tiles": the tiles of each row of tiles are listed (tables/runs.py), and a tile is masked by a band or by a bitmap.
"""

import triton
import triton.language as tl


@triton.jit
def queries_of(program, heads, m_tiles, order, MASK: tl.constexpr):
    """The tile of queries that a program owns: its pair of a batch entry and a head, these two, and the tile."""
    pair = program // m_tiles
    m = m_tiles - 1 - program % m_tiles  # under a causal mask the last tiles of queries take longest
    if MASK == "tiles":
        m = tl.load(order + m)
    return pair, pair // heads, pair % heads, m


@triton.jit
def keys_of(program, heads, n_tiles, order, MASK: tl.constexpr, GROUP: tl.constexpr):
    """The same of a tile of keys: the pair has the first query head, the third is the key head."""
    pair_k, n = program // n_tiles, program % n_tiles  # under a causal mask the first tiles of keys take longest
    heads_k = heads // GROUP
    b, head_k = pair_k // heads_k, pair_k % heads_k
    if MASK == "tiles":
        n = tl.load(order + n_tiles - 1 - n)
    return b * heads + head_k * GROUP, b, head_k, n


@triton.jit
def interval(rows, limit, ends, row0, row1, column0, column1, low, high, MASK: tl.constexpr):
    """Each row sees the columns begin <= j < end; of `limit` rows."""
    if MASK == "varlen":
        begin = tl.load(ends + rows, mask=rows < limit, other=0)
        end = tl.load(ends + limit + rows, mask=rows < limit, other=0)
    else:
        begin = tl.maximum(rows + low, column0)
        end = tl.minimum(rows + high + 1, column1)
        inside = (rows >= row0) & (rows < row1)
        begin = tl.where(inside, begin, 0)
        end = tl.where(inside, end, 0)
    return begin, end


@triton.jit
def walk(begin, end, rows, limit, TILE: tl.constexpr):
    """Tiles of TILE columns: some row sees something of first <= n < last; of those every row sees all of free <= n < stop.

    The tiles outside [free, stop) have to be masked.
    """
    sees = begin < end
    far = 1 << 30
    first = tl.min(tl.where(sees, begin, far), 0) // TILE
    last = (tl.max(tl.where(sees, end, 0), 0) + TILE - 1) // TILE
    first = tl.minimum(first, last)
    exists = rows < limit
    free = (tl.max(tl.where(exists, tl.where(sees, begin, far), 0), 0) + TILE - 1) // TILE
    stop = tl.min(tl.where(exists, tl.where(sees, end, 0), far), 0) // TILE
    free = tl.minimum(tl.maximum(free, first), last)
    stop = tl.minimum(tl.maximum(stop, free), last)
    return first, last, free, stop


@triton.jit
def existing(limit, end, MASKED: tl.constexpr, MASK: tl.constexpr):
    """How many columns are read where tiles are masked: those beyond every row's end are as if there were none, for their NaN would reach a product.

    What lies ahead of a row's begin, or is hidden by a table, is left to careful.py.
    """
    if MASKED and MASK != "tiles":
        limit = tl.minimum(limit, tl.max(end, 0))
    return limit


@triton.jit
def by_table(ref, bands, bitmaps, rows, columns, places, bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which pairs of a listed tile are visible, (rows, columns); places, bits: each row's and column's number in the tile of ROWS x COLUMNS.

    A row's words of 32 bits are loaded once: a load for each pair needs an address for each, and there are no registers for these.
    """
    if ref >= 0:
        row = bitmaps + (ref * ROWS + places) * 4
        words = tl.load(row)[:, None]
        for i in tl.static_range(1, (COLUMNS + 31) // 32):
            words = tl.where((bits // 32 == i)[None, :], tl.load(row + i)[:, None], words)
        sees = ((words >> (bits % 32)[None, :]) & 1) != 0
    else:
        at = bands + (-1 - ref) * 6
        row0, row1 = tl.load(at), tl.load(at + 1)
        begin = tl.maximum(rows + tl.load(at + 4), tl.load(at + 2))
        end = tl.minimum(rows + tl.load(at + 5) + 1, tl.load(at + 3))
        inside = (rows >= row0) & (rows < row1)
        sees = inside[:, None] & (columns[None, :] >= begin[:, None]) & (columns[None, :] < end[:, None])
    return sees
