"""How the `tiled` backend cuts a call: into parts (heads that share a mask), blocks of rows, and steps (a block's tiles that hold pairs).

Tensors of a part are views of the call's with the query heads of a group next to each other, or packed copies
(lane, seqlen_q * group, dim) in the compute dtype. A lane is one (batch, key/value head).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.masks.bands import Band, Bands, within
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.tiles import FULL, lower
from tilewise.problem import Call

# Pairs with their scores alive at once, per device type. CPU: 2 MiB in fp32, what two cores keep in their second-level caches.
_PAIRS = {"cpu": 1 << 19}
_PAIRS_ELSEWHERE = 1 << 24
_TILE_M, _TILE_N = 256, 256

ALL = slice(None)


class Predicate(NamedTuple):
    """Which pairs of a partly visible tile are visible. Queries are the rows, whichever loop is the outer one."""

    visible: Tensor  # bool (queries, keys)
    hide: Tensor  # 0 where visible, else -inf, in the compute dtype: masks finite scores by addition


class Step(NamedTuple):
    """Columns [start, stop) of a block; `predicate` is None where every pair is visible."""

    start: int
    stop: int
    predicate: Predicate | None


class Block(NamedTuple):
    """Rows [start, stop) and the steps that hold their pairs."""

    start: int
    stop: int
    steps: list[Step]


@dataclass(frozen=True)
class Part:
    """The lanes of `batch` x `heads_k`, all with the mask `region`; `group` selects among the query heads of each key/value head."""

    call: Call
    region: Bands | Bitmap
    batch: slice
    heads_k: slice
    group: slice
    tile_m: int
    tile_n: int

    def queries(self, x: Tensor) -> Tensor:
        """A view (batch, heads_k, seqlen_q, group, dim) of x (batch, seqlen_q, heads_q, dim)."""
        return x.unflatten(2, (-1, self.call.group))[self.batch, :, self.heads_k, self.group].transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        """A view (batch, heads_k, seqlen_k, dim) of x (batch, seqlen_k, heads_k, dim)."""
        return x[self.batch, :, self.heads_k].transpose(1, 2)

    def statistics(self, x: Tensor) -> Tensor:
        """A view (batch, heads_k, seqlen_q, group) of x (batch, heads_q, seqlen_q)."""
        return x.unflatten(1, (-1, self.call.group))[self.batch, self.heads_k, self.group].transpose(2, 3)

    def per_head(self, x: Tensor) -> Tensor:
        """A view (..., heads_k, group) of x (..., heads_q)."""
        return x.unflatten(-1, (-1, self.call.group))[..., self.heads_k, self.group]

    def pairs(self, x: Tensor) -> Tensor:
        """A view (batch, heads_k, seqlen_q, group, seqlen_k) of x (batch, heads_q, seqlen_q, seqlen_k); all but the last may be 1."""
        x = x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (-1, self.call.group))
        return cut(x, self.batch, self.heads_k, self.group).transpose(2, 3)

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A view that `queries` or `keys` gave, as one contiguous (lane, rows, dim) in `dtype`."""
        return x.to(dtype).reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    def query_blocks(self, dtype: torch.dtype) -> Iterator[Block]:
        """The blocks of tile_m queries, each with the keys it sees."""
        return _blocks(self.region, self.tile_m, self.tile_n, dtype, self.call.q.device, False)

    def key_blocks(self, dtype: torch.dtype) -> Iterator[Block]:
        """The blocks of tile_n keys, each with the queries that see it: the same cut of the transposed mask."""
        return _blocks(self.region.transpose(), self.tile_n, self.tile_m, dtype, self.call.q.device, True)


def cut(x: Tensor, *slices: slice) -> Tensor:
    """x[slices], where a dimension of size 1 broadcasts and stays."""
    return x[tuple(part if size > 1 else slice(None) for part, size in zip(slices, x.shape, strict=False))]


