"""Caches on disk whose files were cut short, damaged or replaced, and folders in which others keep files of their own."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tilewise.backends.cpu import build, native
from tilewise.machine import sealed
from tilewise.sm90 import cache

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, pipes and rights as POSIX systems have them")


def compiled() -> bytes:
    """The CPU kernel as its compiler wrote it. Where sources are newer than what is installed, it is loaded from the user's cache, and has a seal."""
    path = native.library().path
    content = path.read_bytes()
    return content[: content.rindex(sealed.MARK)] if sealed.whole(path) else content


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """The CPU kernel as build.py leaves it in the user's cache, with a compiler that takes no time."""
    content = compiled()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compiled", lambda *options: content)
    path = build.build()
    assert native._built() == path and path.stat().st_mode & 0o777 == 0o755 and list(path.parent.iterdir()) == [path]
    return path


def damaged(path: Path, at: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    at %= len(content)
    content[at : at + len(new)] = new
    path.unlink()  # not what this process may have loaded
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:size])


def instead(path: Path, make) -> None:
    path.unlink()
    make(path)


SPOILED = {
    "empty": lambda path: cut(path, 0),
    "ten bytes": lambda path: cut(path, 10),
    "one page": lambda path: cut(path, 4096),
    "1.5 MB": lambda path: cut(path, 1_500_000),
    "without its last byte": lambda path: cut(path, -1),
    "without its seal": lambda path: cut(path, -40),
    "a byte too many": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a page of zeros": lambda path: damaged(path, 8192, bytes(4096)),
    "zeros at the end": lambda path: damaged(path, -4096, bytes(4096)),
    "one bit": lambda path: damaged(path, 300_000, bytes([path.read_bytes()[300_000] ^ 1])),
    "a text": lambda path: instead(path, lambda path: path.write_text("no library")),
    "a link to nothing": lambda path: instead(path, lambda path: path.symlink_to("nothing")),
    "a link in a circle": lambda path: instead(path, lambda path: path.symlink_to(path.name)),
    "a pipe": lambda path: instead(path, os.mkfifo),
    "a link to a device": lambda path: instead(path, lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_cpu_kernel_is_passed_over_with_a_word_and_built_again(how, library):
    right = library.read_bytes()
    SPOILED[how](library)
    said = native._built()
    assert isinstance(said, str) and str(library) in said
    if how != "a link to a device":  # which others may write to
        assert said.endswith("is not as `python -m tilewise.backends.cpu.build` wrote it, which makes it again") or "symbolic links" in said
        if how != "a link in a circle":  # nobody knows where it leads
            assert build.build() == library and library.read_bytes() == right and native._built() == library


def test_a_folder_in_the_place_of_the_cpu_kernel_is_said(library):
    instead(library, Path.mkdir)
    assert "is not as" in native._built()
    with pytest.raises(build.BuildError, match=f"the kernel cannot be kept at {library}: .*: Is a directory; XDG_CACHE_HOME names another"):
        build.build()
    assert list(library.parent.iterdir()) == [library]  # nothing is left aside


def test_a_cpu_kernel_of_another_digest_is_not_taken(library):
    """A seal is of a name, too."""
    assert not sealed.whole(library.rename(library.with_name("other.so")))


def test_builders_at_the_same_time_leave_one_whole_library(library):
    library.unlink()
    builders = [threading.Thread(target=build.build) for _ in range(8)]
    for each in builders:
        each.start()
    for each in builders:
        each.join()
    assert list(library.parent.iterdir()) == [library] and native._built() == library


@pytest.mark.parametrize("size", [3000, 1_500_000, -1])
@pytest.mark.parametrize("place", ["named", "installed"])
def test_a_library_without_a_seal_is_not_loaded_where_it_was_cut_short(size, place, tmp_path, monkeypatch):
    path = tmp_path / native.NAME
    path.write_bytes(compiled()[:size])
    if place == "named":
        monkeypatch.setenv("TILEWISE_CPU_LIBRARY", str(path))
        found = native._load.__wrapped__()
    else:
        monkeypatch.setattr(sys.modules["tilewise.backends.cpu"], "__path__", [str(tmp_path)])
        found = native._installed()
    assert isinstance(found, str) and f"{path} is cut short" in found


COMPUTE = """
import sys, warnings
import torch, tilewise as tw
from tilewise.backends.cpu import native
native._installed = lambda: ""
q = torch.randn(1, 9, 2, 16)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for length in (9, 8):
        tw.attention(q[:, :length], q, q)
print(*(each.message for each in said), sep="\\n")
"""


def test_a_process_that_meets_a_cpu_kernel_cut_short_computes_and_says_so_once(library):
    cut(library, 1_500_000)
    done = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, check=True)
    (said,) = done.stdout.splitlines()
    assert said.startswith("'tiled' computes attention in place of 'cpu', several times slower: its compiled kernel is not installed")
    assert f"{library} is not as `python -m tilewise.backends.cpu.build` wrote it" in said


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "given"))
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    (tmp_path / "given" / "hopper").mkdir(parents=True, mode=0o700)
    return tmp_path / "given" / "hopper"


def put(path: Path, size: int = 10, age: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (age, age))
    return path


VERSION, NAME = "0123456789abcdef", "0123456789abcdef" * 2


def test_only_files_with_the_names_of_entries_are_removed(root, monkeypatch, tmp_path):
    ours = [put(root / VERSION / name) for name in (f"{NAME}.so", f".{NAME}.abcd_012.tmp", f".{NAME}.lock")]
    theirs = [
        put(root / name)
        for name in (
            "run1/checkpoint.pt", f"run1/{NAME}.so", f"{VERSION}/notes.txt", f"{VERSION}/{NAME[:-1]}.so", f"{VERSION}/{NAME}.so.bak",
            f"{VERSION}/{NAME}0.so", f"{VERSION}/{NAME}/{NAME}.so", f"{VERSION}0/{NAME}.so", f"{VERSION.upper()}/{NAME}.so", f"{NAME}.so",
            f"{VERSION}/.{NAME}.lock.bak", f"{VERSION}/.abcdefgh",
        )
    ]  # fmt: skip
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    kept = put(root / VERSION / f"{NAME[::-1]}.so", age=2.0)
    cache._evict(kept)
    assert kept.exists() and not any(path.exists() for path in ours) and all(path.exists() for path in theirs)
    assert cache.clear() == 1 and not kept.exists() and all(path.exists() for path in theirs)


@pytest.mark.parametrize("level", ["hopper", "version", "entry"])
def test_nothing_behind_a_link_is_removed(level, root, tmp_path, monkeypatch):
    theirs = put(tmp_path / "theirs" / VERSION / f"{NAME}.so")
    if level == "hopper":
        root.rmdir()
        root.symlink_to(tmp_path / "theirs")
        assert "is a symbolic link, behind which nothing is removed; TILEWISE_CACHE_DIR names another folder" in cache.why_not()
    elif level == "version":
        (root / VERSION).symlink_to(tmp_path / "theirs" / VERSION)
    else:
        (root / VERSION).mkdir()
        (root / VERSION / f"{NAME}.so").symlink_to(theirs)
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    cache._evict(root / "none")
    assert cache.clear() == 0 and cache.entries() == [] and theirs.exists()


def test_an_entry_that_cannot_be_removed_is_left(root, monkeypatch):
    found = put(root / VERSION / f"{NAME}.so")
    monkeypatch.setattr(cache, "MOST_BYTES", 0)

    def refuse(*_, **__):
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "unlink", refuse)
    cache._evict(root / "none")
    assert cache.clear() == 0 and cache.entries() == [found]
