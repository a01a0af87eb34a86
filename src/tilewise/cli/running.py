"""`tilewise run -- PROGRAM`: the program as it is, on tilewise, without an edit."""

import os
from argparse import Namespace
from pathlib import Path

from tilewise.cli.codes import UNUSABLE

STARTUP = Path(__file__).parent / "startup"


def run(options: Namespace) -> int:
    """Become the program, with startup/sitecustomize.py in front of its Python; returns only where there is no such program."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise ValueError("give a program after --, as in: tilewise run -- python train.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))}
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    try:
        os.execvpe(program[0], program, environment)
    except FileNotFoundError as error:
        error.filename = program[0]
        raise
    return UNUSABLE
