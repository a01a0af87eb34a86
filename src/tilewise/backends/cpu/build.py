"""Compiles the kernel on this machine: `python -m tilewise.backends.cpu.build`. A wheel brings it compiled; this is for development.

The result goes to the user's cache directory, named after a digest of the sources, so that changed sources never meet an old library. It is no
place for it where others may write (trust.py).
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from tilewise.backends.cpu.abi import NAME
from tilewise.machine import trust

SOURCES = Path(__file__).parent / "csrc"
DEFINITIONS = Path(__file__).parent / "CMakeLists.txt"


class BuildError(RuntimeError):
    """The compiler, or CMake, is missing or failed; the message says how."""


def target() -> Path:
    """Where `build` puts the library for the sources as they are now."""
    digest = hashlib.sha256()
    for path in [DEFINITIONS, *sorted(SOURCES.glob("*"))]:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "tilewise" / digest.hexdigest()[:16] / NAME


def build(*options: str, to: Path | None = None) -> Path:
    """Compile unless it is there already; the library's path. `options` are passed to CMake, and `to` is where a special build goes.

    Raises BuildError with the compiler's last words.
    """
    result = to or target()
    if to is None:
        trust.make_folder(result.parent)
        if refused := trust.why_not(result):
            raise BuildError(f"the kernel is not kept where others may write: {refused}; XDG_CACHE_HOME names another folder")
    if result.exists():
        return result
    if shutil.which("cmake") is None:
        raise BuildError("cmake was not found: install it (apt-get install cmake g++, or pip install cmake)")
    with tempfile.TemporaryDirectory(prefix="tilewise-build-") as folder:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _run("cmake", "-S", str(DEFINITIONS.parent), "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *generator, *options)
        _run("cmake", "--build", folder, "--parallel", "2")
        result.parent.mkdir(parents=True, exist_ok=True)  # where a special build goes
        finished = result.with_name(f"{result.name}.{os.getpid()}")  # moved into place whole, as others may be building too
        shutil.copy2(Path(folder) / result.name if to is None else next(Path(folder).glob("*.so")), finished)
        finished.chmod(finished.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # whatever the umask says
        finished.replace(result)
    return result


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
