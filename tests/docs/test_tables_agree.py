"""Two generated tables never give one cell two values more than 3 % apart: a rate, a time or a memory of a contender in a case on a device.

Where two sets have a case in common and were timed in different sessions, they may be; SESSIONS lists those cells, and the pages say so.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tilewise.bench.tables.readme import EIGHT_BITS
from tilewise.ladder import BACKWARD_RUNGS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_APART = 0.03
TOKENS, HIDDEN = 16384, 2048  # of the papers' cases and the ladder's
UNITS = ("TFLOP/s", "ms", "MB")
OTHER_UNITS = ("kernel, ms", "us", "profile", "two GPUs, ms")  # of tables with cells of their own
SESSIONS = {  # (device, case): the most that its values are apart, and the sessions
    ("h100", "b1 s16384 h32 d64 Full() bf16 fwd"): (0.04, "ladder of 2026-11-21, papers of 2026-11-25, fp8 of 2026-11-26"),
    ("h100", "b2 s8192 h16 d128 Causal() bf16 fwd"): (0.04, "papers of 2026-11-25, fp8 of 2026-11-26"),
    ("h200", "b1 s16384 h16 d128 Full() bf16 bwd"): (
        0.05,
        "one card, minutes apart: in turns with rungs of half its rate, or with its equals",
    ),
    ("h200", "b1 s16384 h32 d64 Full() bf16 bwd"): (0.06, "the same"),
}
MARKER = re.compile(r"<!-- (?P<kind>(?!from)[a-z-]+)(?::(?P<rest>\S+))?(?: (?P<name>\S+))? -->\n(?P<body>.*?)<!-- ", re.DOTALL)


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


class Table(NamedTuple):
    kind: str  # "against-best", "worklog:causal", "profile"
    rest: str  # what its marker says besides
    title: str  # the line ahead of it, between its markers
    device: str
    header: list[str]
    rows: list[list[str]]


def device_of(rest: str, body: str, after: str) -> str:
    marked = re.search(r"h[12]00", rest)
    said = marked or re.search(r"H[12]00", body + after[:400])
    return said[0].lower() if said else "cpu"


def tables(text: str) -> Iterator[Table]:
    """All generated tables of a page; between two markers there may be several, or none."""
    for found in MARKER.finditer(text):
        rest = found["name"] or found["rest"] or ""
        kind = found["kind"]
        if found["name"] and kind == "tilewise":
            kind, _, rest = rest.partition(":")
        elif kind in ("worklog", "context-parallel", "vllm"):
            kind = f"{kind}:{rest}"
        device = "h200" if found["kind"] == "context-parallel" else device_of(rest, found["body"], text[found.end() :])
        parts = re.split(r"^((?:\|.*\n)+)", found["body"], flags=re.MULTILINE)
        for before, part in zip(parts[::2], parts[1::2], strict=False):
            lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in part.splitlines()]
            yield Table(kind, rest, (before.strip().splitlines() or [""])[-1], device, lines[0], lines[2:])


def cells(text: str) -> Iterator[tuple[Cell, float]]:
    """Of all generated tables of a page that have a reader."""
    for table in tables(text):
        for row in table.rows:
            for unit, case, impl, cell in READERS.get(table.kind, lambda table, row: ())(table, row):
                if got := split(cell, impl):
                    yield Cell(table.device, unit, case, got[0]), got[1]


def by_case(table: Table, row: list[str]):
    """A case a row; a column a contender, or ours and the best other's."""
    case = row[0].partition(": ")[2]
    for column, cell in zip(table.header[1:], row[1:], strict=False):
        unit = next((each for each in UNITS if re.search(rf"\b{each}\b", f"{table.header[0]} {column}")), None)
        if unit and case and column not in ("ratio",):
            yield unit, case, column.partition(",")[0], cell


def models(table: Table, row: list[str]):
    kernel = next(place for place, name in enumerate(table.header) if name.startswith("kernel"))
    yield "kernel, ms", row[1], "tilewise", row[kernel]
    yield "kernel, ms", row[1], "peer", row[kernel + 1]


def longest(table: Table, row: list[str]):
    if found := re.match(r"(\w+) d(\d+) (\S+), (\d+) tokens", row[0]):
        direction, head_dim, mask, seqlen = found.groups()
        for column, cell in zip(table.header[1:3], row[1:3], strict=True):
            yield "TFLOP/s", papers(head_dim, mask, int(seqlen), direction), column, cell


