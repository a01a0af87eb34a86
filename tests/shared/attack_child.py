"""Attacks run in a process of their own, so that a crash is a failure with the case's name: `run` starts it, `serve` is what it does.

The child prints a line before each case; the last line is that of the case in which it died.
"""

import faulthandler
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
MOST = 5  # failures of a family


def run(module: str, families: str, first: int, last: int, **environment: str) -> None:
    """AssertionError with what is wrong with the cases first:last of a module's families, "one,two", if anything is."""
    path = os.pathsep.join(map(str, (TESTS / "shared", TESTS.parent / "src")))
    given = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2", **environment}
    command = [sys.executable, TESTS / f"shared/{module}.py", families, str(first), str(last)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        began = [line for line in done.stdout.splitlines() if line.startswith("case ")]
        what = f"died by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise AssertionError(f"{module} {what} in {began[-1] if began else 'no case'}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")


def serve(families: dict[str, Callable[[int], None]]) -> None:
    """Every case of the families that the command line names, until so many of one have failed."""
    faulthandler.enable()
    names, first, last = sys.argv[1].split(","), *map(int, sys.argv[2:])
    failed = dict.fromkeys(names, 0)
    for name in names:
        for seed in range(first, last):
            print(f"case {name} {seed}", flush=True)
            try:
                families[name](seed)
            except Exception:
                failed[name] += 1
                print(f"FAILED: {name} {seed}\n{traceback.format_exc(limit=-6)}", flush=True)
            if failed[name] == MOST:
                break
    sys.exit(any(failed.values()))
