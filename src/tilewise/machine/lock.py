"""One process at a time compiles a kernel; the others wait for what it keeps.

The ranks of a training compile the same kernels in the same minute, and helpers (helpers.py) what their parent soon asks for. A lock ends with the
process that holds it, however that ends. Where a file system has no locks, nobody waits.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewise.machine import trust

try:
    import fcntl
except ImportError:  # Windows, where there are no kernels either
    fcntl = None

MOST_S = 120.0  # a kernel takes 10; whoever holds a lock for longer was stopped
POLL_S = 0.02


@contextmanager
def held(entry: Path, most_s: float = MOST_S) -> Iterator[bool]:
    """The lock of an entry of the cache; whether this process has it. While another one does, this waits for up to `most_s` seconds."""
    handle, end = _taken(entry), time.monotonic() + most_s
    while handle is None and time.monotonic() < end:
        time.sleep(POLL_S)
        handle = _taken(entry)
    try:
        yield bool(handle)
    finally:
        if handle:
            _give_back(entry, handle)


def _taken(entry: Path) -> int | None:
    """A handle; None where another process has the lock, 0 where there can be none."""
    if fcntl is None:
        return 0
    path = _path(entry)
    try:
        trust.make_folder(entry.parent)
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return 0
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except (BlockingIOError, FileNotFoundError):  # it is another's; or it was, and went away
        pass
    except OSError:
        os.close(handle)
        return 0
    os.close(handle)
    return None


def _give_back(entry: Path, handle: int) -> None:
    assert fcntl is not None  # or there would be no handle
    try:
        _path(entry).unlink(missing_ok=True)  # while it is held, so that nobody takes a name that goes
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the handle too
    except OSError:
        pass
    finally:
        os.close(handle)


def _path(entry: Path) -> Path:
    return entry.with_name(f".{entry.stem}.lock")
