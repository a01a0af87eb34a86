"""Requirements with digests, from what pip reports."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("hashes")


def item(name: str, version: str, **source) -> dict:
    return {"metadata": {"name": name, "version": version}, "download_info": source}


def test_lines_of_a_report(tool):
    here, numpy = item("tilewise", "9.8.7", dir_info={}), item("numpy", "2.4.6", archive_info={"hashes": {"sha256": "ab" * 32}})
    other = item("Jinja2", "3.1.6", archive_info={"hashes": {"md5": "0", "sha256": "cd" * 32}})
    assert tool.requirements({"install": [numpy, here, other]}) == [
        f"Jinja2==3.1.6 --hash=sha256:{'cd' * 32}",
        f"numpy==2.4.6 --hash=sha256:{'ab' * 32}",
    ]


@pytest.mark.parametrize("source", [{}, {"archive_info": {}}, {"archive_info": {"hashes": {"md5": "0"}}}, {"vcs_info": {"vcs": "git"}}])
def test_what_has_no_digest_is_refused(source, tool):
    with pytest.raises(ValueError, match="numpy 2.4.6 came without a sha256 from its index"):
        tool.requirements({"install": [item("numpy", "2.4.6", **source)]})
