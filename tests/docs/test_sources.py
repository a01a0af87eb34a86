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


SOURCES = (DOCS / "sources.md").read_text(encoding="utf-8")
ITEMS = re.findall(r"^\| (?!its item|---)(.+?) \| (.+) \|$", SOURCES, re.MULTILINE)
NAMED = {  # words of an item, and a page that has to be named for it
    "Transformer block accounting": "worklog/3-gpu.md#a-transformer-block",
    "FA2 used for all sequence lengths": "worklog/k6.md",
    "H100 results": "worklog/index.md#results",
    "FLOP counting": "benchmarks.md#what-is-measured-and-how",
    "MFU": "worklog/3-gpu.md#a-transformer-block",
    "cost by context length": "benchmarks.md#training",
    "dK and dV summed over the group": "hopper-backward.md",
    "backward: dP, dS": "worklog/backward.md",
    "backward: dV, dK, dQ": "worklog/backward.md",
    "Algorithm 2": "worklog/backward.md",
    "the backward pass, which it leaves to the paper": "worklog/backward.md",
}


def targets(text: str) -> list[tuple[str, str]]:
    """(file, heading) of each link to a page here; either may be empty."""
    return re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", text)


def test_each_item_of_each_source_has_a_page():
    assert len(ITEMS) > 175 and all(targets(there) for _, there in ITEMS)
    for part in SOURCES.split("\n## ")[1:]:
        items = re.findall(r"^\| (?!its item|---)(.+?) \|", part, re.MULTILINE)
        repeated = {item for item in items if items.count(item) > 1}
        assert repeated <= {"its results and profile", "what comes next"}  # of each rung
    for words, page in NAMED.items():
        found = [there for item, there in ITEMS if words in item]
        assert found and all(f"]({page}" in there for there in found), words


def test_pages_and_headings_of_all_items_exist():
    for file, heading in targets(SOURCES):
        assert (DOCS / file).is_file(), file
        assert not heading or heading in headings((DOCS / file).read_text(encoding="utf-8")), f"{file}#{heading}"


def test_every_source_is_named_with_a_link():
    for author in ("S. Boehm", "A. Gordić", "K. Sharma", "H. Elshafie", "Z. Ye", "P. Tillet"):
        assert re.search(rf"{author}, (?:[A-Z]\. .+?, )?\[\*.+\*\]\(https://", SOURCES), author


@pytest.mark.parametrize(
    "author,page", [("H. Elshafie", "profiling.md"), ("P. Tillet", "5-fa2.md"), ("Z. Zhou", "5-fa2.md"), ("Z. Ye", "2-online-softmax.md")]
)
def test_a_page_names_whom_it_follows(author, page):
    text = (DOCS / "worklog" / page).read_text(encoding="utf-8")
    assert author in text[text.index("\n## Sources\n") :]
