"""Compiled kernels on disk: kept, found again without the DSL, and never taken for what they are not."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch

from tilewise.backends.hopper.forward import config
from tilewise.machine import once
from tilewise.sm90 import cache, jit


def said_by(function) -> str:
    """What a kernel says to a call without arguments, as there is no GPU for others."""
    with pytest.raises(TypeError) as error:
        function()
    return str(error.value)


@pytest.fixture
def builds(exported, monkeypatch) -> list:
    """The calls of the compiler, which takes no time."""
    calls = []

    def build(*given, **_):
        calls.append(given)
        return exported

    monkeypatch.setattr(jit, "build", build)
    return calls


@pytest.fixture
def path(kept, small) -> Path:
    return cache.entry(small[0], small[2], jit.arch())


def test_the_second_process_does_not_compile(kept, small, builds, path):
    first = jit.compiled(*small)
    assert jit.compiled(*small) is first and len(builds) == 1
    jit._compiled.cache_clear()  # as in another process
    assert "launch(tensors" in said_by(jit.compiled(*small)) and len(builds) == 1
    assert list(path.parent.iterdir()) == [path] and cache.entries() == [path]


def test_a_function_and_its_name_have_one_entry(kept, small, builds):
    from importlib import import_module

    module, _, name = small[0].partition(":")
    jit.compiled(*small)
    jit.compiled(getattr(import_module(module), name), *small[1:])
    assert len(builds) == 1 and len(cache.entries()) == 1


def test_with_options_it_is_compiled_afresh(kept, small, builds):
    jit.compiled(*small)
    jit.compiled(*small, "remarks{ptx}")
    assert [call[3:] for call in builds] == [(), ("remarks{ptx}",)] and len(cache.entries()) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        lambda content: content[:-1] + bytes([content[-1] ^ 128]),
        lambda content: os.urandom(len(content)),
    ],
)
def test_a_damaged_entry_is_replaced(spoil, kept, small, builds, path):
    jit.compiled(*small)
    right = path.read_bytes()
    path.unlink()  # a new file, as what is loaded must not change
    path.write_bytes(spoil(right))
    jit._compiled.cache_clear()
    assert cache.load(path) is None
    assert "launch(tensors" in said_by(jit.compiled(*small)) and len(builds) == 2
    assert path.read_bytes() == right


def test_an_entry_under_another_name_is_not_taken(kept, small, builds, path):
    jit.compiled(*small)
    other = cache.entry(small[0], replace(small[2], dtype=torch.float16), jit.arch())
    shutil.copy(path, other)
    assert cache.load(path) and cache.load(other) is None


def test_every_field_of_the_configuration_is_told_apart(kept, small):
    launch, plain = small[0], replace(small[2], alibi=True)  # without ALiBi there is no `diagonal`
    others = {"dtype": torch.float16, "mask_kind": "causal"}
    changed = [replace(plain, **{each.name: others.get(each.name, f"{getattr(plain, each.name)}0")}) for each in fields(plain)]
    paths = {cache.entry(launch, each, "sm_90a") for each in (plain, *changed)}
    paths |= {cache.entry(launch, plain, "sm_90"), cache.entry(f"{launch}_other", plain, "sm_90a")}
    assert len(paths) == len(changed) + 3


@dataclass(frozen=True)
class Strange:
    field: object


def test_what_has_no_lasting_name_is_refused(kept, small):
    with pytest.raises(TypeError, match="Strange.field has no lasting name"):
        cache.entry(small[0], Strange(object()), "sm_90a")
    assert cache.entry("tests.somewhere:make.<locals>.launch", small[2], "sm_90a") is None


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the device code, whose fingerprint is taken anew."""
    for name in cache.SOURCES:
        shutil.copytree(cache.PACKAGE / name, tmp_path / "package" / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(cache, "fingerprint", cache.fingerprint.__wrapped__)
    monkeypatch.setattr(cache, "IMPORTED", cache._stamps())
    return tmp_path / "package"


def test_other_versions_have_other_entries(kept, small, sources, monkeypatch):
    def where():
        return cache.entry(small[0], small[2], "sm_90a")

    seen = {where()}
    version = cache.metadata.version
    monkeypatch.setattr(cache.metadata, "version", lambda name: f"{version(name)}.1" if "cutlass" in name else version(name))
    seen.add(where())
    monkeypatch.setattr(cache.metadata, "version", lambda name: f"{version(name)}.1" if "tvm" in name else version(name))
    seen.add(where())
    monkeypatch.setattr(cache.metadata, "version", version)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    seen.add(where())
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    monkeypatch.setattr(cache, "toolkit_of", lambda path: "cu99")
    seen.add(where())
    assert len(seen) == 5 and None not in seen


def test_changed_device_code_has_other_entries(kept, small, sources, monkeypatch):
    before = cache.entry(small[0], small[2], "sm_90a")
    assert before is not None
    changed = sources / "sm90" / "fragments.py"
    changed.write_text(changed.read_text() + "\n")
    monkeypatch.setattr(cache, "IMPORTED", cache._stamps())  # as in another process
    after = cache.entry(small[0], small[2], "sm_90a")
    assert after is not None and before != after


@pytest.mark.parametrize("edit", ["appended", "older", "another"])
def test_code_that_was_edited_under_this_process_is_not_kept(edit, kept, small, sources, exported, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    before, changed = cache.entry(small[0], small[2], "sm_90a"), sources / "sm90" / "fragments.py"
    if edit == "appended":
        changed.write_text(changed.read_text() + "\n")
    elif edit == "older":  # the file system's clock is behind
        os.utime(changed, (1e9, 1e9))
    else:
        (sources / "sm90" / "new.py").write_text("")
    with pytest.warns(RuntimeWarning, match="compiled and not kept, because their sources were written after this process began"):
        assert cache.entry(small[0], small[2], "sm_90a") is None and not cache.store(before, exported)


def test_sources_from_the_future_are_as_good_as_others(kept, small, sources, monkeypatch):
    """The clock of a file server may be ahead of this machine's."""
    for path in sources.rglob("*.py"):
        os.utime(path, (4e9, 4e9))
    monkeypatch.setattr(cache, "IMPORTED", cache._stamps())
    assert cache.entry(small[0], small[2], "sm_90a") is not None


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_switched_off(value, kept, small, builds, monkeypatch, exported):
    monkeypatch.setenv("TILEWISE_CACHE", value)
    assert jit.compiled(*small) is exported and not kept.exists()
    assert cache.describe() == f"every process compiles what it needs: the cache is off, because TILEWISE_CACHE is '{value}'"


def test_a_folder_that_cannot_be_written_to(tmp_path, kept, small, builds, monkeypatch, exported):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "file"))
    assert jit.compiled(*small) is exported
    assert f"every process compiles what it needs: {tmp_path / 'file'} cannot be written to" in cache.describe()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_the_right_to_write(tmp_path, kept, small, builds, exported):
    tmp_path.chmod(0o500)
    try:
        assert jit.compiled(*small) is exported and "cannot be written to" in cache.describe()
    finally:
        tmp_path.chmod(0o700)


