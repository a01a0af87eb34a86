"""Percentages, microseconds, milliseconds and clocks in the worklog's prose are asserted in a block of the page, stand in a generated table of
the page, are computed from a trace's picture, or are in SOURCES with where they come from."""

import ast
import re

import pytest
from trace_pictures import cost_of_stamps, softmax_under, spent
from worklog_pages import FOLDER, ROOT, TEXTS, blocks, excerpt_of

NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(rf"(?<![\w-])((?:{NUMBER}(?: %)?(?:, | to | and | or ))*{NUMBER}) (%|us|ms|clocks)(?!\w)")
GENERATED = re.compile(
    r"```.*?```|<!-- (\w+):\S+(?: \S+)? -->.*?<!-- (?:/\1|\1:end).*?-->|<script.*?</script>|!\[.*?\]\(.*?\)|^\|.*?$|\$[^$]*\$",
    re.DOTALL | re.MULTILINE,
)
SCALE = {"%": 0.01, "us": 1e-6, "ms": 1e-3, "clocks": 1.0}
NOT_KEPT = "an exploratory run, with day and machine on the page; its rows were not kept"
SOURCES = {  # (page, figure): where it comes from
    ("3-gpu.md", "12 %"): "K3's profile, which the paragraph links to; the block next to it has 12.5 %",
    ("k5.md", "52 %"): "K4.2's page, of the same tile",
    ("k5.md", "1,536 clocks"): "asserted on K6's page: three warpgroups of 512",
    ("lost.md", "2 %"): NOT_KEPT,
    ("lost.md", "6 %"): NOT_KEPT,
    ("lost.md", "70.7 clocks"): NOT_KEPT,
    ("lost.md", "4 %"): "lab/2026-11-21.md",
    ("lost.md", "11 %"): "lab/2026-11-21.md",
    ("lost.md", "3 %"): "lab/2026-11-21.md",
    ("lost.md", "40 us"): "lab/2026-11-21.md",
    ("production.md", "700 clocks"): "lab/2026-11-21.md",
    ("profiling.md", "80 %"): "a rule of thumb",
    ("profiling.md", "90 %"): "the same",
    ("profiling.md", "100 %"): "all issue slots",
}


def under(name: str) -> dict[int, dict[str, int]]:
    return softmax_under(FOLDER / "traces" / f"{name}.svg")


def of_traces() -> dict[str, set[str]]:
    """By page, the figures that its traces' pictures give."""
    shares = {page: under(name) for page, name in (("k5.md", "k5"), ("k6.md", "k6-turns"), ("k7.md", "k7"), ("k8.md", "k8"))}
    found = {page: {f"{each} %" for of_one in share.values() for each in of_one.values()} for page, share in shares.items()}
    found["k7.md"] |= found["k6.md"]  # which it compares with
    found["k6.md"] |= {f"{cost_of_stamps(FOLDER / 'traces' / f'{name}.svg'):.0f} %" for name in ("k6", "k6-turns", "k6-overlap")}
    found["backward.md"] = {f"{share} %" for name in BACKWARD for lane in phases(name).values() for share in lane.values()}
    return found


BACKWARD = "b1", "b2", "b3"


def phases(name: str) -> dict[str, dict[str, int]]:
    return spent(FOLDER / "traces" / f"{name}.svg")


TRACES = of_traces()


def figures(text: str) -> list[tuple[str, str]]:
    """(number, unit) of all figures outside of code, generated tables and pictures; "8, 19 and 20 us" are three."""
    prose = " ".join(GENERATED.sub(" ", text).split())
    return [(number, found[2]) for found in FIGURE.finditer(prose) for number in re.findall(NUMBER, found[1])]


def value(node: ast.AST) -> float | None:
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float()):
            return float(node.value)
        case ast.UnaryOp(op=ast.USub()):
            return value(node.operand)
    return None


def asserted(text: str) -> tuple[set[float], list[tuple[float, float]]]:
    """Numbers in the assertions of a page's own blocks, and pairs of bounds, `a < x < b`."""
    numbers, bounds = set(), []
    for block in blocks(text):
        for statement in ast.walk(ast.parse(block[1])) if not excerpt_of(text, block) else ():
            for node in ast.walk(statement) if isinstance(statement, ast.Assert) else ():
                if (number := value(node)) is not None:
                    numbers.add(number)
                if isinstance(node, ast.Compare) and len(node.ops) == 2:
                    low, high = value(node.left), value(node.comparators[1])
                    bounds += [(low, high)] if low is not None and high is not None else []
    return numbers, bounds


