"""The guide's pages keep their promises: their Python blocks run, in order, and leave nothing installed."""

import re
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, f"{page.name} shows no code"
    finders = list(sys.meta_path)
    exec(compile("\n".join(blocks), str(page), "exec"), {})
    assert [finder for finder in sys.meta_path if type(finder).__module__.startswith("tilewise")] == [
        finder for finder in finders if type(finder).__module__.startswith("tilewise")
    ]


def test_pages_are_in_the_navigation():
    listed = (GUIDE.parents[1] / "mkdocs.yml").read_text()
    assert PAGES and not [page.name for page in PAGES if f"guide/{page.name}" not in listed]
