"""The table of errors by recipe: it is what its rows say, and a page without markers is an error."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("tool_eight_bits", ROOT / "tools" / "eight_bits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_what_the_rows_say(tool):
    text = tool.PAGE.read_text()
    assert tool.filled(text) == text


def test_every_case_is_there(tool):
    rows = [json.loads(line) for line in tool.ROWS.read_text().splitlines()]
    assert [(row["head_dim"], row["seqlen_k"], row["inputs"]) for row in rows] == [
        (*size, kind) for size in tool.SIZES for kind in tool.INPUTS
    ]


def test_ratios(tool):
    row = {
        "inputs": "llm",
        "head_dim": 64,
        "seqlen_k": 2048,
        "rms": {"bf16": 1e-4, "per tensor": 2e-2, "fp8": 1e-2, "int8": 5e-3, "int8_qk": 1e-3},
    }
    assert tool.table([row]).splitlines()[-1] == "| llm | 64 | 2,048 | 1.0e-04 | 2.0e-02 | 2.00 | 4.00 | 20.00 |"


def test_a_page_without_markers(tool):
    with pytest.raises(AssertionError, match="has no markers"):
        tool.filled("nothing")
