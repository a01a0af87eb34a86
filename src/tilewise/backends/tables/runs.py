"""A mask beyond one band as tables for the kernel: for every tile of queries the runs of key tiles to visit, and how each is masked.

masks/tiles.py says which tiles; here its runs take the form that one pass over the keys wants. A tile that several bands touch becomes a bitmap,
the runs to be masked come before those that need none, a full tile at the end of the keys is masked for the keys that do not exist, and a
query tile that sees nothing visits one tile, of which it sees nothing. Made once a mask, lengths, tile and device, and kept with the mask's
region.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from tilewise.backends.tables.keeping import kept
from tilewise.masks.band_tables import LO
from tilewise.masks.bands import Bands
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.mask import Plane
from tilewise.masks.tiles import BAND, BITMAP, FULL, Runs, lower

FAR = 1 << 30  # beyond every key, and far from overflowing when a row is added
WORDS = 4  # of 32 keys, in a row of a bitmap: as many as the largest tile_n needs, and one wide read
EVERYTHING, NOTHING = 0, 1  # the first rows of `bands`
AT_ONCE = 1024  # runs that have their bits in memory at a time
LITTLE = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), axis=1, bitorder="little").ravel()  # bits turned round


@dataclass(frozen=True, eq=False)
class Tables:
    """int32 tensors on one device.

    Query tile m of plane p has the runs spans[p, m, 0] .. spans[p, m, 2], those to be masked up to spans[p, m, 1]. Run r covers the key
    tiles runs[r, 0] <= n < runs[r, 1]; where it is masked, by bitmaps[ref] for ref = runs[r, 2] >= 0, else by bands[-1 - ref].
    """

    order: Tensor  # (m_blocks,) query tiles, those with the most keys last, as under a causal mask
    spans: Tensor  # (planes, m_blocks, 3)
    runs: Tensor  # (runs, 4): n0, n1, ref, 0
    bands: Tensor  # (bands, 6): q0 q1 k0 k1 lo hi
    bitmaps: Tensor  # (bitmaps, tile_m, WORDS): key j of a tile is bit j % 32 of word j // 32
    planes: Tensor  # (batch, heads): which plane each uses
    regions: tuple  # kept alive, because others find these tables by their identities


class Lowered(NamedTuple):
    """One plane; a run each row of `runs`: m_block, masked, n0, n1, ref; those of a query tile that are masked first, then the last tiles first."""

    runs: ndarray
    bands: ndarray
    bitmaps: ndarray


def tables(planes: tuple[Plane, ...], batch: int, heads: int, tile_m: int, tile_n: int, device: torch.device) -> Tables:
    """The tables of a mask with the regions of `planes`, for `batch` entries and `heads` query heads."""
    regions = tuple(plane.region for plane in planes)
    where = tuple((plane.batch, plane.heads) for plane in planes)
    key = "hopper", tile_m, tile_n, device, batch, heads, where, tuple(map(id, regions))

    def make() -> Tables:
        arrays = _arrays(planes, batch, heads, tile_m, tile_n)
        return Tables(*(torch.from_numpy(x).to(device) for x in arrays), regions=regions)

    return kept(regions[0].memo, key, make)


def _arrays(planes: tuple[Plane, ...], batch: int, heads: int, tile_m: int, tile_n: int) -> tuple[ndarray, ...]:
    """The arrays of `Tables`, in its order."""
    seqlen_q, seqlen_k = planes[0].region.seqlen_q, planes[0].region.seqlen_k
    m_blocks = -(-seqlen_q // tile_m)
    bands = [np.array([[0, seqlen_q, 0, seqlen_k, -FAR, FAR], [0, 0, 0, 0, -FAR, FAR]])]
    bitmaps, spans, runs, work = [np.zeros((1, tile_m, WORDS), np.int32)], [], [], np.zeros(m_blocks, np.int64)
    used = np.zeros((batch, heads), np.int32)
    for number, plane in enumerate(planes):
        made = lowered(lower(plane.region, tile_m, tile_n), sum(map(len, bands)), sum(map(len, bitmaps)))
        bands.append(made.bands)
        bitmaps.append(made.bitmaps)
        m_block, masked, n0, n1, _ = made.runs.T
        start = sum(map(len, runs)) + np.searchsorted(m_block, np.arange(m_blocks + 1))
        spans.append(np.stack([start[:-1], start[:-1] + np.bincount(m_block[masked == 1], minlength=m_blocks), start[1:]], axis=1))
        runs.append(np.column_stack([made.runs[:, 2:], np.zeros(len(n0), np.int64)]))
        work += np.bincount(m_block, weights=n1 - n0, minlength=m_blocks).astype(np.int64) * len(plane.batch) * len(plane.heads)
        used[plane.batch.start : plane.batch.stop, plane.heads.start : plane.heads.stop] = number
    order = np.argsort(work, kind="stable").astype(np.int32)
    whole = (np.concatenate(x).astype(np.int32) for x in (runs, bands, bitmaps))
    return order, np.stack(spans).astype(np.int32), *whole, used


def lowered(runs: Runs, bands_before: int, bitmaps_before: int, words: int = WORDS, blind: bool = True) -> Lowered:
    """What is to be visited of `runs`, for tables with `bands_before` bands and `bitmaps_before` bitmaps already; bitmaps of `words` words a row.

    blind: with a tile for query tiles that see nothing.
    """
    m_block = np.repeat(np.arange(runs.m_blocks), np.diff(runs.row_ptr))
    n0, n1, kind, ref = (x.astype(np.int64) for x in (runs.n0, runs.n1, runs.kind, runs.ref))
    table, bitmaps = np.zeros((0, 6), np.int64), _repacked(runs.bitmaps, words)
    rows = []

    def add(which: ndarray, masked: bool, first: ndarray, last: ndarray, ref: ndarray | int) -> None:
        rows.append(np.stack(np.broadcast_arrays(m_block[which], int(masked), first, last, ref), axis=1)[first < last])

    whole = np.flatnonzero(kind == FULL)
    tail = runs.seqlen_k // runs.tile_n  # the first tile that keys do not fill
    add(whole, False, n0[whole], np.minimum(n1[whole], tail), -1 - EVERYTHING)
    add(whole, True, np.maximum(n0[whole], tail), n1[whole], -1 - EVERYTHING)
    if isinstance(runs.region, Bitmap):
        which = np.flatnonzero(kind == BITMAP)
        add(which, True, n0[which], n1[which], bitmaps_before + ref[which])
    else:
        table = runs.region.table.copy()
        table[:, LO:] = table[:, LO:].clip(-FAR, FAR)
        follows = np.zeros(len(n0), dtype=bool)  # the same tile as the run before
        follows[1:] = (kind[1:] == BAND) & (kind[:-1] == BAND) & (m_block[1:] == m_block[:-1]) & (n0[1:] == n0[:-1])
        shared = follows.copy()
        shared[:-1] |= follows[1:]
        alone = np.flatnonzero((kind == BAND) & ~shared)
        add(alone, True, n0[alone], n1[alone], -1 - (bands_before + ref[alone]))
        first = np.flatnonzero(shared & ~follows)
        add(first, True, n0[first], n1[first], bitmaps_before + np.arange(len(first)))
        bitmaps = _drawn(runs, m_block, np.flatnonzero(shared), np.cumsum((shared & ~follows)[shared]) - 1, len(first), words)
    if blind:
        nothing = np.flatnonzero(np.diff(runs.row_ptr) == 0)
        rows.append(np.stack(np.broadcast_arrays(nothing, 1, 0, 1, -1 - NOTHING), axis=1))
    found = np.concatenate(rows)
    return Lowered(found[np.lexsort((-found[:, 2], -found[:, 1], found[:, 0]))], table, bitmaps)


def _repacked(bits: ndarray, words: int) -> ndarray:
    """Bits (tiles, tile_m, ceil(tile_n / 8)) in numpy's order as int32 (tiles, tile_m, words)."""
    wide = np.zeros((*bits.shape[:2], 4 * words), np.uint8)
    wide[..., : bits.shape[2]] = LITTLE[bits]
    return wide.view("<i4")


