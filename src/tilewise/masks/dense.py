"""Masks without structure: one bit for each (query, key) pair, given as a boolean tensor or already packed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.masks.arguments import check_count
from tilewise.masks.bitmap import Bitmap, content
from tilewise.masks.mask import Mask, Plane

FIRST_BIT = 0x80  # of a byte, as numpy.packbits orders them


class _PairByPair(Mask):
    """A mask that holds a tensor with leading dimensions (batch or 1, heads or 1), or fewer."""

    def _regions(self, tensor: Tensor, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        bits = content(tensor).bits
        if tensor.dtype == torch.bool and tensor.shape[-1] != seqlen_k:  # one bit for all keys of a query
            bits = np.where(bits & FIRST_BIT, np.packbits(np.ones(seqlen_k, bool)), 0).astype(np.uint8)
        bits = np.broadcast_to(bits, (*bits.shape[:2], seqlen_q, bits.shape[3]))
        return tuple(
            Plane(range(batch)[at_b], range(heads)[at_h], Bitmap(bits[b, h], seqlen_q, seqlen_k))
            for b, at_b in _each(bits.shape[0])
            for h, at_h in _each(bits.shape[1])
        )


@dataclass(frozen=True, eq=False, repr=False)
class Dense(_PairByPair):
    """A boolean tensor, true where visible: (seqlen_q or 1, seqlen_k or 1), before it heads or 1, and before that batch or 1.

    It is read when it is first needed (a copy of one bit a pair is kept), again after torch's operators wrote to it, and compared by
    content. A tensor made under torch.inference_mode() counts no writes, so each call reads it. Writes that torch does not count, through
    `.data`, a numpy array or DLPack, are not seen: give a new tensor after them, such as a clone. A CUDA graph keeps what the tensor held when a
    call before the capture read it; torch.compile leaves such calls out of its graphs.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        given = self.tensor
        if not isinstance(given, Tensor):
            raise ShapeError(f"Dense: expected a bool tensor, got {type(given).__name__}; convert it with torch.as_tensor")
        if given.dtype != torch.bool or given.layout != torch.strided or given.is_nested:
            raise ShapeError(
                f"Dense: expected a strided bool tensor, got {given.dtype}, {'nested' if given.is_nested else given.layout}; "
                "write mask > 0 (or == 0) to say what is visible, and pass scores to add as bias="
            )
        check_values("Dense", given)
        if given.dim() not in (2, 3, 4):
            expected = "2, 3 or 4 dimensions, the last of (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1)"
            raise ShapeError(f"Dense: expected {expected}, got shape {tuple(given.shape)}")
        self._set("bitmap", None, (given.shape[0] if given.dim() == 4 else 1, given.shape[-3] if given.dim() > 2 else 1))

    def _write(self, tensors: list[Tensor]) -> str:
        tensors.append(self.tensor)
        return f"Dense(#{len(tensors) - 1})"

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        rows, keys = self.tensor.shape[-2:]
        if rows not in (1, seqlen_q) or keys not in (1, seqlen_k):
            raise ShapeError(f"Dense: the mask is {rows} x {keys}, the call has seqlen_q {seqlen_q} and seqlen_k {seqlen_k}")
        return self._regions(self.tensor, seqlen_q, seqlen_k, batch, heads)


@dataclass(frozen=True, eq=False, repr=False)
class Packed(_PairByPair):
    """The visible pairs as packed bits, an eighth of `Dense`: uint8 (batch or 1, heads or 1, seqlen_q, ceil(seqlen_k / 8)).

    Key j is bit 7 - j % 8 of byte j // 8 (numpy.packbits' order); bits beyond seqlen_k are zero.
    """

    bits: Tensor
    seqlen_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "seqlen_k", check_count("Packed: seqlen_k", self.seqlen_k))
        given = self.bits
        if not isinstance(given, Tensor) or given.dtype != torch.uint8 or given.dim() != 4 or given.shape[3] != -(-self.seqlen_k // 8):
            found = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            expected = f"(batch or 1, heads or 1, seqlen_q, {-(-self.seqlen_k // 8)})"
            raise ShapeError(f"Packed: for seqlen_k {self.seqlen_k} expected a uint8 tensor {expected}, got {found}")
        check_values("Packed", given)
        self._set("bitmap", None, (given.shape[0], given.shape[1]))

    def _write(self, tensors: list[Tensor]) -> str:
        tensors.append(self.bits)
        return f"Packed(#{len(tensors) - 1},{self.seqlen_k})"

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        if (self.bits.shape[2], self.seqlen_k) != (seqlen_q, seqlen_k):
            rows = self.bits.shape[2]
            raise ShapeError(f"Packed: the mask is {rows} x {self.seqlen_k}, the call has seqlen_q {seqlen_q} and seqlen_k {seqlen_k}")
        if seqlen_k % 8 and bool((content(self.bits).bits[..., -1] & (0xFF >> seqlen_k % 8)).any()):
            raise ShapeError(f"Packed: bits beyond seqlen_k {seqlen_k} are set; expected zeros there")
        return self._regions(self.bits, seqlen_q, seqlen_k, batch, heads)


def check_values(name: str, given: Tensor) -> None:
    if given.is_meta:
        raise ShapeError(f"{name}: a mask tensor on the meta device has no values; pass one on a real device")
    if given.layout != torch.strided or given.is_nested:
        raise ShapeError(f"{name}: expected a strided tensor, got {'nested' if given.is_nested else given.layout}; use .to_dense()")


def _each(extent: int) -> list[tuple[int, slice]]:
    """Each entry of a broadcast dimension, and the entries of the full dimension that it stands for."""
    return [(0, slice(None))] if extent == 1 else [(at, slice(at, at + 1)) for at in range(extent)]
