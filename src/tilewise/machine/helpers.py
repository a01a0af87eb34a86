"""Processes that compile kernels next to this one, before they are asked for: those of the backward pass while this process compiles the forward's.

Processes, because compilers hold Python's lock from the first line that they trace to the end of their last pass: a thread that compiles stops the
others. They are programs of their own: not forked, as this process has threads and CUDA, and not of multiprocessing, which would run the user's
script again. They see no GPU. What they compile goes into a cache on disk, where the process that needs a kernel waits for one that is being made
(lock.py). So a helper that fails, or is not there, costs nothing: the kernel is compiled where it is needed, and what is wrong with it is said
there.

A helper imports its compiler, which takes a second, but not torch (standin.py). It waits for more to do for IDLE_S, and ends with this process, or
with the thread that started it. TILEWISE_HELPERS=0 does without.
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
from collections.abc import Callable
from pathlib import Path

from tilewise.machine import environment

IDLE_S = 60.0
MOST = 4  # helpers of a process, half a gigabyte each
STANDIN = Path(__file__).with_name("standin.py")
PROGRAM = (
    f"import sys; sys.path[:] = sys.argv[4:]; exec(open({str(STANDIN)!r}).read()); module = install(sys.argv[2], sys.argv[3]); "
    "from tilewise.machine import helpers; helpers.serve(int(sys.argv[1]), module.compile_one)"
)
UNSEEN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
SETTINGS = UNSEEN | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TILEWISE_HELPERS": "0"}
SET_DEATH_SIGNAL = 1  # of prctl


class Helper:
    """One such process, seen from the one that started it."""

    def __init__(self, compilers: str, ours: str, settings: dict[str, str]) -> None:
        command = [sys.executable, "-c", PROGRAM, str(os.getpid()), compilers, ours, *map(str, sys.path)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, env=os.environ | SETTINGS | settings)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._jobs, self._done, self.waiting_for = self.process.stdin, self.process.stdout, 0
        os.set_blocking(self._done.fileno(), False)

    def idle(self) -> bool:
        """Whether it has done what it was given."""
        self.waiting_for -= len(self._done.read() or b"")
        return self.waiting_for == 0

    def give(self, job: bytes) -> None:
        """Raises OSError where it has ended."""
        self.waiting_for += 1
        self._jobs.write(job)
        self._jobs.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._jobs, self._done):
            with contextlib.suppress(OSError):  # what it was given last went nowhere
                pipe.close()


class Helpers:
    """Those of this process that have one compiler.

    compilers: modules that do without torch, separated by commas. ours: likewise, what needs those; the last one's `compile_one(*each)` compiles each
    of a job. settings: for their environment.
    """

    def __init__(self, compilers: str, ours: str, settings: Callable[[], dict[str, str]] = dict) -> None:
        self.compilers, self.ours, self.settings = compilers, ours, settings
        self.working: list[Helper] = []
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.working.clear)  # they are its parent's

    def give(self, job: list[tuple]) -> None:
        """To one that has nothing to do, or to a new one where there is room for it; else, or where that fails, to nobody. Returns at once."""
        for helper in [each for each in self.working if each.process.poll() is not None]:
            helper.end()
            self.working.remove(helper)
        try:
            sent = pickle.dumps(job)
            found = next((each for each in self.working if each.idle()), None)
            if found is None:
                if len(self.working) >= room():
                    return
                found = Helper(self.compilers, self.ours, self.settings())
                self.working.append(found)
            found.give(sent)
        except (OSError, ValueError, TypeError, AttributeError, pickle.PicklingError):  # too many processes, or one that has just ended
            return

    def end(self) -> None:
        """End all of them, and wait until they have."""
        while self.working:
            self.working.pop().end()


def why_not() -> str:
    """Why this process has no helpers; empty where it may."""
    if environment.switched_off("TILEWISE_HELPERS"):
        return f"TILEWISE_HELPERS is {os.environ['TILEWISE_HELPERS']!r}"
    if sys.platform != "linux" or getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        return "no Python can be started here as a program of its own"
    return "" if room() else "this process has a single core"


def room() -> int:
    """How many helpers there may be."""
    return min(MOST, len(os.sched_getaffinity(0)) - 1)


def serve(parent: int, compile_one: Callable) -> None:
    """What a helper does: compile what comes, a pickled list at a time, and say when it is done."""
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
        for each in job:
            compile_one(*each)
        os.write(done, b".")
