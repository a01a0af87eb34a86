"""tools/shape.py on the tree as it is, and its counts on made-up imports."""

import importlib
import re
from pathlib import Path

import pytest


@pytest.fixture
def shape(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("shape")


def test_it_counts_the_tree(shape, capsys):
    assert shape.main([]) == 0
    said = capsys.readouterr().out
    for pattern in (
        r"rooms \d+, floors \d+",
        r"arrows \d+, up \d+, circles \d+",
        r"\d+ files above 400 lines",
        r"parameters: \d+ tilewise\.",
    ):
        assert re.search(pattern, said), pattern
    for call in ("forward", "backward", "decode"):
        functions, stays, files, returns = map(int, re.search(rf"{call}, first: (\d+)\D+(\d+)\D+(\d+)\D+(\d+)", said).groups())
        assert functions >= stays == files + returns > 0


def test_rooms(shape):
    named = {"tilewise": "tilewise", "tilewise.api": "api", "tilewise.masks.bands": "masks", "tilewise.backends.philox": "backends"}
    named |= {"tilewise.backends.hopper.forward.call": "backends.hopper", "tilewise.backends": "backends"}
    assert {name: shape.room(name) for name in named} == named


def test_floors_and_circles(shape):
    down = {("a", "b"), ("b", "c"), ("a", "c")}
    assert shape.floors(down, {*"abcd"}) == 3 and shape.circles(down) == []
    assert shape.circles({*down, ("c", "b")}) == [{"b", "c"}] and shape.floors({*down, ("c", "b")}, {*"abc"}) == 3
