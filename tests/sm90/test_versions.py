"""Another version of the compiler than the tested one is named, once, and not refused."""

import re
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from tilewise.cli import doctor
from tilewise.sm90 import versions

ROOT = Path(__file__).parents[2]
SENTENCE = (
    "kernels are compiled by nvidia-cutlass-dsl 4.9.0, and were tested with 4.8.1; should one fail: pip install nvidia-cutlass-dsl==4.8.1"
)


@pytest.fixture
def other(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "4.9.0" if name == versions.DSL else real(name))
    versions.warn_untested.cache_clear()
    yield
    versions.warn_untested.cache_clear()


def test_another_version_is_named_once(other):
    with pytest.warns(RuntimeWarning, match=re.escape(SENTENCE)):
        versions.warn_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_untested()
    assert doctor.machine()["kernel compiler"] == SENTENCE


@pytest.mark.parametrize("found", [versions.TESTED, None])
def test_the_tested_version_is_not_named(found, monkeypatch):
    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(versions.metadata, "version", version)
    assert versions.untested() == ""


def test_a_call_is_warned_of(other, monkeypatch):
    from tilewise.sm90 import cache

    monkeypatch.setattr(cache.prebuilt, "entry", lambda *_: None)
    monkeypatch.setattr(cache, "find_spec", lambda _: object())
    monkeypatch.setattr(cache, "folder", lambda: "the cache is away")
    with pytest.warns(RuntimeWarning, match="were tested with 4.8.1"):
        assert cache.entry("module:function", None, "sm_90a") is None


def test_it_is_the_version_of_the_constraints_and_within_the_extra():
    assert f"{versions.DSL}=={versions.TESTED}\n" in (ROOT / "constraints.txt").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("hopper", "test"):
        (asked,) = [each.partition(";")[0] for each in extras[extra] if each.startswith(versions.DSL)]
        least, below = re.fullmatch(rf"{versions.DSL}>=([\d.]+),<(\d+)", asked).groups()
        assert least.split(".") <= versions.TESTED.split(".") < [below]
