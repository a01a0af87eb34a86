"""The README keeps its promises: its Python blocks run in order, the call stands by line 15, a number by line 20."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    exec(compile("\n".join(blocks), str(README), "exec"), {})
    assert "pairs are visible" in capsys.readouterr().out


def test_call_by_line_15_and_number_by_line_20():
    lines = README.read_text().splitlines()
    assert any("tw.attention(" in line for line in lines[:15])
    assert any(re.match(r"\|.*\d", line) for line in lines[:20]), "no generated table row in the first 20 lines"
