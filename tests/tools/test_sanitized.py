"""The record of the sanitizers' last run: what changes it, and what it answers."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("sanitized")


def test_the_digest_is_of_code(tool, tmp_path):
    for pattern in tool.READ + tool.DRIVEN:
        for path in tool.ROOT.glob(pattern):
            if path.is_file():
                copy = tmp_path / path.relative_to(tool.ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    before = tool.digest(tmp_path)
    assert before == tool.digest()
    test = tmp_path / "tests/backends/cpu/test_amx.py"
    test.write_text(f"# a comment\n{test.read_text()}")
    assert tool.digest(tmp_path) == before
    seen = {before}
    for name, more in (
        ("tests/backends/cpu/test_amx.py", "\nx = 1\n"),
        ("src/tilewise/backends/cpu/csrc/scores.h", "\n"),
        ("src/tilewise/backends/cpu/bound.py", "\nx = 1\n"),
        ("tools/sanitize.sh", "\n"),
    ):
        path = tmp_path / name
        path.write_text(path.read_text() + more)
        now = tool.digest(tmp_path)
        assert now not in seen
        seen.add(now)


def test_it_says_whether_it_has_passed(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "RECORD", tmp_path / "sanitized.json")
    monkeypatch.setattr(sys, "argv", ["sanitized.py"])
    assert tool.main() == 1 and "not sanitized as it is" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["sanitized.py", "--write"])
    monkeypatch.setattr(subprocess, "run", lambda *words, **how: subprocess.CompletedProcess(words, 0, stdout="a compiler 14.2\nand more"))
    assert tool.main() == 0
    monkeypatch.setattr(sys, "argv", ["sanitized.py"])
    assert tool.main() == 0 and "a compiler 14.2" in capsys.readouterr().out
    record = json.loads(tool.RECORD.read_text())
    tool.RECORD.write_text(json.dumps(record | {"sources": "other"}))
    assert tool.main() == 1
