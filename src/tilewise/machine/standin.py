"""What helpers (helpers.py) have in the place of torch, which takes seconds to import.

Kernels are made from dtypes and numbers. Nothing else of torch is used for that, but modules on the way there name much of it when they are
imported: annotations, decorators, base classes, operators that are registered. All these are `Nothing` here, and only dtypes are what they are
called. The compiler does without torch, and is imported before there is anything of that name.

This file is run by itself, ahead of the package.
"""

import importlib
import importlib.machinery
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

SIZES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
SIZES |= {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Dtype:
    """A torch.dtype, by its name."""

    def __init__(self, name: str) -> None:
        self.name, self.itemsize = name, SIZES[name]

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __or__(self, other) -> "Dtype":
        return self


class Anything(type):
    """Of classes that have every attribute and take everything; a call with one function returns it, as decorators do."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return found(name)

    def __getitem__(cls, index) -> type:
        return cls

    def __call__(cls, *given, **named):
        return given[0] if len(given) == 1 and callable(given[0]) and not named else Nothing

    def __or__(cls, other) -> type:
        return cls

    __ror__ = __or__  # pyright: ignore[reportAssignmentType]


class Nothing(metaclass=Anything):
    pass


class Public(Anything):
    """Without private attributes: a compiler asks annotations for these, to find out whether they are of a kind of its own."""

    def __getattr__(cls, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return super().__getattr__(name)


class Tensor(metaclass=Public):
    """A class that nothing is one of."""


DTYPES = {name: Dtype(name) for name in SIZES}


def found(name: str):
    """An attribute of whatever it may be."""
    return DTYPES.get(name) or {"Tensor": Tensor}.get(name) or (Warning if name.endswith("Warning") else Nothing)


class Module(ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return found(name)


class Finder(MetaPathFinder, Loader):
    """Finds torch and all that may be in it; or, before it is `there`, says that there is no torch."""

    there = False

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torch":
            return None
        if not self.there:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec) -> Module:
        return Module(spec.name)

    def exec_module(self, module) -> None:
        pass


def install(compilers: str, ours: str):
    """The last of our modules, which are imported behind the compilers (both separated by commas): without torch, or with it where that fails."""
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        _imported(compilers)
        finder.there = True
        return _imported(ours)
    except Exception:  # of a compiler, or of a module of ours, that asks for more
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.partition(".")[0] in ("torch", "tilewise")]:
            del sys.modules[name]
        return _imported(ours)


def _imported(names: str):
    return [importlib.import_module(name) for name in names.split(",")][-1]
