"""Global memory: what a call's tensors lie in, and nothing else; and the boxes that the copy engine reads and writes in it."""

import ctypes
import math
import struct
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from torch import Tensor

LINE = 16  # bytes; views begin at multiples of it
ITEMS = {0: 1, 6: 2, 10: 2}  # bytes of a number of CUtensorMapDataType: uint8, fp16, bf16


class Fault(RuntimeError):
    """What a GPU would not do, or does without telling."""


class Region:
    """Bytes from `low` up to `high`."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high, self.base = low, high, low // LINE * LINE
        self.views = {}

    def view(self, kind) -> np.ndarray:
        """From `base` on."""
        if kind not in self.views:
            n = -(-(self.high - self.base) // LINE) * LINE
            self.views[kind] = np.frombuffer((ctypes.c_uint8 * n).from_address(self.base), kind)
        return self.views[kind]


class Memory:
    """The tensors that a call was given. Whatever else is read or written is a Fault."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.regions: list[Region] = []
        for low, high in sorted(_span(x) for x in tensors if x.numel()):
            if self.regions and low <= self.regions[-1].high:
                self.regions[-1] = Region(self.regions[-1].low, max(high, self.regions[-1].high))
            else:
                self.regions.append(Region(low, high))
        self._last = self.regions[0]

    def region(self, low: int, high: int) -> Region | None:
        """The one that holds the bytes from `low` up to `high`."""
        if not (self._last.low <= low and high <= self._last.high):
            found = [each for each in self.regions if each.low <= low and high <= each.high]
            if not found:
                return None
            self._last = found[0]
        return self._last

    def at(self, addresses: np.ndarray, kind, n: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(which, view, where) for all of `addresses`, each of n numbers."""
        size = n * kind.itemsize
        if (addresses & np.uint64(size - 1)).any():
            raise Fault(f"{addresses[(addresses & np.uint64(size - 1)) != 0][0]:#x} is no multiple of the {size} bytes that are accessed")
        region = self.region(int(addresses.min()), int(addresses.max()) + size)
        if region:
            return [(slice(None), region.view(kind), (addresses - np.uint64(region.base)).astype(np.int64) // kind.itemsize)]
        if len(addresses) == 1:
            raise Fault(f"{size} bytes at {int(addresses[0]):#x} are in no tensor of the call")
        return [(slice(i, i + 1), *self.at(addresses[i : i + 1], kind, n)[0][1:]) for i in range(len(addresses))]

    def bytes(self, address: int, n: int) -> np.ndarray:
        region = self.region(address, address + n)
        if region is None:
            raise Fault(f"{n} bytes at {address:#x} are in no tensor of the call")
        return region.view(np.dtype("u1"))[address - region.base : address - region.base + n]


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class TensorMap(NamedTuple):
    """A tensor of 8- or 16-bit numbers, and the box of it that is copied at a time: what the host wrote for the copy engine, as the DSL packs it.

    NVIDIA documents what makes such a map (cuTensorMapEncodeTiled), not what it looks like; this was found by trying.
    """

    base: int
    sizes: tuple[int, ...]  # in bytes the first, then in numbers of it; the innermost comes first
    steps: tuple[int, ...]  # bytes, from the second dimension on
    box: tuple[int, ...]  # as sizes
    swizzled_bytes: int  # of a row of the box in shared memory; 16: it is not swizzled
    item: int = 2  # bytes of a number

    @classmethod
    def of(cls, packed: bytes) -> "TensorMap":
        words = struct.unpack("<16I", packed[:64])
        dims, kind, swizzle = (words[2] >> 4 & 7) + 1, words[2] >> 7 & 15, words[2] >> 13 & 3
        if kind not in ITEMS or words[6] or dims < 2:
            raise Fault(f"a tensor map of another kind: {[hex(word) for word in words]}")
        item = ITEMS[kind]
        sizes, box = ([item * (x[0] + 1), *(each + 1 for each in x[1:dims])] for x in (words[8:13], packed[55:60]))
        steps = tuple(16 * step for step in words[3 : 2 + dims])
        return cls(words[0] | words[1] << 32, tuple(sizes), steps, tuple(box), 16 << swizzle, item)

    @property
    def row(self) -> int:
        """Bytes."""
        return self.box[0]

    @property
    def bytes(self) -> int:
        return math.prod(self.box)

    def rows(self, corner: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """(address, first, n) of every row of the box there: the n bytes of it from `first` on are the tensor's, from `address` on."""
        start = self.item * corner[0]
        first = max(0, -start)
        n = max(0, min(self.box[0], self.sizes[0] - start) - first)
        for offset in product(*map(range, reversed(self.box[1:]))):
            place = [c + i for c, i in zip(corner[1:], reversed(offset), strict=True)]
            inside = all(0 <= p < size for p, size in zip(place, self.sizes[1:], strict=True))
            yield self.base + start + first + sum(p * step for p, step in zip(place, self.steps, strict=True)), first, n if inside else 0


def swizzled(addresses: np.ndarray, row_bytes: int) -> np.ndarray:
    """Where bytes of shared memory go: 16-byte pieces of a row change places, by the number of the 128 bytes that it lies in (of 8, 4 or 2)."""
    return addresses ^ (addresses >> 7 & row_bytes // 16 - 1) << 4
