"""Finding and loading the compiled kernel: one shared library, no Python or torch symbols in it.

Looked for, in this order: the file that TILEWISE_CPU_LIBRARY names, and then no other; next to this module (put there by `pip install`); what
`build.py` compiled from exactly these sources. Where none is found the library works without it, and `problem()` says why.

The file that is named, and what build.py left in the user's cache, are loaded only where no other user could have written them (machine/trust.py).
What lies next to this module is as trustworthy as this module. None is loaded that was cut short, as it would end the process; what build.py left
is known by its seal to be whole (machine/sealed.py).
"""

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tilewise.backends.cpu import abi
from tilewise.backends.cpu.abi import NAME
from tilewise.machine import environment, sealed, trust

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
    isa = os.environ.get("TILEWISE_CPU_ISA") or "auto"
    found = _found()
    if isinstance(found, str):
        return found
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


def _found() -> Path | str:
    """The library to load, or the reason why there is none."""
    if os.environ.get("TILEWISE_CPU_LIBRARY"):
        return _named()
    passed_over = []
    for look in (_installed, _built):
        found = look()
        if isinstance(found, Path):
            return found
        passed_over.append(found)
    return "; ".join(
        (
            "its compiled kernel is not installed, or is older than its sources: reinstall tilewise where a C++ compiler (GCC 12 or Clang 14, or "
            "later) is found, or run `python -m tilewise.backends.cpu.build`",
            *filter(None, passed_over),
        )
    )


def _named() -> Path | str:
    """The library that TILEWISE_CPU_LIBRARY names: the absolute path that is looked at here is the one to load."""
    path = environment.named("TILEWISE_CPU_LIBRARY")
    if isinstance(path, str):
        return path
    said = f"TILEWISE_CPU_LIBRARY={os.environ['TILEWISE_CPU_LIBRARY']} is not loaded"
    if refused := trust.why_not(path):
        return f"{said}, as others may have written it: {refused}"
    wrong = _unfit(path)
    return f"{said}: {wrong}" if wrong else path


def _installed() -> Path | str:
    """The library that lies next to this module; or elsewhere, as that of an editable install does, if it is not older than a source.

    Otherwise a sentence, empty where there is none.
    """
    here, places = Path(__file__).parent, map(Path, sys.modules[__name__.rpartition(".")[0]].__path__)
    wrong = ""
    for path in (place / NAME for place in places if (place / NAME).exists()):
        wrong = _unfit(path) or (path.parent != here and _older_than_sources(path)) or ""
        if not wrong:
            return path
    return wrong


def _unfit(path: Path) -> str:
    """Why a library without a seal cannot be loaded, as far as that is known before it is; empty where nothing speaks against it."""
    try:
        if path.exists() and not path.is_file():
            return f"{path} is no file"
        return f"{path} is cut short: install it again" if sealed.cut_short(path) else ""
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def _older_than_sources(path: Path) -> str:
    from tilewise.backends.cpu.build import DEFINITIONS, SOURCES

    newest = max((DEFINITIONS, *SOURCES.glob("*")), key=lambda source: source.stat().st_mtime)
    if newest.stat().st_mtime <= path.stat().st_mtime:
        return ""
    ahead = (
        ", which by this machine's clock is yet to be written: set the clock, or touch it" if newest.stat().st_mtime > time.time() else ""
    )
    return f"{path} is older than {newest}{ahead}"


def _built() -> Path | str:
    """The library that build.py compiled from these sources, whole, where nobody else could have put it there; or a sentence, empty where there
    is none."""
    from tilewise.backends.cpu.build import target

    path = target()
    if isinstance(path, str):
        return f"nor can a built one be kept, as {path}"
    if not os.path.lexists(path):
        return ""
    if refused := trust.why_not(path):
        return f"{path} is not loaded, as others may have written it: {refused} (XDG_CACHE_HOME names another folder)"
    return path if sealed.whole(path) else f"{path} is not as `python -m tilewise.backends.cpu.build` wrote it, which makes it again"


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
