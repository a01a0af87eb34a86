"""What each rung of the ladder adds: the share of its lines that the rung before it does not have.

Lines of code count, without blank lines, comments on lines of their own, and docstrings. A rung should be an idea away from the one before,
at most a quarter new; those that begin a new floor say so below, with the reason. Exit code 1 where a rung is newer than that, or where a
floor is declared that is none.
"""

import ast
import difflib
import sys
from itertools import pairwise
from pathlib import Path

LADDER = Path(__file__).parents[1] / "src" / "tilewise" / "ladder"
MOST_NEW = 0.25
NEW_FLOORS = {
    "k2": "one fused kernel in place of three: tiles, shared memory and online softmax all need each other",
    "k3": "a copy by threads becomes a descriptor, a ring of stages and mbarriers, none of which is of use alone",
    "d1": "rows are the heads of a group and not queries, keys are cut over blocks, and pieces need a second kernel",
    "b1": "another pass: five products, the loops swapped, dK and dV in place of O, and dQ as a sum over thread blocks",
    "k4_2": "P cannot go to the tensor cores without the softmax on their accumulator, nor O without both",
}


def code_lines(path: Path) -> list[str]:
    """The lines of code of a file, without blanks at their ends."""
    text = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    return [line.rstrip() for number, line in lines if number not in prose and line.strip() and not line.strip().startswith("#")]


def new_lines(before: list[str], after: list[str]) -> int:
    """How many lines of `after` are not in `before`, in order."""
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    return len(after) - sum(block.size for block in matcher.get_matching_blocks())


BRANCHES = {"d": "k5_1", "b": "k4_2"}  # of decoding and of gradients, and the rungs that they leave the ladder from


def rungs() -> list[Path]:
    """The files of the ladder, from the first to the last, and then those of its branches."""
    return [path for letter in ("k", *BRANCHES) for path in sorted(LADDER.glob(f"{letter}[0-9]*.py"))]


def name_of(path: Path) -> str:
    """`k4_1` of `k4_1_wgmma_qk.py`."""
    words = path.stem.split("_")
    return "_".join(words[:2]) if len(words) > 1 and words[1].isdigit() else words[0]


def steps() -> list[tuple[str, str, int, int]]:
    """(rung before, rung, its new lines, its lines) for each step up."""
    codes = [(name_of(path), code_lines(path)) for path in rungs()]
    stem = [each for each in codes if each[0][0] == "k"]
    pairs = [*pairwise(stem)]
    for letter, start in BRANCHES.items():
        pairs += pairwise([each for each in codes if each[0] == start or each[0][0] == letter])
    return [(low, high, new_lines(before, after), len(after)) for (low, before), (high, after) in pairs]


def faults() -> list[str]:
    """Sentences on the steps that are too high, and on floors that are none."""
    wrong = []
    for low, high, new, lines in steps():
        steep = new > MOST_NEW * lines
        if steep and high not in NEW_FLOORS:
            wrong.append(f"{high} is {new / lines:.0%} new over {low}: at most {MOST_NEW:.0%}, unless NEW_FLOORS says why")
        if not steep and high in NEW_FLOORS:
            wrong.append(f"{high} is only {new / lines:.0%} new over {low}: it is no new floor, take it out of NEW_FLOORS")
    return wrong


def main() -> int:
    for low, high, new, lines in steps():
        note = f"  new floor: {NEW_FLOORS[high]}" if high in NEW_FLOORS else ""
        print(f"{low:>4} -> {high:4} {new:4} of {lines:3} lines new, {new / lines:4.0%}{note}")
    for fault in faults():
        print(fault, file=sys.stderr)
    return 1 if faults() else 0


if __name__ == "__main__":
    sys.exit(main())
