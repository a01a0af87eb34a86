"""The rows, and heads and keys, of a mask that one process of several computes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.errors import ShapeError
from tilewise.masks.arguments import Ranges, check_count, is_integer, ranges
from tilewise.masks.bands import Bands
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.mask import Blocks, Mask, Plane


@dataclass(frozen=True, eq=False, repr=False)
class Part(Mask):
    """`mask` of a call of `seqlen_q` queries, for those in `rows` alone, end to end, against all keys of that call.

    rows: half-open ranges (first, last) of queries, (n, 2), ascending and apart. heads: (first, last, all): query heads first .. last - 1 of
    `all`; None: all. keys: (first, last, all) likewise, for a call on these keys alone, out of `all`; first is a multiple of 8.

    Row by row the call has the bits of the whole one where each range begins at a multiple of the backend's tile of queries, and all but the last
    range are made of whole tiles. Dropout drops the pairs that it would drop in the whole call. `alibi_slopes` count by the call's own lengths, as
    under any mask. With `keys` neither holds, and dropout is refused.
    """

    mask: Mask
    seqlen_q: int
    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int] | None = None
    keys: tuple[int, int, int] | None = None

    if TYPE_CHECKING:  # it takes more than it keeps

        def __init__(
            self,
            mask: Mask,
            seqlen_q: int,
            rows: Ranges,
            heads: tuple[int, int, int] | None = None,
            keys: tuple[int, int, int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise ValueError(f"Part: mask must be a mask, got {type(self.mask).__name__} {self.mask!r:.100}")
        object.__setattr__(self, "seqlen_q", check_count("Part: seqlen_q", self.seqlen_q))
        object.__setattr__(self, "rows", ranges("Part: rows", self.rows))
        end = 0
        for first, last in self.rows:
            if first < end or last > self.seqlen_q:
                raise ShapeError(f"Part: rows must ascend, be apart and end at {self.seqlen_q} at most, got {(first, last)} after {end}")
            end = last
        batch, heads = self.mask.extent
        if self.keys is not None:
            object.__setattr__(self, "keys", _range("keys", self.keys))
            if self.keys[0] % 8:
                raise ValueError(f"Part: keys must begin at a multiple of 8, got {self.keys}")
        if self.heads is not None:
            object.__setattr__(self, "heads", _range("heads", self.heads))
            first, last, every = self.heads
            if heads not in (1, every):
                raise ShapeError(f"Part: the mask is made for heads {heads}, but heads={self.heads} are of {every}; they must agree")
            heads = 1 if heads == 1 else last - first
        kind = "bitmap" if self.mask.kind == "bitmap" else "runs"
        self._set(kind, None if self.mask.source is None else self._write([]), (batch, heads), self.mask.alike)

    @property
    def length(self) -> int:
        """How many queries there are."""
        return sum(last - first for first, last in self.rows)

    def _write(self, tensors) -> str:
        heads = "" if self.heads is None else f",{self.heads}"
        keys = "" if self.keys is None else f",keys={self.keys}"
        return f"Part({self.mask.text(tensors)},{self.seqlen_q},{[list(each) for each in self.rows]}{heads}{keys})".replace(" ", "")

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        whole = (0,), (seqlen_q,), (0,), (seqlen_k,)
        region = self._planes(seqlen_q, seqlen_k, 1, 1)[0].region if tuple(map(tuple, blocks)) == whole else None
        if not isinstance(region, Bands):
            raise ShapeError(f"{self!r:.200} is of a whole call, not of a document in one; write Part(Documents(...), ...)")
        return region

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        if seqlen_q != self.length:
            raise ShapeError(f"Part: its rows are {self.length} queries, the call has seqlen_q {seqlen_q}; they must agree")
        first, last, every = (0, heads, heads) if self.heads is None else self.heads
        if heads == 1 and self.mask.extent[1] == 1:  # of a mask that is the same for all
            first, last, every = 0, 1, 1
        if last - first != heads:
            raise ShapeError(f"Part: heads={self.heads} are {last - first}, the call has heads {heads}; they must agree")
        cut: dict[int, Bands | Bitmap] = {}  # by region, which many planes may share
        planes, every_key = [], seqlen_k
        if self.keys is not None:
            if seqlen_k != self.keys[1] - self.keys[0]:
                raise ShapeError(
                    f"Part: keys={self.keys} are {self.keys[1] - self.keys[0]}, the call has seqlen_k {seqlen_k}; they must agree"
                )
            every_key = self.keys[2]
        for plane in self.mask.planes(self.seqlen_q, every_key, batch, every):
            begin, end = max(plane.heads.start, first), min(plane.heads.stop, last)
            if begin < end:
                if id(plane.region) not in cut:
                    region = rows_of(plane.region, self.rows)
                    cut[id(plane.region)] = region if self.keys is None else keys_of(region, *self.keys[:2])
                region = cut[id(plane.region)]
                planes.append(Plane(plane.batch, range(begin - first, end - first), region))
        return tuple(planes)


def rows_of(region: Bands | Bitmap, rows: tuple[tuple[int, int], ...]) -> Bands | Bitmap:
    """The pairs of these ranges of queries, end to end; bands in the order that they have in `region`, range by range."""
    if isinstance(region, Bitmap):
        bits = [region.bits[first:last] for first, last in rows]
        return Bitmap(np.concatenate([region.bits[:0], *bits]), sum(map(len, bits)), region.seqlen_k)
    length = sum(last - first for first, last in rows)
    tables, start = [region.table[:0]], 0
    for first, last in rows:
        tables.append(region.rows(first, last).shift(start - first, 0, length, region.seqlen_k).table)
        start += last - first
    return Bands(np.concatenate(tables), length, region.seqlen_k)


def keys_of(region: Bands | Bitmap, first: int, last: int) -> Bands | Bitmap:
    """The pairs of these keys; first is a multiple of 8."""
    if isinstance(region, Bitmap):
        bits = region.bits[:, first // 8 : -(-last // 8)].copy()
        if last % 8:
            bits[:, -1] &= 0xFF << (8 - last % 8) & 0xFF
        return Bitmap(bits, region.seqlen_q, last - first)
    return region.crop(0, region.seqlen_q, first, last).shift(0, -first, region.seqlen_q, last - first)


def _range(name: str, given: Any) -> tuple[int, int, int]:
    if not (isinstance(given, tuple | list) and len(given) == 3 and all(map(is_integer, given)) and 0 <= given[0] < given[1] <= given[2]):
        raise ValueError(f"Part: {name} must be (first, last, all) with 0 <= first < last <= all, or None, got {given!r:.100}")
    first, last, every = map(int, given)
    return first, last, every
