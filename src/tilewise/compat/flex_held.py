"""What a mask_mod holds, by which a mask that was made for a BlockMask is told to be stale."""

from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.masks import Mask

PLAIN = int, float, str, type(None)  # what a mod may hold besides tensors
MOST_HELD = 64  # functions and objects that are looked into for it
MOST_READ = 64  # numbers of a tensor that a mod is thought to read


class Seen(NamedTuple):
    """A BlockMask's mask, for as long as what its mask_mod holds is the same, and the tensors among it are not written to."""

    mod: Callable
    sizes: tuple[int, int]
    state: list[Any]
    versions: list[tuple[Tensor, int | None]]
    mask: Mask

    @classmethod
    def of(cls, mod: Callable, sizes: tuple[int, int], state: list[Any], captured: list[Tensor], mask: Mask) -> "Seen":
        """captured: the tensors of the mod's operations, whichever of `state` they are."""
        watched = captured + [x for x in state if isinstance(x, Tensor) and _may_be_read(x)]
        return cls(mod, sizes, state, [(x, _version(x)) for x in watched], mask)

    def holds(self, mod: Callable, sizes: tuple[int, int], state: list[Any]) -> bool:
        if self.mod is not mod or self.sizes != sizes or len(self.state) != len(state):
            return False
        same = all(a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b) for a, b in zip(self.state, state, strict=True))
        return same and all(version is not None and _version(x) == version for x, version in self.versions)


def _version(x: Tensor) -> int | None:
    """None where torch does not count writes."""
    return None if x.is_inference() else x._version


def _may_be_read(x: Tensor) -> bool:
    """Whether a mod may well decide by numbers of x that it reads itself, as by `x.item()`, which is no operation on its indices."""
    return x.numel() <= MOST_READ and not (isinstance(x, torch.nn.Parameter) or x.is_inference())


def held_by(mod: Callable) -> list[Any]:
    """The tensors and plain values that a function holds: in itself, in its objects and globals and in the functions among them, up to MOST_HELD of
    these.
    """
    found, ahead, met = [], [mod], set()
    for each in ahead:  # which grows: what is nearest comes first
        if len(met) >= MOST_HELD:
            break
        if isinstance(each, (PLAIN, Tensor)):
            found.append(each)
            continue
        if id(each) in met or isinstance(each, type | ModuleType):
            continue
        met.add(id(each))
        if isinstance(each, list | tuple | dict | set | frozenset):
            ahead += each.values() if isinstance(each, dict) else each
        elif isinstance(each, partial):
            ahead += [each.func, each.args, each.keywords]
        elif isinstance(each, MethodType):
            ahead += [each.__self__, each.__func__]
        elif isinstance(each, FunctionType):
            ahead += [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
            ahead += [each.__defaults__, each.__kwdefaults__]
            ahead += _globals(each.__code__, each.__globals__)
        elif hasattr(each, "__dict__") or hasattr(each, "__slots__"):
            ahead += [getattr(each, "__dict__", None), getattr(type(each), "__call__", None)]  # noqa: B004 (what it holds is asked for)
            slots = (getattr(kind, "__slots__", ()) for kind in type(each).__mro__)
            ahead += [getattr(each, name, None) for names in slots for name in ((names,) if isinstance(names, str) else names)]
    return found


def _globals(code: CodeType, there: dict[str, Any]) -> list[Any]:
    """The globals that a function and those within it name."""
    found = [there[name] for name in code.co_names if name in there]
    for within in code.co_consts:
        if isinstance(within, CodeType):
            found += _globals(within, there)
    return found