def default_tile(call: Call) -> tuple[int, int]:
    """(tile_m, tile_n): few queries, and as many keys as keep the score tiles of all lanes in cache together."""
    tile_m = _power_of_two(min(call.seqlen_q, max(_TILE_M // call.group, 16)))
    rows = call.group * tile_m * max(call.batch * call.heads_k, 1)
    return tile_m, _power_of_two(min(call.seqlen_k, max(_TILE_N, _budget(call) // rows)))


def _budget(call: Call) -> int:
    return _PAIRS.get(call.q.device.type, _PAIRS_ELSEWHERE)


def parts(call: Call, tile: tuple[int, int]) -> Iterator[Part]:
    """Parts that cover every (batch, query head) once, as many lanes at a time as keep the score tiles in cache."""
    group, (tile_m, tile_n) = call.group, tile
    lanes = max(_budget(call) // (tile_m * tile_n * group), torch.get_num_threads())
    for plane in call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q):
        for heads_k, members in _head_ranges(plane.heads, group):
            heads = len(heads_k)
            for b in _pieces(plane.batch, max(lanes // max(heads, 1), 1)):
                for h in _pieces(heads_k, lanes):
                    yield Part(call, plane.region, _slice(b), _slice(h), _slice(members), tile_m, tile_n)


def _head_ranges(heads: range, group: int) -> list[tuple[range, range]]:
    """Query heads as (key/value heads, members of their groups): whole groups together, groups cut by the range one by one."""
    first, last = -(-heads.start // group), heads.stop // group
    if first * group == heads.start and last * group == heads.stop:
        return [(range(first, last), range(group))]
    owners = range(heads.start // group, -(-heads.stop // group))
    return [(range(h, h + 1), range(max(heads.start - h * group, 0), min(heads.stop - h * group, group))) for h in owners]


def _pieces(whole: range, size: int) -> Iterator[range]:
    return (whole[i : i + size] for i in range(0, len(whole), size))


def _slice(r: range) -> slice:
    return slice(r.start, r.stop)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _blocks(region: Bands | Bitmap, rows: int, columns: int, dtype: torch.dtype, device: torch.device, transposed: bool) -> Iterator[Block]:
    runs = lower(region, rows, columns)
    row_ptr, n0, n1, kind, ref = (x.tolist() for x in (runs.row_ptr, runs.n0, runs.n1, runs.kind, runs.ref))
    for m_block in range(len(row_ptr) - 1):
        start, stop = m_block * rows, min((m_block + 1) * rows, runs.seqlen_q)
        tiles = ((n, kind[r], ref[r]) for r in range(row_ptr[m_block], row_ptr[m_block + 1]) for n in range(n0[r], n1[r]))
        steps = []
        for n, runs_of_tile in groupby(tiles, key=lambda tile: tile[0]):
            kinds, refs = zip(*(tile[1:] for tile in runs_of_tile), strict=True)
            c0, c1 = n * columns, min((n + 1) * columns, runs.seqlen_k)
            if kinds[0] == FULL:
                steps.append(Step(c0, c1, None))
            elif isinstance(region, Bands):
                bands = tuple(_relative(region.table[r].tolist(), start, stop, c0, c1) for r in refs)
                first, last, predicate = _band_predicate(bands, stop - start, c1 - c0, transposed, dtype, device)
                steps.append(Step(c0 + first, c0 + last, predicate))
            else:
                bits = np.unpackbits(runs.bitmaps[refs[0]], axis=1)[: stop - start, : c1 - c0]
                first, last, predicate = _predicate(bits.astype(bool), transposed, dtype, device)
                steps.append(Step(c0 + first, c0 + last, predicate))
        if steps:
            yield Block(start, stop, steps)


def _relative(row: list[int], r0: int, r1: int, c0: int, c1: int) -> Band:
    """A row of a table of bands, seen from the tile [r0, r1) x [c0, c1): equal tiles get equal bands wherever they lie."""
    q0, q1, k0, k1, lo, hi = row
    rows, columns = r1 - r0, c1 - c0
    edges = (min(max(q - r0, 0), rows) for q in (q0, q1)), (min(max(k - c0, 0), columns) for k in (k0, k1))
    return Band(*edges[0], *edges[1], *(min(max(d - c0 + r0, -rows), columns) for d in (lo, hi)))


@lru_cache(maxsize=8)  # causal masks and windows repeat two or three tiles; documents repeat none, and are not worth the memory
def _band_predicate(bands: tuple[Band, ...], rows: int, columns: int, transposed: bool, dtype: torch.dtype, device: torch.device):
    visible = np.zeros((rows, columns), dtype=bool)
    for band in bands:
        q0, q1, k0, k1, _, _ = band
        visible[q0:q1, k0:k1] |= within(band, q0, q1, k0, k1)
    return _predicate(visible, transposed, dtype, device)


def _predicate(visible: np.ndarray, transposed: bool, dtype: torch.dtype, device: torch.device) -> tuple[int, int, Predicate]:
    """(first, last, predicate of columns [first, last)): columns at either end that nobody sees are cut off."""
    seen = np.flatnonzero(visible.any(axis=0))
    first, last = int(seen[0]), int(seen[-1]) + 1
    visible = visible[:, first:last]
    pairs = torch.from_numpy(np.ascontiguousarray(visible.T if transposed else visible)).to(device)
    hide = torch.zeros(pairs.shape, dtype=dtype, device=device).masked_fill_(~pairs, -math.inf)
    return first, last, Predicate(pairs, hide)
