"""What a mask is: an immutable expression that resolves, for given lengths, to the visible (query, key) pairs.

`Mask` carries everything that users and backends call; `constructors.py` adds the constructors. Two masks that read the same are equal, hash
equally and share what was resolved for them.
"""

import operator
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.masks.arguments import check_count
from tilewise.masks.band_tables import INF, LONGEST, straight
from tilewise.masks.bands import Band, Bands
from tilewise.masks.bitmap import Bitmap, Recent, identity

KEPT = 256  # resolved masks that are kept of those of bands, and of those of bitmaps
KEPT_BITMAP_BYTES, KEPT_BAND_BYTES = 1 << 30, 64 << 20  # and how many bytes of them
DERIVED = 4  # times its table, about, is what a region of bands takes with all that is derived from it
OPERATIONS = {"&": operator.and_, "|": operator.or_, "-": operator.sub}


class Plane(NamedTuple):
    """The region that these batch entries and query heads use."""

    batch: range
    heads: range
    region: Bands | Bitmap


class Blocks(NamedTuple):
    """Rectangles of queries [q0, q1) and keys [k0, k1), one a document; int64 (n,) each. A mask is placed in all of them at once."""

    q0: ndarray
    q1: ndarray
    k0: ndarray
    k1: ndarray

    def diagonal(self, align: str) -> ndarray:
        """key - query on the main diagonal of each rectangle, drawn through its bottom right or top left corner."""
        return self.k1 - self.q1 if align == "bottom_right" else self.k0 - self.q0

    def bands(self, **columns) -> ndarray:
        """One band a rectangle, with these columns in place of its own."""
        values = {**self._asdict(), "lo": -INF, "hi": INF, **columns}
        return np.stack(np.broadcast_arrays(*(values[name] for name in Band._fields)), axis=1)


