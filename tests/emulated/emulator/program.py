"""A kernel's instructions as Python: each stretch without jumps is a function that computes all 32 lanes of a warp at once.

A register is an array of 32 numbers that is replaced and never written to. What touches memory or other threads is a method of the warp (warp.py).
Every function has two forms: m is None where all lanes take part, and an array of 32 truth values where only some do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from emulator import arithmetic
from emulator.ptx import Instruction, Kernel
from emulator.translation import NOTHING, lines_of

JUMPS, ENDS = ("bra",), ("ret", "exit")
WAITS = ("bar.sync", "barrier.cluster.wait")  # for other warps
POLLS = ("mbarrier.try_wait", "ld.acquire", "nanosleep")
TOGETHER = ("shfl.", "vote.", "redux.", "elect.", "bar.", "barrier.", "stmatrix.", "ldmatrix.", "movmatrix.", "mma.", "wgmma.")


@dataclass(eq=False)
class Stretch:
    """Instructions that are executed one after another, and what comes then."""

    number: int
    instructions: list[Instruction]
    program: "Program"
    kind: str = ""  # "together": all lanes that are left have to be there; "wait": other warps, too; "poll": others may go first
    guard: int | None = None  # the register of the predicate that a jump depends on
    negated: bool = False
    target: int | None = None  # the stretch that a jump leads to
    ends: bool = False  # the threads

    @cached_property
    def whole(self) -> Callable:
        return self.program.function(self, masked=False)

    @cached_property
    def partly(self) -> Callable:
        return self.program.function(self, masked=True)


class Program:
    """A kernel's stretches, in their order."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.numbers = {name: i for i, name in enumerate(kernel.registers)}
        self.constants: list[np.ndarray] = []
        self._known: dict[tuple, int] = {}
        self.stretches = list(self._stretches())

    def _stretches(self) -> Iterator[Stretch]:
        code, labels = self.kernel.instructions, self.kernel.labels
        starts = self._starts(code, {0, *labels.values()})
        number_of = {start: number for number, start in enumerate(starts)}
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(code)], strict=True)):
            stretch, last = Stretch(number, code[start:end], self, _kind(code[start])), code[end - 1]
            if last.op.startswith(JUMPS):
                stretch.target = number_of[labels[last.operands[0]]]
                if last.guard:
                    stretch.guard, stretch.negated = self.numbers[last.guard.lstrip("!")], last.guard.startswith("!")
            stretch.ends = last.op.startswith(ENDS)
            if last.op.startswith(JUMPS + ENDS):
                stretch.instructions = stretch.instructions[:-1]
            yield stretch

    @staticmethod
    def _starts(code: list[Instruction], starts: set[int]) -> list[int]:
        """Where stretches begin, besides those given: behind jumps, around what waits, and at the first that all lanes do together."""
        gathered = False
        for i, each in enumerate(code):
            kind = _kind(each)
            gathered = gathered and i not in starts
            if kind in ("wait", "poll") or (kind == "together" and not gathered):
                starts.add(i)
            if kind in ("wait", "poll") or each.op.startswith(JUMPS + ENDS):
                starts.add(i + 1)
            gathered = gathered or kind == "together"
        return sorted(starts - {len(code)})

    def function(self, stretch: Stretch, masked: bool) -> Callable:
        lines = [line for each in stretch.instructions for line in lines_of(self, each, masked)]
        space = {"K": self.constants, **vars(arithmetic)}
        exec(compile("def f(R, m, w):\n " + "\n ".join(lines or ["pass"]), f"<{self.kernel.name[:40]} {stretch.number}>", "exec"), space)
        return space["f"]

    def constant(self, bits: int, kind: str) -> str:
        """32 times the number with these bits, as an expression."""
        key = bits, kind
        if key not in self._known:
            self._known[key] = len(self.constants)
            size = np.dtype(kind).itemsize
            self.constants.append(np.full(32, bits & (1 << 8 * size) - 1, np.uint64).astype(f"u{size}").view(kind))
        return f"K[{self._known[key]}]"


def _kind(instruction: Instruction) -> str:
    for kind, names in (("wait", WAITS), ("poll", POLLS), ("together", TOGETHER)):
        if instruction.op.startswith(names) and not instruction.op.startswith(NOTHING):
            return kind
    return ""
