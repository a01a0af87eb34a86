"""What a day's sample of a grid holds (tests/shared/sampled.py)."""

import subprocess
import sys
from itertools import chain, product
from pathlib import Path

import pytest
from sampled import LONG, chosen, resting, some

GRID = [set(enumerate(cell)) for cell in product("abc", "xyz", range(6))]


@pytest.mark.parametrize("seed", ["20260101", "20260102"])
def test_every_kind_is_there(seed):
    found = chosen(GRID, 0.2, seed)
    assert set.union(*(GRID[place] for place in found)) == set.union(*GRID) and len(found) == 11
    assert found == chosen(GRID, 0.2, seed) != chosen(GRID, 0.2, "another day")
    assert chosen(GRID, 1.0, seed) == set(range(len(GRID)))
    assert set.union(*(GRID[place] for place in chosen(GRID, 0.0, seed))) == set.union(*GRID)


def test_what_one_cell_alone_has_is_no_kind():
    assert len(chosen([{("seed", n)} for n in range(40)], 0.1, "")) == 4


def test_names():
    names = [f"{one}; {another}" for one, another in product("abcd", "xy")]
    found = some([*names, "alone"], 0.0, "")
    assert {part for name in found for part in name.split("; ")} == {*"abcdxy", "alone"} and len(found) < len(names)


@pytest.mark.parametrize(
    "days", [("20261129", "20261130", "20261201"), ("20261231", "20270101", "20270102"), ("20280228", "20280229", "20280301")]
)
def test_long_tests_run_on_one_of_three_days(days):
    tests = [f"test_{n}" for n in range(7)]
    ran = [set(tests) - resting(tests, day) for day in days]
    assert sorted(chain(*ran)) == tests and {len(each) for each in ran} == {2, 3}


def test_the_list_of_long_tests_is_of_tests_that_exist():
    for line in LONG.read_text().split():
        file, name = line.split("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text(), line


def test_kinds_of_some_arguments(tmp_path):
    path = tmp_path / "test_grid.py"
    path.write_text(
        "import pytest\n@pytest.mark.sampled(0.0, of='b')\n@pytest.mark.parametrize('a', range(9))\n@pytest.mark.parametrize('b', 'xyz')\n"
        "def test_grid(a, b): pass\n"
    )
    found, _ = collected(path, "not slow")
    assert {line.partition("[")[2][0] for line in found} == {*"xyz"} and len(found) == 3


def collected(path, words):
    """What pytest collects of that file, and all that it says."""
    run = [
        sys.executable,
        "-m",
        "pytest",
        str(path),
        "-q",
        "--collect-only",
        "-p",
        "sampled",
        "-c",
        "/dev/null",
        "-o",
        "markers=slow",
        "-m",
        words,
    ]
    shared = Path(__file__).parents[1] / "shared"
    text = subprocess.run(run, env={"PYTHONPATH": str(shared)}, capture_output=True, text=True, check=True).stdout
    return {line for line in text.splitlines() if "::" in line}, text


def test_in_pytest(tmp_path):
    """Those of a day and those marked slow are the whole grid, and each is in one of them."""
    path = tmp_path / "test_grid.py"
    path.write_text(
        "import pytest\n@pytest.mark.sampled(0.1)\n@pytest.mark.parametrize('a', range(9))\n@pytest.mark.parametrize('b', 'xyz')\n"
        "def test_grid(a, b): pass\n"
    )
    (fast, said), (slow, _) = (collected(path, words) for words in ("not slow", "slow"))
    assert len(fast | slow) == 27 and not fast & slow and said.startswith("TILEWISE_TEST_SEED=2")
    values = {part for line in fast for part in line[line.index("[") + 1 : -1].split("-")}
    assert values == {*"012345678xyz"} and 9 <= len(fast) <= 11  # a value of b may be met where that of a is there already
