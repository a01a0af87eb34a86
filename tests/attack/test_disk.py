"""A disk without room: a kernel is compiled once and run, nothing is left behind, and the reason is a sentence."""

import errno
import os
import resource
from types import SimpleNamespace

import pytest

from tilewise.backends.cpu import build
from tilewise.machine import once, sealed
from tilewise.sm90 import cache, jit

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits of files as POSIX systems have them")


@pytest.fixture
def full():
    """No file of this process can grow beyond 100 kB, which is met where a full disk or a quota is: by `write`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_each_kernel_is_compiled_once(small, tmp_path, monkeypatch, full):
    if not cache.library():
        pytest.skip("the DSL is not installed, or not for this processor")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    monkeypatch.setattr(once, "_said", set())
    builds = []
    monkeypatch.setattr(jit, "build", lambda *given, **options: builds.append(options) or SimpleNamespace())
    with pytest.warns(
        RuntimeWarning, match="compiled kernels are not kept, .* cannot be written to .*TILEWISE_CACHE_DIR names another"
    ) as said:
        for _ in range(2):
            jit._compiled.__wrapped__(*small, "")
    assert builds == [{}, {}] and len(said) == 1 and not list(tmp_path.iterdir())
    assert "cannot be written to" in cache.describe()


def test_what_is_half_written_goes(tmp_path, full):
    path = tmp_path / "library.so"
    path.write_bytes(b"before")
    with pytest.raises(OSError):
        sealed.write(path, bytes(200_000))
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"before"


def test_a_build_that_cannot_be_kept_says_so(tmp_path, monkeypatch, full):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compiled", lambda *options: bytes(200_000))
    with pytest.raises(build.BuildError, match="the kernel cannot be kept at .*: File too large; XDG_CACHE_HOME names another folder"):
        build.build()
    assert not list(build.target().parent.iterdir())


def test_a_build_without_room_for_the_compiler_says_so(tmp_path, monkeypatch):
    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/tilewise-build-x")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", no_room)
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    with pytest.raises(build.BuildError, match="/tmp/tilewise-build-x: No space left on device; .* TMPDIR for files of the moment"):
        build.build()


def test_no_folder_for_files_of_the_moment(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    monkeypatch.setattr(cache.tempfile, "gettempdir", none)
    assert "No usable temporary directory found, for files of the moment; TMPDIR names another folder" in cache.why_not()