def _drawn(runs: Runs, m_block: ndarray, which: ndarray, tile: ndarray, count: int, words: int) -> ndarray:
    """The union of the bands of the runs `which` in each of `count` key tiles; tile[i] is that of which[i], ascending."""
    out = np.zeros((count, runs.tile_m * words // 2), np.uint64)
    below = np.packbits(np.tri(runs.tile_n + 1, 32 * words, -1, bool), axis=1, bitorder="little").view(np.uint32)  # row n: the first n keys
    assert isinstance(runs.region, Bands)
    q0, q1, k0, k1, lo, hi = (column[:, None] for column in runs.region.table[runs.ref[which]].T)
    row, n0 = m_block[which, None] * runs.tile_m + np.arange(runs.tile_m), runs.n0[which, None] * runs.tile_n
    begin, end = np.maximum(k0, row + lo) - n0, np.minimum(k1, row + hi + 1) - n0
    end[(row < q0) | (row >= q1)] = 0
    begin, end = (x.clip(0, runs.tile_n) for x in (begin, end))
    for i in range(0, len(which), AT_ONCE):
        part = slice(i, i + AT_ONCE)
        bits = (below.take(end[part], axis=0) & ~below.take(begin[part], axis=0)).reshape(-1, runs.tile_m * words).view(np.uint64)
        tiles, first = np.unique(tile[part], return_index=True)
        out[tiles] |= np.bitwise_or.reduceat(bits, first, axis=0)
    return out.view("<i4").reshape(count, runs.tile_m, words)
