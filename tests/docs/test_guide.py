"""docs/guide and docs/start keep their promises: the Python blocks of each page run in order, if their imports are installed, and leave nothing"""

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path for folder in ("guide", "start") for path in sorted((DOCS / folder).glob("*.md")) if "```python" in path.read_text("utf-8")]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page):
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for name in (
        name for node in imports for name in ([node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    ):
        if find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed: pip install -c constraints.txt '.[test]'")
    before = _own_finders()
    exec(compile(code, str(page), "exec"), {})
    assert _own_finders() == before


def _own_finders() -> list:
    return [finder for finder in sys.meta_path if type(finder).__module__.startswith("tilewise")]
