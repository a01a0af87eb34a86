"""The page on GPUs that nobody here has: its table of cards is what tools/triton_table.py writes from the table of compiled kernels."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("triton_table")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_table_is_up_to_date(tool):
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(text, tool.triton_facts.rows()) == text, "run python tools/triton_table.py"


def test_every_architecture_has_a_card(tool):
    from tilewise.backends.triton.targets import COMPILED

    assert set(tool.CARDS) == set(COMPILED) and set(tool.RAN) <= set(COMPILED)


def test_a_card(tool):
    table = tool.triton_facts.rows()
    lines = tool.cards(table).splitlines()
    facts = table["sm_80 forward bfloat16 128 band plain"]["facts"]
    assert lines[2] == f"| A100 | sm_80 | sm80 | compiles, not run | 163 KiB | {facts['registers']} | {facts['stack']} | 192 (A100) | 208 |"
    assert "| tests and bench |" in next(line for line in lines if "| sm_90 |" in line)
