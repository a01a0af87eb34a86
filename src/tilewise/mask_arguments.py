"""Checks of what mask constructors are given: every message names the argument, what was given and what is expected."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor

from tilewise.errors import ShapeError

ALIGNMENTS = ("bottom_right", "top_left")
LARGEST = (1 << 31) - 1  # positions are int32 in every kernel


def align_argument(align: str) -> str:
    """The argument as text, empty for the default; ValueError where it is no alignment."""
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be 'bottom_right' or 'top_left', got {align!r}")
    return "" if align == ALIGNMENTS[0] else f"align={align!r}"


def check_count(name: str, value: Any, least: int = 0, otherwise: str = "") -> None:
    """ValueError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer, {least} or more{otherwise}, got {value!r}")


def check_fits(name: str, end: int, length_name: str, lengths: ndarray) -> None:
    """ShapeError unless positions up to `end` exist in sequences of these lengths."""
    if (lengths < end).any():
        raise ShapeError(f"{name} reaches position {end}, but {length_name} is {lengths.min()}; it must not go beyond the sequence")


def integers(name: str, value: Any, dims: int) -> list:
    """A list, array or tensor of integers as nested lists of `dims` dimensions; ShapeError where it is something else."""
    items = value.tolist() if isinstance(value, Tensor | ndarray) else value
    if not isinstance(items, list | tuple):
        raise ShapeError(f"{name} must be a list, array or tensor of integers with {dims} dimension{'s' * (dims > 1)}, got {value!r:.100}")
    if dims > 1:
        return [integers(f"{name}[{place}]", item, dims - 1) for place, item in enumerate(items)]
    for place, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int | np.integer) or abs(item) > LARGEST:
            raise ShapeError(f"{name}[{place}] must be an integer of at most 2**31 - 1, got {item!r:.100}")
    return [int(item) for item in items]


def cu_seqlens(name: str, value: Any) -> tuple[int, ...]:
    """Checked starts of packed documents and the end of the last: integers that begin with 0 and never decrease."""
    ends = integers(f"Documents: {name}", value, 1)
    if not ends or ends[0] != 0:
        raise ShapeError(f"Documents: {name} must begin with 0 (one entry more than documents), got {ends[:5]}")
    for place, (a, b) in enumerate(pairwise(ends)):
        if b < a:
            raise ShapeError(f"Documents: {name} must not decrease, got {a} followed by {b} at index {place + 1}; pass cumulated lengths")
    return tuple(ends)


def ranges(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Checked half-open ranges (n, 2) with 0 <= start <= end."""
    pairs = integers(name, value, 2)
    for place, pair in enumerate(pairs):
        if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
            raise ShapeError(f"{name}[{place}] must be a half-open range (start, end) with 0 <= start <= end, got {pair}")
    return tuple((a, b) for a, b in pairs)
