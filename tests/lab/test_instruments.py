"""Every instrument of the lab starts: what it imports of tilewise is there, and it says what it takes."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "lab/instruments"
HELPERS = "choices", "mma_kernel", "rows"
COMPILING = "fp8", "fp8_facts", "mma_forward"  # which are written in the DSL, or compile at once
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in HELPERS)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_takes(name, monkeypatch, capsys):
    if name in COMPILING:
        pytest.importorskip("cutlass")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as done:
        importlib.import_module(name).main()
    assert done.value.code == 0 and "usage:" in capsys.readouterr().out


def test_the_readme_names_them():
    text = (FOLDER.parent / "README.md").read_text()
    assert not [name for name in NAMES if f"`{name}.py`" not in text]
