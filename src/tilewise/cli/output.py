"""Where commands write."""

import errno
import os
from pathlib import Path

from rich.console import Console

WIDE = 160  # columns of a table that goes to a file or a pipe, which have no width of their own


class Output(Console):
    """Standard output. Where nobody reads it any more that is BrokenPipeError, as for `print`, and not rich's own exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console_for_tables() -> Output:
    """The terminal as it is; wide where the output is none."""
    console = Output()
    return console if console.is_terminal or "COLUMNS" in os.environ else Output(width=WIDE)


def require_writable(path: Path) -> None:
    """Make the folder of `path`, and raise OSError where no file can be written at `path`: before the work that is to fill it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    path.open("ab").close()
    if new:
        path.unlink()
