"""What the compiler is given in the place of a launch's operands, made of the annotations of their bundles (operands.py)."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import torch

from tilewise.sm90 import jit


class Of(NamedTuple):
    """A tensor of these sizes and dtype, or functions of the configuration that give them; None takes its place where one of them is None.

    A name among the sizes is the same length wherever it stands among a launch's operands, "_" a length of its own.
    """

    sizes: str | Callable[[Any], str | None]
    dtype: torch.dtype | str | Callable[[Any], torch.dtype | None] = "dtype"  # a name: the configuration's field
    aligned: bool = False  # every row starts at a multiple of 16 bytes
    scattered: bool = False  # the strides may be any, 0 too; otherwise the last is 1


Ints, Floats = (partial(Of, dtype=dtype) for dtype in (torch.int32, torch.float32))


class When(NamedTuple):
    """None takes the place of what is so annotated, unless the configuration's field is true, or has one of the values."""

    field: str
    values: tuple = ()

    def holds(self, config) -> bool:
        found = getattr(config, self.field)
        return found in self.values if self.values else bool(found)


class StandIns:
    """For the operands of one launch, by its configuration."""

    def __init__(self, config) -> None:
        self.config, self.sizes = config, defaultdict(jit.size)

    def __call__(self, kind, **others):
        """For an operand of that annotation; of a union it is the first. others: what fields of a bundle are annotated with in this launch."""
        from tilewise.sm90.dsl import Float32, Int32

        kind, *said = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if kind is None or not all(each.holds(self.config) for each in said if isinstance(each, When)):
            return None
        if layout := next((each for each in (kind, *said) if isinstance(each, Of)), None):
            return self._tensor(layout)
        if isinstance(kind, UnionType):
            kind = get_args(kind)[0]
        if kind in (int, float):
            return Int32(0) if kind is int else Float32(1.0)
        if get_origin(kind) is tuple:
            return tuple(map(self, get_args(kind)))
        return kind(*map(self, (kind.__annotations__ | others).values()))

    def _tensor(self, layout: Of):
        sizes, dtype = layout.sizes, attrgetter(layout.dtype) if isinstance(layout.dtype, str) else layout.dtype
        sizes, dtype = (x(self.config) if callable(x) else x for x in (sizes, dtype))
        if sizes is None or dtype is None:
            return None
        shape = map(self._size, sizes.split())
        return jit.scattered(dsl(dtype), *shape) if layout.scattered else jit.tensor(dsl(dtype), *shape, aligned=layout.aligned)

    def _size(self, name: str):
        return int(name) if name.isdigit() else jit.size() if name == "_" else self.sizes[name]


def dsl(dtype: torch.dtype):
    """torch's dtype as the DSL calls it."""
    from tilewise.sm90 import dsl as names

    return {
        torch.bfloat16: names.BFloat16,
        torch.float16: names.Float16,
        torch.float32: names.Float32,
        torch.int8: names.Int8,
        torch.uint8: names.cutlass.Uint8,
        torch.int32: names.Int32,
        torch.int64: names.Int64,
    }[dtype]
