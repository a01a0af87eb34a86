"""Each file of the ladder has its listing, with a table of names that is the source's; each rung's page leads to it."""

import re

from worklog_pages import FOLDER, TEXTS, tool

listings = tool("worklog_listings")
PAGES = listings.pages()


def test_every_file_of_the_ladder_has_its_page():
    assert set(PAGES) == set((FOLDER / "listings").iterdir())
    for path, text in PAGES.items():
        assert path.read_text(encoding="utf-8") == text, "run python tools/worklog_listings.py"
        assert f"](listings/{path.name})" in TEXTS[f"{listings.page_of(path.stem)}.md"], path.name


def test_a_table_has_the_names_that_its_file_has():
    """Counted by another means: every field and every parameter, and every name at the beginning of an assignment."""
    for path in listings.rungs():
        source = path.read_text(encoding="utf-8")
        body = re.sub(r"def configure\(.*?\n\n\n", "", re.sub(r'""".*?"""', "", source, flags=re.DOTALL), flags=re.DOTALL)
        wanted = set(re.findall(r"^ +(\w+)(?:: [\w.\[\], ]+)? = ", body, re.MULTILINE))
        listed = {name for name, *_ in listings.names(source)}
        assert wanted <= listed, (path.name, wanted - listed)


def test_what_a_row_says():
    source = '''
class Smem(NamedTuple):
    Q: cute.Tensor  # (tile_m, head_dim)
    n: int = 2


def f(a: Int32, b: Int32):
    """Nothing."""
    x, y = a, b  # two
    x, z = g(a)
    _, w = h()
    m.n = 1


def k(a: Int32):
    x = a
'''
    assert listings.names(source) == [
        ("Q", "`Smem`", "`cute.Tensor`: (tile_m, head_dim)"),
        ("n", "`Smem`", "`int = 2`"),
        ("a", "`f()`, `k()`", "`Int32`"),
        ("b", "`f()`", "`Int32`"),
        ("x", "`f`", "`a`: two"),
        ("y", "`f`", "`b`: two"),
        ("z", "`f`", "`g(a)`"),
        ("w", "`f`", "`h()`"),
        ("x", "`k`", "`a`"),
    ]
