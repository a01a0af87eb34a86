"""From a mask to tiles: for each query tile, the runs of key tiles to visit and how each run is masked.

Empty tiles are absent, so they are neither loaded nor computed. A FULL run needs no predicate, a BAND run two compares an element
against one band, a BITMAP run a bit an element. The column view, for a backward that walks key tiles, is
`lower(region.transpose(), tile_n, tile_m)`.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy import ndarray

from tilewise.masks.band_tables import areas_within, expand
from tilewise.masks.bands import Band, Bands, within
from tilewise.masks.bitmap import Bitmap


class Kind(IntEnum):
    """How a run is masked."""

    FULL = 0
    BAND = 1
    BITMAP = 2


FULL, BAND, BITMAP = Kind


@dataclass(frozen=True, eq=False)
class Runs:
    """The tiles of a region in tile_m x tile_n tiles, as runs of key tiles, query tile by query tile (compressed rows).

    Runs row_ptr[m_block] .. row_ptr[m_block + 1] belong to query tile m_block, ordered by n0. Run r covers key tiles
    n0[r] <= n_block < n1[r] with kind[r]: FULL (ref -1); BAND, where ref[r] is a row of region.table; BITMAP, where bitmaps[ref[r]] are
    the bits (tile_m, ceil(tile_n / 8)) in numpy.packbits' order. A tile that several bands touch has one run of length 1 a band, next to
    each other: bands are disjoint, so each run adds its own pairs. Rows and keys beyond the lengths never make a tile partial; kernels
    mask the tail of the keys.
    """

    region: Bands | Bitmap
    tile_m: int
    tile_n: int
    row_ptr: ndarray  # int64 (m_blocks + 1,)
    n0: ndarray  # int32 (runs,)
    n1: ndarray  # int32 (runs,)
    kind: ndarray  # int8 (runs,)
    ref: ndarray  # int32 (runs,)
    bitmaps: ndarray  # uint8 (bitmaps, tile_m, ceil(tile_n / 8))

    def __post_init__(self) -> None:
        for array in (self.row_ptr, self.n0, self.n1, self.kind, self.ref, self.bitmaps):
            array.setflags(write=False)

    @property
    def seqlen_q(self) -> int:
        return self.region.seqlen_q

    @property
    def seqlen_k(self) -> int:
        return self.region.seqlen_k

    @property
    def m_blocks(self) -> int:
        return -(-self.seqlen_q // self.tile_m)

    @property
    def n_blocks(self) -> int:
        return -(-self.seqlen_k // self.tile_n)

    def row(self, m_block: int) -> range:
        """The indices of the runs of a query tile."""
        return range(int(self.row_ptr[m_block]), int(self.row_ptr[m_block + 1]))

    def tiles(self) -> tuple[int, int, int]:
        """How many tiles are (full, partial, skipped)."""
        length = self.n1.astype(np.int64) - self.n0
        full = int(length[self.kind == FULL].sum())
        first = np.ones(len(length), dtype=bool)  # the first of the runs that share a tile
        first[1:] = (self.n0[1:] != self.n0[:-1]) | (np.diff(self._m_block_of_run()) != 0)
        partial = int(length[(self.kind != FULL) & first].sum())
        return full, partial, self.m_blocks * self.n_blocks - full - partial

    def mask_tile(self, m_block: int, run: int, n_block: int | None = None) -> ndarray:
        """The pairs that `run` adds in key tile n_block (default: its first), bool, (tile_m, tile_n) or less at the lengths' ends."""
        n_block = int(self.n0[run]) if n_block is None else n_block
        q0, k0 = m_block * self.tile_m, n_block * self.tile_n
        q1, k1 = min(q0 + self.tile_m, self.seqlen_q), min(k0 + self.tile_n, self.seqlen_k)
        if self.kind[run] == FULL:
            return np.ones((q1 - q0, k1 - k0), dtype=bool)
        if self.kind[run] == BAND:
            assert isinstance(self.region, Bands)
            return within(Band(*self.region.table[self.ref[run]].tolist()), q0, q1, k0, k1)
        bits = self.bitmaps[self.ref[run], : q1 - q0]
        return np.unpackbits(bits, axis=1, count=k1 - k0).view(bool)

    def _m_block_of_run(self) -> ndarray:
        return np.repeat(np.arange(self.m_blocks), np.diff(self.row_ptr))