def readme_papers(table: Table, row: list[str]):
    head_dim, mask = row[0].split(", ")
    for first, direction in ((1, "fwd"), (4, "bwd")):
        for cell in row[first : first + 2]:
            yield "TFLOP/s", papers(head_dim, mask, TOKENS, direction), "tilewise", cell


def at_8k(table: Table, row: list[str]):
    for column, cell in zip(table.header, row, strict=True):
        if column in ("TFLOP/s", "full, TFLOP/s", "causal"):
            yield "TFLOP/s", papers("128", "causal" if column == "causal" else "full", 8192), row[0], cell


def of_a_rung(table: Table, row: list[str]):
    head_dim, mask = row[0].split(" ")
    direction = "bwd" if table.rest in BACKWARD_RUNGS else "fwd"
    for column, cell in zip(table.header[2:], row[2:], strict=True):
        yield "TFLOP/s", papers(head_dim, mask, tokens(column), direction), row[1], cell


def in_a_profile(table: Table, row: list[str]):
    for column, cell in zip(table.header[1:], row[1:], strict=True):
        yield "profile", f"{table.header[0]}: {row[0]}", column, cell


def readme_eight_bits(table: Table, row: list[str]):
    names = {words: impl for impl, words in EIGHT_BITS.items()}
    for column, cell in zip(table.header[1:], row[1:], strict=True):
        yield "TFLOP/s", papers(row[0].removeprefix("head_dim "), "causal", TOKENS), names[column], cell


def readme_cpu(table: Table, row: list[str]):
    shape, dtype, direction = table.header[0].rsplit(" ", 2)
    for impl, cell in zip(table.header[1:], row[1:], strict=True):
        for part in cell.split(", "):
            value, unit = part.split(" ")
            yield unit, f"{shape} {row[0]} {dtype} {direction}", impl, value


def in_us(cell: str) -> str:
    """Without the rate in brackets: "17.0 (1.97)", "18.5 (1.81) sdpa:cudnn"."""
    return re.sub(r" \([\d.]+\)", "", cell)


def decode(table: Table, row: list[str]):
    """As `b16 8k 32:8 p64 q1`; a group has a table, with the heads and new tokens in the line ahead of it and three columns a layout."""
    if table.header[0] == "batch":
        groups = [(row[0], row[2:4])]
    else:
        heads_q, heads_k, new = re.match(r"(\d+) query and (\d+) key heads of 128, (\d+) new", table.title).groups()
        pages = [re.search(r"(\d+|contiguous), us", column)[1] for column in table.header[1::3]]
        batch, length = row[0].split(" x ")
        cases = [f"b{batch} {length} {heads_q}:{heads_k} p{page.replace('contiguous', '0')} q{new}" for page in pages]
        groups = [(case, row[place : place + 2]) for case, place in zip(cases, range(1, len(row), 3), strict=True)]
    for case, both in groups:
        for cell in both:
            yield "us", case, "tilewise", in_us(cell)


def readme_decode(table: Table, row: list[str]):
    others = {"64 of many lengths, 470,049 in all": "b64 ragged-64k", "64 behind one prefix, 73,728 in all": "b64 prefix-9k"}
    case = others.get(row[0]) or "b{} {}".format(*row[0].split(" x "))
    for cell in (row[1], row[3]):
        yield "us", f"{case} 32:8 p64 q1", "tilewise", cell


def decode_rungs(table: Table, row: list[str]):
    batch, length, heads = re.match(r"(\d+) x (\S+), heads (\S+)", row[0]).groups()
    for column, cell in zip(table.header[1:], row[1:], strict=True):
        yield "us", f"b{batch} {length} {heads} p0 q1", column, in_us(cell)


def two_gpus(table: Table, row: list[str]):
    for column, cell in zip(table.header[1:], row[1:], strict=True):
        if column in ("tilewise", "measured"):
            yield "two GPUs, ms", row[0], "tilewise", cell


