"""What the backward pass reads to know what is visible, where that is no single band: the tensors of operands.KeyTables.

For packed documents the GPU finds them from cu_seqlens (`Columns`); for any other mask they are made from its tiles once, as tables.py does for
the forward pass, of the transposed mask: for every block of keys the tiles of queries that it visits (`Visits`).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.forward.rows import ColumnsConfig, RowsConfig
from tilewise.backends.hopper.operands import KEYS, QUERIES, WORD, KeyTables, Packed
from tilewise.backends.hopper.stand_ins import Ints, StandIns
from tilewise.backends.tables.documents import Offsets, found
from tilewise.backends.tables.keeping import kept
from tilewise.backends.tables.runs import EVERYTHING, FAR, lowered
from tilewise.masks import DeviceDocuments, Documents
from tilewise.masks.band_tables import expand
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.mask import Plane
from tilewise.masks.tiles import lower
from tilewise.problem import Call
from tilewise.sm90 import jit

WALKS, RUNNING = 256, 16  # of `_walks`
EXISTING = 2  # the row of `bands` after those of tables.py: keys and queries that exist


class Columns(NamedTuple):
    """Packed documents, as operands.KeyTables has them."""

    keys: Annotated[Tensor, Ints("2 seqlen_q")]
    queries: Annotated[Tensor, Ints("2 seqlen_k")]
    walks: Annotated[Tensor, Ints("walks 4")]  # n_blocks + 1
    visitors: Annotated[Tensor, Ints("m_blocks 2")]
    query_walks: Annotated[Tensor, Ints("query_blocks 4")]  # none of `tables`, but of `query_tables`


@dataclass(frozen=True, eq=False)
class Visits:
    """Any other mask, int32, likewise.

    Block n of the keys visits under plane p the tiles of queries visits[i, 0], spans[p, n, 0] <= i < spans[p, n, 1], one after another (`_walks`);
    at the rows visits[i, 3] they ascend, by which a tile is found. The tile is masked by bitmaps[ref] for ref = visits[i, 1] >= 0, else by
    bands[-1 - ref], for which keys are the rows and queries the columns; all of it is seen for bands[EVERYTHING]. Of the blocks that visit it,
    visits[i, 2] have a smaller number than this one.
    """

    visits: Tensor  # (visits, 4)
    bands: Tensor  # (bands, 6)
    bitmaps: Tensor  # (bitmaps, tile_n, tile_m / 32): query i of a tile is bit i % 32 of word i // 32
    spans: Tensor  # (planes, n_blocks, 2)
    visited: Tensor  # (planes, m_blocks): how many blocks visit a tile
    seeing: Tensor  # (planes, seqlen_q): whether a query sees any key
    planes: Tensor  # (batch, heads_q): which plane each uses
    regions: tuple  # kept alive, because others find these tables by their identities


@dataclass(frozen=True, eq=False)
class QueryVisits:
    """Likewise, of QUERIES queries that visit tiles of KEYS keys: queries are the rows, tiles ascend, and visits[i, 2:] are of no use."""

    visits: Tensor  # (visits, 4)
    bands: Tensor  # (bands, 6)
    bitmaps: Tensor  # (bitmaps, QUERIES, KEYS / 32)
    spans: Tensor  # (planes, tiles of queries, 2)
    regions: tuple


OF_KEYS = tuple(name for name in Visits.__dataclass_fields__ if name != "regions")
OF_QUERIES = tuple(name for name in QueryVisits.__dataclass_fields__ if name != "regions")


def of_call(call: Call, config) -> KeyTables:
    """For a call of a kernel of `config`; what is for by_queries.py only where it runs."""
    if config.mask_kind == "varlen":
        return of_documents(columns_of(call.mask, call.seqlen_q, call.seqlen_k, config, call.q.device), config)
    if config.mask_kind != "tiles":
        return KeyTables()
    planes = call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
    visits = visits_of(planes, call.batch, call.heads_q, config, call.q.device)
    made = {name: getattr(visits, name) for name in OF_KEYS}
    if config.separate_dq_kernel:
        queries = query_visits_of(planes, call.q.device)
        made |= {f"query_{name}": getattr(queries, name) for name in OF_QUERIES}
    return KeyTables(**made)


def of_documents(columns: Columns, config) -> KeyTables:
    """For packed documents."""
    keys, queries, walks, visitors, query_walks = columns
    return KeyTables(keys, queries, walks, visitors, query_walks=query_walks if config.separate_dq_kernel else None)


def of_batch(tables: KeyTables, part: slice) -> KeyTables:
    """The same for some of the batch entries."""
    return tables if tables.planes is None else tables._replace(planes=tables.planes[part])


def for_repairs(tables: KeyTables) -> KeyTables:
    """What repairs read of them."""
    keys, queries, _, _, visits, bands, bitmaps, spans, _, seeing, planes, *_ = tables
    return KeyTables(keys, queries, None, None, visits, bands, bitmaps, spans, None, seeing, planes)


def kernel(config: Config) -> jit.Kernel:
    """What finds the columns for one of `config`."""
    tiles = (QUERIES, KEYS), (config.tile_n, config.tile_m)
    rows, columns = (RowsConfig(tile_m=m, tile_n=n, least=0) for m, n in tiles)
    return jit.Kernel("tilewise.backends.hopper.backward.intervals:launch", columns_arguments, ColumnsConfig(rows=rows, columns=columns))


def columns_arguments(config: ColumnsConfig) -> list:
    """Stand-ins for `intervals.launch`'s tensors and scalars."""
    made = StandIns(config)
    keys, queries, *others = made(Columns)
    return [made(Packed), keys, queries, made(Ints("n_blocks 4")), *others]


