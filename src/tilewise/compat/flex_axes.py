"""The operations of a mask_mod on whole axes of queries, keys and distances, and the bools among their results as masks."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.masks import Causal, Documents, FirstKeys, Full, Mask, Slices, SlidingWindow

aten = torch.ops.aten
DIAGONALS = 64  # more bands than that are better held as bits
RECTANGLES = 1 << 14
SAME = (aten.clone.default, aten.alias.default, aten._to_copy.default, aten.lift_fresh.default, aten.detach.default)
COMPARISONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}  # and what they are with sides exchanged


class Unrecognised(Exception):
    """What a mod does is not among what is recognised; the message ends a sentence that begins with its name."""


@dataclass(frozen=True)
class Value:
    """Values along one axis: "q" by query, "k" by key, "d" by key - query from 1 - seqlen_q on, or None, one for all. `line` (slope,
    start) where they are integers `slope * index + start`, the index of "d" being the distance.
    """

    axis: str | None
    numbers: Tensor  # (length of the axis,)
    line: tuple[int, int] | None = None


def held(numbers: list) -> Tensor:
    """Python's numbers as a tensor that holds them without rounding, whatever torch's default is."""
    kinds = {type(number) for number in numbers}
    dtype = torch.bool if kinds == {bool} else torch.int64 if kinds <= {bool, int} else torch.float64
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def _one(x: Tensor | bool | int) -> Tensor:
    return x.detach().cpu().reshape(1) if isinstance(x, Tensor) else held([x])


class Axes:
    """Operations on whole axes of a call's queries, keys and distances; on the CPU, where an index out of range is an error like any other."""

    def __init__(self, seqlen_q: int, seqlen_k: int) -> None:
        self.seqlen_q, self.seqlen_k = seqlen_q, seqlen_k
        self.starts = {"q": (0, seqlen_q), "k": (0, seqlen_k), "d": (1 - seqlen_q, seqlen_k)}

    def inputs(self, b: Tensor, h: Tensor) -> tuple[Value, ...]:
        return Value(None, b), Value(None, h), self.on_line("q", 1, 0), self.on_line("k", 1, 0)

    def on_line(self, axis: str, slope: int, start: int) -> Value:
        return Value(axis, slope * torch.arange(*self.starts[axis], dtype=torch.int64, device="cpu") + start, (slope, start))

    def step(self, function: Callable, args: tuple, kwargs: dict) -> "Value | Mask":
        """What a step gives for operands that are values, masks, captured tensors and numbers."""
        kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "pin_memory")}
        operands = leaves((args, kwargs), Value | Mask)
        if function in SAME and isinstance(args[0], Mask) and kwargs.get("dtype") in (None, torch.bool):
            return args[0]
        name = function.overloadpacket.__name__
        axes = {x.axis for x in operands if isinstance(x, Value)} - {None}
        if len(axes) > 1 or any(isinstance(x, Mask) for x in operands):
            if kwargs or not all(isinstance(x, Value | Mask | int) or (isinstance(x, Tensor) and x.numel() == 1) for x in args):
                raise Unrecognised(f"brings query and key together by {function} with {sorted(kwargs) or 'other arguments than indices'}")
            return self._together(name, [x if isinstance(x, Value | Mask) else Value(None, _one(x)) for x in args])
        try:
            numbers = function(*mapped(args, _numbers), **mapped(kwargs, _numbers))
        except Exception as error:  # an index out of range, most of all
            raise Unrecognised(f"cannot be followed: {function}: {error}") from error
        return self._value(next(iter(axes), None), numbers)

    def _value(self, axis: str | None, numbers: Tensor) -> Value:
        if axis is None:
            return Value(None, numbers.reshape(1) if numbers.dim() == 0 else numbers)
        length = self.starts[axis][1] - self.starts[axis][0]
        if numbers.dim() == 0 or numbers.shape[-1] == 1:  # new_ones(()), say
            return Value(None, numbers.reshape(1) if numbers.dim() == 0 else numbers)
        if numbers.shape[-1] != length:
            raise Unrecognised("changes the shape of its indices")
        line = None
        if numbers.dim() == 1 and numbers.dtype in (torch.int64, torch.int32) and length > 1:
            slope = int(numbers[1] - numbers[0])
            start = int(numbers[0]) - slope * self.starts[axis][0]
            if torch.equal(numbers.long(), self.on_line(axis, slope, start).numbers):
                line = slope, start
        return Value(axis, numbers, line)

    def _together(self, name: str, operands: list) -> "Value | Mask":
        """Operations that bring axes together, or masks."""
        if name in ("bitwise_not", "logical_not"):
            return Full() - self.lifted(operands[0])
        if name == "where" and len(operands) == 3:
            condition, yes, no = map(self.lifted, operands)
            return (condition & yes) | (no - condition)
        if len(operands) == 2:
            one, two = operands
            if name in ("bitwise_and", "logical_and"):
                return self._and(one, two)
            if name in ("bitwise_or", "logical_or"):
                return self._or(one, two)
            if name in ("bitwise_xor", "logical_xor"):
                one, two = self.lifted(one), self.lifted(two)
                return (one - two) | (two - one)
            if isinstance(one, Value) and isinstance(two, Value) and (found := self._of_distance(name, one, two)) is not None:
                return found
            if name in COMPARISONS and isinstance(one, Value) and isinstance(two, Value) and {one.axis, two.axis} == {"q", "k"}:
                return self._compared(name, one, two) if one.axis == "q" else self._compared(COMPARISONS[name], two, one)
        raise Unrecognised(f"brings query and key together by {name}")

    def _and(self, one: "Value | Mask", two: "Value | Mask") -> "Value | Mask":
        for a, b in ((one, two), (two, one)):
            if isinstance(a, Value) and a.axis is None and a.numbers.numel() == 1 and a.numbers.dtype == torch.bool:
                return b if bool(a.numbers) else a
        return self.lifted(one) & self.lifted(two)

    def _or(self, one: "Value | Mask", two: "Value | Mask") -> "Value | Mask":
        for a, b in ((one, two), (two, one)):
            if isinstance(a, Value) and a.axis is None and a.numbers.numel() == 1 and a.numbers.dtype == torch.bool:
                return a if bool(a.numbers) else b
        return self.lifted(one) | self.lifted(two)

    def _of_distance(self, name: str, one: Value, two: Value) -> Value | None:
        """A sum, difference or comparison of lines that depends on key - query alone; None where it does not."""
        if one.line is None or two.line is None or name not in ("add", "sub", *COMPARISONS):
            return None
        sign = 1 if name == "add" else -1
        by_q, by_k = (sum(slope for x, slope in ((one, one.line[0]), (two, sign * two.line[0])) if x.axis == axis) for axis in ("q", "k"))
        if {one.axis, two.axis} != {"q", "k"} or by_q != -by_k:
            return None
        difference = self.on_line("d", by_k, one.line[1] + sign * two.line[1])
        if name in COMPARISONS:
            return self._value("d", getattr(torch, name)(difference.numbers, 0))
        return difference

    def _compared(self, name: str, of_q: Value, of_k: Value) -> Mask:
        """The pairs with values that compare so: for each stretch of queries with one value, the stretches of keys."""
        rows = _stretches(of_q.numbers)
        columns = _stretches(of_k.numbers)
        if name == "eq":
            places: dict[Any, list[tuple[int, int]]] = {}
            for k0, k1, number in columns:
                places.setdefault(number, []).append((k0, k1))
            boxes = [((q0, q1), keys) for q0, q1, number in rows for keys in places.get(number, ())]
        else:
            if len(rows) * len(columns) > 1 << 22:
                raise Unrecognised("compares too many different numbers of queries and keys")
            ends = held([number for *_, number in columns])
            boxes = []
            for q0, q1, number in rows:
                chosen = getattr(torch, name)(held([number]), ends).tolist()
                boxes += [((q0, q1), keys[:2]) for keys, yes in zip(columns, chosen, strict=True) if yes]
        return self._boxes(boxes)

    def _boxes(self, boxes: list[tuple[tuple[int, int], tuple[int, int]]]) -> Mask:
        """The union of rectangles of queries and keys, as documents where they are such."""
        if len(boxes) > RECTANGLES:
            raise Unrecognised(f"describes more than {RECTANGLES} rectangles")
        follow = all(a[0][1] == b[0][0] and a[1][1] == b[1][0] for a, b in pairwise(boxes))
        if boxes and follow and boxes[0][0][0] == boxes[0][1][0] == 0:
            ends_q, ends_k = ([0, *(box[side][1] for box in boxes)] for side in (0, 1))
            return Documents(ends_q) if ends_q == ends_k else Documents(ends_q, ends_k)
        return Slices([q for q, _ in boxes], [k for _, k in boxes], [0] * len(boxes))

    def lifted(self, given: "Value | Mask") -> Mask:
        """The pairs for which a bool along an axis is true."""
        if isinstance(given, Mask):
            return given
        if given.numbers.dtype != torch.bool or given.numbers.dim() != 1:
            raise Unrecognised("gives no bool")
        stretches = [(first, last) for first, last, yes in _stretches(given.numbers) if yes]
        if given.axis is None or not stretches or stretches == [(0, len(given.numbers))]:
            return Full() if stretches else Full() - Full()
        if given.axis == "d":
            return self._diagonals(stretches)
        if given.axis == "q":
            return self._boxes([(rows, (0, self.seqlen_k)) for rows in stretches])
        if len(stretches) == 1 and stretches[0][0] == 0:
            return FirstKeys(stretches[0][1])
        return self._boxes([((0, self.seqlen_q), keys) for keys in stretches])

    def _diagonals(self, stretches: list[tuple[int, int]]) -> Mask:
        if len(stretches) > DIAGONALS:
            raise Unrecognised(f"describes more than {DIAGONALS} bands")
        first, end = self.starts["d"]
        bounds = ((first + begin, first + stop - 1) for begin, stop in stretches)
        mask, *others = (self._band(None if lo == first else lo, None if hi == end - 1 else hi) for lo, hi in bounds)
        for band in others:
            mask = mask | band
        return mask

    def _band(self, lo: int | None, hi: int | None) -> Mask:
        """The pairs with lo <= key - query <= hi; None is unbounded."""
        align = "bottom_right" if self.seqlen_q == self.seqlen_k else "top_left"
        if (lo, hi) == (None, None):
            return Full()
        if hi is not None and hi < 0:
            return self._band(lo, None) - SlidingWindow(-hi - 1, None, align)
        if lo is not None and lo > 0:
            return self._band(None, hi) - SlidingWindow(None, lo - 1, align)
        return Causal(align) if (lo, hi) == (None, 0) else SlidingWindow(None if lo is None else -lo, hi, align)


def mapped(tree: Any, change: Callable) -> Any:
    """An operator's arguments, plain tuples, lists and dicts of leaves, with `change` done to each leaf. A tenth of what pytree's takes."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(x, change) for x in tree])
    return {name: mapped(x, change) for name, x in tree.items()} if kind is dict else change(tree)


def leaves(tree: Any, kind: Any) -> list:
    """The leaves of an operator's arguments that are of a kind."""
    found: list = []
    mapped(tree, lambda x: found.append(x) if isinstance(x, kind) else None)
    return found


def _numbers(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().cpu()
    return x.numbers if isinstance(x, Value) else x


def _stretches(numbers: Tensor) -> list[tuple[int, int, Any]]:
    """(first, end, number) of the stretches of equal numbers."""
    if numbers.dim() != 1:
        raise Unrecognised("differs by head where it must not")
    if len(numbers) == 0:
        return []
    changes = (torch.nonzero(numbers[1:] != numbers[:-1]).flatten() + 1).tolist()
    edges = [0, *changes, len(numbers)]
    return list(zip(edges[:-1], edges[1:], numbers[edges[:-1]].tolist(), strict=True))
