"""The Python blocks of docs/algorithm.md run from top to bottom, and its equation numbers are the ones that the code refers to."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "algorithm.md"


def blocks() -> list[tuple[int, str]]:
    """(line of the file, source) of each Python block."""
    text = PAGE.read_text(encoding="utf-8")
    return [
        (text[: found.start(1)].count("\n"), found[1]) for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def test_blocks_run():
    page = blocks()
    assert len(page) >= 8
    namespace: dict = {"__name__": "algorithm"}
    for line, source in page:
        exec(compile("\n" * line + source, str(PAGE), "exec"), namespace)
    assert "two_tiles" in namespace


def test_equations_are_numbered_in_order():
    text = PAGE.read_text(encoding="utf-8")
    assert [int(n) for n in re.findall(r"\\tag\{(\d+)\}", text)] == list(range(1, 28))
    section = text[text.index("## 8") : text.index("## 9")]
    assert all(section.count(f"({n})") >= 1 for n in range(28, 38))


def test_code_refers_to_equations_that_exist():
    files = [ROOT / "src/tilewise/ladder/derivation.py", *(ROOT / "src/tilewise/backends/tiled").glob("*.py")]
    used = {int(n) for file in files for n in re.findall(r"Eq\. (\d+)", file.read_text(encoding="utf-8"))}
    assert {1, 11, 16, 25} <= used <= set(range(1, 38))
