"""Measured figures in the prose of all pages are asserted in a block of the page, stand in a generated table of the page, are computed from
a trace's picture, or are in figure_sources.py with where they come from: a file, in which they are looked up, or arithmetic, which is done.

Rates of the worklog in TFLOP/s are test_tables_agree.py's.
"""

import ast
import re
from functools import cache

import pytest
from figure_sources import FACTS, SOURCES
from trace_pictures import cost_of_stamps, softmax_under, spent
from worklog_pages import FOLDER, ROOT, TEXTS, blocks, excerpt_of

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
SCALE = {  # what a block of a page may assert a figure in, besides the unit itself
    **{"%": 0.01, "us": 1e-6, "ms": 1e-3, "clocks": 1.0},
    **{"TFLOP/s": 1e12, "TB/s": 1e12, "GB/s": 1e9, "GHz": 1e9, "GF": 1e9, "s": 1.0, "ns": 1e-9},
    **{"TB": 1e12, "GB": 1e9, "MB": 1e6, "MiB": 2**20, "KB": 1024, "kB": 1e3, "bytes": 1.0, "registers": 1.0, "instructions": 1.0},
    **{"times": 1.0, "thousand": 1e3, "million": 1e6, "cases": 1.0, "cells": 1.0, "tests": 1.0, "runs": 1.0, "problems": 1.0},
}
OFTEN = "%", "us", "ms", "clocks"
UNITS = "|".join(SCALE)
FIGURE = re.compile(rf"(?<![\w.^-])((?:{NUMBER}(?: %)?(?:, | to | and | or ))*{NUMBER}) ({UNITS})(?![\w(/])")
GENERATED = re.compile(
    r"```.*?```|<!-- ([\w-]+):\S+(?: \S+)? -->.*?<!-- (?:/\1|\1:end).*?-->|<script.*?</script>|!\[.*?\]\(.*?\)|^\|.*?$|\$[^$]*\$",
    re.DOTALL | re.MULTILINE,
)
LISTINGS = "worklog/listings/"  # generated as a whole
PAGES = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")} | {
    name: page.read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if not (name := page.relative_to(ROOT / "docs").as_posix()).startswith(LISTINGS)
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
    return {f"worklog/{page}": shares for page, shares in found.items()}


BACKWARD = "b1", "b2", "b3"


def phases(name: str) -> dict[str, dict[str, int]]:
    return spent(FOLDER / "traces" / f"{name}.svg")


TRACES = of_traces()


def figures(text: str) -> list[tuple[str, str]]:
    """(number, unit) of all figures outside of code, generated tables and pictures; "8, 19 and 20 us" are three."""
    prose = " ".join(GENERATED.sub(" ", text).split())
    return [(number, found[2]) for found in FIGURE.finditer(prose) for number in re.findall(NUMBER, found[1])]


def held(name: str) -> list[tuple[str, str]]:
    """The figures of a page in the units that it is held in here."""
    elsewhere = ("TFLOP/s",) if name.startswith("worklog/") else ()
    return [each for each in figures(PAGES[name]) if each[1] not in elsewhere]


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
        round(scale * each, digits) == plain for each in numbers for scale in (1, 1 / SCALE[unit]) if digits or scale != 1 or each == plain
    ):
        return True
    return any(low <= scale * plain <= high and high - low <= 0.1 * scale * plain for low, high in bounds for scale in (1, SCALE[unit]))


def in_a_table(number: str, unit: str, text: str) -> bool:
    """Of the page's profiles, in a row that names the unit if it is none of OFTEN, or a percentage in another generated table."""
    profiles = "".join(re.findall(r"<!-- profile:\S+ -->\n(.*?)<!-- /profile", text, re.DOTALL))
    others = "".join(re.findall(r"<!-- worklog:begin \S+ -->\n(.*?)<!-- worklog:end", text, re.DOTALL))
    plain = number.replace(",", "")
    if unit not in OFTEN:
        profiles, others = "".join(re.findall(rf"^\|[^|]*\b{unit}\b.*$", profiles, re.MULTILINE)), ""
    return plain in re.findall(NUMBER, profiles.replace(",", "")) or plain in re.findall(rf"({NUMBER}) ?%", others)


def agrees(number: str, value: float, digits: int | None = None) -> bool:
    """Whether `value`, rounded as `number` is, is that."""
    digits = len(number.partition(".")[2]) if digits is None else digits
    return abs(value - float(number.replace(",", ""))) <= 0.5001 * 10.0**-digits


@cache
def numbers_of(path: str) -> set[float]:
    """All that stand in a file, of a page in its tables."""
    text = re.sub(r"(?<=\d)_(?=\d)", "", (ROOT / path).read_text(encoding="utf-8").replace("**", " "))
    if path.startswith(("docs/", "README")):
        text = "\n".join(found[0] for found in GENERATED.finditer(text))
    return {float(each.replace(",", "")) for each in re.findall(rf"(?<![\w.])(?:{NUMBER})(?:e[-+]?\d+)?", text)}


