"""A set of (query, key) pairs as packed bits: what a mask becomes when no few bands describe it."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.errors import ShapeError, UnsupportedError, check_capture
from tilewise.masks.bands import Bands

MAX_PAIRS = 1 << 32  # 64k x 64k, half a GiB of bits
STRIP = 1024  # rows or bytes unpacked at a time


@dataclass(frozen=True, eq=False)
class Bitmap:
    """A set of pairs in a seqlen_q x seqlen_k frame: `bits` uint8 (seqlen_q, ceil(seqlen_k / 8)), key j in byte j // 8.

    The bit order is numpy.packbits': key 0 is the most significant bit of byte 0. Bits beyond seqlen_k are zero.
    """

    bits: ndarray
    seqlen_q: int
    seqlen_k: int
    memo: dict = field(default_factory=dict, repr=False)  # what others derive from this object: its transpose, its runs of tiles

    def __post_init__(self) -> None:
        if self.seqlen_q * self.seqlen_k > MAX_PAIRS:
            raise UnsupportedError(
                f"a mask without structure of {self.seqlen_q} x {self.seqlen_k} pairs would take "
                f"{self.seqlen_q * self.seqlen_k / 2**33:.1f} GiB of bits; at most 65536 x 65536 pairs are held as bits: "
                "describe the mask by bands (Causal, SlidingWindow, Documents, Slices and & | - ~)"
            )
        self.bits.setflags(write=False)

    @classmethod
    def of(cls, dense: ndarray) -> "Bitmap":
        """The pairs where `dense` (seqlen_q, seqlen_k) is true."""
        return cls(np.packbits(dense, axis=1), *dense.shape)

    @classmethod
    def of_bands(cls, bands: Bands) -> "Bitmap":
        """The pairs of `bands`, packed a strip of rows at a time."""
        bits = np.empty((bands.seqlen_q, -(-bands.seqlen_k // 8)), dtype=np.uint8)
        for i0 in range(0, bands.seqlen_q, STRIP):
            i1 = min(i0 + STRIP, bands.seqlen_q)
            bits[i0:i1] = np.packbits(bands.rows(i0, i1).shift(-i0, 0, i1 - i0, bands.seqlen_k).dense(), axis=1)
        return cls(bits, bands.seqlen_q, bands.seqlen_k)

    def __reduce__(self):
        return Bitmap, (np.array(self.bits), self.seqlen_q, self.seqlen_k)

    def __and__(self, other: "Bitmap") -> "Bitmap":
        return self._with(self.bits & self._same_frame(other))

    def __or__(self, other: "Bitmap") -> "Bitmap":
        return self._with(self.bits | self._same_frame(other))

    def __sub__(self, other: "Bitmap") -> "Bitmap":
        return self._with(self.bits & ~self._same_frame(other))

    def rows(self, i0: int, i1: int) -> ndarray:
        """The rows of queries i0 <= q < i1 as booleans (i1 - i0, seqlen_k)."""
        return np.unpackbits(self.bits[i0:i1], axis=1, count=self.seqlen_k).view(bool)

    def transpose(self) -> "Bitmap":
        """The same pairs seen from the keys; the object is kept, and its own transpose is this one."""
        flipped = self.memo.get("transpose")
        if flipped is None:
            columns = np.empty((self.seqlen_k, -(-self.seqlen_q // 8)), dtype=np.uint8)
            for byte in range(0, self.bits.shape[1], STRIP // 8):
                strip = np.unpackbits(self.bits[:, byte : byte + STRIP // 8], axis=1)[:, : self.seqlen_k - 8 * byte]
                columns[8 * byte : 8 * byte + strip.shape[1]] = np.packbits(strip.T, axis=1)
            flipped = Bitmap(columns, self.seqlen_k, self.seqlen_q)
            flipped.memo["transpose"] = self
            self.memo["transpose"] = flipped
        return flipped

    def pairs(self) -> int:
        """How many pairs the set holds."""
        return int(sum(np.bitwise_count(self.bits[i : i + STRIP]).sum(dtype=np.int64) for i in range(0, self.seqlen_q, STRIP)))

    def dense(self) -> ndarray:
        """The set as a boolean matrix (seqlen_q, seqlen_k)."""
        return self.rows(0, self.seqlen_q)

    def nbytes(self) -> int:
        """The bytes of the bits, of the transpose's, and of the tiles made from either."""
        made = list(self.memo.values())
        flipped = [other for other in made if isinstance(other, Bitmap)]
        tiles = [runs for one in (self, *flipped) for runs in list(one.memo.values()) if not isinstance(runs, Bitmap)]
        return sum(one.bits.nbytes for one in (self, *flipped)) + sum(runs.bitmaps.nbytes for runs in tiles)

    def _with(self, bits: ndarray) -> "Bitmap":
        return Bitmap(bits, self.seqlen_q, self.seqlen_k)

    def _same_frame(self, other: "Bitmap") -> ndarray:
        if (self.seqlen_q, self.seqlen_k) != (other.seqlen_q, other.seqlen_k):
            raise ShapeError(
                f"two bitmaps have the lengths {self.seqlen_q} x {self.seqlen_k} and {other.seqlen_q} x {other.seqlen_k}; they must agree"
            )
        return other.bits


