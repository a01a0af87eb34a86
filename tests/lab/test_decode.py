"""lab/instruments/decode.py on a CPU: cells, tunings, and a rehearsal of all parts but the sweep, which needs the kernels."""

import argparse
import importlib
import json
from pathlib import Path

import pytest


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/instruments")
    return importlib.import_module("decode")


def test_cells_as_the_bench_writes_them(decode):
    for title in (*decode.USUAL_CELLS, "b3 1000 8:8 p0 q4"):
        assert decode.cell_from(title).title == title
    with pytest.raises(argparse.ArgumentTypeError, match="'b1 8k' is no cell; cells are such as"):
        decode.cell_from("b1 8k")


def test_tunings(decode):
    pytest.importorskip("cutlass")
    assert decode.tuning_from("equal: cut.solo_speedup_x4=0, kv_stages=3") == ("equal", {"cut.solo_speedup_x4": 0, "kv_stages": 3})
    with pytest.raises(argparse.ArgumentTypeError, match=r"'cut\.along' is no choice of decode\.config\.Config and decode\.call\.Cut"):
        decode.tuning_from("equal: cut.along=0")


def test_a_rehearsal(decode, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert decode.main([str(out), "--device", "cpu", "--cell", "b2 72 4:2 p8 q1", "--budget", "0"]) == 0
    first, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["environment"] and [row["what"] for row in rows] == ["features", "append", "prefix"]
    assert rows[2]["prefix"] == 64 and all(us > 0 for row in rows for us in row["us"].values())


def test_what_is_no_part(decode, capsys, tmp_path):
    with pytest.raises(SystemExit):
        decode.main([str(tmp_path / "rows.jsonl"), "--only", "host"])
    assert "only names host; there are features, append, prefix, sweep" in capsys.readouterr().err
