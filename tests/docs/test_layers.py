"""Imports run one way: the layers of DESIGN.md, read from it, and no circle of modules."""

import ast
import graphlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def modules() -> dict[str, Path]:
    found = {}
    for path in (SOURCE / "tilewise").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str) -> set[str]:
    """Modules of ours that a module imports anywhere, in functions too, but for the names of types."""
    found, tree = set(), ast.parse(MODULES[name].read_text())
    for branch in [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]:
        branch.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tilewise":
            found |= {full if (full := f"{node.module}.{each.name}") in MODULES else node.module for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in MODULES}
    return found


@cache
def imports() -> dict[str, set[str]]:
    return {name: imported(name) for name in MODULES}


def layers() -> list[list[str]]:
    """Lowest first; names of one line do not import each other."""
    block = re.search(r"```layers\n(.*?)```", (ROOT / "DESIGN.md").read_text(), re.DOTALL)[1]
    return [line.partition("#")[0].split() for line in block.splitlines()]


LAYERS = layers()


def room(module: str) -> str:
    """The longest name in the list that the module is, or lies in; the package itself is `tilewise`."""
    inside = module.partition(".")[2]
    rooms = [name for layer in LAYERS for name in layer if inside == name or inside.startswith(f"{name}.")]
    return max(rooms, key=len, default=module)


LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def test_no_import_runs_up():
    wrong = {}
    for module in MODULES.keys() - {"tilewise.ladder.__main__"}:  # which is a door of the command line
        here = room(module)
        assert here in LEVEL, f"{module}: DESIGN.md's layers do not name it"
        if found := [other for other in imports()[module] if room(other) != here and LEVEL[room(other)] >= LEVEL[here]]:
            wrong[module] = f"is in {here} and must not import {found}"
    assert not wrong


def test_there_are_no_circles():
    """Also by imports within functions. A module's imports of its own package's `__init__` count, those of packages above it do not."""
    graphlib.TopologicalSorter({name: found - {name} for name, found in imports().items()}).prepare()


def test_a_wrong_import_is_seen(monkeypatch):
    monkeypatch.setitem(imports(), "tilewise.masks.tiles", {"tilewise.backends.cpu"})
    with pytest.raises(AssertionError, match="must not import"):
        test_no_import_runs_up()
    monkeypatch.setitem(imports(), "tilewise.masks.tiles", {"tilewise.masks.flex"})
    with pytest.raises(graphlib.CycleError):
        test_there_are_no_circles()
