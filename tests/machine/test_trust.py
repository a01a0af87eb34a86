"""Code is loaded only from where no other user could have put it: the rule itself, the kernel cache, the CPU library."""

import os
import shutil
import warnings
from pathlib import Path

import pytest

from tilewise.backends.cpu import build, native
from tilewise.machine import once, sealed, trust

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users own files on POSIX systems")
STRANGER = 12345


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(once, "_said", set())


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "a" / "b" / "file").write_text("code")
    return tmp_path / "a"


@pytest.fixture
def give_away(monkeypatch):
    """Make a file or folder another user's: as root by changing its owner, else by what lstat says of it."""
    given: set[str] = set()
    lstat = os.lstat

    def changed(path, **options):
        status = lstat(path, **options)
        return os.stat_result((*status[:4], STRANGER, *status[5:])) if os.fspath(path) in given else status

    monkeypatch.setattr(trust.os, "lstat", changed)
    return lambda path: given.add(os.fspath(path))


def test_what_is_the_users_own_is_taken(folder):
    assert trust.why_not(folder / "b" / "file") == "" and trust.why_not(folder) == ""


def test_what_is_not_there_is_no_reason(folder):
    assert trust.why_not(folder / "b" / "none" / "file") == ""


@pytest.mark.parametrize("at", ["", "b", "b/file"])
def test_another_owner_is_named(at, folder, give_away):
    give_away(folder / at)
    said = f"{folder / at} belongs to another user (number {STRANGER}, and this is {os.getuid()})"
    assert trust.why_not(folder / "b" / "file") == said


def test_root_and_this_user_may_own(folder, monkeypatch, give_away):
    give_away(folder)
    monkeypatch.setattr(trust.os, "getuid", lambda: STRANGER)
    if os.geteuid() in (0, os.lstat("/").st_uid):
        assert trust.why_not(folder / "b" / "file") == ""  # the rest is the administrator's
    else:
        assert f"belongs to another user (number {os.geteuid()}, and this is {STRANGER})" in trust.why_not(folder / "b" / "file")


@pytest.mark.parametrize("at", ["", "b", "b/file"])
@pytest.mark.parametrize("mode, who", [(0o777, "everybody"), (0o702, "everybody"), (0o770, "its group")])
def test_who_else_may_write_is_named(at, mode, who, folder, monkeypatch):
    monkeypatch.setattr(trust, "_private", lambda group, owner: False)
    (folder / at).chmod(mode)
    assert trust.why_not(folder / "b" / "file") == f"{folder / at} can be written to by {who} (chmod go-w {folder / at} ends that)"


def test_a_group_that_is_its_owners_alone_may_write(folder, monkeypatch):
    import grp
    import pwd

    folder.chmod(0o770)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(("alice", "x", uid, uid, "", "/", "/bin/sh")))
    for group, members, taken in (("alice", [], True), ("alice", ["alice"], True), ("alice", ["mallory"], False), ("staff", [], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda _, known=(group, "x", 1, members): grp.struct_group(known))
        assert (trust.why_not(folder / "b") == "") is taken


def test_in_a_sticky_folder_only_the_users_own_is_taken(folder, give_away):
    folder.chmod(0o1777)
    assert trust.why_not(folder / "b" / "file") == ""
    give_away(folder / "b")
    assert "belongs to another user" in trust.why_not(folder / "b" / "file")


def test_a_sticky_file_is_no_folder(folder):
    (folder / "b" / "file").chmod(0o1666)
    assert "can be written to by everybody" in trust.why_not(folder / "b" / "file")


def test_links_are_followed_step_by_step(folder, tmp_path, give_away):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    (open_to_all / "code").write_text("theirs")
    open_to_all.chmod(0o777)
    (folder / "out").symlink_to("../open/code")
    (folder / "absolute").symlink_to(open_to_all)
    (folder / "back").symlink_to(folder / "out")
    for path in (folder / "out", folder / "absolute" / "code", folder / "back", folder / ".." / "open" / "code"):
        assert trust.why_not(path).startswith(f"{open_to_all} can be written to by everybody")
    (open_to_all / "into").symlink_to(folder / "b" / "file")  # where others may put another link in its place
    assert trust.why_not(open_to_all / "into").startswith(f"{open_to_all} can be written to")
    (folder / "link").symlink_to(folder / "b" / "file")
    assert trust.why_not(folder / "link") == ""
    give_away(folder / "link")
    assert trust.why_not(folder / "link").startswith(f"{folder / 'link'} belongs to another user")
    (folder / "round").symlink_to("round")
    assert "more than 40 symbolic links" in trust.why_not(folder / "round")


def test_a_relative_path_is_looked_at_from_here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    folder.chmod(0o777)
    assert trust.why_not(Path("b/file")).startswith(f"{folder} can be written to")


def test_new_folders_are_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        trust.make_folder(tmp_path / "x" / "y" / "z")
    finally:
        os.umask(before)
    assert [oct((tmp_path / each).stat().st_mode & 0o777) for each in ("x", "x/y", "x/y/z")] == ["0o700"] * 3


def test_the_cpu_library_of_others_is_passed_over(tmp_path, monkeypatch, give_away):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = build.target()
    trust.make_folder(path.parent)
    sealed.write(path, native.library().path.read_bytes())
    assert native._built() == path
    give_away(path)
    said = native._built()
    assert (
        said.startswith(f"{path} is not loaded, as others may have written it: {path} belongs to another user") and "XDG_CACHE_HOME" in said
    )


def test_a_library_that_others_may_write_to_is_not_the_one_that_was_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "library.so"
    shutil.copy(native.library().path, path)
    path.chmod(0o755)
    monkeypatch.setenv("TILEWISE_CPU_LIBRARY", str(path))
    assert native._load.__wrapped__().path == path
    path.chmod(0o757)
    said = f"TILEWISE_CPU_LIBRARY={path} is not loaded, as others may have written it: {path} can be written to by everybody"
    assert native._load.__wrapped__().startswith(said)


def test_nothing_is_built_where_others_may_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(build.BuildError, match=rf"{tmp_path} can be written to by everybody .*; XDG_CACHE_HOME names another folder"):
        build.build()


def test_one_sentence_is_said_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for refused in ("a is open", "a is open", "b is open"):
            trust.warn(refused, "it is made anew")
    assert [str(each.message) for each in said] == [f"{x} is open, so nothing is loaded from there: it is made anew" for x in "ab"]
