"""docs/sources.md leads from each section of the project's sources to a page and a heading that exist, and so does every link with a heading."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = re.compile(r"\b(?:code|api)\.md#")  # their headings are names of the code (mkdocstrings)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)")


def headings(text: str) -> set[str]:
    """As the site names them: words of a heading, in lower case, joined by dashes; a second one of the same name counts."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found: dict[str, int] = {}
    for title in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[`*$\\]|\[([^\]]*)\]\([^)]*\)", lambda match: match[1] or "", title)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found[slug] = found.get(slug, 0) + 1
    return {slug if n == 1 else f"{slug}_{n - 1}" for slug, count in found.items() for n in range(1, count + 1)}


def missing(page: Path, text: str) -> list[str]:
    """Links with a heading that the page they lead to does not have."""
    wrong = []
    for file, heading in LINK.findall(text):
        target = (page.parent / file).resolve() if file else page
        if target.suffix == ".md" and (not target.exists() or heading not in headings(target.read_text(encoding="utf-8"))):
            wrong.append(f"{file}#{heading}")
    return wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "api.md"], ids=lambda page: page.relative_to(DOCS).as_posix())
def test_headings_that_links_name_exist(page):
    assert not [link for link in missing(page, page.read_text(encoding="utf-8")) if not GENERATED.search(link)]


def test_a_heading_that_is_missing_is_seen():
    assert missing(DOCS / "sources.md", "[a](sources.md#a-note) [b](sources.md#no-note) [c](none.md#x)") == [
        "sources.md#no-note",
        "none.md#x",
    ]
    assert headings("# A `b`, $c$: d\n## 1. Online\n## 1. Online\n") == {"a-b-c-d", "1-online", "1-online_1"}


def test_every_source_is_named_with_a_link():
    text = (DOCS / "sources.md").read_text(encoding="utf-8")
    for author in ("S. Boehm", "A. Gordić", "K. Sharma", "H. Elshafie", "Z. Ye", "P. Tillet"):
        assert re.search(rf"{author}, (?:[A-Z]\. .+?, )?\[\*.+\*\]\(https://", text), author
    rows = re.findall(r"^\| (?!its section|---)(.+?) \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) > 35 and all("](" in there or "profile on each" in there or "tests of these" in there for _, there in rows)