class Mask:
    """Which (query, key) pairs are visible. `a & b`, `a | b`, `a - b` and `~a` combine masks (`Full() - a` where torch.compile traces).

    kind: "full", "band" (one closed-form band), "runs" (any union of bands, or masks that differ by head) or "bitmap" (contains a Dense).
    source: the mask as text, or None where it holds a tensor (then see `text`).
    extent: (batch, heads) that the mask tells apart, 1 where it does not, or where there is one.
    alike: whether it is the same for every batch entry and head, however many there are.
    """

    kind: str
    source: str | None
    extent: tuple[int, int]
    alike: bool

    def _set(self, kind: str, source: str | None, extent: tuple[int, int] = (1, 1), alike: bool = True) -> None:
        for name, value in (("kind", kind), ("source", source), ("extent", extent), ("alike", alike and extent == (1, 1))):
            object.__setattr__(self, name, value)

    def __and__(self, other: "Mask") -> "Mask":
        return Combined("&", self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Combined("|", self, other) if isinstance(other, Mask) else NotImplemented

    def __sub__(self, other: "Mask") -> "Mask":
        return Combined("-", self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Combined("-", Full(), self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mask) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        tensors: list[Tensor] = []
        text = self.text(tensors)
        return re.sub(r"#(\d+)", lambda found: f"<{'x'.join(map(str, tensors[int(found[1])].shape))}>", text)

    def transpose(self) -> "Mask":
        """The same pairs with queries and keys exchanged, for lengths (seqlen_k, seqlen_q)."""
        return self.mask if isinstance(self, Transpose) else Transpose(self)

    def text(self, tensors: list[Tensor]) -> str:
        """The mask as an expression that `parse` reads; the tensors it holds are appended to `tensors` and written `#index`."""
        return self._write(tensors) if self.source is None else self.source

    def planes(self, seqlen_q: int, seqlen_k: int, batch: int = 1, heads: int = 1) -> tuple[Plane, ...]:
        """The region that each batch entry and query head uses; equal masks and lengths give the same objects back.

        Raises ShapeError where the mask does not fit these lengths, batch or heads, ValueError for negative ones and beyond 2**60.
        """
        given = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch, "heads": heads}
        sizes = [check_count(name, value) for name, value in given.items()]
        if sizes[0] > LONGEST or sizes[1] > LONGEST:
            raise ValueError(f"seqlen_q and seqlen_k must be at most 2**60, got {seqlen_q} and {seqlen_k}")
        return (_BITMAPS if self.kind == "bitmap" else _BANDS).get((self._key(), *sizes), lambda: _resolved(self, *sizes))

    def resolve(self, seqlen_q: int, seqlen_k: int) -> Bands | Bitmap:
        """The region of a mask that is the same for every batch entry and head; else ShapeError."""
        if not self.alike:
            raise ShapeError(f"mask {self} differs by batch entry or head {self.extent}; use planes() in place of resolve()")
        return self.planes(seqlen_q, seqlen_k)[0].region

    def pairs(self, seqlen_q: int, seqlen_k: int, batch: int = 1, heads: int = 1) -> int:
        """How many (query, key) pairs are visible, summed over `batch` entries and `heads` query heads. Exact, without a matrix."""
        return sum(len(plane.batch) * len(plane.heads) * plane.region.pairs() for plane in self.planes(seqlen_q, seqlen_k, batch, heads))

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """The mask as bool (seqlen_q, seqlen_k); (batch or 1, heads or 1, seqlen_q, seqlen_k) where it differs by batch entry or head."""
        planes = self.planes(seqlen_q, seqlen_k, *self.extent)
        out = torch.zeros(*self.extent, seqlen_q, seqlen_k, dtype=torch.bool, device="cpu")
        for batch, heads, region in planes:
            out[batch.start : batch.stop, heads.start : heads.stop] = torch.from_numpy(region.dense())
        return out[0, 0] if self.extent == (1, 1) else out

    def slices(self, seqlen_q: int, seqlen_k: int) -> tuple[ndarray, ndarray, ndarray]:
        """The mask as MagiAttention's slices: q_ranges (n, 2), k_ranges (n, 2), kinds (n,), all int64; see `Slices`."""
        region = self.resolve(seqlen_q, seqlen_k)
        if isinstance(region, Bitmap):
            raise ShapeError(f"mask {self} holds a dense tensor, which slices cannot describe; build it from masks of bands")
        pieces = straight(region.table)[1]
        return pieces[:, 0:2], pieces[:, 2:4], (pieces[:, 5] < INF) + 2 * (pieces[:, 4] > -INF)

    def show(self, seqlen_q: int, seqlen_k: int, **options) -> str | bytes:
        """A picture of the mask and its tiles; see `tilewise.masks.picture.show` for the options."""
        from tilewise.masks.picture import show

        return show(self, seqlen_q, seqlen_k, **options)

    def _repr_html_(self) -> str:
        """The picture that a notebook shows, at lengths that fit the mask."""
        from tilewise.masks.notebook import html

        return html(self)

    def _key(self):
        if self.source is not None:
            return self.source
        tensors: list[Tensor] = []
        return self.text(tensors), *map(identity, tensors)

    def _write(self, tensors: list[Tensor]) -> str:
        """The text of a mask that may hold tensors."""
        raise NotImplementedError

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        """The mask in every block at once: for masks of bands that are the same for every head."""
        return Bands.of(self._bands(blocks), seqlen_q, seqlen_k, disjoint=True)

    def _bands(self, blocks: Blocks) -> ndarray:
        """Disjoint bands, one or more a block."""
        raise NotImplementedError

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        whole = Blocks(*(np.array([edge]) for edge in (0, seqlen_q, 0, seqlen_k)))
        return (Plane(range(batch), range(heads), self._place(whole, seqlen_q, seqlen_k)),)


@dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    """Every query sees every key."""

    def __post_init__(self) -> None:
        self._set("full", "Full()")

    def _bands(self, blocks: Blocks) -> ndarray:
        return blocks.bands()


@dataclass(frozen=True, eq=False, repr=False)
class Combined(Mask):
    """`left & right`, `left | right` or `left - right`."""

    operation: str
    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        kinds = {self.left.kind, self.right.kind}
        held = self.left.source is None or self.right.source is None
        (batch, heads), (other_batch, other_heads) = self.left.extent, self.right.extent
        extent = joint_extent("batch", batch, other_batch), joint_extent("heads", heads, other_heads)
        kind = "bitmap" if "bitmap" in kinds else "runs"
        if self.operation == "&" and kinds <= {"full", "band"}:
            kind = "band" if "band" in kinds else "full"
        self._set(kind, None if held else self._write([]), extent, self.left.alike and self.right.alike)

    def __reduce__(self):
        return _combined, self._chain()

    def _chain(self, unwritten: bool = False) -> tuple[Mask, list[tuple[str, Mask]]]:
        """The leftmost mask (`unwritten`: the first with a known text), and each operation and mask that follow it.

        Everything below loops over this: chains of masks may be longer than the stack is deep.
        """
        steps, first = [(self.operation, self.right)], self.left
        while isinstance(first, Combined) and not (unwritten and first.source is not None):
            steps.append((first.operation, first.right))
            first = first.left
        return first, steps[::-1]

    def _write(self, tensors: list[Tensor]) -> str:
        first, steps = self._chain(unwritten=True)
        text, last = first.text(tensors), first.operation if isinstance(first, Combined) else None
        for operation, right in steps:
            left = text if last in (None, operation) else f"({text})"
            text, last = f"{left}{operation}{f'({right.text(tensors)})' if isinstance(right, Combined) else right.text(tensors)}", operation
        return text

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        first, steps = self._chain()
        placed = first._place(blocks, seqlen_q, seqlen_k)
        for operation, right in steps:
            placed = OPERATIONS[operation](placed, right._place(blocks, seqlen_q, seqlen_k))
        return placed

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        if self.kind != "bitmap" and self.alike:
            return super()._planes(seqlen_q, seqlen_k, batch, heads)
        if 0 in (batch, heads):  # nobody uses them, but there are planes, as of every mask
            planes = self.planes(seqlen_q, seqlen_k, max(batch, 1), max(heads, 1))
            return tuple(Plane(one.batch if batch else range(0), one.heads if heads else range(0), one.region) for one in planes)
        first, steps = self._chain()
        planes = first.planes(seqlen_q, seqlen_k, batch, heads)
        for operation, right in steps:
            others = right.planes(seqlen_q, seqlen_k, batch, heads)
            made: dict[tuple[int, int], Bands | Bitmap] = {}  # by the two regions, which many planes may share
            planes = tuple(plane for one in planes for two in others for plane in _overlap(operation, one, two, made))
        return planes


@dataclass(frozen=True, eq=False, repr=False)
class Transpose(Mask):
    """`mask` with queries and keys exchanged."""

    mask: Mask

    def __post_init__(self) -> None:
        self._set(self.mask.kind, None if self.mask.source is None else self._write([]), self.mask.extent, self.mask.alike)

    def _write(self, tensors: list[Tensor]) -> str:
        return f"Transpose({self.mask.text(tensors)})"

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        return self.mask._place(Blocks(blocks.k0, blocks.k1, blocks.q0, blocks.q1), seqlen_k, seqlen_q).transpose()

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        return tuple(plane._replace(region=plane.region.transpose()) for plane in self.mask.planes(seqlen_k, seqlen_q, batch, heads))


def joint_extent(name: str, *extents: int) -> int:
    """The number of batch entries or heads that masks used together tell apart; 1 is the same for all. ShapeError where they disagree."""
    given = [extent for extent in extents if extent != 1]  # tensors, where torch.jit.trace looks on: they are equal, but hash apart
    if any(extent != given[0] for extent in given[1:]):
        raise ShapeError(f"masks used together are made for different {name} sizes, {sorted(given)}; each must be that size or 1")
    return given[0] if given else 1


def _combined(first: Mask, steps: list[tuple[str, Mask]]) -> Mask:
    for operation, right in steps:
        first = Combined(operation, first, right)
    return first


def _overlap(operation: str, one: Plane, two: Plane, made: dict) -> list[Plane]:
    """What `operation` gives where both planes apply; nothing where no batch entry and head has both."""
    batch, heads = (range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one[:2], two[:2], strict=True))
    if not (batch and heads):
        return []
    regions = [one.region, two.region]
    key = id(one.region), id(two.region)
    if key in made:
        return [Plane(batch, heads, made[key])]
    if any(isinstance(region, Bitmap) for region in regions):
        regions = [region if isinstance(region, Bitmap) else Bitmap.of_bands(region) for region in regions]
    made[key] = OPERATIONS[operation](*regions)
    return [Plane(batch, heads, made[key])]


