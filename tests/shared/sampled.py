"""Of parametrised repetitions a sample runs, by a seed of the day, and all where tests may be slow.

`@pytest.mark.sampled(0.2)` takes a fifth of a test's cells, at least one of each kind: each value that more than one of them has, of an argument
or of a field of one (of those in `of="mask,name"`, where that is given); of a mask, its expression without numbers. The others are marked slow. A
test of many cells that is not marked so is sampled where TILEWISE_TEST_SHARE is less than 1. There, too, the tests of long.txt, which take a second,
run every third day (tools/long_tests.py writes that list); those marked so run every day, as cells are chosen of them.
"""

import datetime
import math
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random

import pytest

TODAY = f"{datetime.datetime.now(datetime.UTC):%Y%m%d}"
SEED = os.environ.setdefault("TILEWISE_TEST_SEED", TODAY)  # pytest-xdist's workers inherit it: they must agree
SHARE = float(os.environ.setdefault("TILEWISE_TEST_SHARE", "1"))
NUMBERS = re.compile(r"[^A-Za-z_()&|~=]+")  # and what lies between them
LONG = Path(__file__).with_name("long.txt")
FEW = 2  # cells of a test that is not marked, which are not worth a choice


def chosen(cells: Sequence[set[Hashable]], share: float, seed: str) -> set[int]:
    """The places of a `share` of the cells, each the set of its properties: a random one, in which every property of at least two cells is."""
    order = list(range(len(cells)))
    Random(seed).shuffle(order)
    missing = {kind for kind, number in Counter(kind for cell in cells for kind in cell).items() if number > 1}
    found = []
    for place in order:
        if missing & cells[place]:
            found.append(place)
            missing -= cells[place]
    rest = [place for place in order if place not in found]
    return {*found, *rest[: max(0, math.ceil(share * len(cells)) - len(found))]}


def some(cells: Sequence, share: float, what: str) -> list:
    """A sample of cells that are dataclasses, or are named by their properties, "one; another": what has but one is always there."""
    several = [cell for cell in cells if not isinstance(cell, str) or "; " in cell]
    places = chosen([properties(cell) for cell in several], share * SHARE, f"{SEED} {what}")
    left = [cell for place, cell in enumerate(several) if place not in places]
    return [cell for cell in cells if cell not in left]


def properties(value) -> set[Hashable]:
    if isinstance(value, str):
        return set(enumerate(value.split("; ")))
    if not is_dataclass(value):
        return {repr(value)}
    said = {field.name: repr(getattr(value, field.name)) for field in fields(value)}
    return {(name, NUMBERS.sub("", text) if name == "mask" else text) for name, text in said.items()}


def _of_item(item: pytest.Item) -> set[Hashable]:
    mark, found = item.get_closest_marker("sampled"), set()
    of = set(mark.kwargs["of"].split(",")) if mark and "of" in mark.kwargs else set()
    for name, value in item.callspec.params.items():
        for kind in properties(value):
            field = kind[0] if isinstance(kind, tuple) else name
            if not of or of & {name, field}:
                found.add((name, kind))
    return found


def resting(tests: Sequence[str], seed: str) -> set[str]:
    """Those that do not run on the day of that seed: two of three, of which one runs on each of the next days."""
    day = datetime.datetime.strptime(seed, "%Y%m%d").toordinal() if re.fullmatch(r"2\d{7}", seed) else zlib.crc32(seed.encode())
    return set(tests) - set(sorted(tests)[day % 3 :: 3])


def _share(item: pytest.Item) -> float:
    mark = item.get_closest_marker("sampled")
    return (mark.args[0] if mark else 1.0) * SHARE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    grids = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow") and _share(item) < 1.0:
            grids[item.nodeid.partition("[")[0]].append(item)
    for name, grid in grids.items():
        if len(grid) <= FEW and not grid[0].get_closest_marker("sampled"):
            continue
        kept = chosen([_of_item(item) for item in grid], _share(grid[0]), f"{SEED} {name}")
        for place, item in enumerate(grid):
            if place not in kept:
                item.add_marker(pytest.mark.slow)
    off = resting(LONG.read_text().split(), SEED) if SHARE < 1.0 and LONG.exists() else set()
    for item in items:
        if item.nodeid.partition("[")[0] in off and not item.get_closest_marker("sampled"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Said ahead of the tests, as -q leaves out the header."""
    if not hasattr(session.config, "workerinput"):
        session.config.get_terminal_writer().line(f"TILEWISE_TEST_SEED={SEED} TILEWISE_TEST_SHARE={SHARE:g}")
