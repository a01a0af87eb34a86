"""The mask language: what each constructor means. `a & b`, `a | b`, `a - b` and `~a` combine any two masks.

Every mask here is made of bands: a handful of rectangles cut by diagonals (`bands.py`), placed in all documents at once.
`dense.py` has the masks that are not.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.errors import ShapeError
from tilewise.masks.arguments import (
    Integers,
    Ranges,
    by_heads,
    check_count,
    check_fits,
    check_offset,
    cu_seqlens,
    integers,
    placed,
    ranges,
    window,
)
from tilewise.masks.band_tables import INF, expand
from tilewise.masks.bands import Bands
from tilewise.masks.bitmap import Recent
from tilewise.masks.dense import Dense, Packed
from tilewise.masks.mask import Blocks, Full, Mask, Plane, Transpose, joint_extent
from tilewise.masks.padding import Padding
from tilewise.masks.part import Part
from tilewise.masks.text import SHORT, evaluate
from tilewise.masks.trees import DeviceTree, PrefixTree

LONG_BYTES = 32 << 20  # of masks with long texts
A_CHARACTER = 12  # bytes a mask takes, about, for each character of its text


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Query i sees key j iff j <= p, its position p = i + seqlen_k - seqlen_q + offset (align="top_left", torch's convention: p = i + offset).

    A prefill in pieces over a cache with its first n slots filled, the last of them by the piece: `Causal("top_left", n - seqlen_q)`.
    """

    align: str = "bottom_right"
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", check_offset("Causal: offset", self.offset))
        self._set("band", f"Causal({placed(self.align, self.offset)})")

    def _bands(self, blocks: Blocks) -> ndarray:
        return blocks.bands(hi=blocks.diagonal(self.align) + self.offset)