def computes(number: str, formula: str) -> bool:
    """A figure that ends in zeros is rounded to them: 1,644 is 1,600."""
    value = eval(formula, {"__builtins__": {}})
    return agrees(number, value) or agrees(number, value, len(number.rstrip("0")) - len(number) if "." not in number else None)


def is_from(number: str, source: str | tuple[str, ...]) -> bool:
    """By figure_sources.py: arithmetic comes to it, it stands in a file, or a formula of numbers that stand in files comes to it.

    What a page says of several things has a source for each.
    """
    if isinstance(source, tuple):
        return all(is_from(number, each) for each in source)
    if source.startswith("= "):
        return computes(number, source.removeprefix("= "))
    paths, _, formula = source.partition(": ")
    if not re.match(r"(lab|docs|src|tests|tools|benchmarks)/|README", paths):
        return True
    known = set[float]().union(*(numbers_of(path) for path in paths.split(", ")))
    formula = formula or number.replace(",", "")
    measured = [each for each in re.findall(r"\d[\d.]*(?:e[-+]?\d+)?", formula) if not re.fullmatch(r"1e-?\d+", each)]
    return all(any(agrees(each, value) for value in known) for each in measured) and computes(number, formula)


def source_of(name: str, figure: str) -> str | tuple[str, ...] | None:
    return SOURCES.get(name, {}).get(figure) or FACTS.get(figure)


def without_source(name: str, text: str) -> list[str]:
    wrong = []
    for number, unit in figures(text) if name not in PAGES else held(name):
        figure = f"{number} {unit}"
        if figure in TRACES.get(name, ()) or in_a_table(number, unit, text) or is_asserted(number, unit, text):
            continue
        if not (source := source_of(name, figure)) or not is_from(number, source):
            wrong.append(figure)
    return wrong


@pytest.mark.parametrize("name", PAGES)
def test_figures_of_a_page_have_a_source(name):
    assert not without_source(name, PAGES[name])


def test_a_stale_figure_is_seen():
    block = "```python\nassert round(x) == 41 and 0.52 < y < 0.53\n```\n"
    text = f"It takes 41 us, 52 % and 7 or 8 %, once 1,536 clocks.\n| 5 us |\n{block}<!-- profile:k5 -->\n| busy 8 % |\n<!-- /profile -->\n"
    assert figures(text) == [("41", "us"), ("52", "%"), ("7", "%"), ("8", "%"), ("1,536", "clocks")]
    assert without_source("none.md", text) == ["7 %", "1,536 clocks"]


@pytest.mark.parametrize("unit", sorted(SCALE.keys() - set(OFTEN)))
def test_a_stale_figure_of_each_unit_is_seen(unit):
    """One that a block asserts has a source, one next to it in a list has none; nor has it by a table with another unit."""
    block = "```python\nassert round(x, 1) == 987.5\n```\n"
    table = f"<!-- profile:k5 -->\n| read, {unit} | 985 |\n| time, us | 986 |\n<!-- /profile -->\n"
    text = f"It has 985, 986 and 987.5 {unit}, and 2,987.4 {unit} a step; read 987 {unit}s.\n{block}{table}"
    assert figures(text) == [(number, unit) for number in ("985", "986", "987.5", "2,987.4")]
    assert without_source("none.md", text) == [f"986 {unit}", f"2,987.4 {unit}"]


def test_a_stale_source_is_seen():
    """A file in which a number does not stand (any more), a formula of which the same is so, and one that comes to another number."""
    rows = "lab/rows/triton-softcap-compiled.jsonl"
    assert (
        is_from("944", (rows, "= 945 - 1"))
        and not is_from("944", (rows, "= 945 - 2"))
        and is_from("944", rows)
        and is_from("1,096", f"{rows}: 1545 - 449")
        and is_from("1,100", f"{rows}: 1545 - 449")
    )
    assert is_from("1.83", "= 989.4e12 / (132 * 4096) / 1e9") and is_from("200", f"{rows}, README.md: 1096 / 5.48") is False
    assert not any(
        is_from(number, source) for number, source in (("945", rows), ("1,096", f"{rows}: 1544 - 448"), ("1,097", f"{rows}: 1545 - 449"))
    )
    assert not is_from("1.84", "= 989.4e12 / (132 * 4096) / 1e9")
    with pytest.raises(FileNotFoundError):
        is_from("1", "lab/rows/none.jsonl")


def test_no_source_is_left_without_its_figure():
    found = {name: {f"{number} {unit}" for number, unit in held(name)} for name in PAGES}
    left = {(name, figure) for name, sources in SOURCES.items() for figure in sources if figure not in found[name]}
    assert not left and FACTS.keys() <= set().union(*found.values())
    listed = [(figure, source) for sources in (FACTS, *SOURCES.values()) for figure, source in sources.items()]
    assert not [each for each in listed if not is_from(each[0].split()[0], each[1])]
    assert sum(map(len, found.values())) > 400


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