def _resolved(mask: Mask, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
    for name, extent, value in (("batch", mask.extent[0], batch), ("heads", mask.extent[1], heads)):
        if extent not in (1, value):
            raise ShapeError(f"the mask is made for {name} {extent}, the call has {name} {value}; they must agree (mask: {mask!r:.200})")
    return mask._planes(seqlen_q, seqlen_k, batch, heads)


def _bitmap_bytes(planes: tuple[Plane, ...]) -> int:
    return sum(plane.region.nbytes() for plane in planes if isinstance(plane.region, Bitmap))


def _band_bytes(planes: tuple[Plane, ...]) -> int:
    return DERIVED * sum(plane.region.table.nbytes for plane in planes if isinstance(plane.region, Bands))


def _drop(planes: tuple[Plane, ...]) -> None:
    """What was derived from regions refers to them in turn, and may be tables on a GPU: Python's collector never comes for their memory."""
    for plane in planes:
        flipped = plane.region.memo.get("transpose")
        plane.region.memo.clear()
        if flipped is not None:
            flipped.memo.clear()


# By text and content: a key that is the mask would keep its tensors alive.
_BITMAPS = Recent(KEPT, KEPT_BITMAP_BYTES, _bitmap_bytes, _drop)
_BANDS = Recent(KEPT, KEPT_BAND_BYTES, _band_bytes, _drop)
