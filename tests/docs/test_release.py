"""One version: a literal in src/tilewise/__init__.py, read by everything else; CHANGELOG.md's newest section; what a tag publishes."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parents[2]
HOME = ROOT / "src/tilewise/__init__.py"
WHERE = (
    *ROOT.glob("*.*"),
    ROOT / "Makefile",
    *(path for name in ("src", "tests", "tools", ".github") for path in (ROOT / name).rglob("*")),
)
CHANGES = (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("release")


def test_the_version_stands_once(release):
    stated = re.compile(rf"(?<![\d.=]){re.escape(tilewise.__version__)}(?![\d.])")  # constraints.txt may have a package of the same version
    kinds = {".py", ".toml", ".cff", ".yml", ".yaml", ".sh", ""}
    texts = {path: path.read_text() for path in WHERE if path.suffix in kinds and path.is_file()}
    assert [path for path, text in texts.items() if stated.search(text)] == [HOME]
    assert release.version(texts[HOME]) == tilewise.__version__


def test_the_package_reads_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"] and settings["project"]["dynamic"] == ["version"]
    assert ROOT / settings["tool"]["scikit-build"]["metadata"]["version"]["input"] == HOME


def test_the_changes_begin_with_it():
    newest, *older = re.findall(r"^## (.*)$", CHANGES, re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(tilewise.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", newest)
    assert older and all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", each) for each in older)


def test_what_a_release_says(release):
    changes = "# Changes\n\nAbout.\n\n## 3.1.0 (2030-01-02)\n\n### Added\n- a\n\n## 3.0.0 (2029-01-02)\n\n- b\n"
    assert release.notes("v3.1.0", "3.1.0", changes) == "### Added\n- a\n"
    with pytest.raises(ValueError, match=r"the tag is 3\.1\.0, but .* has version 3\.1\.0: the tag must be v3\.1\.0"):
        release.notes("3.1.0", "3.1.0", changes)
    with pytest.raises(ValueError, match=r"begins with '3\.1\.0 \(2030-01-02\)'; for this tag it must be '3\.2\.0 \(YYYY-MM-DD\)'"):
        release.notes("v3.2.0", "3.2.0", changes)
    with pytest.raises(ValueError, match="unreleased"):
        release.notes("v3.1.0", "3.1.0", changes.replace("2030-01-02", "unreleased"))


def test_actions_have_their_least_rights():
    """Every workflow may only read but for the jobs that say more, and every action is of a named version."""
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        text = path.read_text()
        assert "\npermissions:\n  contents: read\n" in text, path.name
        used = re.findall(r"uses: (?!\./)(\S+)", text)
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", each) for each in used), used
        assert text.count("timeout-minutes:") == text.count("runs-on:"), path.name