def lower(region: Bands | Bitmap, tile_m: int, tile_n: int) -> Runs:
    """The runs of `region` in tiles of tile_m queries and tile_n keys; made once a region and tile size, and kept with the region.

    Raises ValueError for tile sizes below 1.
    """
    if tile_m < 1 or tile_n < 1:
        raise ValueError(f"tile_m and tile_n must be 1 or more, got {tile_m} and {tile_n}")
    key = ("runs", tile_m, tile_n)
    runs = region.memo.get(key)
    if runs is None:
        lowered = _lower_bands(region, tile_m, tile_n) if isinstance(region, Bands) else _lower_bitmap(region, tile_m, tile_n)
        runs = region.memo[key] = lowered
    return runs


def _lower_bands(region: Bands, tile_m: int, tile_n: int) -> Runs:
    table, seqlen_q, seqlen_k = region.table, region.seqlen_q, region.seqlen_k
    first = table[:, 0] // tile_m
    ref, place = expand((table[:, 1] - 1) // tile_m + 1 - first)
    m_block = first[ref] + place
    bounds = np.stack([m_block * tile_m, np.minimum((m_block + 1) * tile_m, seqlen_q)], axis=1)  # (pieces, 2)
    piece = table[ref]
    piece[:, 0:2] = np.stack([np.maximum(piece[:, 0], bounds[:, 0]), np.minimum(piece[:, 1], bounds[:, 1])], axis=1)
    q0, q1, k0, k1, lo, hi = piece.T

    # The tiles that the piece touches, n0 .. n1; those in inside0 .. inside1 hold only keys that all its rows see.
    n0, n1 = np.maximum(k0, q0 + lo) // tile_n, -(-np.minimum(k1, q1 + hi) // tile_n)
    inside0, end = -(-np.maximum(k0, q1 - 1 + lo) // tile_n), np.minimum(k1, q0 + hi + 1)
    inside1 = np.where(end >= seqlen_k, -(-seqlen_k // tile_n), end // tile_n)
    inside0, inside1 = np.where(inside0 < inside1, (inside0, inside1), (n1, n1))
    filled = (q0 == bounds[:, 0]) & (q1 == bounds[:, 1]) & (inside0 < inside1)

    parts = [np.stack([m_block, *ends, ref], axis=1) for ends in ((n0, inside0), (inside0, inside1), (inside1, n1))]
    parts[1] = parts[1][~filled]
    parts = np.concatenate(parts)
    full = np.stack([m_block, inside0, inside1, np.full_like(ref, FULL), np.full_like(ref, -1), np.ones_like(ref)], axis=1)[filled]
    rows = np.concatenate([_partial_rows(region, tile_m, tile_n, parts[parts[:, 1] < parts[:, 2]]), full])
    return _joined(region, tile_m, tile_n, rows, np.zeros((0, tile_m, -(-tile_n // 8)), np.uint8))


def _partial_rows(region: Bands, tile_m: int, tile_n: int, pieces: ndarray) -> ndarray:
    """Band pieces (m_block, n0, n1, ref), of partial tiles each, as rows (m_block, n0, n1, kind, ref, joinable).

    Pieces that meet no other stay. The others are cut where another one of their query tile begins or ends: then bands either share
    all tiles of a segment or none. Those that fill it together become FULL, once; those that share without filling come apart into
    tiles, which may again be full.
    """
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    span = -(-region.seqlen_k // tile_n) + 1
    begin, end = pieces[:, 0] * span + pieces[:, 1], pieces[:, 0] * span + pieces[:, 2]
    meets = np.zeros(len(pieces), dtype=bool)
    meets[1:] |= np.maximum.accumulate(end)[:-1] > begin[1:]
    meets[:-1] |= end[:-1] > begin[1:]
    alone = pieces[~meets]
    single = np.column_stack([alone[:, :3], np.full(len(alone), BAND), alone[:, 3], np.ones(len(alone), np.int64)])

    marks = np.sort(np.append(begin[meets], end[meets]))
    marks = marks[np.append(True, marks[1:] > marks[:-1])[: len(marks)]]
    first = np.searchsorted(marks, begin[meets])
    piece, place = expand(np.searchsorted(marks, end[meets]) - first)
    cut = first[piece] + place
    owner = pieces[meets][piece]
    segments = np.stack([owner[:, 0], marks[cut] % span, marks[cut + 1] % span, owner[:, 3]], axis=1)
    settled, broken = _settled(region, tile_m, tile_n, segments)

    piece, place = expand(broken[:, 2] - broken[:, 1])
    n_block = broken[piece, 1] + place
    tiles = np.stack([broken[piece, 0], n_block, n_block + 1, broken[piece, 3]], axis=1)
    return np.concatenate([single, settled, _settled(region, tile_m, tile_n, tiles)[0]])


def _settled(region: Bands, tile_m: int, tile_n: int, segments: ndarray) -> tuple[ndarray, ndarray]:
    """Segments (m_block, n0, n1, ref), equal or disjoint, as (rows, the shared ones of several tiles that are not full)."""
    segments = segments[np.lexsort(segments.T[[3, 1, 0]])]
    m_block, n0, n1, ref = segments.T
    new = np.ones(len(segments), dtype=bool)
    new[1:] = (segments[1:, :2] != segments[:-1, :2]).any(axis=1)
    group = np.cumsum(new) - 1
    shared = np.flatnonzero(np.bincount(group, minlength=1)[group] > 1)

    q0, q1 = m_block[shared] * tile_m, np.minimum((m_block[shared] + 1) * tile_m, region.seqlen_q)
    k0, k1 = n0[shared] * tile_n, np.minimum(n1[shared] * tile_n, region.seqlen_k)
    seen = areas_within(region.table[ref[shared]], np.stack([q0, q1, k0, k1], axis=1))
    total = np.bincount(group[shared], weights=seen, minlength=len(segments))
    complete = total[group[shared]] == (q1 - q0) * (k1 - k0)

    rows = np.stack([m_block, n0, n1, np.full_like(ref, BAND), ref, np.ones_like(ref)], axis=1)
    rows[shared, 5] = 0
    rows[shared[complete], 3:] = FULL, -1, 1
    broken = (rows[:, 5] == 0) & (n1 - n0 > 1)
    return rows[(new | (rows[:, 3] == BAND)) & ~broken], segments[broken]


def _lower_bitmap(region: Bitmap, tile_m: int, tile_n: int) -> Runs:
    n_blocks = -(-region.seqlen_k // tile_n)
    width = np.minimum(tile_n, region.seqlen_k - np.arange(n_blocks) * tile_n)  # keys in each tile
    rows, bitmaps, made = [], [], 0
    for m_block, q0 in enumerate(range(0, region.seqlen_q, tile_m)):
        height = min(tile_m, region.seqlen_q - q0)
        tiles = np.zeros((tile_m, n_blocks * tile_n), dtype=bool)
        tiles[:height, : region.seqlen_k] = region.rows(q0, q0 + height)
        tiles = tiles.reshape(tile_m, n_blocks, tile_n).swapaxes(0, 1)
        seen = np.count_nonzero(tiles, axis=(1, 2))
        kind = np.where(seen == height * width, FULL, BITMAP)
        partial = (seen > 0) & (kind == BITMAP)
        ref = np.where(partial, made + np.cumsum(partial) - 1, -1)
        n_block = np.arange(n_blocks)
        rows.append(np.stack([np.full_like(n_block, m_block), n_block, n_block + 1, kind, ref, kind == FULL], axis=1)[seen > 0])
        bitmaps.append(np.packbits(tiles[partial], axis=2))
        made += len(bitmaps[-1])
    empty = np.zeros((0, tile_m, -(-tile_n // 8)), np.uint8)
    return _joined(region, tile_m, tile_n, np.concatenate([np.zeros((0, 6), np.int64), *rows]), np.concatenate([empty, *bitmaps]))


def _joined(region: Bands | Bitmap, tile_m: int, tile_n: int, rows: ndarray, bitmaps: ndarray) -> Runs:
    """Rows (m_block, n0, n1, kind, ref, joinable) in order, with joinable neighbours of one kind and ref as one run."""
    rows = rows[np.lexsort((rows[:, 4], rows[:, 1], rows[:, 0]))]
    follows = np.zeros(len(rows), dtype=bool)  # goes on where the row before ends
    follows[1:] = (rows[1:, [0, 1, 3, 4, 5]] == rows[:-1, [0, 2, 3, 4, 5]]).all(axis=1) & (rows[1:, 5] == 1)
    first = np.flatnonzero(~follows)
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    m_block, n0, _, kind, ref, _ = rows[first].T
    return Runs(
        region=region,
        tile_m=tile_m,
        tile_n=tile_n,
        row_ptr=np.searchsorted(m_block, np.arange(-(-region.seqlen_q // tile_m) + 1)).astype(np.int64),
        n0=n0.astype(np.int32),
        n1=rows[last, 2].astype(np.int32),
        kind=kind.astype(np.int8),
        ref=ref.astype(np.int32),
        bitmaps=bitmaps,
    )
