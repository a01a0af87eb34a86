"""Compiles the kernel on this machine: `python -m tilewise.backends.cpu.build`. A wheel brings it compiled; this is for development.

The result goes to the user's cache directory, named after a digest of the sources, so that changed sources never meet an old library. It is sealed
(machine/sealed.py), so that what is cut short or damaged is compiled again. It is no place for it where others may write (machine/trust.py).
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tilewise.backends.cpu.abi import NAME
from tilewise.machine import sealed, trust
from tilewise.machine.folders import cache_folder

SOURCES = Path(__file__).parent / "csrc"
DEFINITIONS = Path(__file__).parent / "CMakeLists.txt"


class BuildError(RuntimeError):
    """The compiler, or CMake, is missing or failed, or the library cannot be kept; the message says how."""


def target() -> Path | str:
    """Where `build` puts the library for the sources as they are now; a sentence where this user has no folder for it."""
    root = cache_folder()
    if isinstance(root, str):
        return f"{root}; XDG_CACHE_HOME names a folder for it"
    digest = hashlib.sha256()
    for path in [DEFINITIONS, *sorted(SOURCES.glob("*"))]:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return root / digest.hexdigest()[:16] / NAME


def build(*options: str, to: Path | None = None) -> Path:
    """Compile unless it is there already, whole; the library's path. `options` are passed to CMake, and `to` is where a special build goes.

    Raises BuildError with the compiler's last words, or with why the library cannot be kept.
    """
    result = to or target()
    if isinstance(result, str):
        raise BuildError(f"the kernel is not kept: {result}")
    try:
        if to is None:
            trust.make_folder(result.parent)
            if refused := trust.why_not(result):
                raise BuildError(f"the kernel is not kept where others may write: {refused}; XDG_CACHE_HOME names another folder")
        if not sealed.whole(result):
            result.parent.mkdir(parents=True, exist_ok=True)  # where a special build goes
            sealed.write(result, _compiled(*options), mode=0o755)
    except OSError as error:
        where = error.filename2 or error.filename or result
        raise BuildError(
            f"the kernel cannot be kept at {result}: {where}: {error.strerror}; XDG_CACHE_HOME names another folder for it, and TMPDIR for "
            "files of the moment"
        ) from None
    return result


def _compiled(*options: str) -> bytes:
    """The library."""
    if shutil.which("cmake") is None:
        raise BuildError("cmake was not found: install it (apt-get install cmake g++, or pip install cmake)")
    with tempfile.TemporaryDirectory(prefix="tilewise-build-") as folder:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _run("cmake", "-S", str(DEFINITIONS.parent), "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *generator, *options)
        _run("cmake", "--build", folder, "--parallel", "2")
        return next(Path(folder).glob("*.so")).read_bytes()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
