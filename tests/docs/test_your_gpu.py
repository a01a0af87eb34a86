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
    assert (
        lines[2]
        == f"| A100 | sm_80 | sm80 | compiles, not run | 163 KiB | {facts['registers']} | {facts['stack']} | 1, 8 | 192 (A100) | 208 |"
    )
    assert all("|  |" not in line for line in lines), "a card has no prediction"
    assert "| tests and bench |" in next(line for line in lines if "| sm_90 |" in line)


def test_blocks_of_a_multiprocessor(tool):
    """By registers, by shared memory, and by how many warps there may be."""
    from tilewise.backends.triton.targets import Target

    ampere, ada, cdna, rdna = map(Target, ("sm_80", "sm_89", "gfx942", "gfx1100"))
    assert tool.blocks(ampere, 4, 255, 1000) == 2 and tool.blocks(ampere, 4, 168, 1000) == 3
    assert tool.blocks(ampere, 4, 32, 49 << 10) == 3 and tool.blocks(ada, 4, 32, 49 << 10) == 2
    assert tool.blocks(ampere, 8, 32, 0) == 8 and tool.blocks(ada, 8, 32, 0) == 6
    assert tool.blocks(cdna, 4, 286, 32 << 10) == 1 and tool.blocks(cdna, 4, 256, 32 << 10) == 2
    assert tool.blocks(rdna, 8, 256, 8192) == 1 and tool.blocks(rdna, 8, 168, 8192) == 2
