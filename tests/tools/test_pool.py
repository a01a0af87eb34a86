"""The pool of tools that compile: every key once, errors, and what it says of the time that is left."""

import importlib
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("pool")


def test_every_key_once_with_progress(pool, capsys):
    assert sorted(pool.each(math.factorial, [*range(7)], workers=2)) == [(n, math.factorial(n)) for n in range(7)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"{done} of 7" for done in range(1, 8)] and " 0.0 left: " in lines[-1]
    assert [*pool.each(math.factorial, [])] == []


def test_what_a_process_raises_is_raised(pool):
    with pytest.raises(ValueError, match="negative"):
        list(pool.each(math.factorial, [1, -1], workers=1))


def test_the_estimate_is_from_the_mean(pool):
    assert pool.left(100, 635, 900.0) == "100 of 635, 15.0 minutes, 80.2 left"
    assert pool.cores() >= 1
