"""Two generated tables never give one cell two values more than 3 % apart: a rate, a time or a memory of a contender in a case on a device.

Where two sets have a case in common and were timed in different sessions, they may be; SESSIONS lists those cells, and the pages say so.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_APART = 0.03
TOKENS, HIDDEN = 16384, 2048  # of the papers' cases and the ladder's
UNITS = ("TFLOP/s", "ms", "MB")
SESSIONS = {  # (device, case): the most that its values are apart, and the sessions
    ("h100", "b1 s16384 h32 d64 Full() bf16 fwd"): (0.04, "ladder of 2026-11-21, papers of 2026-11-25, fp8 of 2026-11-26"),
    ("h100", "b2 s8192 h16 d128 Causal() bf16 fwd"): (0.04, "papers of 2026-11-25, fp8 of 2026-11-26"),
    ("cpu", "b1 s4096 h8 d64 Full() fp32 fwd"): (0.16, "cpu and cpu-dense of 2026-11-22, three hours apart"),
    ("cpu", "b1 s4096 h8 d64 Causal() fp32 fwd"): (0.12, "the same"),
    ("cpu", "b1 s4096 h4 d128 Full() fp32 fwd"): (0.12, "the same"),
    ("cpu", "b1 s4096 h4 d128 Causal() fp32 fwd"): (0.16, "the same"),
}
MARKER = re.compile(r"<!-- (?:tilewise:begin (?P<kind>[\w-]+)(?P<rest>\S*)|(?P<rung>table|ladder):\S+) -->\n(?P<body>.*?)<!-- ", re.DOTALL)


class Cell(NamedTuple):
    device: str
    unit: str
    case: str  # "b2 s8192 h16 d128 Full() bf16 fwd"
    impl: str


def tokens(text: str) -> int | None:
    found = re.fullmatch(r"([\d,]+)(k?)", text.strip())
    return found and int(found[1].replace(",", "")) * (1024 if found[2] else 1)


def papers(head_dim: str, mask: str, seqlen: int, direction: str = "fwd") -> str:
    mask = {"full": "Full()", "causal": "Causal()"}.get(mask, mask)
    return f"b{TOKENS // seqlen} s{seqlen} h{HIDDEN // int(head_dim)} d{head_dim} {mask} bf16 {direction}"


def split(cell: str, column: str) -> tuple[str, float] | None:
    """(contender, value) of "669.7 fa4" or, in a contender's own column, of "**709**"; None of what is no number."""
    found = re.match(r"\**([\d,]+(?:\.\d+)?)\**(?: ([a-z][\w:.-]*))?$", cell)
    return found and (found[2] or column, float(found[1].replace(",", "")))


def rows_of(body: str) -> tuple[list[str], list[list[str]]]:
    lines = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in body.splitlines() if line.startswith("|")]
    return (lines[0], lines[2:]) if len(lines) > 2 else ([], [])


def device_of(rest: str, body: str, after: str) -> str:
    marked = re.search(r"h[12]00", rest)
    said = marked or re.search(r"H[12]00", body + after[:400])
    return said[0].lower() if said else "cpu"


def cells(text: str) -> Iterator[tuple[Cell, float]]:
    """Of all generated tables of a page."""
    for found in MARKER.finditer(text):
        header, rows = rows_of(found["body"])
        kind = found["kind"] or found["rung"]
        device = device_of(found["rest"] or "", found["body"], text[found.end() :])
        for row in rows:
            for unit, case, impl, cell in READERS.get(kind, lambda header, row: ())(header, row):
                if got := split(cell, impl):
                    yield Cell(device, unit, case, got[0]), got[1]


def by_case(header: list[str], row: list[str]):
    """A case a row; a column a contender, or ours and the best other's."""
    case = row[0].partition(": ")[2]
    for column, cell in zip(header[1:], row[1:], strict=False):
        unit = next((each for each in UNITS if re.search(rf"\b{each}\b", f"{header[0]} {column}")), None)
        if unit and case and column not in ("ratio",):
            yield unit, case, column.partition(",")[0], cell


def models(header: list[str], row: list[str]):
    kernel = next(place for place, name in enumerate(header) if name.startswith("kernel"))
    yield "kernel, ms", row[1], "tilewise", row[kernel]
    yield "kernel, ms", row[1], "peer", row[kernel + 1]


def longest(header: list[str], row: list[str]):
    if found := re.match(r"(\w+) d(\d+) (\S+), (\d+) tokens", row[0]):
        direction, head_dim, mask, seqlen = found.groups()
        for column, cell in zip(header[1:3], row[1:3], strict=True):
            yield "TFLOP/s", papers(head_dim, mask, int(seqlen), direction), column, cell


def readme_papers(header: list[str], row: list[str]):
    head_dim, mask = row[0].split(", ")
    for first, direction in ((1, "fwd"), (4, "bwd")):
        for cell in row[first : first + 2]:
            yield "TFLOP/s", papers(head_dim, mask, TOKENS, direction), "tilewise", cell


def at_8k(header: list[str], row: list[str]):
    for column, cell in zip(header, row, strict=True):
        if column in ("TFLOP/s", "full, TFLOP/s", "causal"):
            yield "TFLOP/s", papers("128", "causal" if column == "causal" else "full", 8192), row[0], cell