class Content(NamedTuple):
    """A boolean tensor as packed bits (batch, heads, seqlen_q, ceil(seqlen_k / 8)), and a digest of shape and bits."""

    bits: ndarray
    digest: bytes


_READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> (its version and address when it was read, Content or integers)


def content(tensor: Tensor) -> Content:
    """The bits of a bool tensor (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), or of a uint8 tensor that is packed already.

    They are read once, and again after the tensor was written to; each time where it is an inference tensor, which counts no writes.
    """
    if tensor.is_meta:
        raise ShapeError("a mask tensor on the meta device has no values; pass one on a real device")

    def read() -> Content:
        given = tensor.detach().cpu().numpy()
        given = given.reshape((1,) * (4 - given.ndim) + given.shape)
        bits = given.copy() if given.dtype == np.uint8 else _packed(given)
        return Content(bits, _digest(tensor, bits))

    return _once(tensor, read)


def values(tensor: Tensor) -> tuple:
    """The integers of an int32 or int64 tensor (n,), or the rows of one of more dimensions; read as `content` reads."""
    return _once(tensor, lambda: tuple(tensor.tolist()))


def identity(tensor: Tensor) -> bytes | tuple[int, ...]:
    """Equal for tensors that mean the same in a mask."""
    return content(tensor).digest if tensor.dtype in (torch.bool, torch.uint8) else values(tensor)


def _once(tensor: Tensor, read: Callable[[], Any]) -> Any:
    """What `read` gives, kept until the tensor is written to."""
    version = None if tensor.is_inference() else (tensor._version, tensor.data_ptr())
    seen, found = _READ.get(tensor) or (None, None)
    if version is None or seen != version:
        check_capture(
            tensor, "a mask that holds a tensor", "call once before the capture, which then keeps the tensor's values of that time"
        )
        found = read()
        if version is not None:
            _READ[tensor] = (version, found)
    return found


def _packed(dense: ndarray) -> ndarray:
    """Bits along the last dimension, matrix by matrix: packing copies what is not contiguous, so not all at once."""
    bits = np.empty((*dense.shape[:3], -(-dense.shape[3] // 8)), dtype=np.uint8)
    for at in np.ndindex(*dense.shape[:2]):
        bits[at] = np.packbits(dense[at], axis=1)
    return bits


def _digest(tensor: Tensor, bits: ndarray) -> bytes:
    state = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    state.update(bits.data)
    return state.digest()


class Recent:
    """Up to `count` values made lately, by key, of `limit` bytes together; the one unused for longest goes first.

    The newest stays whatever its size. `size` gives a value's bytes, which may grow with what is derived from it; `drop` is told which one goes.
    """

    def __init__(self, count: int, limit: int, size: Callable[[Any], int], drop: Callable[[Any], None] = lambda _: None) -> None:
        self.count, self.limit, self.size, self.drop = count, limit, size, drop
        self.values: OrderedDict = OrderedDict()
        self.lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of `key`, made where it is not there."""
        with self.lock:
            if key in self.values:
                self.values.move_to_end(key)
                return self.values[key]
        made = make()
        with self.lock:
            made = self.values.setdefault(key, made)
            self.values.move_to_end(key)
            total = sum(map(self.size, self.values.values()))
            while (total > self.limit or len(self.values) > self.count) and len(self.values) > 1:
                oldest = self.values.popitem(last=False)[1]
                total -= self.size(oldest)
                self.drop(oldest)
        return made