def test_entries_of_a_folder_that_became_read_only_are_used(kept, small, builds, path, monkeypatch):
    jit.compiled(*small)
    jit._compiled.cache_clear()

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    jit.compiled(*small)
    assert len(builds) == 1


def test_what_was_not_used_for_longest_goes_first(kept, small, exported, monkeypatch):
    dtypes, heads = (torch.bfloat16, torch.float16), (64, 96)
    paths = [cache.entry(small[0], config.configure(dtype, dim, dim, "full"), "sm_90a") for dtype in dtypes for dim in heads]
    for age, each in enumerate(paths[:3]):
        assert cache.store(each, exported)
        os.utime(each, (1e9 + age, 1e9 + age))
    assert cache.load(paths[0])  # so that it was used last
    monkeypatch.setattr(cache, "MOST_BYTES", 3 * paths[0].stat().st_size)
    cache.store(paths[3], exported)
    assert set(cache.entries()) == {paths[0], paths[2], paths[3]}
    assert cache.clear() == 3 and not cache.entries() and cache.clear() == 0


RACE = """
import sys
from pathlib import Path
from tilewise.sm90 import cache

class Exported:
    def export_to_c(self, path, name):
        Path(path).write_bytes(Path(sys.argv[2]).read_bytes())

path = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    assert cache.store(path, Exported())
    assert cache.whole(path)
assert cache.load(path) is not None
print("done")
"""


