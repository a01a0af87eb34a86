"""A mask as the kernel reads it: for each plane a table of bands, the bands that touch each block of query rows, and bits where it must be.

The kernel crops bands itself, to the panel and the block of keys in hand, so nothing here depends on tile sizes but the row blocks.
"""

import ctypes
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
from numpy import ndarray

from tilewise.backends.cpu import abi
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.masks.band_tables import INF, expand
from tilewise.masks.bands import Bands
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.mask import Mask, Plane
from tilewise.masks.tiles import Kind, lower
from tilewise.problem import DecodeCall

TILE_N = 96  # keys of a tile of a bitmap that is classified as a whole
SLACK = 8  # bytes the kernel may read beyond the end of a row of bits

_MADE: WeakKeyDictionary = WeakKeyDictionary()  # region -> Planes
_REVERSED = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class Planes:
    """Addresses for `abi.Args`, and the arrays that must outlive them."""

    planes: int
    plane_of: int | None
    kept: list = field(repr=False)


def nbytes(kept: list) -> int:
    """Of the arrays in such a list, and of those that its Planes keep."""
    return sum(each.nbytes if isinstance(each, ndarray) else nbytes(each.kept) if isinstance(each, Planes) else 0 for each in kept)


def planes_of(mask: Mask, seqlen_q: int, seqlen_k: int, batch: int, heads_q: int) -> Planes:
    """The mask's planes; made once for each mask and lengths, and kept as long as the region that they come from.

    Raises ShapeError where the mask does not fit.
    """
    planes = mask.planes(seqlen_q, seqlen_k, batch, heads_q)
    if len(planes) != 1:
        return _many(planes, batch, heads_q)
    region = planes[0].region
    found = _MADE.get(region)
    if found is None:
        table = (abi.PlaneArg * 1)(table_of(region, kept := []))
        _MADE[region] = found = Planes(ctypes.addressof(table), None, [table, *kept])
    return found


@lru_cache(maxsize=8)
def _many(planes: tuple[Plane, ...], batch: int, heads_q: int) -> Planes:
    kept: list = []
    regions = list({id(plane.region): plane.region for plane in planes}.values())
    order = {id(region): place for place, region in enumerate(regions)}
    table = (abi.PlaneArg * len(regions))(*(table_of(region, kept) for region in regions))
    index = np.zeros((batch, heads_q), dtype=np.int32)
    for plane in planes:
        index[plane.batch.start : plane.batch.stop, plane.heads.start : plane.heads.stop] = order[id(plane.region)]
    return Planes(ctypes.addressof(table), _address(index, kept), [table, planes, *kept])


