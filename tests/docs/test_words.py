"""Pages and docstrings keep to the words of docs/glossary.md: its table says which not to use, and where."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [*(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (pages|all) \|$", GLOSSARY.read_text(), re.MULTILINE)


def wrong(text: str, everywhere: bool) -> list[str]:
    """The words in `text` that the table forbids there, with those that it has in their place."""
    found = []
    for words, better, where in ROWS:
        if where == "all" or not everywhere:
            each = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in words.split(", "))
            found += [f"{match[0]!r}: write {better}" for match in re.finditer(rf"\b({each})\b", text, re.IGNORECASE)]
    return found


def docstrings(text: str) -> str:
    """Of a module and all in it."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n".join(filter(None, map(ast.get_docstring, nodes)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page):
    text = page.read_text()
    for row in map(" | ".join, ROWS) if page == GLOSSARY else ():
        text = text.replace(f"| {row} |", "")
    assert not wrong(text, everywhere=False)


def test_docstrings():
    found = {path: words for path in (ROOT / "src").rglob("*.py") if (words := wrong(docstrings(path.read_text()), everywhere=True))}
    assert not found


def test_a_wrong_word_is_found():
    assert len(ROWS) > 10
    text = '''"""Ours, and\na batch   element of rivals."""\ndef f():\n    """Beside it, whose."""\n'''
    assert wrong(docstrings(text), everywhere=True) == [
        '\'whose\': write "with ..." or "of which ...", or a sentence of its own',
        "'Beside': write with, next to, against, under, as well",
        "'rivals': write peer",
        "'batch   element': write batch entry",
    ]
    assert [each.split(":")[0] for each in wrong("Whose? This is short\nway.", everywhere=False)] == ["'Whose'", "'short\\nway'"]
