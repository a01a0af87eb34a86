"""One process at a time compiles a kernel."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewise.machine import lock

pytestmark = pytest.mark.skipif(lock.fcntl is None, reason="this system has no such locks")

HOLDER = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print(flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def entry(tmp_path) -> Path:
    return tmp_path / "version" / "kernel.so"


@pytest.fixture
def holder(entry):
    """A process that has the lock until it reads a line."""
    entry.parent.mkdir()
    command = [sys.executable, "-c", HOLDER, str(lock._path(entry))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "\n"
    yield process
    process.kill()
    process.communicate()


def test_it_is_held_once_and_leaves_nothing(entry):
    with lock.held(entry, 0.0) as ours, lock.held(entry, 0.0) as others:
        assert ours and not others
    assert not list(entry.parent.iterdir())
    with lock.held(entry, 0.0) as ours:
        assert ours


def test_others_wait(entry, holder):
    with lock.held(entry, 0.1) as ours:
        assert not ours
    holder.stdin.write("\n")
    holder.stdin.flush()
    with lock.held(entry, 60.0) as ours:
        assert ours


def test_it_ends_with_the_process_that_holds_it(entry, holder):
    holder.kill()
    with lock.held(entry, 60.0) as ours:
        assert ours


def test_nobody_waits_where_there_can_be_no_lock(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    begin = time.monotonic()
    with lock.held(tmp_path / "file" / "kernel.so") as ours:
        assert not ours

    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with lock.held(tmp_path / "version" / "kernel.so") as ours:
        assert not ours
    assert time.monotonic() - begin < lock.MOST_S / 10


def test_a_link_in_its_place_is_not_followed(entry, tmp_path):
    entry.parent.mkdir()
    os.symlink(tmp_path / "elsewhere", lock._path(entry))
    with lock.held(entry, 0.0) as ours:
        assert not ours
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_gives_it_back(entry):
    with pytest.raises(RuntimeError, match="out of registers"), lock.held(entry, 0.0):
        raise RuntimeError("out of registers")
    with lock.held(entry, 0.0) as ours:
        assert ours
