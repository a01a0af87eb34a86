"""What a cache's index tensors must hold: lengths, rows, padding, pages, packed queries. Their values are read here, and nowhere else.

On the CPU they are always checked; on a GPU reading them would wait for it, so only where the caller (`check=True`) or TILEWISE_CHECK=1 asks.
"""

import os
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import ShapeError, check_tensor
from tilewise.problem import Share

# What os.environ reads, where it is CPython's, in a twentieth of the time.
_data, (_CHECK, *_values) = getattr(os.environ, "_data", None), ("TILEWISE_CHECK", "", "0")
_environment = os.environ if _data is None else _data
if _data is not None:
    _CHECK, _values = os.environ.encodekey(_CHECK), list(map(os.environ.encodevalue, _values))
_NO = None, *_values


def wanted(device: torch.device, check: bool) -> bool:
    """Whether values on `device` are to be read and checked."""
    return device.type == "cpu" or check or always()


def always() -> bool:
    """Whether the environment asks for it, in all calls."""
    return _environment.get(_CHECK) not in _NO


def capacity_of(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Tokens that one sequence's cache can hold."""
    return k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])


def check_lengths(
    lengths: list[int], k_cache: Tensor, page_table: Tensor | None, new: list[int] | None = None, share: Share | None = None
) -> None:  # fmt: skip
    """Refuse lengths, of which `new` tokens are about to be appended, that a sequence's cache does not hold, or its share of them."""
    capacity = capacity_of(k_cache, page_table)
    for b, length in enumerate(lengths):
        before = length - (0 if new is None else new[b])
        if before < 0:
            raise ShapeError(f"cache_seqlens[{b}] is {before}; a length must not be negative, and is 0 where a sequence has no tokens yet")
        held = length if share is None else share.held(length)
        if held > capacity:
            least = f"cache_seqlens[{b}] is {length}{' with the new tokens' if new is not None else ''}"
            least += (
                "" if share is None else f", of which rank {share.rank} of {share.world} holds {held} (cp_interleave {share.interleave})"
            )
            pages = (
                "" if page_table is None else f", for page_table has {page_table.shape[1]} pages of {k_cache.shape[1]} tokens a sequence"
            )
            raise ShapeError(f"{least}, but the cache holds between 0 and {capacity} tokens a sequence{pages}; make it larger")


def check_pages(page_table: Tensor, lengths: list[int], n_pages: int, page_size: int, first: list[int] | None = None) -> None:
    """Refuse a page that does not exist among those of a sequence's tokens, from its `first` on; the other entries may be anything."""
    table, size = page_table.numpy(force=True), max(page_size, 1)
    starts = np.zeros(len(lengths), dtype=np.int64) if first is None else np.asarray(first) // size
    ends = -(-np.asarray(lengths, dtype=np.int64) // size)
    column = np.arange(table.shape[1])
    wrong = ((table < 0) | (table >= n_pages)) & (column >= starts[:, None]) & (column < ends[:, None])
    for b in wrong.any(1).nonzero()[0][:1]:
        row = table[b, starts[b] : ends[b]].tolist()
        raise ShapeError(f"page_table[{b}] names pages {row}, but k_cache has pages 0..{n_pages - 1}")


def check_rows(cache_batch_idx: Tensor, n_rows: int) -> None:
    if ((cache_batch_idx < 0) | (cache_batch_idx >= n_rows)).any():
        raise ShapeError(f"cache_batch_idx must be between 0 and {n_rows - 1}, got {cache_batch_idx.tolist()}")


def check_own_places(slots: tuple[Tensor, Tensor], owner: Tensor) -> None:
    """Refuse new tokens that go to the same (page or entry, place), of which one would be lost. owner: the sequence of each."""
    where = torch.stack([x.flatten() for x in slots]).numpy(force=True)
    order = np.lexsort(where)
    met = (where[:, order[1:]] == where[:, order[:-1]]).all(0).nonzero()[0]
    if len(met):
        one, other = sorted(owner.flatten()[order[met[0] : met[0] + 2].tolist()].tolist())
        entry, place = where[:, order[met[0]]]
        raise ShapeError(
            f"new tokens of sequences {one} and {other} go to the same place, {place} of page or entry {entry} of the caches, where one would be "
            "lost; page_table or cache_batch_idx must give each sequence that is appended to a page or an entry of its own"
        )


def check_padding(leftpad: Tensor, lengths: list[int]) -> None:
    padding = leftpad.tolist()
    if any(pad < 0 for pad in padding):
        raise ShapeError(f"leftpad must not be negative, got {padding}")
    if any(pad > length for pad, length in zip(padding, lengths, strict=True)):
        raise ShapeError(f"leftpad {padding} is beyond the lengths of the sequences, {lengths}")


def check_cu_seqlens(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The bounds of packed sequences, which start at 0, do not decrease and end within `total` tokens."""
    check_tensor(name, cu_seqlens, ("sequences + 1",), (torch.int32, torch.int64))
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] > total or any(a > b for a, b in pairwise(bounds)):
        raise ShapeError(f"{name} must start at 0, not decrease and end at most at the {total} tokens that are given, got {bounds}")
    return bounds


def sequence_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """(total,) int64: the packed sequence that each token is in, the last one for tokens beyond all."""
    ends = cu_seqlens[1:].to(torch.int64)
    owner = torch.searchsorted(ends, torch.arange(total, dtype=torch.int64, device=ends.device), right=True)
    return owner.clamp(max=max(ends.shape[0] - 1, 0))
