"""docs/guide/serving.md says what the committed rows say."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("vllm_table")


def test_the_page_is_what_the_rows_make(tool):
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.refreshed(text, tool.load()) == text, "run `python tools/vllm_table.py`"
    assert text.count("| 4,096 behind 65,536 |") == 1


def test_the_newest_row_of_a_cell_counts(tool):
    where = {"device": "X", "vllm": "1", "torch": "1", "commit": "c", "date": "2026-01-01T00"}
    of_engine = {"backend": "CUSTOM", "block": 64, "environment": where}
    row = {"part": "prefill", "new": 10, "cached": 0} | of_engine
    assert tool.table("prefill", [row | {"tokens_per_s": 1e3}, row | {"tokens_per_s": 2e3}])[2] == "| 10 behind 0 | 2.0 |"
    row = {"part": "decode", "sequences": 3, "length": 1024, "layers": 8} | of_engine
    rows = [row | {"ms": 1.0}, row | {"ms": 1.234}, row | {"ms": 5.0, "block": 16}]
    whole, traced = row | {"ms": 9.0, "layers": 32}, row | {"ms": 8.0, "layers": 32, "busy_ms": 7.0}
    found = {part: tool.table(part, [*rows, whole, traced])[2] for part in ("decode", "whole", "busy")}
    assert found == {"decode": "| 3 of 1,024 | 1.23 | 5.00 |", "whole": "| 3 of 1,024 | 9.00 |", "busy": "| 3 of 1,024 | 7.00 |"}
