"""The worklog's pages and tools, for the tests that read them."""

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "worklog"
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md"))}


def tool(name: str):
    """A module of tools/."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


def blocks(text: str) -> list[re.Match]:
    """The Python of a page, block by block."""
    return list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def excerpt_of(text: str, block: re.Match) -> str | None:
    """The file that a block is marked to be from, if it is."""
    marked = re.search(r"<!-- from: (\S+) -->\n\Z", text[: block.start()])
    return marked and marked[1]
