"""Renews the table of compiled Triton kernels that the compile gate reads: tests/backends/triton/kernels.json.

Rows of which the sources are as they were stay, those of kernels that no longer exist go, and the rest is compiled, one to eight seconds a kernel
each. The table is written every few kernels: a run that was stopped resumes. Needs no GPU.
"""

import argparse
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/shared"))
sys.path.insert(0, str(Path(__file__).parent))

import pool
import triton_facts
import triton_inventory

EVERY = 8  # kernels between two writes


@cache
def inventory() -> dict[str, triton_inventory.Case]:
    return {case.name: case for case in triton_inventory.cases()}


def compiled(name: str) -> dict:
    return triton_facts.row(inventory()[name])


def save(table: dict) -> None:
    aside = triton_facts.TABLE.with_suffix(".new")
    aside.write_text(triton_facts.written(table))
    aside.replace(triton_facts.TABLE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=0, help="kernels at once (default: one a core)")
    workers = parser.parse_args().workers
    before = triton_facts.rows()
    table = {name: before[name] for name, case in inventory().items() if triton_facts.known(case, before)}
    missing = [name for name in inventory() if name not in table]
    print(f"{len(table)} rows stay, {len(before) - len(table)} go, {len(missing)} kernels to compile", flush=True)
    try:
        for i, (name, row) in enumerate(pool.each(compiled, missing, workers), 1):
            table[name] = row
            if i % EVERY == 0:
                save(table)
    finally:
        save(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
