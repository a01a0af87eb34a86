"""Checks of what mask constructors are given: every message names the argument, what was given and what is expected."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor

from tilewise.errors import ShapeError

# What constructors take; what they keep is tuples of ints.
Integers = Sequence[int] | ndarray | Tensor
Ranges = Sequence[Sequence[int]] | ndarray | Tensor

ALIGNMENTS = ("bottom_right", "top_left")
LARGEST = (1 << 31) - 1  # positions are int32 in every kernel


def placed(align: str, offset: int) -> str:
    """Where a mask's diagonal lies as arguments in text, empty for the defaults; ValueError where `align` is no alignment."""
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be 'bottom_right' or 'top_left', got {align!r}")
    return ",".join(([] if align == ALIGNMENTS[0] else [f"align={align!r}"]) + ([f"offset={offset}"] if offset else []))


def is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_count(name: str, value: Any, least: int = 0, otherwise: str = "") -> int:
    """`value` as a plain int; ValueError unless it is an integer of at least `least`.

    `index` makes torch.compile specialise on an integer that it traces as a symbol: masks are text, which holds no symbols.
    """
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} must be an integer, {least} or more{otherwise}, got {value!r}")
    return index(value)


def check_offset(name: str, value: Any) -> int:
    """`value` as a plain int; ValueError unless it is an integer that positions can be moved by."""
    if not is_integer(value) or abs(value) > 1 << 29:
        raise ValueError(f"{name} must be an integer between -2**29 and 2**29, got {value!r}")
    return index(value)


def window(left: Any, right: Any) -> tuple[int | None, int | None, int]:
    """Checked bounds of a sliding window, None or 0 and more, and by how much the diagonal moves to make a negative one 0."""
    for name, value in (("left", left), ("right", right)):
        if value is not None and (not is_integer(value) or value < -(1 << 29)):
            raise ValueError(f"SlidingWindow: {name} must be an integer of at least -2**29, or None for unbounded, got {value!r}")
    left, right = (None if value is None else index(value) for value in (left, right))
    if left is not None and right is not None and left + right < 0:
        raise ValueError(
            f"SlidingWindow: left {left} and right {right} leave no key; left + right must be 0 or more, and None is unbounded, not -1"
        )
    if left is not None and left < 0:
        return 0, None if right is None else right + left, -left
    if right is not None and right < 0:
        return None if left is None else left + right, 0, right
    return left, right, 0


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
        if not is_integer(item) or abs(item) > LARGEST:
            raise ShapeError(f"{name}[{place}] must be an integer of at most 2**31 - 1, got {item!r:.100}")
    return [index(item) for item in items]


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


def by_heads(value: Any) -> list[tuple[tuple[int, int], Any]]:
    """The ((first, last), mask) items of a mapping, or of an iterable of such pairs, in the order of the heads; masks are not checked."""
    items = list(value.items() if isinstance(value, Mapping) else value) if isinstance(value, Iterable) else [value]
    for item in items:
        pair = isinstance(item, tuple | list) and len(item) == 2
        if not pair or not isinstance(item[0], tuple | list) or len(item[0]) != 2 or not all(is_integer(end) for end in item[0]):
            found = item[0] if pair else item
            raise ValueError(f"PerHead: expected masks by half-open head ranges (first, last) of integers, got {found!r:.100} for a range")
    return sorted((((index(first), index(last)), mask) for (first, last), mask in items), key=lambda item: item[0])
