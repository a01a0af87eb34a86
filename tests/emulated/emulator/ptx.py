"""PTX, read: the kernels of a module as lists of instructions (PTX ISA 8.8, chapters 4 and 9)."""

import re
from itertools import count
from typing import NamedTuple

CONTAINERS = {"pred": "?", "b16": "u2", "b32": "u4", "b64": "u8", "f32": "u4", "s32": "u4", "u32": "u4"}
BLOCK = re.compile(r"^[ \t]*\{(.*?)\}[ \t]*$", re.MULTILINE | re.DOTALL)  # inline assembly's, with names of its own; they do not nest
DECLARED = re.compile(r"\.reg\s+\.\w+\s+([^;]*);|(?<![^;\s])([$\w]+):(?!:)")


class Instruction(NamedTuple):
    op: str  # with its modifiers
    operands: tuple[str, ...]
    guard: str = ""  # "%p1" or "!%p1"

    def __str__(self) -> str:
        return f"{self.op} {', '.join(self.operands)}"


class Kernel(NamedTuple):
    name: str
    parameters: dict[str, int]  # bytes of each
    registers: dict[str, str]  # numpy's kind of each
    instructions: list[Instruction]
    labels: dict[str, int]  # the number of the instruction behind each


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a module by their names."""
    text = re.sub(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", "", text.partition("\n\t.section")[0], flags=re.MULTILINE)  # of debuggers
    parts = re.sub(r"\.ptr(?: \.\w+)?(?: \.align \d+)?", "", text).split(".entry")[1:]
    found = (re.match(r"\s*(\w+)\((.*?)\)\s*[^{]*\{(.*)\}", part, re.DOTALL) for part in parts)
    return {match[1]: _kernel(*match.groups()) for match in found}


def split(text: str) -> list[str]:
    """At commas that are in no braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[(?:[^{\]]|\{[^}]*\})*\]|[^,{\[])+", text) if part.strip()]


def _kernel(name: str, parameters: str, body: str) -> Kernel:
    sizes = {}
    for each in filter(str.strip, parameters.split(",")):
        kind, identifier, n = re.search(r"\.[a-z](\d+)\s+(\w+)(?:\[(\d+)\])?\s*$", each).groups()
        sizes[identifier] = int(kind) // 8 * int(n or 1)
    numbers = count()
    return Kernel(name, sizes, *_statements(BLOCK.sub(lambda match: _apart(match[1], next(numbers)), body)))


def _apart(block: str, number: int) -> str:
    """A block's text with a number behind the names that it declares."""
    names = [re.escape(name.strip()) for match in DECLARED.finditer(block) for name in (match[1] or match[2]).split(",")]
    return re.sub(rf"(?<![$%\w])(?:{'|'.join(names)})(?!\w)", lambda match: f"{match[0]}__{number}", block) if names else block


def _statements(body: str) -> tuple[dict[str, str], list[Instruction], dict[str, int]]:
    registers, instructions, labels = {}, [], {}
    for piece in re.findall(r"\s*([$\w]+:(?!:)|[^;]+;)", body):
        if piece.endswith(":"):
            if piece[:-1] in labels:
                raise ValueError(f"{piece} stands in two places")
            labels[piece[:-1]] = len(instructions)
        elif declared := re.match(r"\.reg\s+\.(\w+)\s+(.*);", piece, re.DOTALL):
            for name in declared[2].split(","):
                base, n = re.fullmatch(r"([%\w]+)(?:<(\d+)>)?", name.strip()).groups()
                names = [base] if n is None else [f"{base}{i}" for i in range(int(n))]
                registers |= dict.fromkeys(names, CONTAINERS[declared[1]])
        elif not piece.startswith("."):
            guard, op, rest = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?([\w.:]+)\s*(.*);", piece, re.DOTALL).groups()
            instructions.append(Instruction(op, tuple(split(rest)), guard or ""))
    return registers, instructions, labels
