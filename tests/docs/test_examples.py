"""The examples run: each script as a program of its own, the notebook cell by cell with what each one shows."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
SAYS = {  # the last line, but for numbers
    "eight_bits": r"a cache in e4m3 .*50% of the bytes",
    "own_mask": r"the naive formula would store .* MB for one score matrix",
    "packed_training": r"loss \S+ after 30 steps",
    "serve_with_pages": r"6 of 32 pages are in use",
    "several_processes": r"O has the bits of one process",
    "train_gpt": r"step 39: \S+ nats a byte",
}


def test_each_script_has_its_line():
    assert SAYS.keys() == {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path, tmp_path):
    """Started elsewhere, as a user would."""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=where, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert re.search(SAYS[path.stem], ran.stdout), ran.stdout
    assert not list(tmp_path.iterdir())


NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    """It is nbformat 4, holds no results, and its cells run in order; objects that a cell ends with are shown as pages would show them."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["metadata"]["kernelspec"]["language"]) == (4, "python")
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    space, pictures = {}, []
    for cell in book["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and cell["source"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, f"{path.name} holds results: clear them"
            shown = run("".join(cell["source"]), space)
            pictures += [shown._repr_html_()] if hasattr(shown, "_repr_html_") else []
    assert len(pictures) == 5 and all("<svg" in picture for picture in pictures)


def run(code: str, space: dict):
    """Execute a cell; the value of its last line where that is an expression, as a notebook shows it."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), space)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)


WIDEST = 120  # columns that a page of the site shows without cutting them off
FENCED = re.compile(r"(<!-- from: \S+ -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_code_is_no_wider_than_a_page():
    """Blocks of all pages, but for excerpts of sources and what tools write, and the examples."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [(page.name, block[3]) for page in pages for block in FENCED.finditer(page.read_text(encoding="utf-8")) if not block[1]]
    assert len(blocks) > 200
    wide = [(name, line) for name, text in blocks for line in text.splitlines() if len(line) > WIDEST]
    wide += [(path.name, line) for path in SCRIPTS for line in path.read_text(encoding="utf-8").splitlines() if len(line) > WIDEST]
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    wide += [("notebook", line) for cell in cells for line in cell["source"] if len(line.rstrip()) > WIDEST]
    assert not wide


def test_every_example_is_on_its_page():
    page = (ROOT / "docs/start/examples.md").read_text(encoding="utf-8")
    assert all(f"examples/{path.name}" in page for path in SCRIPTS + NOTEBOOKS) and len(NOTEBOOKS) == 1