def test_processes_that_write_one_entry_at_once(kept, path, exported):
    command = [sys.executable, "-c", RACE, str(path), str(exported.path)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert [racer.communicate(timeout=60)[0] for racer in racers] == ["done\n"] * 2
    assert [racer.returncode for racer in racers] == [0, 0]
    assert cache.entries() == [path] and cache.load(path)


WARM = """
import json, sys, time
import torch
start = time.perf_counter()
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.forward.call import arguments
from tilewise.sm90.jit import compiled
function = compiled(sys.argv[1], arguments, config.configure(torch.bfloat16, 64, 64, "full"))
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "kind": type(function).__module__, "dsl": "cutlass" in sys.modules}))
"""


def test_a_fresh_process_does_not_import_the_dsl(kept, small, path, exported):
    assert cache.store(path, exported)
    found = subprocess.run([sys.executable, "-c", WARM, small[0]], capture_output=True, text=True, check=True)
    said = json.loads(found.stdout)
    assert not said["dsl"] and said["kind"].startswith("tvm_ffi")
    assert said["seconds"] < 5  # 0.2 on an idle machine


@pytest.mark.slow
def test_processes_that_compile_one_kernel_at_once(kept, small, path):
    command = [sys.executable, "-c", WARM, small[0]]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [json.loads(racer.communicate(timeout=300)[0]) for racer in racers]
    assert all(each["kind"].startswith("tvm_ffi") for each in said) and cache.entries() == [path]


def refused(monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    return pytest.warns(RuntimeWarning, match="TILEWISE_CACHE_DIR names another folder")


@pytest.mark.skipif(os.name != "posix", reason="users own files on POSIX systems")
@pytest.mark.parametrize("level", ["folder", "version", "ahead"])
def test_a_folder_that_others_may_write_to_is_not_used(level, kept, small, builds, path, monkeypatch, exported):
    jit.compiled(*small)
    jit._compiled.cache_clear()
    open_to_all = {"folder": kept, "version": path.parent, "ahead": kept.parent}[level]
    open_to_all.chmod(0o777)
    right = path.read_bytes()
    with refused(monkeypatch) as said:
        assert jit.compiled(*small) is exported  # in memory
        jit._compiled.cache_clear()
        assert jit.compiled(*small) is exported
    assert len(said) == 1 and str(said[0].message).startswith(f"{open_to_all} can be written to by everybody")
    assert path.read_bytes() == right and len(builds) == 3
    if level != "version":
        assert cache.entries() == [] and f"every process compiles what it needs: {open_to_all} can be written to" in cache.describe()


@pytest.mark.skipif(os.name != "posix", reason="users own files on POSIX systems")
def test_an_entry_that_others_may_write_to_is_replaced(kept, small, builds, path, monkeypatch):
    jit.compiled(*small)
    jit._compiled.cache_clear()
    path.chmod(0o666)
    with refused(monkeypatch) as said:
        assert "launch(tensors" in said_by(jit.compiled(*small))
    assert len(said) == 1 and len(builds) == 2 and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="users own files on POSIX systems")
def test_an_entry_of_another_user_is_not_loaded(kept, small, builds, path, monkeypatch):
    jit.compiled(*small)
    lstat = os.lstat

    def changed(at, **options):
        status = lstat(at, **options)
        return os.stat_result((*status[:4], 12345, *status[5:])) if Path(at) == path else status

    monkeypatch.setattr(os, "lstat", changed)
    with refused(monkeypatch) as said:
        assert cache.load(path) is None and cache.load(path) is None
    assert len(said) == 1 and f"{path} belongs to another user (number 12345" in str(said[0].message)


@pytest.mark.skipif(os.name != "posix", reason="users own files on POSIX systems")
def test_new_folders_are_for_this_user_alone(kept, small, builds, path):
    before = os.umask(0)
    try:
        jit.compiled(*small)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (kept.parent, kept, path.parent)] == [0o700] * 3
