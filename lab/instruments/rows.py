"""Rows of an instrument: printed and added to a file as soon as they are there, and kernels compiled ahead of what is timed."""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tilewise.sm90.jit import Kernel

START = time.monotonic()


class Rows:
    """A file of JSON lines, each with the seconds since the process began."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, **row) -> None:
        line = json.dumps(row | {"at_s": round(time.monotonic() - START, 1)})
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def compile_ahead(kernels: Iterable[Kernel]) -> None:
    """Each once, on all cores; exits with the first that cannot be compiled."""
    from tilewise.backends.hopper import warmup

    for outcome in warmup.warm(dict.fromkeys(kernels)):
        if outcome.state == "failed":
            sys.exit(f"{' '.join(warmup.describe(outcome.kernel))}: {outcome.reason}")
