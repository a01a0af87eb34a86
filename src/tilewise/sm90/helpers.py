"""Processes that compile kernels beside this one, before they are asked for: those of the backward pass while this process compiles the forward's.

Processes, because the DSL holds Python's lock from the first line that it traces to the end of its last pass: a thread that compiles stops the
others. They are programs of their own: not forked, as this process has threads and CUDA, and not of multiprocessing, which would run the user's
script again. They see no GPU. What they compile goes into the cache (cache.py), where `jit.compiled` waits for a kernel that is being made
(lock.py). So a helper that fails, or is not there, costs nothing: the kernel is compiled where it is needed, and what is wrong with it is said there.

A helper imports the DSL, which takes a second, but not torch (standin.py). It waits for more to do for IDLE_S, and ends with this process, or with
the thread that started it. TILEWISE_HELPERS=0 does without.
"""

import atexit
import contextlib
import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tilewise.machine import environment
from tilewise.sm90 import cache, jit, lock
from tilewise.sm90.jit import Kernel

IDLE_S = 60.0
MOST = 4  # helpers of a process, half a gigabyte each
STANDIN = Path(__file__).with_name("standin.py")
PROGRAM = (
    f"import sys; sys.path[:] = sys.argv[2:]; exec(open({str(STANDIN)!r}).read()); install(); "
    "from tilewise.sm90 import helpers; helpers.serve(int(sys.argv[1]))"
)
SET_DEATH_SIGNAL = 1  # of prctl

_guard = threading.Lock()
_seen: set[tuple] = set()  # (launch, config) of what was asked for
_helpers: list["Helper"] = []


class Helper:
    """One such process, seen from the one that started it."""

    def __init__(self) -> None:
        settings = {"CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": jit.arch(), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-c", PROGRAM, str(os.getpid()), *map(str, sys.path)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nothing, env=os.environ | settings | {"TILEWISE_HELPERS": "0"}
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        self.waiting_for = 0

    def idle(self) -> bool:
        """Whether it has done what it was given."""
        self.waiting_for -= len(self.process.stdout.read() or b"")
        return self.waiting_for == 0

    def give(self, job: bytes) -> None:
        """Raises OSError where it has ended."""
        self.waiting_for += 1
        self.process.stdin.write(job)
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what it was given last went nowhere
                pipe.close()


def why_not() -> str:
    """Why this process has no helpers; empty where it may."""
    if environment.switched_off("TILEWISE_HELPERS"):
        return f"TILEWISE_HELPERS is {os.environ['TILEWISE_HELPERS']!r}"
    if sys.platform != "linux" or getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        return "no Python can be started here as a program of its own"
    if len(os.sched_getaffinity(0)) < 2:
        return "this process has a single core"
    return "; ".join(jit.why_no_compiler()) or cache.why_not()


def begin(*groups: Sequence[Kernel]) -> None:
    """Have those of the kernels compiled that are not on disk, each group by a helper, in its order. Returns at once, and raises nothing."""
    for group in groups:
        if all(kernel.identity in _seen for kernel in group):
            continue
        with _guard:
            new = [kernel for kernel in group if kernel.identity not in _seen]
            _seen.update(kernel.identity for kernel in new)
            if new and not why_not() and (missing := [*filter(None, map(_missing, new))]):
                _give(missing)


def _missing(kernel: Kernel) -> tuple[Kernel, Path] | None:
    """With the entry that it will be; None where it is there, or cannot be kept."""
    entry = cache.entry(*kernel.identity, jit.arch())
    return (kernel, entry) if entry and not entry.exists() and cache.keeps(entry) else None


def _give(kernels: list[tuple[Kernel, Path]]) -> None:
    for helper in [each for each in _helpers if each.process.poll() is not None]:
        helper.end()
        _helpers.remove(helper)
    try:
        job = pickle.dumps(kernels)
        found = next((each for each in _helpers if each.idle()), None)
        if found is None:
            if len(_helpers) >= min(MOST, len(os.sched_getaffinity(0)) - 1):
                return
            found = Helper()
            _helpers.append(found)
        found.give(job)
    except (OSError, ValueError, AttributeError, pickle.PicklingError):  # too many processes, or one that has just ended
        return


@atexit.register
def end() -> None:
    """End all helpers of this process, and wait until they have."""
    while _helpers:
        _helpers.pop().end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.clear)  # they are its parent's


def serve(parent: int) -> None:
    """What a helper does: compile what comes, a pickled list of kernels and their entries at a time, and say when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # which ended before that
        return
    jobs, done = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1):
        os.dup2(nothing, handle)
    while select.select([jobs], [], [], IDLE_S)[0]:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        for kernel, entry in job:
            _compile(kernel, entry)
        os.write(done, b".")


def _compile(kernel: Kernel, entry: Path) -> None:
    if cache.entry(*kernel.identity, jit.arch()) != entry:  # the sources were edited since the parent read them
        return
    with lock.held(entry, 0.0) as ours:
        if not ours or cache.whole(entry):
            return
        try:
            cache.store(entry, jit.build(*kernel, runs=False))
        except Exception:  # of the compiler, which has many; whoever needs the kernel gets it
            return
