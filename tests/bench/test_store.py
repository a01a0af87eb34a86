"""Rows survive the file, and can be found again."""

import json
from dataclasses import asdict, replace

import pytest

from tilewise.bench.provenance import _commit, provenance
from tilewise.bench.store import Row, append, latest, load, select

ROW = Row(
    impl="tilewise",
    name="cpu",
    case={"batch": 1, "seqlen_q": 512, "head_dim": 64, "mask": "Causal()"},
    clock="wall",
    passed=True,
    median_s=0.25,
    environment={"device": "a CPU", "threads": 2},
)


def test_round_trip_and_append(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    other = replace(ROW, impl="sdpa", passed=None, median_s=None, reason="it cannot")
    append(path, [ROW])
    append(path, [other])
    assert load(path) == [ROW, other]
    assert load(path, path) == [ROW, other, ROW, other]
    assert len(path.read_text().splitlines()) == 2


def test_unknown_fields_are_dropped_and_blank_lines_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(asdict(ROW) | {"added_later": 1}) + "\n\n")
    assert load(path) == [ROW]


@pytest.mark.parametrize("line", ["{", "[1]", '{"impl": "x"}'])
def test_a_line_that_is_no_row(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    append(path, [ROW])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: not a benchmark row"):
        load(path)


WRONG = {
    "median_s": ["0.25", -1.0, 0, True, [1.0]],
    "error": ["small", {}],
    "passed": ["yes", 1],
    "case": [None, [], "b1", {"batch": [1]}, {"batch": "8"}, {"seqlen_k": 1.5}, {"mask": None}],
    "impl": [None, 3],
    "samples": [None, 2.5, "9"],
    "environment": [None, "a CPU"],
    "rms_error": [[1.0], {"o": "1"}],
}


@pytest.mark.parametrize("name, found", [(name, found) for name, values in WRONG.items() for found in values])
def test_fields_of_other_types_are_refused_by_name(tmp_path, name, found):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(ROW) | {name: found}) + "\n")
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 1: not a benchmark row \(({name}|batch|seqlen_k) is .*, expected ") as caught:
        load(path)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_times_that_are_no_numbers(tmp_path, number):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(ROW)).replace("0.25", number) + "\n")
    with pytest.raises(ValueError, match=r"line 1: not a benchmark row \(median_s is (nan|inf), expected above 0, float \| None\)"):
        load(path)


def test_numbers_that_json_does_not_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        append(tmp_path / "rows.jsonl", [replace(ROW, error=float("nan"))])


def test_select_looks_in_the_row_its_case_and_its_environment():
    rows = [ROW, replace(ROW, impl="sdpa"), replace(ROW, case={**ROW.case, "seqlen_q": 1024})]
    assert select(rows, impl="tilewise", threads=2) == [rows[0], rows[2]]
    assert select(rows, seqlen_q=lambda n: n > 512) == [rows[2]]
    assert select(rows, impl="naive") == [] and select(rows, no_such_field=None) == rows


def test_latest_keeps_one_row_a_measurement():
    again = replace(ROW, median_s=0.5)
    other = replace(ROW, environment={"device": "another"})
    assert latest([ROW, other, again]) == [again, other]
    assert latest([ROW, replace(ROW, clock="events")]) == [ROW, replace(ROW, clock="events")]


def test_provenance_is_complete_and_json_ready():
    stamp = provenance("cpu")
    assert json.loads(json.dumps(stamp)) == stamp
    assert {"device", "torch", "python", "tilewise", "threads", "commit", "dirty", "date", "driver"} <= set(stamp)
    assert stamp["date"].endswith("+00:00") and stamp["device"] and stamp["tilewise"]
    assert not any("/" in str(value) for name, value in stamp.items() if name != "device")


def test_a_copy_says_of_which_commit_it_is(monkeypatch):
    """Also where it came with an older history."""
    _commit.cache_clear()
    monkeypatch.setenv("TILEWISE_COMMIT", "abc123")
    try:
        assert _commit() == {"commit": "abc123", "dirty": None}
    finally:
        _commit.cache_clear()
