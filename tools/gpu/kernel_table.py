"""Renews the table of compiled kernels that the compile gate reads: tests/backends/hopper/kernels.json.

    python tools/gpu/kernel_table.py           # what `make test` and `make test-slow` compile
    python tools/gpu/kernel_table.py fast      # what `make test` compiles; other rows stay if they are still right

Rows whose sources are as they were stay, those of kernels that are no more go, and the rest is compiled, on all cores, three to ten seconds a kernel
each. What is done is written every few kernels: a run that was stopped goes on where it was. Needs no GPU, but cuobjdump.
"""

import argparse
import os
import sys
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
os.environ["TILEWISE_CACHE"] = "0"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/shared"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_facts
import kernel_inventory
import pool

EVERY = 8  # kernels between two writes


@cache
def inventory(which: str) -> dict[str, kernel_inventory.Kernel]:
    """Each once, by its key; the first of a key is the one that the table holds."""
    found = {}
    for kernel in (*kernel_inventory.fast(), *(kernel_inventory.slow() if which == "all" else ())):
        found.setdefault(kernel_facts.key(kernel), kernel)
    return found


OUTPUT = []


def begin() -> None:
    OUTPUT.append(kernel_facts.main_output())


def compiled(which: str, key: str) -> dict:
    kernel = inventory(which)[key]
    return kernel_facts.row(kernel, kernel_facts.measured(kernel, OUTPUT[0]))


def save(table: dict) -> None:
    aside = kernel_facts.TABLE.with_suffix(".new")
    aside.write_text(kernel_facts.written(table))
    aside.replace(kernel_facts.TABLE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("which", choices=("all", "fast"), nargs="?", default="all")
    parser.add_argument("--workers", type=int, default=0, help="kernels at once (default: one a core)")
    which, workers = (given := parser.parse_args()).which, given.workers
    before, everything = kernel_facts.rows(), inventory("all")
    table = {key: before[key] for key, kernel in everything.items() if kernel_facts.known(kernel, before)}
    missing = [key for key in inventory(which) if key not in table]
    print(f"{len(table)} rows stay, {len(before) - len(table)} go, {len(missing)} kernels to compile", flush=True)
    try:
        for i, (key, row) in enumerate(pool.each(partial(compiled, which), missing, workers, begin), 1):
            table[key] = row
            if i % EVERY == 0:
                save(table)
    finally:
        save(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
