"""Environment variables: all are documented on one page, and names and values that mean nothing are said."""

import re
import warnings
from pathlib import Path

import pytest

from tilewise.machine import environment, once
from tilewise.sm90 import cache

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "environment.md"
NAME = re.compile(r"\bTILEWISE_[A-Z0-9_]*[A-Z0-9]\b")
SUFFIXES = {".py", ".sh", ".txt", ".cpp", ".h", ".c", ".toml", ""}


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(once, "_said", set())


def named_in(*folders: str) -> set[str]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    return {name for path in (*files, ROOT / "Makefile") for name in NAME.findall(path.read_text(encoding="utf-8"))}


def test_every_variable_is_documented_and_every_documented_one_is_there():
    documented = set(re.findall(r"`(TILEWISE_[A-Z0-9_]+)`", PAGE.read_text(encoding="utf-8")))
    assert named_in("src", "tools") <= documented
    assert documented <= named_in("src", "tools") | {f"TILEWISE_FUZZ_{name}" for name in ("CALLS", "SEED")} | named_in(
        "tests/gpu", "tests/shared", "tests/compat"
    )
    assert set(environment.NAMES) <= documented


@pytest.mark.parametrize(
    "value, off", [("0", True), ("OFF", True), (" no ", True), ("false", True), ("1", False), ("On", False), ("", False)]
)
def test_switches(value, off, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert environment.switched_off("TILEWISE_CACHE") is off


def test_a_value_that_means_nothing_is_said_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    with pytest.warns(
        RuntimeWarning, match=rf"TILEWISE_CACHE is '{tmp_path}', which means nothing: it takes 0, off, no, false or 1,"
    ) as said:
        assert not environment.switched_off("TILEWISE_CACHE") and isinstance(cache.folder(), Path)
    assert len(said) == 1


def test_names_that_are_nearly_ours_are_said(monkeypatch):
    for name in ("TILEWISE_CPU_LIBARY", "TILEWISE_CACHEDIR", "TILEWISE_OF_SOMEBODY_ELSE", "TILEWISE_FUZZ_SEED"):
        monkeypatch.setenv(name, "x")
    said = sorted(environment.misspelt())
    assert said == [
        "TILEWISE_CACHEDIR is set and means nothing: did you mean TILEWISE_CACHE_DIR?",
        "TILEWISE_CPU_LIBARY is set and means nothing: did you mean TILEWISE_CPU_LIBRARY?",
    ]


def test_a_path_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TILEWISE_CPU_LIBRARY", raising=False)
    assert environment.named("TILEWISE_CPU_LIBRARY") == ""
    for given in ("x.so", "./x.so", str(tmp_path / "x.so")):
        monkeypatch.setenv("TILEWISE_CPU_LIBRARY", given)
        assert environment.named("TILEWISE_CPU_LIBRARY") == tmp_path / "x.so"