def columns_of(mask: Documents | DeviceDocuments, seqlen_q: int, seqlen_k: int, config: Config, device: torch.device) -> Columns:
    """The columns of packed documents, as `documents.found` finds them. Bad cu_seqlens that were not checked lead to nothing outside of the tensors,
    and no block waits for ever.
    """
    return found(mask, seqlen_q, seqlen_k, "columns", config, device, _columns)


def finder(
    inner: Offsets, seqlen_q: int, seqlen_k: int, config, device: torch.device, current: bool = False
) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[[Tensor, Tensor, Sequence], None]]:
    """What allocates the columns of documents, behind them a scratch, and what writes those of one cu_seqlens_q and cu_seqlens_k after the other,
    (documents + 1,) int32 on the device. current: as in `short.tables`.
    """
    compute, n_blocks, m_blocks = jit.compiled(*kernel(config)), -(-seqlen_k // config.tile_n), -(-seqlen_q // config.tile_m)
    shapes = (2, seqlen_q), (2, seqlen_k), (n_blocks + 1, 4), (m_blocks, 2), (-(-seqlen_q // QUERIES), 4), (n_blocks, 4)

    def find(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, written: Sequence) -> None:
        keys, queries, *made, scratch = written
        compute((cu_seqlens_q, cu_seqlens_k, seqlen_k, *inner), keys, queries, scratch, *made)

    return short.tables(shapes, device, current), find


def _columns(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, inner: Offsets, seqlen_q: int, seqlen_k: int, config: Config) -> Columns:
    new, find = finder(inner, seqlen_q, seqlen_k, config, cu_seqlens_q.device)
    *columns, _ = written = new()
    find(cu_seqlens_q, cu_seqlens_k, written)
    return Columns(*columns)


def visits_of(planes: tuple[Plane, ...], batch: int, heads: int, config: Config, device: torch.device) -> Visits:
    """The visits of a mask with the regions of `planes`, for `batch` entries and `heads` query heads; made once, and kept."""
    regions = tuple(plane.region for plane in planes)
    where = tuple((plane.batch, plane.heads) for plane in planes)
    key = "hopper visits", config.tile_m, config.tile_n, device, batch, heads, where, tuple(map(id, regions))

    def make() -> Visits:
        return Visits(*_on_device(_arrays(planes, batch, heads, config.tile_m, config.tile_n), device), regions)

    return kept(regions[0].memo, key, make)


def query_visits_of(planes: tuple[Plane, ...], device: torch.device) -> QueryVisits:
    """Likewise, for by_queries.py."""
    regions = tuple(plane.region for plane in planes)
    key = "hopper query visits", device, tuple(map(id, regions))
    return kept(regions[0].memo, key, lambda: QueryVisits(*_on_device(_visits(regions, QUERIES, KEYS), device), regions))


def _on_device(arrays: Iterable[ndarray], device: torch.device) -> Iterator[Tensor]:
    """As int32."""
    return (torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(device) for x in arrays)


def _arrays(planes: tuple[Plane, ...], batch: int, heads: int, tile_m: int, tile_n: int) -> tuple[ndarray, ...]:
    """The arrays of `Visits`, in its order."""
    regions, m_blocks = [plane.region for plane in planes], -(-planes[0].region.seqlen_q // tile_m)
    *by_keys, spans = _visits([region.transpose() for region in regions], tile_n, tile_m, in_turns=True)
    visited = [np.bincount(by_keys[0][begin[0, 0] : begin[-1, 1], 0], minlength=m_blocks) for begin in spans]
    used = np.zeros((batch, heads), np.int32)
    for number, plane in enumerate(planes):
        used[plane.batch.start : plane.batch.stop, plane.heads.start : plane.heads.stop] = number
    seeing = np.stack([_seeing(region) for region in regions])
    return *by_keys, spans, np.stack(visited), seeing, used


def _visits(regions: Sequence, tile_m: int, tile_n: int, in_turns: bool = False) -> tuple[ndarray, ...]:
    """visits, bands, bitmaps and spans of blocks of tile_m rows that visit tiles of tile_n columns, ascending or as `_walks` has them."""
    seqlen_q, seqlen_k = regions[0].seqlen_q, regions[0].seqlen_k
    everything = [0, seqlen_q, 0, seqlen_k, -FAR, FAR]
    bands, bitmaps = [np.array([everything, [0, 0, 0, 0, -FAR, FAR], everything])], [np.zeros((1, tile_m, tile_n // WORD), np.int32)]
    spans, visits = [], [np.zeros((1, 4), np.int64)]
    for region in regions:
        made = lowered(lower(region, tile_m, tile_n), sum(map(len, bands)), sum(map(len, bitmaps)), words=tile_n // WORD, blind=False)
        bands.append(made.bands)
        bitmaps.append(made.bitmaps)
        block, tiles = _tiles(made.runs, seqlen_q // tile_m)
        before = sum(map(len, visits))
        if in_turns:
            order = _walks(block, tiles[:, 0])
            tiles = tiles[order]
            tiles[:, 3] = before + order.argsort()
        start = before + np.searchsorted(block, np.arange(-(-seqlen_q // tile_m) + 1))
        spans.append(np.stack([start[:-1], start[1:]], axis=1)[None])
        visits.append(tiles)
    return tuple(map(np.concatenate, (visits, bands, bitmaps, spans)))


def _tiles(runs: ndarray, whole: int) -> tuple[ndarray, ndarray]:
    """Rows of Visits.visits, and the block of each, from rows block, masked, first, last, ref; blocks from `whole` on are not full."""
    run, place = expand(runs[:, 3] - runs[:, 2])
    n_block, masked, first, _, ref = runs[run].T
    m_block = first + place
    ref = np.where((ref == -1 - EVERYTHING) & ((masked == 1) | (n_block >= whole)), -1 - EXISTING, ref)
    by_query, turn = np.lexsort((n_block, m_block)), np.empty(len(run), np.int64)
    turn[by_query] = np.arange(len(run)) - np.searchsorted(m_block[by_query], m_block[by_query])
    order = np.lexsort((m_block, n_block))
    return n_block[order], np.stack([m_block, ref, turn, np.zeros_like(turn)], axis=1)[order]


def _walks(n_block: ndarray, m_block: ndarray) -> ndarray:
    """The order of visits: each block's, one after another, as it walks; n_block and m_block ascend.

    At every tile a block waits for those of smaller numbers. Down from the last tile hardly one waits where walks of later keys end later, as they do
    under bands of any kind. But a prefix that many sequences share, or a sink, is seen by queries far behind those of the next blocks, which wait
    until it comes down to them. So blocks may also take tiles as these come free, which begins upwards. Which way takes less time is found by going
    through the turns of about WALKS blocks, of which RUNNING run at a time (lab/instruments/turns.py): a matter of the mask alone, so that a call
    on some of the heads has the bits of the whole one.
    """
    down = np.lexsort((-m_block, n_block))
    lasts = np.flatnonzero(np.diff(n_block, append=-1))
    if (np.diff(m_block[lasts]) >= 0).all():
        return down
    every = -(-(int(n_block[-1]) + 1) // WALKS)
    chosen = (n_block % every == 0) & (m_block % every == 0)
    walks, running = _split(n_block[chosen], m_block[chosen] // every), max(1, RUNNING // every)
    if _in_turns([walk[::-1] for walk in walks], running, False)[0] <= _in_turns(walks, running, True)[0]:
        return down
    orders = _in_turns(_split(n_block, m_block), RUNNING, True)[1]
    return np.concatenate(orders) + np.repeat(np.append(0, lasts[:-1] + 1), np.diff(lasts, prepend=-1))


def _split(n_block: ndarray, m_block: ndarray) -> list[ndarray]:
    """The tiles of each block that has any."""
    return np.split(m_block, np.flatnonzero(np.diff(n_block)) + 1)


def _in_turns(walks: list[ndarray], running: int, sort: bool) -> tuple[int, list[ndarray]]:
    """When the last of these walks ends, one after another, `running` at a time; a visit takes 1, and waits for the one before it at its tile.
    sort: each takes its tiles as they come free, which lets it end the earliest; and these orders.
    """
    ends = np.zeros(1 + max((int(walk.max(initial=0)) for walk in walks), default=0), np.int64)
    free, orders = [0] * running, []
    for walk in walks:
        begin, taken, ready = heapq.heappop(free), np.arange(1, len(walk) + 1), ends[walk]
        if sort:
            orders.append(np.argsort(np.maximum(ready, begin), kind="stable"))
            walk, ready = walk[orders[-1]], ready[orders[-1]]
        ends[walk] = taken + np.maximum.accumulate(np.maximum(begin, ready + 1 - taken))
        heapq.heappush(free, int(ends[walk[-1]]) if len(walk) else begin)
    return int(ends.max()), orders


def _seeing(region) -> ndarray:
    """Whether each query sees any key."""
    if isinstance(region, Bitmap):
        return region.bits.any(axis=1)
    change = np.zeros(region.seqlen_q + 1, np.int64)  # no row of a band is empty
    np.add.at(change, region.table[:, 0], 1)
    np.add.at(change, region.table[:, 1], -1)
    return np.cumsum(change)[:-1] > 0
