"""Prints what the tree is like to walk, as reviews of its layout count it: `python tools/shape.py [--no-calls]`.

rooms     packages and modules directly below tilewise; of the backends hopper, cpu and tiled each, the rest is one room
floors    rooms on the longest way down the imports
arrows    pairs of rooms of which one imports the other, anywhere in its files, but for the package's own list of names; `up` are those against the
          layers of DESIGN.md; circles are groups of rooms that reach each other
stays     of a small call on the CPU, first and repeated: it stays in a file until it calls a function of another; a return is a stay in a file where
          it was before
files     of src with more than 400 lines, and functions with the longest lists of parameters: of all, and of those that no user calls
"""

import argparse
import ast
import re
import sys
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "tilewise"
BACKENDS = ("hopper", "cpu", "tiled")
PUBLIC = ("tilewise.compat", "tilewise.api", "tilewise.decoding", "tilewise.varlen")  # whose lists are a contract
MOST_LINES = 400
Edges = set[tuple[str, str]]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    _, *parts = module.split(".")
    inside = parts[:2] if parts[:1] == ["backends"] and parts[1:2] and parts[1] in BACKENDS else parts[:1]
    return ".".join(inside) or "tilewise"


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports, in functions too, but for the names of types."""
    found, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
    for branch in [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]:
        branch.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tilewise":
            found |= {full if (full := f"{node.module}.{each.name}") in known else node.module for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in known}
    return found


def arrows(known: dict[str, Path]) -> Edges:
    """(room, a room that it imports). Nobody imports a `__main__`, so it is no part of its room."""
    others = {name: path for name, path in known.items() if not name.endswith(".__main__")}
    pairs = {(room(name), room(other)) for name, path in others.items() for other in imported(path, known)}
    return {(a, b) for a, b in pairs if a != b}


def below(edges: Edges, start: str) -> set[str]:
    found, ahead = set(), [start]
    while ahead:
        here = ahead.pop()
        ahead += [b for a, b in edges if a == here and b not in found]
        found |= {b for a, b in edges if a == here}
    return found


def circles(edges: Edges) -> list[set[str]]:
    reach = {name: below(edges, name) for pair in edges for name in pair}
    groups = {frozenset(other for other in there if name in reach[other]) for name, there in reach.items() if name in there}
    return sorted(map(set, groups), key=sorted)


def floors(edges: Edges, names: set[str]) -> int:
    """Rooms on the longest way down; one that is met again is not counted twice."""
    depth: dict[str, int] = {}

    def of(name: str, way: tuple[str, ...]) -> int:
        if name in way:
            return 0
        if name not in depth:
            depth[name] = 1 + max((of(b, (*way, name)) for a, b in edges if a == name), default=0)
        return depth[name]

    return max(of(name, ()) for name in sorted(names))


def levels() -> dict[str, int]:
    """The floor of each room in DESIGN.md's list of layers, lowest first."""
    block = re.search(r"```layers\n(.*?)```", (ROOT / "DESIGN.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    found: dict[str, int] = {}
    for level, line in enumerate(block.splitlines()):
        for name in line.partition("#")[0].split():
            found.setdefault(room(f"tilewise.{name}" if name != "tilewise" else name), level)
    return found


def parameters(known: dict[str, Path]) -> list[tuple[int, str, str]]:
    """(how many parameters, module, function), longest first; self and cls are none."""
    found = []
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
                found.append((sum(each.arg not in ("self", "cls") for each in given), name, node.name))
    return sorted(found, key=lambda each: (-each[0], *each[1:]))


def stays(call: Callable[[], object]) -> dict[str, int]:
    """Functions of ours that a call enters, its stays in files, the files, and its returns to a file."""
    entered: list[str] = []

    def note(frame, event: str, _) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/") and not frame.f_code.co_name.startswith("<"):
            entered.append(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    runs, files = len(list(groupby(entered))), len(set(entered))
    return {"functions": len(entered), "stays": runs, "files": files, "returns": runs - files}


def calls() -> dict[str, dict[str, int]]:
    """Of a forward, a backward and a decode call, the first of its kind and a repeated one."""
    import torch

    import tilewise as tw

    found = {}
    q, k, v = (torch.randn(1, 24, 2, 16, requires_grad=True) for _ in range(3))
    cache, lengths = torch.randn(2, 32, 2, 16), torch.tensor([9, 20], dtype=torch.int32)
    for turn in ("first", "repeated"):
        kept = []
        found[f"forward, {turn}"] = stays(lambda kept=kept: kept.append(tw.attention(q, k, v, causal=True)))
        d_o = torch.randn_like(kept[0])
        found[f"backward, {turn}"] = stays(lambda kept=kept, d_o=d_o: torch.autograd.grad(kept[0], (q, k, v), d_o))
        found[f"decode, {turn}"] = stays(lambda: tw.decode(q[:, :2].detach().reshape(2, 1, 2, 16), cache, cache, cache_seqlens=lengths))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-calls", action="store_true", help="without the stays of calls, which import torch")
    given = parser.parse_args(argv)
    known, layer = modules(), levels()
    every = arrows(known)
    kept = {(a, b) for a, b in every if a != "tilewise"}
    up = sorted(f"{a} -> {b}" for a, b in kept if a in layer and b in layer and layer[a] < layer[b])
    print(f"rooms {len({*map(room, known)})}, floors {floors(every, {*map(room, known)})}")
    print(
        f"arrows {len(kept)}, up {len(up)}, circles {len(circles(every))}",
        *up,
        *(" <-> ".join(sorted(each)) for each in circles(every)),
        sep="; ",
    )
    for name, counts in {} if given.no_calls else calls().items():
        print(
            f"{name}: {counts['functions']} functions, {counts['stays']} stays in {counts['files']} files, {counts['returns']} of them returns"
        )
    lengths = sorted(((len(path.read_text(encoding="utf-8").splitlines()), name) for name, path in known.items()), reverse=True)
    long = [f"{name} {lines}" for lines, name in lengths if lines > MOST_LINES]
    print(f"{len(long)} files above {MOST_LINES} lines", *long, sep="\n  ")
    taken = parameters(known)
    inside = next(each for each in taken if not each[1].startswith(PUBLIC))
    print("longest lists of parameters:", *(f"{n} {module}.{name}" for n, module, name in (taken[0], inside)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
