"""Renews the table of compiled Triton kernels that the compile gate reads: tests/backends/triton/kernels.json.

Rows of which the sources are as they were stay, those of kernels that no longer exist go, and the rest is compiled, one to eight seconds a kernel
each. The table is written every few kernels: a run that was stopped resumes. Then the table of cards in docs/guide/your-gpu.md follows. Needs no GPU.

    python tools/triton_table.py                                                         # renew the table
    python tools/triton_table.py --try sm_89 dkdv bfloat16 128 32,64,8,2                 # what tile_m, tile_n, warps and stages take
    python tools/triton_table.py --try sm_89 dkdv bfloat16 128 32,64,8,2 tiles dropout   # with a mask and a feature of triton_inventory.py
"""

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/shared"))
sys.path.insert(0, str(Path(__file__).parent))

import pool
import torch
import triton_facts
import triton_inventory

from tilewise.backends.triton.config import Config
from tilewise.backends.triton.targets import Target

EVERY = 8  # kernels between two writes
PAGE = Path(__file__).parents[1] / "docs/guide/your-gpu.md"
BEGIN, END = "<!-- cards:begin -->\n", "<!-- cards:end -->"
CARDS = {
    "sm_80": "A100",
    "sm_86": "A40, RTX 3090",
    "sm_89": "L40S, RTX 4090",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX 5090, RTX PRO 6000",
    "gfx90a": "MI210, MI250",
    "gfx942": "MI300",
    "gfx950": "MI350",
    "gfx1100": "RX 7900",
    "gfx1201": "RX 9070",
}
RAN = {"sm_90": "tests and bench"}  # of the others nobody has sent anything in


class Rates(NamedTuple):
    """Of one card, from its maker's data sheet: dense bf16 with sums in fp32, dense int8, multiprocessors (or compute units), boost clock, fp32 lanes
    of one.
    """

    tflops: float
    tops: float
    units: int
    ghz: float
    lanes: int


RATES = {
    "sm_80": ("A100", Rates(312, 624, 108, 1.41, 64)),
    "sm_86": ("RTX 3090", Rates(71, 284, 82, 1.695, 128)),
    "sm_89": ("RTX 4090", Rates(165, 661, 128, 2.52, 128)),
    "sm_90": ("H100", Rates(989, 1979, 132, 1.83, 128)),
    "sm_100": ("B200", Rates(2250, 4500, 148, 1.85, 128)),
    "sm_120": ("RTX 5090", Rates(209.5, 838, 170, 2.41, 128)),
    "gfx90a": ("MI210", Rates(181, 181, 104, 1.7, 64)),
    "gfx942": ("MI300X", Rates(1307, 2615, 304, 2.1, 128)),
    "gfx950": ("MI355X", Rates(2517, 5033, 256, 2.4, 128)),
    "gfx1100": ("RX 7900 XTX", Rates(123, 123, 96, 2.5, 64)),
    "gfx1201": ("RX 9070 XT", Rates(195, 389, 64, 2.97, 64)),
}


class Room(NamedTuple):
    """What the blocks of a multiprocessor share (of AMD's: of a compute unit, whose quarters or halves have the registers)."""

    parts: int  # that have registers of their own
    registers: int  # of a part, for one lane
    step: int  # registers are given out in so many
    most: int  # warps of a part
    shared: int  # KiB
    kept: int = 0  # KiB of them for each block, beside its own


ROOMS = {  # by family
    "sm80": Room(4, 512, 8, 16, 164, 1),
    "sm86": Room(4, 512, 8, 12, 100, 1),
    "sm90": Room(4, 512, 8, 16, 228, 1),
    "sm100": Room(4, 512, 8, 16, 228, 1),
    "sm120": Room(4, 512, 8, 12, 100, 1),
    "cdna": Room(4, 512, 8, 8, 64),
    "gfx950": Room(4, 512, 8, 8, 160),
    "rdna": Room(2, 1536, 24, 16, 64),
}
EXPONENTIALS = 16  # a clock of each unit
OTHERS = 6  # fp32 instructions for each score of the forward kernel: scaling, maximum, sum, rounding
SCALED = 2  # more for sums of int8: from integer to fp32, and the scale
HEAD_DIM = 128


