"""The compiled code on docs/worklog/profiling.md: `python tools/worklog_sass.py` compiles the rungs and writes it; needs no GPU, but cuobjdump.

An excerpt of rung NAME stands between `<!-- sass:begin NAME -->` and `<!-- sass:end NAME -->`: the loop over tiles that need no mask, at head_dim 128
without a causal mask. Landmarks are shown as they are; of what lies between them, how many instructions of which kind. `counts` is the table of all.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/shared"))

import kernel_facts
from worklog_tables import table

from tilewise.ladder import RUNGS, VARIANTS
from tilewise.sm90 import jit

PAGE = Path(__file__).parents[1] / "docs" / "worklog" / "profiling.md"
SHOWN = ("k5", "k6")
LANDMARK = re.compile(r"SYNCS|BAR\.|WARPGROUP|HGMMA|BRA")
PRODUCTS, MOST_KINDS = 2, 3  # of a loop; of a summary
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
Code = list[tuple[int, str]]  # address, instruction


@cache
def code(name: str) -> tuple[tuple[int, str], ...]:
    """What ptxas makes of a rung at head_dim 128 without a mask."""
    rung = (RUNGS | VARIANTS)[name]
    with tempfile.TemporaryDirectory() as folder:
        config = rung.code.configure(128, False, **rung.choice)
        options = f"--keep-ptx --keep-cubin --dump-dir {folder}"
        built = jit.build(rung.code.launch, rung.arguments(), config, options)
        text = kernel_facts.disassembled(built.__cubin__, Path(folder))
    return tuple((int(address, 16), instruction) for address, instruction in INSTRUCTION.findall(text))


def loop(instructions: Code) -> Code:
    """The shortest stretch that ends with a conditional jump to its beginning and has both products. ValueError where none has.

    A plain jump backwards is the way back from a wait, which tries again out of the way.
    """
    found = []
    for at, instruction in instructions:
        if (jump := re.match(r"@!?P\d BRA 0x([0-9a-f]+)", instruction)) and int(jump[1], 16) <= at:
            within = [each for each in instructions if int(jump[1], 16) <= each[0] <= at]
            if sum("gsb0" in each and "GMMA" in each for _, each in within) == PRODUCTS:
                found.append(within)
    if not found:
        raise ValueError("no loop of this code has both products")
    return min(found, key=len)


def kind(instruction: str) -> str:
    """`MUFU.EX2` and `HGMMA` of an instruction with its predicate and modifiers."""
    name = re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0]
    return name if name.startswith("MUFU") else name.partition(".")[0]


def excerpt(name: str) -> str:
    """The loop's landmarks. Of a product's instructions the first and the last are shown, which is the one with `gsb0`."""
    lines, between, first = [], [], True
    for at, instruction in loop(code(name)):
        product, last = "GMMA" in instruction, "gsb0" in instruction
        if LANDMARK.search(instruction) and (not product or first or last):
            lines += [*_summary(between), f"{at:04x}  {instruction}"]
            between = []
        else:
            between.append(instruction)
        first = last or (first and not product)
    return "\n".join([*lines, *_summary(between)])


def _summary(between: list[str]) -> list[str]:
    if not between:
        return []
    kinds = Counter(map(kind, between)).most_common(MOST_KINDS)
    return [
        f"      ... {len(between)}: {', '.join(f'{count} {name}' for name, count in kinds)}{', ...' if len(kinds) == MOST_KINDS else ''}"
    ]


def counts_table() -> str:
    """A column a rung: what a warp issues for a tile of keys, and where its exponentials stand."""
    columns = []
    for name in SHOWN:
        instructions = loop(code(name))
        kinds = Counter(kind(each) for _, each in instructions)
        config = (RUNGS | VARIANTS)[name].code.configure(128, False)
        columns.append((
            f"{config.tile_m} x {config.tile_n}",
            len(instructions),
            *(kinds[each] for each in ("HGMMA", "MUFU.EX2", "FFMA", "FMUL", "FADD", "FMNMX", "F2FP", "SHFL")),
            f"{exponentials_under_output(instructions)} of {kinds['MUFU.EX2']}",
        ))  # fmt: skip
    names = (
        "tile", "instructions of the loop", "HGMMA: products of 64 x 128 x 16", "MUFU.EX2: exponentials",
        "FFMA: scale, less the maximum",
        "FMUL: rescaling", "FADD: sums", "FMNMX: maxima", "F2FP: two numbers to bf16", "SHFL: to other lanes of the row",
        "exponentials that stand while O's product may be running",
    )  # fmt: skip
    return table(("a warp and tile of keys", *SHOWN), list(zip(names, *columns, strict=True)))


def exponentials_under_output(instructions: Code) -> int:
    """Of those after a wait that leaves a product in flight, up to the wait for it."""
    count, in_flight = 0, False
    for _, instruction in instructions:
        if wait := re.search(r"DEPBAR\.LE gsb0, 0x(\d)", instruction):
            in_flight = wait[1] != "0"
        count += in_flight and kind(instruction) == "MUFU.EX2"
    return count


def written(text: str) -> str:
    """The page with its excerpts written anew."""

    def fill(found: re.Match) -> str:
        body = counts_table().strip("\n") if found[2] == "counts" else f"```text\n{excerpt(found[2])}\n```"
        return f"{found[1]}\n{body}\n\n{found[3]}"

    return re.sub(r"(<!-- sass:begin (\S+) -->\n).*?(<!-- sass:end \2 -->)", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