def planes_of_sequences(mask: Mask, queries: ndarray, keys: ndarray, keep: list) -> ctypes.Array:
    """One plane for each sequence, by its numbers of queries and keys.

    Causal and window masks are written down directly, as lengths change with every token.
    """
    planes = (abi.PlaneArg * len(queries))()
    if (sides := _window(mask)) is None:
        for n, (rows, length) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
            planes[n] = table_of(mask.resolve(rows, length), keep)
    else:
        left, right = sides
        table = np.zeros((len(queries), 6), dtype=np.int64)
        table[:, 1], table[:, 3] = queries, keys
        table[:, 4] = -INF if left is None else keys - queries - min(left, INF // 2)
        table[:, 5] = INF if right is None else keys - queries + min(right, INF // 2)
        address, step = table.ctypes.data, table.strides[0]
        for n, plane in enumerate(planes):
            plane.bands, plane.n_bands = address + n * step, 1
        keep.append(table)
    keep.append(planes)
    return planes


def planes_of_shares(call: DecodeCall, queries: ndarray, keep: list) -> ctypes.Array:
    """One plane for each sequence, by its number of queries, with the keys of a share: what a query sees of a band is an interval of them, too."""
    planes, share = (abi.PlaneArg * len(queries))(), call.share
    assert share is not None
    for n, (rows, length) in enumerate(zip(queries.tolist(), call.seqlens.tolist(), strict=True)):
        region = call.mask.resolve(rows, length)
        assert isinstance(region, Bands)  # or `cache.bind` had refused the mask
        table = region.table
        band, place = expand(table[:, 1] - table[:, 0])
        row = table[band, 0] + place
        begin, end = np.maximum(table[band, 2], row + table[band, 4]), np.minimum(table[band, 3], row + table[band, 5] + 1)
        open_ends = np.full_like(row, -INF), np.full_like(row, INF)
        bands = np.stack([row, row + 1, share.held(begin), share.held(end), *open_ends], axis=1)
        planes[n] = table_of(Bands.of(bands, rows, share.held(length), disjoint=True), keep)
    keep.append(planes)
    return planes


def _window(mask: Mask) -> tuple[int | None, int | None] | None:
    """(left, right) of a mask that is a bottom-right window, causal and full included; None for others."""
    if isinstance(mask, Full):
        return None, None
    if isinstance(mask, Causal | SlidingWindow) and mask.align == "bottom_right" and mask.offset == 0:
        return (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
    return None


def table_of(region: Bands | Bitmap, kept: list) -> abi.PlaneArg:
    """The tables of one region; the arrays that they point into are appended to `kept`."""
    if isinstance(region, Bitmap):
        return _bitmap_plane(region, kept)
    plane = abi.PlaneArg(bands=_address(region.table, kept), n_bands=len(region))
    if len(region) > 1:  # in an order that follows from the rows of a block alone, as bits do
        table = region.table
        first = table[:, 0] // abi.ROW_BLOCK
        band, place = expand((table[:, 1] - 1) // abi.ROW_BLOCK + 1 - first)
        block = first[band] + place
        begin = np.maximum(
            table[band, 2], np.maximum(table[band, 0], block * abi.ROW_BLOCK) + table[band, 4]
        )  # its first key in these rows
        order = np.lexsort((begin, block))
        plane.row_ptr, plane.row_bands = _lists(block[order], band[order], region.seqlen_q, kept)
    return plane


def _bitmap_plane(region: Bitmap, kept: list) -> abi.PlaneArg:
    """Every run of tiles is a rectangle; in those that are not full the bits decide."""
    runs = lower(region, abi.ROW_BLOCK, TILE_N)
    block = np.repeat(np.arange(runs.m_blocks), np.diff(runs.row_ptr))
    q0, k0 = block * abi.ROW_BLOCK, runs.n0.astype(np.int64) * TILE_N
    q1, k1 = np.minimum(q0 + abi.ROW_BLOCK, region.seqlen_q), np.minimum(runs.n1.astype(np.int64) * TILE_N, region.seqlen_k)
    table = np.stack([q0, q1, k0, k1, np.full_like(q0, -INF), np.full_like(q0, INF)], axis=1)
    plane = abi.PlaneArg(bands=_address(table, kept), n_bands=len(table))
    plane.row_ptr, plane.row_bands = _lists(block, np.arange(len(table)), region.seqlen_q, kept)
    plane.in_bitmap = _address((runs.kind == Kind.BITMAP).astype(np.uint8), kept)
    columns = region.transpose().bits  # (seqlen_k, ceil(seqlen_q / 8)): the kernel's lanes are queries
    bits = np.zeros((region.seqlen_k, columns.shape[1] + SLACK), dtype=np.uint8)
    bits[:, : columns.shape[1]] = _REVERSED[columns]
    plane.bits, plane.bits_stride = _address(bits, kept), bits.shape[1]
    return plane


def _lists(block: ndarray, band: ndarray, seqlen_q: int, kept: list) -> tuple[int, int]:
    """Row pointers and band numbers, for entries that are ordered by block of rows."""
    row_ptr = np.searchsorted(block, np.arange(-(-seqlen_q // abi.ROW_BLOCK) + 1)).astype(np.int64)
    return _address(row_ptr, kept), _address(band.astype(np.int32), kept)


def _address(array: ndarray, kept: list) -> int:
    array = np.ascontiguousarray(array)
    kept.append(array)
    return array.ctypes.data