def predicted(rates: Rates, integers: bool = False) -> float:
    """TFLOP/s of a long forward pass of head_dim 128 in which products, exponentials and the rest follow each other and nothing waits for memory.
    integers: with precision="int8_qk", without the quantiser.
    """
    whole = products = 4 * HEAD_DIM / (1e3 * rates.tflops / rates.units / rates.ghz)  # clocks for each score
    others = OTHERS
    if integers:
        products, others = (1 + rates.tflops / rates.tops) / 2 * whole, OTHERS + SCALED
    return rates.tflops * whole / (products + 1 / EXPONENTIALS + others / rates.lanes)


def blocks(target: Target, warps: int, registers: int, shared: int) -> int:
    """How many blocks of a kernel a multiprocessor holds at once, by registers of a thread and bytes of shared memory of a block."""
    room = ROOMS[target.family]
    of_part = min(room.most, room.registers // (-(-registers // room.step) * room.step))
    return min(room.parts * of_part // warps, (room.shared << 10) // (shared + (room.kept << 10)))


@cache
def inventory() -> dict[str, triton_inventory.Case]:
    return {case.name: case for case in triton_inventory.cases()}


def compiled(name: str) -> dict:
    return triton_facts.row(inventory()[name])


def tried(arch: str, kernel: str, dtype: str, head_dim: str, tiles: str, *rest: str) -> triton_facts.Facts:
    """Facts of a kernel with a configuration that is not the table's."""
    config = Config(*map(int, tiles.split(",")))
    case = triton_inventory.Case(arch, kernel, getattr(torch, dtype), int(head_dim), *rest, chosen=config)
    return triton_facts.measured(case.built(), case.target)


def save(table: dict) -> None:
    aside = triton_facts.TABLE.with_suffix(".new")
    aside.write_text(triton_facts.written(table))
    aside.replace(triton_facts.TABLE)


def cards(table: dict) -> str:
    """A line for each card: what its forward kernel takes, and whether anything was run there."""
    titles = (
        "card",
        "architecture",
        "family",
        "run",
        "shared memory of a block",
        "registers",
        "stack",
        "blocks of a multiprocessor, warps",
        "predicted TFLOP/s",
        "with `int8_qk`",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---|---:|---:|---:|---:|---:|---:|"]
    for arch, card in CARDS.items():
        row, target = table[triton_inventory.Case(arch, "forward").name], Target(arch)
        facts, warps = row["facts"], Config(*row["config"]).warps
        held = blocks(target, warps, facts["registers"], facts["shared"])
        cells = card, arch, target.family, RAN.get(arch, "compiles, not run"), f"{target.shared_bytes >> 10} KiB"
        name, rates = RATES.get(arch, ("", None))
        told = f"{predicted(rates):.0f} ({name})" if rates else ""
        eight = f"{predicted(rates, integers=True):.0f}" if rates else ""
        lines.append(f"| {' | '.join(cells)} | {facts['registers']} | {facts['stack']} | {held}, {held * warps} | {told} | {eight} |")
    return "\n".join(lines)


def page(text: str, table: dict) -> str:
    """The page with the table of cards between its marks."""
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    return f"{head}{BEGIN}\n{cards(table)}\n\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=0, help="kernels at once (default: one a core)")
    parser.add_argument("--try", dest="words", nargs="+", metavar="WORD", help="compile one kernel and print its facts, as above")
    given = parser.parse_args()
    if given.words:
        print(tried(*given.words))
        return 0
    before = triton_facts.rows()
    table = {name: before[name] for name, case in inventory().items() if triton_facts.known(case, before)}
    missing = [name for name in inventory() if name not in table]
    print(f"{len(table)} rows stay, {len(before) - len(table)} go, {len(missing)} kernels to compile", flush=True)
    try:
        for i, (name, row) in enumerate(pool.each(compiled, missing, given.workers), 1):
            table[name] = row
            if i % EVERY == 0:
                save(table)
    finally:
        save(table)
    for name in sorted(table):
        if (stack := table[name]["facts"]["stack"]) and triton_inventory.AGAIN not in name:
            print(f'    "{name}": {stack},')  # for the lists of spills in tests/backends/triton/test_compile.py
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