@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Mask):
    """Query i sees key j iff p - left <= j <= p + right; its position p is as in `Causal`, and None is unbounded.

    A window that excludes the query's own position has a negative bound: the keys p - 9 .. p - 3 are `SlidingWindow(9, -3)`, which is
    `SlidingWindow(6, 0, offset=-3)`, and reads so. left + right must not be negative.
    """

    left: int | None
    right: int | None
    align: str = "bottom_right"
    offset: int = 0

    def __post_init__(self) -> None:
        check_offset("SlidingWindow: offset", self.offset)
        left, right, moved = window(self.left, self.right)
        for name, value in (("left", left), ("right", right), ("offset", check_offset("SlidingWindow: offset", self.offset + moved))):
            object.__setattr__(self, name, value)
        place = placed(self.align, self.offset)
        kind = "full" if self.left is None and self.right is None else "band"
        self._set(kind, f"SlidingWindow({self.left},{self.right}{',' if place else ''}{place})")

    def _bands(self, blocks: Blocks) -> ndarray:
        diagonal = blocks.diagonal(self.align) + self.offset
        lo = -INF if self.left is None else diagonal - min(self.left, INF // 2)
        return blocks.bands(lo=lo, hi=INF if self.right is None else diagonal + min(self.right, INF // 2))


@dataclass(frozen=True, eq=False, repr=False)
class FirstKeys(Mask):
    """Every query sees keys 0 .. n-1."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_count("FirstKeys: n", self.n))
        self._set("runs", f"FirstKeys({self.n})")

    def _bands(self, blocks: Blocks) -> ndarray:
        return blocks.bands(k1=np.minimum(blocks.k1, blocks.k0 + min(self.n, INF)))


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Mask):
    """Causal (bottom right), and keys 0 .. n-1 for everyone."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_count("PrefixLM: n", self.n))
        self._set("runs", f"PrefixLM({self.n})")

    def _bands(self, blocks: Blocks) -> ndarray:
        prefix = np.minimum(blocks.k1, blocks.k0 + min(self.n, INF))
        return np.concatenate([blocks.bands(k1=prefix), blocks.bands(k0=prefix, hi=blocks.diagonal("bottom_right"))])


@dataclass(frozen=True, eq=False, repr=False)
class Chunks(Mask):
    """Query i at position p = i + seqlen_k - seqlen_q sees key j iff both are in the same chunk of n keys."""

    n: int

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "n", check_count(f"{name}: n", self.n, least=1))
        self._set("runs", f"{name}({self.n})")

    def _bands(self, blocks: Blocks) -> ndarray:
        n = min(self.n, INF)
        owner, chunk = expand(-(-(blocks.k1 - blocks.k0) // n))
        blocks, diagonal = Blocks(*(edge[owner] for edge in blocks)), blocks.diagonal("bottom_right")[owner]
        k0 = blocks.k0 + chunk * n
        k1 = np.minimum(k0 + n, blocks.k1)
        rows = {"q0": np.maximum(blocks.q0, k0 - diagonal), "q1": np.minimum(blocks.q1, k0 + n - diagonal)}
        return blocks.bands(**rows, k0=k0, k1=k1, hi=self._last(diagonal))

    def _last(self, diagonal: ndarray) -> ndarray | int:
        """The largest key - query that is visible, where `diagonal` is that of equal positions."""
        return INF


@dataclass(frozen=True, eq=False, repr=False)
class ChunkedCausal(Chunks):
    """Query i at position p = i + seqlen_k - seqlen_q sees key j iff j <= p and both are in the same chunk of n keys (Llama 4)."""

    def _last(self, diagonal: ndarray) -> ndarray:
        return diagonal


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Packed documents: tokens see only their own document, and there what `inner` allows for that document's lengths (None: everything).

    cu_seqlens_q, cu_seqlens_k: the starts of the documents and the end of the last one, (documents + 1,) integers from 0 up (list, array or
    tensor); keys follow the queries where cu_seqlens_k is None. Tokens beyond the last document see nothing and are seen by nobody.
    """

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...] | None = None
    inner: Mask | None = None

    if TYPE_CHECKING:  # it takes more than it keeps

        def __init__(self, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None, inner: Mask | None = None) -> None: ...

    def __post_init__(self) -> None:
        cu_q = cu_seqlens("cu_seqlens_q", self.cu_seqlens_q)
        cu_k = cu_q if self.cu_seqlens_k is None else cu_seqlens("cu_seqlens_k", self.cu_seqlens_k)
        if len(cu_q) != len(cu_k):
            raise ShapeError(
                f"Documents: cu_seqlens_k describes {len(cu_k) - 1} documents and cu_seqlens_q {len(cu_q) - 1}; "
                "they must describe the same documents (an absent document has length 0)"
            )
        inner = Full() if self.inner is None else self.inner  # not a default value: torch.compile traces its construction only
        check_inner(inner)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "cu_seqlens_q", cu_q)
        object.__setattr__(self, "cu_seqlens_k", cu_k)
        keys = "" if cu_k == cu_q else f",{list(cu_k)}"
        among = "" if inner.kind == "full" else f",inner={inner.source}"
        self._set("runs", f"Documents({list(cu_q)}{keys}{among})".replace(" ", ""))

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        assert self.cu_seqlens_k is not None and self.inner is not None  # since __post_init__
        check_fits("Documents: cu_seqlens_q", self.cu_seqlens_q[-1], "seqlen_q", blocks.q1 - blocks.q0)
        check_fits("Documents: cu_seqlens_k", self.cu_seqlens_k[-1], "seqlen_k", blocks.k1 - blocks.k0)
        cu_q, cu_k = np.array(self.cu_seqlens_q), np.array(self.cu_seqlens_k)
        q, k = blocks.q0[:, None] + cu_q, blocks.k0[:, None] + cu_k
        return self.inner._place(Blocks(q[:, :-1].ravel(), q[:, 1:].ravel(), k[:, :-1].ravel(), k[:, 1:].ravel()), seqlen_q, seqlen_k)


def check_inner(inner: Mask) -> None:
    if not isinstance(inner, Mask):
        raise ValueError(f"Documents: inner must be a mask, got {type(inner).__name__} {inner!r}")
    if inner.kind == "bitmap" or not inner.alike or inner.source is None:
        raise ValueError(
            f"Documents: inner must be made of bands and be the same for every head, got {inner}; "
            "write Documents(...) & Dense(...), or PerHead({heads: Documents(...)})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class DeviceDocuments(Mask):
    """`Documents` with cu_seqlens (documents + 1,) in tensors that nobody has read: what attention_varlen asks for.

    seqused_k: (documents,), how many keys of each document there are to see; the others are seen by nobody. None: all.

    Reading them waits for their device. A backend that can leave them there calls `check`; for all others this is the mask that it reads as.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    inner: Mask
    seqused_k: Tensor | None = None

    def __post_init__(self) -> None:
        check_inner(self.inner)
        self._set("runs", None)

    def read(self) -> Documents:
        """The mask with the values that the tensors hold now. Keys that are not used are documents without queries, after each of the others."""
        self._check_used()
        return Documents(*self.ends(), inner=self.inner)

    def ends(self) -> tuple[Tensor, Tensor]:
        """cu_seqlens of `read`, where the tensors are: (documents + 1,), or (2 documents + 1,) each with `seqused_k`."""
        if self.seqused_k is None:
            return self.cu_seqlens_q, self.cu_seqlens_k
        starts, used = self.cu_seqlens_k[:-1], self.seqused_k.to(self.cu_seqlens_k)
        keys = torch.cat((torch.stack((starts, starts + used), dim=1).flatten(), self.cu_seqlens_k[-1:]))
        return self.cu_seqlens_q.repeat_interleave(2)[1:], keys

    def documents(self) -> list[tuple[int, int, int, int]]:
        """(q0, q1, k0, k1) of each document, with the keys that are used."""
        read, step = self.read(), 1 if self.seqused_k is None else 2
        assert read.cu_seqlens_k is not None  # since __post_init__
        pairs = [*zip(pairwise(read.cu_seqlens_q), pairwise(read.cu_seqlens_k), strict=True)]
        return [(q0, q1, k0, k1) for (q0, q1), (k0, k1) in pairs[::step]]

    def check(self, seqlen_q: int, seqlen_k: int) -> None:
        """Raise what `read` and `planes` would; the values are read once, and again after torch's operators wrote to the tensors."""
        check_lengths(self.cu_seqlens_q, self.cu_seqlens_k, seqlen_q, seqlen_k)
        self._check_used()

    def longest(self) -> int:
        """Queries of the longest document as the tensor was when it was last checked; 0 where it never was."""
        return (_ENDS.get(self.cu_seqlens_q) or (None, 0, 0))[2]

    def _check_used(self) -> None:
        """Raise ShapeError unless as many keys as are used are there; read once, and again after a write."""
        if self.seqused_k is None:
            return
        version = _version(self.seqused_k), _version(self.cu_seqlens_k)
        if None in version or _USED.get(self.seqused_k) != version:
            ends, used = cu_seqlens("cu_seqlens_k", self.cu_seqlens_k), self.seqused_k.tolist()
            lengths = [end - start for start, end in pairwise(ends)]
            for document, (length, count) in enumerate(zip(lengths, used, strict=True)):
                if not 0 <= count <= length:
                    raise ShapeError(f"seqused_k[{document}] is {count}; it must be between 0 and {length}, the document's keys")
            _USED[self.seqused_k] = version

    def planes(self, seqlen_q: int, seqlen_k: int, batch: int = 1, heads: int = 1) -> tuple[Plane, ...]:
        return self.read().planes(seqlen_q, seqlen_k, batch, heads)

    def _key(self):
        return self.read()._key()

    def _write(self, tensors: list[Tensor]) -> str:
        tensors += [self.cu_seqlens_q, self.cu_seqlens_k]
        used = ""
        if self.seqused_k is not None:
            tensors.append(self.seqused_k)
            used = f",#{len(tensors) - 1}"
        first = len(tensors) - 2 - bool(used)
        return f"DeviceDocuments(#{first},#{first + 1},{self.inner.source}{used})"

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        return self.read()._place(blocks, seqlen_q, seqlen_k)


def check_lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqlen_q: int, seqlen_k: int) -> None:
    """`DeviceDocuments.check`, of its tensors."""
    for axis, seqlen, tensor in (("q", seqlen_q, cu_seqlens_q), ("k", seqlen_k, cu_seqlens_k)):
        if axis == "k" and tensor is cu_seqlens_q and seqlen_q == seqlen_k:
            return
        if (end := _last(f"cu_seqlens_{axis}", tensor)) > seqlen:
            check_fits(f"Documents: cu_seqlens_{axis}", end, f"seqlen_{axis}", np.array([seqlen]))


# cu_seqlens -> (their version and address when they were read, the last one, the longest document's length)
_ENDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_USED: WeakTensorKeyDictionary = (
    WeakTensorKeyDictionary()
)  # seqused_k -> the versions and addresses of it and of cu_seqlens_k when it was right


def longest_of(cu_seqlens: Iterable[int]) -> int:
    """The longest document's length."""
    return max((end - start for start, end in pairwise(cu_seqlens)), default=0)


def _version(tensor: Tensor) -> tuple[int, int] | None:
    """What changes when torch's operators write to the tensor; None where it counts no writes."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


_LATEST: dict[
    str, tuple[Callable[[], Tensor | None], tuple[int, int], int]
] = {}  # by name: a reference to the tensor, and what _ENDS has of it


def _last(name: str, tensor: Tensor) -> int:
    """The last of checked cu_seqlens."""
    latest, seen, end = _LATEST.get(name, (lambda: None, None, 0))
    if latest() is tensor and seen == (tensor._version, tensor.data_ptr()):
        return end
    version = _version(tensor)
    seen, end, _ = _ENDS.get(tensor) or (None, 0, 0)
    if version is None or seen != version:
        ends = cu_seqlens(name, tensor)
        end = ends[-1]
        if version is not None:
            _ENDS[tensor] = version, end, longest_of(ends)
    if version is not None:
        _LATEST[name] = weakref.ref(tensor), version, end
    return end


@dataclass(frozen=True, eq=False, repr=False)
class Slices(Mask):
    """MagiAttention's slices: the union of rectangles q_ranges[i] x k_ranges[i], each cut according to kinds[i]; overlaps count once.

    q_ranges, k_ranges: (n, 2) half-open ranges of integers. kinds: (n,) of 0 full, 1 causal through the bottom right corner, 2 inverse
    causal (j - k0 >= i - q0) through the top left corner, 3 both.
    """

    q_ranges: Ranges
    k_ranges: Ranges
    kinds: Integers

    def __post_init__(self) -> None:
        for name in ("q_ranges", "k_ranges"):
            object.__setattr__(self, name, ranges(f"Slices: {name}", getattr(self, name)))
        object.__setattr__(self, "kinds", tuple(integers("Slices: kinds", self.kinds, 1)))
        if not len(self.q_ranges) == len(self.k_ranges) == len(self.kinds):
            raise ShapeError(
                f"Slices: q_ranges, k_ranges and kinds must have one entry a slice, "
                f"got {len(self.q_ranges)}, {len(self.k_ranges)} and {len(self.kinds)}"
            )
        for place, kind in enumerate(self.kinds):
            if kind not in (0, 1, 2, 3):
                raise ValueError(f"Slices: kinds[{place}] is {kind}; expected 0 full, 1 causal, 2 inverse causal or 3 both")
        q, k, kinds = [list(map(list, self.q_ranges)), list(map(list, self.k_ranges)), list(self.kinds)]
        self._set("runs", f"Slices({q},{k},{kinds})".replace(" ", ""))

    @classmethod
    def from_mask(cls, mask: Mask, seqlen_q: int, seqlen_k: int) -> "Slices":
        """The slices that are `mask` at these lengths; at most three a band, and they do not overlap."""
        if not isinstance(mask, Mask):
            raise ValueError(f"Slices.from_mask: mask must be a mask, got {type(mask).__name__} {mask!r:.100}")
        return cls(*mask.slices(seqlen_q, seqlen_k))

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        q, k = np.array(self.q_ranges, np.int64).reshape(-1, 2), np.array(self.k_ranges, np.int64).reshape(-1, 2)
        check_fits("Slices: q_ranges", int(q.max(initial=0)), "seqlen_q", blocks.q1 - blocks.q0)
        check_fits("Slices: k_ranges", int(k.max(initial=0)), "seqlen_k", blocks.k1 - blocks.k0)
        kinds = np.tile(np.array(self.kinds, np.int64), len(blocks.q0))
        (q0, q1), (k0, k1) = ((start[:, None, None] + ranges).reshape(-1, 2).T for start, ranges in ((blocks.q0, q), (blocks.k0, k)))
        table = Blocks(q0, q1, k0, k1).bands(lo=np.where(kinds & 2, k0 - q0, -INF), hi=np.where(kinds & 1, k1 - q1, INF))
        return Bands.of(table, seqlen_q, seqlen_k)


@dataclass(frozen=True, eq=False, repr=False)
class PerHead(Mask):
    """Another mask for each half-open range of query heads: `PerHead({(0, 4): Causal(), (4, 8): SlidingWindow(127, 0)})`.

    The ranges cover heads 0 .. heads_q - 1 exactly once.
    """

    masks: tuple[tuple[tuple[int, int], Mask], ...]

    if TYPE_CHECKING:  # it takes more than it keeps

        def __init__(self, masks: Mapping[tuple[int, int], Mask] | Sequence[tuple[tuple[int, int], Mask]]) -> None: ...

    def __post_init__(self) -> None:
        masks = tuple(by_heads(self.masks))
        end = 0
        for (first, last), mask in masks:
            if not isinstance(mask, Mask) or mask.extent[1] != 1:
                raise ValueError(f"PerHead: heads {(first, last)} need a mask that is the same for every head, got {mask!r}")
            if first != end or last <= first:
                raise ValueError(
                    f"PerHead: the head ranges {[heads for heads, _ in masks]} must be half open and cover every head once from 0 on; "
                    f"expected a range that starts at {end}, got {(first, last)}"
                )
            end = last
        if not masks:
            raise ValueError("PerHead: no head ranges given; expected {(first, last): mask, ...}")
        object.__setattr__(self, "masks", masks)
        held = any(mask.source is None for _, mask in masks)
        kind = "bitmap" if any(mask.kind == "bitmap" for _, mask in masks) else "runs"
        extent = joint_extent("batch", *(mask.extent[0] for _, mask in masks)), end
        self._set(kind, None if held else self._write([]), extent, alike=False)

    def _write(self, tensors: list[Tensor]) -> str:
        return "PerHead({" + ",".join(f"({first},{last}):{mask.text(tensors)}" for (first, last), mask in self.masks) + "})"

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        if heads != self.extent[1]:
            raise ShapeError(f"PerHead: the head ranges cover {self.extent[1]} heads, the call has heads {heads}; they must agree")
        return tuple(
            plane._replace(heads=range(first, last))
            for (first, last), mask in self.masks
            for plane in mask.planes(seqlen_q, seqlen_k, batch, last - first)
        )


CONSTRUCTORS = {
    kind.__name__: kind
    for kind in (
        Full,
        Causal,
        SlidingWindow,
        PrefixLM,
        PrefixTree,
        FirstKeys,
        ChunkedCausal,
        Chunks,
        Documents,
        Slices,
        Dense,
        Packed,
        Padding,
        Part,
        PerHead,
        Transpose,
        DeviceDocuments,
        DeviceTree,
    )
}


def parse(text: str, tensors: Iterable[Tensor] = ()) -> Mask:
    """The mask that `text` describes (see `Mask.text`); `#i` stands for tensors[i] wherever a tensor or a list of integers may be given.

    Raises ValueError where the text is not a mask expression.
    """
    tensors = tuple(tensors)
    if tensors:
        return _evaluated(text, tensors)
    return _plain(text) if len(text) <= SHORT else _LONG.get(text, lambda: _evaluated(text, ()))


def _evaluated(text: str, tensors: tuple[Tensor, ...]) -> Mask:
    mask = evaluate(text, CONSTRUCTORS, tensors)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask text {text!r} is not a mask but {mask!r:.100}; expected an expression of {', '.join(CONSTRUCTORS)}")
    return mask


@lru_cache(maxsize=1024)
def _plain(text: str) -> Mask:
    return _evaluated(text, ())


# Masks with a thousand documents, which may be others in every step.
_LONG = Recent(1024, LONG_BYTES, lambda mask: A_CHARACTER * len(mask.source))
