"""The list of long tests, from what pytest says of durations."""

import importlib
from pathlib import Path

SAID = """
9.15s setup    tests/docs/test_a.py::test_recipes[rung]
3.00s call     tests/docs/test_a.py::test_recipes[b]
0.99s call     tests/emulated/test_b.py::test_cases[b1-q150k150-h1/1 and::more]
2.10s call     tests/emulated/test_b.py::test_alone
(13503 durations < 0.02s hidden.)
"""


def test_a_run_makes_the_list(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    long_tests = importlib.import_module("long_tests")
    path, run = tmp_path / "long.txt", tmp_path / "run.log"
    path.write_text("tests/x.py::test_resting\ntests/emulated/test_b.py::test_cases\n")
    run.write_text(SAID)
    monkeypatch.setattr(long_tests, "LONG", path)
    assert long_tests.main([str(run)]) == 0 and capsys.readouterr().out == "3 tests, 1 of them as before\n"
    assert path.read_text().split() == [
        "tests/docs/test_a.py::test_recipes",
        "tests/emulated/test_b.py::test_alone",
        "tests/x.py::test_resting",
    ]
