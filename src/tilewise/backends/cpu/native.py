"""Finding and loading the compiled kernel: one shared library, no Python or torch symbols in it.

Looked for, in this order: the file that TILEWISE_CPU_LIBRARY names; next to this module (put there by `pip install`); what `build.py`
compiled from exactly these sources. Where none is found the library works without it, and `problem()` says why.

The file that is named, and what build.py left in the user's cache, are loaded only where no other user could have written them (trust.py). The
cache is then passed over with a warning; the named file, which somebody asked for, is a reason why there is no kernel. What lies next to this
module is as trustworthy as this module.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tilewise.backends.cpu import abi
from tilewise.backends.cpu.abi import NAME
from tilewise.machine import trust

_FAILURES = {abi.NO_MEMORY: "out of memory", abi.BAD_ABI: "it is of another version", abi.BAD_ISA: "no such instruction set"}


@dataclass(frozen=True)
class Library:
    """The loaded kernel. `isa` is what runs by default: the best of `isas`, or what TILEWISE_CPU_ISA asks for.

    The best may leave calls that are too small for it to the second best; what is asked for (`forced`) runs them all.
    """

    path: Path
    isa: str
    forced: bool
    isas: tuple[str, ...]
    shared_pool: bool  # runs on torch's threads
    functions: ctypes.CDLL


class Missing(Exception):
    """No usable kernel; the message is the reason."""


def problem() -> str | None:
    """Why the compiled kernel cannot be used here, or None where it can."""
    try:
        library()
    except Missing as reason:
        return str(reason)
    return None


def library() -> Library:
    """The compiled kernel, loaded once.

    Raises Missing where there is none, it does not load, its argument struct is not the one of `abi.py`, or TILEWISE_CPU_ISA names an
    instruction set that it or this processor does not have.
    """
    found = _load()
    if isinstance(found, str):
        raise Missing(found)
    return found


def run(function, args: abi.Args) -> None:
    """Call a kernel; MemoryError or RuntimeError where it fails."""
    if status := function(ctypes.byref(args)):
        raise failure(status)


def failure(status: int) -> Exception:
    """What a kernel's status says, as an exception."""
    message = f"the CPU kernel failed: {_FAILURES.get(status, f'status {status}')}"
    return MemoryError(message) if status == abi.NO_MEMORY else RuntimeError(message)


@cache
def _load() -> Library | str:
    """The library, or the reason why there is none. The environment is read once, when the first call loads it."""
    path, isa = os.environ.get("TILEWISE_CPU_LIBRARY"), os.environ.get("TILEWISE_CPU_ISA", "auto")
    if path and (refused := trust.why_not(Path(path))):
        return f"TILEWISE_CPU_LIBRARY={path} is not loaded, as others may have written it: {refused}"
    found = Path(path) if path else _installed() or _built()
    if found is None:
        return (
            "its compiled kernel is not installed, or is older than its sources: reinstall tilewise where a C++ compiler (GCC 12 or Clang 14, or "
            "later) is found, or run `python -m tilewise.backends.cpu.build`"
        )
    try:
        functions = ctypes.CDLL(str(found))
        info = abi.Info()
        functions.tw_info(ctypes.byref(info))
    except (OSError, AttributeError) as error:
        return f"its compiled kernel {found} cannot be loaded: {error}"
    ours = (abi.ABI_VERSION, *(ctypes.sizeof(x) for x in (abi.Args, abi.PlaneArg, abi.TensorArg)))
    if ours != (info.abi_version, info.sizeof_args, info.sizeof_plane, info.sizeof_tensor):
        return (
            f"its compiled kernel {found} was built from other sources: reinstall tilewise, or run `python -m tilewise.backends.cpu.build`"
        )
    isas = tuple(name for code, name in enumerate(abi.ISAS) if info.isas >> code & 1)
    best = abi.ISAS[info.best_isa]
    if isa != "auto" and isa not in isas:
        return f"TILEWISE_CPU_ISA={isa} is not available here; the kernel and this processor have {', '.join(isas)}"
    for name in ("tw_backward_workspace", "tw_decode_workspace", "tw_careful_tiles"):
        getattr(functions, name).restype = ctypes.c_int64
    functions.tw_repeat.argtypes = (ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 5)
    functions.tw_repeat_backward.argtypes = (ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 10)
    pool = _shared_pool()
    functions.tw_set_pool(pool)
    return Library(found, best if isa == "auto" else isa, isa != "auto", isas, pool is not None, functions)


def _installed() -> Path | None:
    """The library that lies next to this module; or elsewhere, as that of an editable install does, if it is not older than a source."""
    here, places = Path(__file__).parent, map(Path, sys.modules[__package__].__path__)
    found = (place / NAME for place in places if (place / NAME).exists())
    return next((path for path in found if path.parent == here or not _older_than_sources(path)), None)


def _older_than_sources(path: Path) -> bool:
    from tilewise.backends.cpu.build import DEFINITIONS, SOURCES

    return any(source.stat().st_mtime > path.stat().st_mtime for source in (DEFINITIONS, *SOURCES.glob("*")))


def _built() -> Path | None:
    """The library that build.py compiled from these sources, where nobody else could have put it there."""
    from tilewise.backends.cpu.build import target

    path = target()
    if not path.exists():
        return None
    if refused := trust.why_not(path):
        trust.warn(refused, "the CPU kernel that build.py compiles is looked for elsewhere (XDG_CACHE_HOME names another folder)")
        return None
    return path


def _shared_pool() -> ctypes.c_void_p | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch uses, so that the kernel runs on torch's own threads.

    Only that symbol of that runtime will do; elsewhere (macOS) the kernel starts its own threads for each call.
    """
    places = [None, *sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))]
    for place in places:
        try:
            return ctypes.cast(ctypes.CDLL(None if place is None else str(place)).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None