def of_a_rung(header: list[str], row: list[str]):
    head_dim, mask = row[0].split(" ")
    for column, cell in zip(header[2:], row[2:], strict=True):
        yield "TFLOP/s", papers(head_dim, mask, tokens(column)), row[1], cell


READERS = {
    **dict.fromkeys(("throughput", "time", "memory", "against-best", "against-sdpa"), by_case),
    "models": models,
    "by-kind": longest,
    "readme-papers": readme_papers,
    **dict.fromkeys(("ladder", "readme-ladder"), at_8k),
    "table": of_a_rung,
}


def disagreements(pages: dict[str, str]) -> dict[Cell, list[tuple[float, str]]]:
    found = defaultdict(list)
    for page, text in pages.items():
        for cell, value in cells(text):
            found[cell].append((value, page))
    return {cell: each for cell, each in found.items() if max(each)[0] > (1 + MOST_APART) * min(each)[0]}


def test_no_cell_has_two_values():
    pages = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
    found = disagreements(pages)
    apart = {(cell.device, cell.case): max(each)[0] / min(each)[0] - 1 for cell, each in found.items()}
    assert apart.keys() == SESSIONS.keys(), {cell: each for cell, each in found.items() if (cell.device, cell.case) not in SESSIONS}
    assert not {place: most for place, most in apart.items() if most > SESSIONS[place][0]}
    said = " ".join(pages["docs/benchmarks.md"].split())
    assert "The tables of these two sets were timed three hours apart" in said and "timed on another day than the papers' cases" in said
    read = [cell for text in pages.values() for cell, _ in cells(text)]
    again = len(read) - len(set(read))
    assert len(read) > 1500 and again > 400  # cells, and such as stand in several tables
    assert {cell.device for cell in read} == {"cpu", "h100", "h200"} and {cell.unit for cell in read} == {*UNITS, "kernel, ms"}


RUNG_TABLE = """<!-- table:k5 -->

| TFLOP/s | | 512 | 8k |
|---|---|---:|---:|
| 128 full | k5 | 1 | **{}** |
| 128 full | best peer | – | 736 fa4 |

Measured on an H100
<!-- /table -->
"""
OTHER_TABLE = """<!-- tilewise:begin against-best:papers:fwd:h100 -->

| throughput (TFLOP/s) | tilewise | best other | ratio |
|---|---:|---:|---:|
| papers: b2 s8192 h16 d128 Full() bf16 fwd | 709 | {} fa4 | 1 |

<!-- tilewise:end -->
"""


def test_a_disagreement_is_found():
    ladder, other = RUNG_TABLE, OTHER_TABLE
    assert not disagreements({"a": ladder.format(624), "b": ladder.format(630), "c": other.format(740)})
    assert [cell.impl for cell in disagreements({"a": ladder.format(624), "b": ladder.format(650), "c": other.format(736)})] == ["k5"]
    assert [cell.impl for cell in disagreements({"a": ladder.format(624), "c": other.format(770)})] == ["fa4"]


SHEET = {989.0, 66.9, 1979.0}  # TFLOP/s of an H100's data sheet
GENERATED = re.compile(
    r"```.*?```|<!-- (\w+):\S+ -->.*?<!-- (?:/\1|\1:end).*?-->|<script.*?</script>|!\[.*?\]\(.*?\)|^\|.*?$", re.DOTALL | re.MULTILINE
)


def rates_in_prose(text: str) -> list[str]:
    """Numbers before "TFLOP/s", outside of code, generated tables with their captions, and pictures."""
    return re.findall(r"(\d[\d,]*(?:\.\d+)?) TFLOP/s", GENERATED.sub("", text))


def rates_known(text: str, cells_of_all: set[float]) -> set[float]:
    """Of any table, of the data sheet, of lab/rows, and what the page's own blocks assert."""
    blocks = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    asserted = {float(number.replace(",", "")) for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", blocks)}
    facts = (ROOT / "lab/rows/fp8-facts-h100.jsonl").read_text(encoding="utf-8")
    measured = {float(round(float(number))) for number in re.findall(r'"tflops": ([\d.]+)', facts)}
    return cells_of_all | asserted | measured | SHEET


def test_rates_in_the_worklogs_prose_are_of_rows():
    every = {value for path in PAGES for cell, value in cells(path.read_text(encoding="utf-8")) if cell.unit == "TFLOP/s"}
    every |= {float(round(value)) for value in every}
    count = 0
    for page in sorted((ROOT / "docs/worklog").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        said = rates_in_prose(text)
        count += len(said)
        assert not [rate for rate in said if float(rate.replace(",", "")) not in rates_known(text, every)], page.name
    assert count > 20


def test_a_stale_rate_is_seen():
    table = "<!-- table:k6 -->\n5 TFLOP/s\n<!-- /table -->\n"
    text = f"It has 669 TFLOP/s, once 1,234 TFLOP/s.\n| a | 1 TFLOP/s |\n```python\nassert x == 669\n```\n{table}"
    assert rates_in_prose(text) == ["669", "1,234"]
    known = rates_known(text, set())
    assert 669.0 in known and 1234.0 not in known