READERS = {
    **dict.fromkeys(("throughput", "time", "memory", "against-best", "against-sdpa"), by_case),
    "models": models,
    "by-kind": longest,
    "by-kind-triton": longest,
    "readme-papers": readme_papers,
    **dict.fromkeys(("ladder", "readme-ladder"), at_8k),
    "table": of_a_rung,
    "profile": in_a_profile,
    "decode": decode,
    "readme-decode": readme_decode,
    "decode-rungs": decode_rungs,
    "readme-eight_bits": readme_eight_bits,
    "readme-cpu": readme_cpu,
    **dict.fromkeys(("context-parallel:times", "context-parallel:checked"), two_gpus),
}
ONCE = "one table a device, so no cell comes twice"  # held by a test
COMPUTED = "computed by tools/worklog_tables.py, which a test holds to it"
NOT_READ = {  # kind: why
    "machines": "names, versions and dates; no measured value",
    **dict.fromkeys(
        (
            "training",
            "error",
            "ceiling",
            "hard-inputs",
            "vllm:prefill",
            "vllm:decode",
            "vllm:whole",
            "vllm:busy",
            "video",
            "eight-bits",
            "context-parallel:decode",
        ),
        ONCE,
    ),
    "counters": "one launch under the profiler, whose clock is not the bench's",
    "context-parallel:predicted": "predictions",
    "cards": "predictions",
    "goals": "the newest row of each cell, of whichever GPU, which the page's other tables show",
    "sass": "counts of instructions",
    **{
        f"worklog:{name}": COMPUTED
        for name in ("score-memory", "units", "blocks", "non-matmul", "causal", "schedule", "tile-sizes", "traffic")
    },
    **{f"worklog:{name}": COMPUTED for name in ("versions", "eight-bits-factor")},
    "worklog:causal-gain": "ratios of rows that other tables show",
    "worklog:production": "steps of a kernel that are in no other table",
}


def pages() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}


def disagreements(pages: dict[str, str]) -> dict[Cell, list[tuple[float, str]]]:
    found = defaultdict(list)
    for page, text in pages.items():
        for cell, value in cells(text):
            found[cell].append((value, page))
    return {cell: each for cell, each in found.items() if max(each)[0] > (1 + MOST_APART) * min(each)[0]}


def test_no_cell_has_two_values():
    texts = pages()
    found = disagreements(texts)
    apart = {(cell.device, cell.case): max(each)[0] / min(each)[0] - 1 for cell, each in found.items()}
    assert apart.keys() == SESSIONS.keys(), {cell: each for cell, each in found.items() if (cell.device, cell.case) not in SESSIONS}
    assert not {place: most for place, most in apart.items() if most > SESSIONS[place][0]}
    said = " ".join(texts["docs/benchmarks.md"].split())
    assert "timed on another day than the papers' cases" in said
    read = [cell for text in texts.values() for cell, _ in cells(text)]
    again = len(read) - len(set(read))
    assert len(read) > 1500 and again > 400  # cells, and such as stand in several tables
    assert {cell.device for cell in read} == {"cpu", "h100", "h200"} and {cell.unit for cell in read} == {*UNITS, *OTHER_UNITS}


def test_every_kind_of_table_is_read_or_has_a_reason():
    found = [table for text in pages().values() for table in tables(text)]
    assert {table.kind for table in found} == READERS.keys() | NOT_READ.keys()
    once = {(table.kind, table.rest, table.device) for table in found if NOT_READ.get(table.kind) == ONCE}
    assert len(once) == len({(kind, device) for kind, _, device in once}), once


TWICE = (
    "readme-decode",
    "decode-rungs",
    "readme-eight_bits",
    "readme-cpu",
    "context-parallel:checked",
    "profile",
    "readme-papers",
)


@pytest.mark.parametrize("kind", TWICE)
def test_a_changed_cell_that_stands_twice_is_found(kind):
    texts = pages()
    before = len(disagreements(texts))
    for page, table in [(page, table) for page, text in texts.items() for table in tables(text) if table.kind == kind]:
        for row in table.rows[:10]:
            for number in [re.search(r"[\d.,]+", cell)[0] for *_, cell in READERS[kind](table, row) if split(cell, "tilewise")]:
                place = next(place for place, cell in enumerate(row) if place > 0 and number in cell)
                changed = [*row[:place], row[place].replace(number, f"9{number}", 1), *row[place + 1 :]]
                text = texts[page].replace(f"| {' | '.join(row)} |", f"| {' | '.join(changed)} |", 1)
                if len(disagreements(texts | {page: text})) > before:
                    return
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", READERS)
def test_a_reader_reads_cells_of_its_tables(kind):
    read = [
        cell
        for text in pages().values()
        for table in tables(text)
        if table.kind == kind
        for row in table.rows
        for cell in READERS[kind](table, row)
    ]
    assert any(split(cell[3], cell[2]) for cell in read)


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
