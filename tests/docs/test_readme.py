"""The README keeps its promises: each of its Python blocks runs alone, as pasted, and all run in order; its first screen has its order."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
LINES = TEXT.splitlines()


def first(pattern: str) -> int:
    """The number of the first line that matches."""
    return next(number for number, line in enumerate(LINES, 1) if re.search(pattern, line))


BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1])
def test_each_python_block_runs_alone(block):
    exec(compile(block, str(README), "exec"), {})


def test_python_blocks_run_in_order(capsys):
    assert len(BLOCKS) >= 5
    exec(compile("\n".join(BLOCKS), str(README), "exec"), {})
    assert "pairs are visible" in capsys.readouterr().out


def test_the_first_screen_has_its_order():
    call, gpu, picture, table = first(r"tw\.attention\("), first(r'"cuda"'), first(r"^!\["), first(r"^\| 64, full .*\d")
    exact, onward = first(r"How we know that it is exact"), first(r"Where to go next")
    assert call <= 15 and picture <= 25 and table <= 35
    assert call < gpu < picture < table < exact < onward < first("^## ")


def test_the_picture_is_small_and_of_the_rows():
    """Those that it names are those that are measured; `make docs` draws it anew."""
    path = ROOT / re.search(r"^!\[.*?\]\((\S+?)\)", TEXT, re.MULTILINE)[1]
    assert path.stat().st_size < 60_000
    texts = {text for each in ElementTree.parse(path).iter() if (text := (each.text or "").strip())}
    assert {"tilewise", "fa4", "fa3:vllm", "sdpa:cudnn", "forward, head_dim 128", "backward, head_dim 128", "16k"} <= texts


def test_contents_and_links_lead_somewhere():
    headings = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)$", TEXT, re.MULTILINE)}
    listed = re.findall(r"\]\(#(\S+?)\)", TEXT.partition("Where to go next")[2].partition("\n\n")[0])
    assert set(listed) == headings and len(listed) == len(headings)
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert target.startswith("https://") or (anchor in headings if not path else (ROOT / path).exists()), target


def test_it_is_short():
    assert len(TEXT.split()) <= 1400


def test_it_ends_with_license_and_citation():
    end = TEXT[TEXT.rindex("\n## ") :]
    assert all((ROOT / name).exists() and f"]({name})" in end for name in ("LICENSE", "CITATION.cff", "CHANGELOG.md"))
