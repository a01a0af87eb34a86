"""Hopper kernels compiled by helpers (machine/helpers.py), into the cache (cache.py), where `jit.compiled` waits for a kernel that is being made."""

import threading
from collections.abc import Sequence
from pathlib import Path

from tilewise.machine import helpers, lock
from tilewise.sm90 import cache, jit
from tilewise.sm90.jit import Kernel

crew = helpers.Helpers("cutlass.cute,tvm_ffi", "tilewise.sm90.dsl,tilewise.sm90.helpers", lambda: {"CUTE_DSL_ARCH": jit.arch()})
_guard = threading.Lock()
_seen: set[tuple] = set()  # (launch, config) of what was asked for


def why_not() -> str:
    """Why this process has no helpers; empty where it may."""
    return helpers.why_not() or "; ".join(jit.why_no_compiler()) or cache.why_not()


def begin(*groups: Sequence[Kernel]) -> None:
    """Have those of the kernels compiled that are not on disk, each group by a helper, in its order. Returns at once, and raises nothing."""
    for group in groups:
        if all(kernel.identity in _seen for kernel in group):
            continue
        with _guard:
            new = [kernel for kernel in group if kernel.identity not in _seen]
            _seen.update(kernel.identity for kernel in new)
            if new and not why_not() and (missing := [*filter(None, map(_missing, new))]):
                crew.give(missing)


def _missing(kernel: Kernel) -> tuple[Kernel, Path] | None:
    """With the entry that it will be; None where it is there, or cannot be kept."""
    entry = cache.entry(*kernel.identity, jit.arch())
    return (kernel, entry) if entry and not entry.exists() and cache.keeps(entry) else None


def compile_one(kernel: Kernel, entry: Path) -> None:
    """In a helper."""
    if cache.entry(*kernel.identity, jit.arch()) != entry:  # the sources were edited since the parent read them
        return
    with lock.held(entry, 0.0) as ours:
        if not ours or cache.whole(entry):
            return
        try:
            cache.store(entry, jit.build(*kernel, runs=False))
        except Exception:  # of the compiler, which has many; whoever needs the kernel gets it
            return
