"""A user without a home, or with one that cannot be read: everything computes, and what keeps nothing says why in a sentence."""

import itertools
import os
import pwd
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.backends.cpu import build, native
from tilewise.cli import commands, doctor, grammar, kernels
from tilewise.machine import once
from tilewise.sm90 import cache

pytestmark = pytest.mark.skipif(os.name != "posix", reason="HOME and rights as POSIX systems have them")
STRANGER = 54321  # who may not read where Python's modules lie either
IMPORTED = commands, kernels


@contextmanager
def another_user():
    """Whom files and folders of this one do not let in, where this one is root."""
    if os.geteuid():
        yield
        return
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


def unset(tmp_path, monkeypatch) -> str:
    def unknown(_):
        raise KeyError("no such user")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    return "HOME is not set, and this user is not in the password file"


def nowhere(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    return f"{tmp_path / 'nowhere'} cannot be read (No such file or directory)"


def a_device(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("HOME", "/dev/null")
    return "/dev/null cannot be read (Not a directory)"


def relative(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("HOME", "here")
    return "the home directory, 'here', is no absolute path: set HOME"


def unreadable(tmp_path, monkeypatch) -> str:
    (tmp_path / "locked").mkdir(mode=0o000)
    monkeypatch.setenv("HOME", str(tmp_path / "locked"))
    return f"{tmp_path / 'locked'} cannot be read (Permission denied)"


def unreadable_below(tmp_path, monkeypatch) -> str:
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "home" / ".cache").chmod(0o000)
    (tmp_path / "home").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return f"{tmp_path / 'home' / '.cache' / 'tilewise'} cannot be read (Permission denied)"


def a_file(tmp_path, monkeypatch) -> str:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    return f"{tmp_path / 'file' / 'tilewise'} cannot be read (Not a directory)"


def a_relative_cache(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    return nowhere(tmp_path, monkeypatch)


HOMES = (unset, nowhere, a_device, relative, unreadable, unreadable_below, a_file, a_relative_cache)


@pytest.fixture(params=HOMES, ids=[each.__name__ for each in HOMES])
def said(request, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "TILEWISE_CACHE_DIR", "TILEWISE_CACHE", "TILEWISE_CPU_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for each in (tmp_path, *itertools.takewhile(lambda folder: folder != Path(tempfile.gettempdir()), tmp_path.parents)):
        each.chmod(0o755)  # pytest's own folders, of which a worker of xdist has one more
    make: Callable = request.param
    sentence = make(tmp_path, monkeypatch)
    with another_user():
        yield sentence
    for each in tmp_path.rglob("*"):
        each.chmod(0o755)


@pytest.mark.filterwarnings("ignore:compiled kernels are not kept")
def test_there_is_a_sentence_and_no_error(said, monkeypatch):
    monkeypatch.setattr(native, "_installed", lambda: "")
    missing = native._load.__wrapped__()
    assert said in build.target() and said in missing and "XDG_CACHE_HOME names a folder for it" in missing
    assert said in cache.folder() and said in cache.why_not() and said in cache.describe() and said in str(doctor.machine().values())
    assert cache.entries() == [] and cache.clear() == 0 and not cache.keeps(Path("/nonexistent/entry.so"))
    with pytest.raises(build.BuildError, match="the kernel is not kept: "):
        build.build()


def test_kernels_are_compiled_in_memory(said, monkeypatch):
    if not cache.library():
        pytest.skip("the DSL is not installed, or not for this processor")
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(cache.prebuilt, "entry", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept, and every process compiles what it needs: ") as warned:
        assert cache.entry("module:launch", None, "sm_90a") is None and cache.entry("module:launch", None, "sm_90a") is None
    assert len(warned) == 1 and said in str(warned[0].message)


def test_calls_compute_and_commands_answer(said, capsys):
    q = torch.randn(1, 9, 2, 16)
    assert tw.attention(q, q, q).isfinite().all() and tw.explain(q, q, q)
    assert grammar.main(["doctor", "--json"]) == 0
    assert grammar.main(["warmup", "--clear"]) == 3 and said in capsys.readouterr().err


def test_a_relative_cache_folder_is_passed_over(tmp_path, monkeypatch):
    """As the XDG base directory specification says; it would be another one after each change of folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TILEWISE_CACHE_DIR", raising=False)
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    assert cache.folder() == tmp_path / ".cache" / "tilewise" / "hopper" and build.target().is_relative_to(tmp_path / ".cache" / "tilewise")


def test_no_current_folder(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "here")
    monkeypatch.setenv("TILEWISE_CPU_LIBRARY", "x.so")
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    assert "there is no current folder to look from" in cache.why_not()
    assert native._load.__wrapped__().startswith("TILEWISE_CPU_LIBRARY is 'x.so', and there is no current folder to look from")
