"""Keys that differ by batch entry: padded batches, as one interval of keys an entry."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.masks.arguments import Integers, integers
from tilewise.masks.bands import Bands
from tilewise.masks.bitmap import values
from tilewise.masks.mask import Blocks, Full, Mask, Plane, joint_extent


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """The keys start <= j < start + lengths of each batch entry, and among them what `inner` allows for their number (None: all of them).

    lengths: (batch,), keys of each entry; None: all from start on. start: (batch,), its first key; None: 0. At least one of them is given, as
    a list, or as an int32 or int64 tensor. Tensors are read when the mask is first needed, not where a call is traced or the mask made, and again
    after torch's operators wrote to them.

    `Padding(lengths) & Causal()` has the diagonal of the whole batch, `Padding(lengths, inner=Causal())` that of each entry's own keys, as a cache
    that is filled differently wants it.
    """

    lengths: Tensor | tuple[int, ...] | None = None
    start: Tensor | tuple[int, ...] | None = None
    inner: Mask | None = None

    if TYPE_CHECKING:  # it takes more than it keeps

        def __init__(self, lengths: Integers | None = None, start: Integers | None = None, inner: Mask | None = None) -> None: ...

    def __post_init__(self) -> None:
        sizes = {}
        for name in ("lengths", "start"):
            given = getattr(self, name)
            if given is not None:
                checked = _check(f"Padding: {name}", given)
                object.__setattr__(self, name, checked)
                sizes[name] = checked.shape[0] if isinstance(checked, Tensor) else len(checked)
        if not sizes:
            raise ValueError("Padding: lengths or start must be given, (batch,) integers; for no padding leave the mask out")
        if self.inner is None:
            object.__setattr__(self, "inner", Full())  # not a default value: torch.compile traces its construction only
        inner = self.inner
        if not isinstance(inner, Mask) or inner.kind == "bitmap" or not inner.alike or inner.source is None:
            raise ValueError(f"Padding: inner must be a mask of bands that is the same for every batch entry and head, got {inner!r:.100}")
        held = isinstance(self.lengths, Tensor) or isinstance(self.start, Tensor)
        self._set("runs", None if held else self._write([]), (joint_extent("batch", *sizes.values()), 1))

    def bounds(self, seqlen_k: int) -> tuple[ndarray, ndarray]:
        """The first key of each batch entry, or of all in arrays of one, and the one after the last, int64. ShapeError where they are no keys."""
        start = np.array([0] if self.start is None else _values(self.start), np.int64)
        lengths = None if self.lengths is None else np.array(_values(self.lengths), np.int64)
        end = np.full_like(start, seqlen_k) if lengths is None else start + lengths
        start, end = np.broadcast_arrays(start, end)
        wrong = np.flatnonzero((start < 0) | (end < start) | (end > seqlen_k))
        if len(wrong):
            entry = wrong[0]
            raise ShapeError(
                f"Padding: batch entry {entry} has the keys {start[entry]} to {end[entry]} (start, start + length), which must be between 0 and "
                f"seqlen_k {seqlen_k}, and in order"
            )
        return start, end

    @property
    def _inner(self) -> Mask:
        assert self.inner is not None  # since __post_init__
        return self.inner

    def _write(self, tensors: list[Tensor]) -> str:
        written = []
        for given in (self.lengths, self.start):
            if isinstance(given, Tensor):
                tensors.append(given)
                written.append(f"#{len(tensors) - 1}")
            else:
                written.append(str(None if given is None else list(given)).replace(" ", ""))
        if self._inner.kind != "full":
            written.append(f"inner={self._inner.source}")
        return f"Padding({','.join(written)})"

    def _key(self):
        if self.source is not None:
            return self.source
        return "Padding", *(given if given is None else _values(given) for given in (self.lengths, self.start)), self._inner.source

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        """Of a mask for one batch entry."""
        ((start, end),) = zip(*self.bounds(int((blocks.k1 - blocks.k0).min(initial=seqlen_k))), strict=True)
        return self._inner._place(blocks._replace(k0=blocks.k0 + start, k1=blocks.k0 + end), seqlen_q, seqlen_k)

    def _planes(self, seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> tuple[Plane, ...]:
        """Entries with the same keys have the same region, and neighbours among them one plane."""
        start, end = self.bounds(seqlen_k)
        if len(start) == 1:
            start, end = start.repeat(batch), end.repeat(batch)
        regions: dict[tuple[int, int], Bands] = {}
        planes: list[Plane] = []
        for entry, keys in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            if keys not in regions:
                whole = Blocks(*(np.array([edge]) for edge in (0, seqlen_q, *keys)))
                regions[keys] = self._inner._place(whole, seqlen_q, seqlen_k)
            if planes and planes[-1].region is regions[keys]:
                planes[-1] = planes[-1]._replace(batch=range(planes[-1].batch.start, entry + 1))
            else:
                planes.append(Plane(range(entry, entry + 1), range(heads), regions[keys]))
        return tuple(planes)


def _check(name: str, given) -> Tensor | tuple[int, ...]:
    if not isinstance(given, Tensor):
        return tuple(integers(name, given, 1))
    if given.dtype not in (torch.int32, torch.int64) or given.layout != torch.strided or given.is_nested or given.dim() != 1:
        found = "nested" if given.is_nested else f"{given.layout} {tuple(given.shape)}"
        raise ShapeError(f"{name} must be a strided tensor (batch,) of int32 or int64, got {given.dtype} {found}")
    if given.is_meta:
        raise ShapeError(f"{name} is on the meta device, which holds no values; pass a tensor on a real device")
    return given


def _values(given: Tensor | tuple[int, ...]) -> tuple[int, ...]:
    return values(given) if isinstance(given, Tensor) else given
