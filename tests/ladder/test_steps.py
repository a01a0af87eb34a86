"""The steps of the ladder are as high as tools/ladder.py says they may be."""

import importlib.util
from pathlib import Path

import pytest

from tilewise.ladder import BACKWARD_RUNGS, DECODE_RUNGS, RUNGS

SPEC = importlib.util.spec_from_file_location("ladder_steps", Path(__file__).parents[2] / "tools" / "ladder.py")
steps = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(steps)


def test_no_step_is_higher_than_declared():
    assert steps.faults() == []
    stem = ["k2", "k3", "k4_1", "k4_2", "k5_1", "k5", "k6_1", "k6", "k7", "k8"]
    assert [high for _, high, *_ in steps.steps()] == [*stem, "d1", "d2", *BACKWARD_RUNGS]
    assert [low for low, high, *_ in steps.steps() if high[0] == "d"] == ["k5_1", "d1"]
    assert [low for low, high, *_ in steps.steps() if high[0] == "b"] == ["k4_2", *BACKWARD_RUNGS][:-1]
    assert {path.stem for path in steps.rungs()} == {
        rung.module for rung in (*RUNGS.values(), *DECODE_RUNGS.values(), *BACKWARD_RUNGS.values())
    }


def test_a_step_too_high_and_a_floor_that_is_none_are_said(monkeypatch):
    monkeypatch.setattr(steps, "NEW_FLOORS", {})
    assert any(fault.startswith("k2 is ") for fault in steps.faults()) and len(steps.faults()) == 5
    monkeypatch.setattr(steps, "steps", lambda: [("k1", "k2", 1, 100)])
    monkeypatch.setattr(steps, "NEW_FLOORS", {"k2": "no reason"})
    assert steps.faults() == ["k2 is only 1% new over k1: it is no new floor, take it out of NEW_FLOORS"]


def test_what_counts_as_a_line_of_code(tmp_path):
    file = tmp_path / "k9.py"
    file.write_text('"""Prose\nof two lines."""\n\n# a comment\nx = 1  # counted\n\n\ndef f():\n    """More."""\n    return x\n')
    assert steps.code_lines(file) == ["x = 1  # counted", "def f():", "    return x"]
    assert steps.new_lines(["a", "b", "c"], ["a", "x", "c"]) == 1


@pytest.mark.parametrize(
    "stem, name", [("k1_naive", "k1"), ("k4_1_wgmma_qk", "k4_1"), ("k5_1_roles", "k5_1"), ("k6_pingpong", "k6"), ("d1_split_kv", "d1")]
)
def test_names(stem, name):
    assert steps.name_of(Path(f"{stem}.py")) == name
