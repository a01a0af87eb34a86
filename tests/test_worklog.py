"""The worklog's pages keep their promises: Python blocks run, equations are the algorithm's, tables and figures show what the code computes."""

import importlib
import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "worklog"
PAGES = sorted(FOLDER.glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
PATHS = pytest.mark.parametrize("name", TEXTS)


@pytest.fixture(scope="module")
def figures():
    return _tool("worklog_figures")


@pytest.fixture(scope="module")
def tables():
    return _tool("worklog_tables")


def _tool(name):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "code.md"])
def test_blocks_run(name):
    text = TEXTS[name]
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace: dict = {"__name__": "worklog"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(FOLDER / name), "exec"), namespace)


@PATHS
def test_numbered_equations_are_those_of_the_algorithm(name):
    numbered = re.compile(r"^\$\$(.*) \\tag\{(\d+)\}\$\$$", re.MULTILINE)
    algorithm = {n: body for body, n in numbered.findall((ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8"))}
    found = numbered.findall(TEXTS[name])
    assert len(found) == TEXTS[name].count(r"\tag{")
    for body, n in found:
        assert body == algorithm[n]


def test_figures_show_what_the_code_computes(figures):
    assert {path.stem for path in (FOLDER / "figures").iterdir()} == set(figures.FIGURES)
    for name, (compute, _) in figures.FIGURES.items():
        shown = figures.shown((FOLDER / "figures" / f"{name}.svg").read_text(encoding="utf-8"))
        assert _same(shown, compute()), name


def test_a_changed_figure_would_be_noticed(figures):
    text = figures.drawn("walk")
    assert _same(figures.shown(text), figures.walk())
    assert not _same(figures.shown(text.replace(", 21]", ", 22]")), figures.walk())


def test_drawing_is_deterministic(figures):
    for name in figures.FIGURES:
        text = figures.drawn(name)
        assert text == figures.drawn(name), name
        assert ElementTree.fromstring(text).tag.endswith("svg")


@PATHS
def test_tables_show_what_the_code_computes(tables, name):
    assert tables.with_tables(TEXTS[name]) == TEXTS[name], "run python tools/worklog_tables.py"


def test_every_table_and_figure_has_its_place(figures, tables):
    text = "".join(TEXTS.values())
    assert set(re.findall(r"<!-- worklog:begin (\S+) -->", text)) == set(tables.TABLES)
    assert set(re.findall(r"\]\(figures/(\S+)\.svg\)", text)) == set(figures.FIGURES)
    assert text.count("<!-- ladder:begin -->") == text.count("<!-- ladder:end -->") == 1


@PATHS
def test_code_that_a_page_links_to_exists_and_is_shown(name):
    shown = re.findall(r"^::: (\S+)", TEXTS["code.md"], re.MULTILINE)
    for target in re.findall(r"\(code\.md#(\S+?)\)", TEXTS[name]):
        assert target in shown or target.rpartition(".")[0] in shown
        module, _, attribute = target.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.import_module(target)


@PATHS
def test_links_between_pages_lead_somewhere(name):
    for file in re.findall(r"\]\(([^)#:]+)", TEXTS[name]):
        assert (FOLDER / file).exists(), file


def _same(shown, computed) -> bool:
    """Equal but for the last of six digits, where machines may differ."""
    if isinstance(computed, dict):
        return shown.keys() == computed.keys() and all(_same(shown[key], computed[key]) for key in computed)
    if isinstance(computed, list):
        return len(shown) == len(computed) and all(map(_same, shown, computed))
    return math.isclose(shown, computed, rel_tol=1e-5)
