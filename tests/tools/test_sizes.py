"""The figures of DESIGN.md and README.md: from the tree and from recorded runs, and none that has grown old."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIFT = 0.05  # of a figure, before `python tools/sizes.py` has to be run again


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("sizes")


def rows(tool) -> dict:
    return tool.gates(tool.GATES.read_text()) if tool.GATES.exists() else {}


def test_what_design_says_is_so(tool):
    stated, found = tool.stated((ROOT / "DESIGN.md").read_text()), tool.count()
    assert stated.keys() == found.keys()
    old = {name: (stated[name], found[name]) for name in found if abs(stated[name] - found[name]) > max(2, DRIFT * found[name])}
    assert not old, "run `python tools/sizes.py`"


def test_minutes_are_those_of_the_newest_run(tool):
    design, readme = (ROOT / "DESIGN.md").read_text(), (ROOT / "README.md").read_text()
    assert tool.README_LINE.search(readme) and tool.in_readme(readme, rows(tool)) == readme
    assert tool.in_design(design, tool.stated(design), rows(tool)) == design


def test_a_run_is_recorded_where_it_succeeds(tool, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tool, "GATES", tmp_path / "gates.jsonl")
    assert tool.run(["sh", "-c", "exit 3"]) == 3 and not tool.GATES.exists()
    assert tool.run(["echo", "ran"]) == 0 and capfd.readouterr().out == "ran\n"
    (row,) = map(json.loads, tool.GATES.read_text().splitlines())
    assert row["command"] == "echo ran" and 0 <= row["wall_s"] < 60 and row["cores"] >= 1 and row["date"].count("-") == 2


def test_tables(tool):
    newer = {"command": "make test", "wall_s": 400, "cpu_s": 700, "cores": 2, "commit": "abc", "date": "2030-01-02"}
    found = tool.gates("\n".join(map(json.dumps, [newer | {"wall_s": 900}, newer])))
    text = f"a\n{tool.BEGIN}old\n{tool.END}\nb\n"
    filled = tool.in_design(text, {"modules": 1234}, found)
    assert "| modules | 1,234 |\n| `make test` on 2 cores, 2030-01-02, abc | 6.7 min, 12 CPU min |" in filled
    assert filled.startswith("a\n") and filled.endswith("\nb\n") and tool.stated(filled) == {"modules": 1234}
    assert tool.in_readme("make test    # the suite: x", found) == "make test    # the suite: about 6.7 minutes on 2 cores"
    with pytest.raises(ValueError, match="must have <!-- sizes:begin -->"):
        tool.in_design("no markers", {}, {})