def is_asserted(number: str, unit: str, text: str) -> bool:
    """As it is, or in units of its own (0.52 for 52 %); a bound of `a < x < b` counts where both are within a tenth of the figure."""
    numbers, bounds = asserted(text)
    digits = len(number.partition(".")[2])
    plain = float(number.replace(",", ""))
    if any(
        round(scale * each, digits) == plain for each in numbers for scale in (1, 1 / SCALE[unit]) if digits or scale > 1 or each == plain
    ):
        return True
    return any(low <= scale * plain <= high and high - low <= 0.1 * scale * plain for low, high in bounds for scale in (1, SCALE[unit]))


def in_a_table(number: str, text: str) -> bool:
    """Of the page's profiles, or a percentage in another generated table."""
    profiles = "".join(re.findall(r"<!-- profile:\S+ -->\n(.*?)<!-- /profile", text, re.DOTALL))
    others = "".join(re.findall(r"<!-- worklog:begin \S+ -->\n(.*?)<!-- worklog:end", text, re.DOTALL))
    plain = number.replace(",", "")
    return plain in re.findall(NUMBER, profiles.replace(",", "")) or plain in re.findall(rf"({NUMBER}) ?%", others)


def without_source(name: str, text: str) -> list[str]:
    wrong = []
    for number, unit in figures(text):
        figure = f"{number} {unit}"
        if figure in TRACES.get(name, ()) or (name, figure) in SOURCES or in_a_table(number, text) or is_asserted(number, unit, text):
            continue
        wrong.append(figure)
    return wrong


@pytest.mark.parametrize("name", TEXTS)
def test_figures_of_a_page_have_a_source(name):
    assert not without_source(name, TEXTS[name])


def test_a_stale_figure_is_seen():
    block = "```python\nassert round(x) == 41 and 0.52 < y < 0.53\n```\n"
    text = f"It takes 41 us, 52 % and 7 or 8 %, once 1,536 clocks.\n| 5 us |\n{block}<!-- profile:k5 -->\n| busy 8 % |\n<!-- /profile -->\n"
    assert figures(text) == [("41", "us"), ("52", "%"), ("7", "%"), ("8", "%"), ("1,536", "clocks")]
    assert without_source("none.md", text) == ["7 %", "1,536 clocks"]


def test_no_source_is_left_without_its_figure():
    found = {(name, f"{number} {unit}") for name, text in TEXTS.items() for number, unit in figures(text)}
    assert SOURCES.keys() <= found and len(found) > 70
    days = {source for source in SOURCES.values() if source.startswith("lab/")}
    assert all((ROOT / day).is_file() for day in days)


def test_pages_say_of_their_traces_what_the_pictures_show():
    """Which share is whose: the sets above would let them be mixed up."""
    flat = {name: " ".join(text.split()) for name, text in TEXTS.items()}
    k5, turns, k7, k8 = (under(name) for name in ("k5", "k6-turns", "k7", "k8"))
    low, high = sorted(each["softmax"] for each in k5.values())
    assert f"{low} to {high} % of a softmax fall on the other's softmax" in flat["k5.md"]
    low, high = sorted(each["products"] for each in k5.values())
    assert f"only {low} to {high} % of it lies under the other's products" in flat["k5.md"]
    low, high = sorted(each["products"] for each in turns.values())
    assert f"{low} to {high} % of a softmax lies under the other's products and none" in flat["k6.md"]
    assert {each["softmax"] for each in turns.values()} == {0} and f"it is {low} to {high} % under products" in flat["k7.md"]
    of_b2, of_b3 = ({lane: each for lane, each in phases(name).items() if "consumer" in lane} for name in ("b2", "b3"))
    (producer,) = [each for lane, each in phases("b2").items() if "producer" in lane]
    low, high = sorted(each["waits for a tile"] for each in of_b2.values())
    said = f"waits for an empty stage {producer['waits for an empty stage']} % of its time, and yet the consumers wait for a tile {low} and {high} %"
    assert said in flat["backward.md"]
    low, high = sorted(each["waits for its turn"] for each in of_b3.values())
    assert f"waiting for turns is {low} and {high} %" in flat["backward.md"]
    for page, share in (("k7.md", k7), ("k8.md", k8)):
        first, second = ((each["softmax"], each["products"]) for each in (share[0], share[1]))
        assert f"{second[0]} % lie under consumer 0's, and {second[1]} % under its products" in flat[page]
        assert re.search(rf"of consumer 0's {first[0]} % .*?{first[1]} %", flat[page])
