"""The worklog's pages keep their promises: Python blocks run, equations are the algorithm's, tables and figures show what the code computes."""

import importlib
import math
import re
from xml.etree import ElementTree

import pytest
from worklog_pages import FOLDER, ROOT, TEXTS, blocks, excerpt_of, tool

from tilewise.ladder import BACKWARD_RUNGS, RUNGS, VARIANTS

PATHS = pytest.mark.parametrize("name", TEXTS)


@pytest.fixture(scope="module")
def figures():
    return tool("worklog_figures")


@pytest.fixture(scope="module")
def tables():
    return tool("worklog_tables")


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "code.md"])
def test_blocks_run(name):
    if name == "cute.md":
        pytest.importorskip("cutlass")
    text = TEXTS[name]
    own = [block for block in blocks(text) if not excerpt_of(text, block)]
    assert own
    namespace: dict = {"__name__": "worklog"}
    for block in own:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(FOLDER / name), "exec"), namespace)


def _holds(source, excerpt):
    """Whether the lines of `excerpt` follow one another in `source`, at any indentation."""
    lines = source.splitlines()
    wanted = excerpt.splitlines()
    for first in range(len(lines) - len(wanted) + 1):
        margin = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        if all(line == (margin + want if want else want) for line, want in zip(lines[first:], wanted, strict=False)):
            return True
    return False


@pytest.mark.parametrize("name", [name for name in TEXTS if re.match(r"k\d|decode|backward", name)])
def test_excerpts_are_what_the_code_says(name):
    text = TEXTS[name]
    excerpts = [(excerpt_of(text, block), block[1]) for block in blocks(text)]
    excerpts = [(path, excerpt) for path, excerpt in excerpts if path]
    assert len(excerpts) == text.count("<!-- from: ") > 0
    for path, excerpt in excerpts:
        assert _holds((ROOT / path).read_text(encoding="utf-8"), excerpt), f"{path} has no such lines any more:\n{excerpt}"


def test_a_changed_excerpt_would_be_noticed():
    source = "def f():\n    a = 1\n\n    b = 2\n"
    assert _holds(source, "a = 1\n\nb = 2\n") and _holds(source, "def f():\n    a = 1\n")
    assert not any(_holds(source, other) for other in ("a = 1\nb = 2\n", "a = 1\n\nb = 3\n", "a = 1\n\n    b = 2\n", "a =\n"))


def test_every_rung_has_its_place_for_results():
    text = "".join(TEXTS.values())
    for marker, more in (("table", BACKWARD_RUNGS), ("profile", {",".join(BACKWARD_RUNGS)})):
        places = re.findall(rf"<!-- {marker}:(\S+) -->", text)
        assert len(places) == len(set(places))
        assert {*RUNGS, *more} <= set(places) <= {*RUNGS, *VARIANTS, *more}, marker
    pictures = set(re.findall(r"\]\((traces/\S+\.svg)\)", text))
    assert pictures == {f"traces/{path.name}" for path in (FOLDER / "traces").iterdir()}
    recorded_as = {"k6_1": "k6-turns"}  # before it was a rung
    untraced = {"k1", "k2", "k5_1"}  # K1 has no stamps; K2 and K5.1 were not recorded
    assert pictures >= {f"traces/{recorded_as.get(name, name)}.svg" for name in set(RUNGS) - untraced}
    assert text.count("<!-- /table -->") == text.count("<!-- table:")
    assert len(re.findall(r"<!-- /profile(?::\S+)? -->", text)) == text.count("<!-- profile:")


SUBJECTS = {  # what a reader of the ladder has to have met by then
    "cute.md": (
        "@cute.jit @cute.kernel Constexpr const_expr range_constexpr cutlass.range shape:stride cute.coalesce cute.composition cute.group_modes "
        "cute.make_identity_tensor None TiledMMA TiledCopy TV_layout partition_A make_fragment_A tSrQ cute.gemm cute.copy swizzle mbarrier phase "
        "count index bytes descriptor WGMMA TMA fence"
    ),
    "3-gpu.md": (
        "SIMT divergence warp hardware_unit latency figures/pyramid.svg figures/block.svg Occupancy MFU 590 295 N^2_d^2_/_M parameters 4_TB "
        "one_thread_a_row A100"
    ),
    "5-fa2.md": (
        "divisions 127 flash1_backward figures/sms.svg split-K split-Q figures/splits.svg Along_head_dim figures/walk.svg 16_within Two_blocks "
        "tile-sizes causal-gain versions MagiAttention"
    ),
}


@pytest.mark.parametrize("name,subject", [(name, subject) for name, subjects in SUBJECTS.items() for subject in subjects.split()])
def test_subjects_have_their_place(name, subject):
    assert re.sub("[ _]", "", subject).lower() in re.sub(r"[\s_]", "", TEXTS[name]).lower()


def test_words_of_the_profile_tables_are_in_the_glossary():
    terms = set(re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE))
    rows = re.findall(r"^\| why warps wait, \w+ \|(.*)\|$", "".join(TEXTS.values()), re.MULTILINE)
    reasons = set(re.findall(r"([a-z][a-z ]+) \d+ %", "".join(rows)))
    assert len(reasons) > 5 and reasons <= terms
    profiles = re.findall(r"<!-- profile:\S+ -->\n(.*?)<!-- /profile", "".join(TEXTS.values()), re.DOTALL)
    rows = {row for text in profiles for row in re.findall(r"^\| ([a-zA-Z][^|]*?) \|", text, re.MULTILINE)}
    rows -= {row for row in rows if row.startswith(("head_dim", "why warps wait"))}
    words = {word for term in terms for word in term.split(", ")}  # a term may have a second name
    unknown = {row for row in rows if not any(word.lower() in row.lower() for word in words | {"time, us"})}
    assert len(rows) > 12 and not unknown


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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "code.md"])
def test_sources_have_authors_and_links(name):
    text = TEXTS[name][TEXTS[name].index("\n## Sources\n") :]
    assert re.search(r"^(- |\w).*\b[A-Z]\. [A-Z]|^- NVIDIA, ", text, re.MULTILINE) and "](https://" in text


@PATHS
def test_links_between_pages_lead_somewhere(name):
    for file in re.findall(r"\]\((?!https:)([^)#:]+)", TEXTS[name]):
        assert (FOLDER / file).exists(), file


def _same(shown, computed) -> bool:
    """Equal but for the last of six digits, where machines may differ."""
    if isinstance(computed, dict):
        return shown.keys() == computed.keys() and all(_same(shown[key], computed[key]) for key in computed)
    if isinstance(computed, str):
        return shown == computed
    if isinstance(computed, list):
        return len(shown) == len(computed) and all(map(_same, shown, computed))
    return math.isclose(shown, computed, rel_tol=1e-5)


@pytest.mark.slow
def test_other_draws_have_factors_in_the_range_that_k8s_page_gives(tables):
    lengths, seeds = (512, 1024, 2048, 4096, 8192), (1, 2, 3)
    factors = [k7 / k8 for k7, k8 in (tables.eight_bit_errors(keys, seed=seed) for keys in lengths for seed in seeds)]
    least, most = re.search(r"With three other draws factors are ([\d.]+) to ([\d.]+)\.", TEXTS["k8.md"]).groups()
    assert (f"{min(factors):.1f}", f"{max(factors):.1f}") == (least, most)
