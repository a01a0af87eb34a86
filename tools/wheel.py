"""Builds a wheel that runs on any Linux with glibc 2.17 or later (manylinux2014): `python tools/wheel.py [folder]`.

The kernel is compiled by the system's compiler and linked by zig (from PyPI) against glibc 2.17's symbols, so that no container is needed.
The wheel is of any Python 3 and any torch: the kernel links to neither.
"""

import importlib.util
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = (2, 17)
NEEDED = ("ziglang", "wheel")


def main(folder: str = "dist") -> int:
    """Build into `folder`; the exit code. Prints the wheel's path."""
    run("-m", "pip", "install", "-q", *NEEDED)
    machine = platform.machine()
    importlib.invalidate_caches()  # zig has only just arrived
    zig = Path(next(iter(importlib.util.find_spec("ziglang").submodule_search_locations))) / "zig"
    linker = f"{zig} cc -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    with tempfile.TemporaryDirectory() as built:
        run("-m", "pip", "wheel", "-q", "--no-deps", "-w", built, f"--config-settings=cmake.define.TILEWISE_LINKER={linker}", str(ROOT))
        (wheel,) = Path(built).glob("*.whl")
        newest = newest_glibc(wheel)
        if newest is None:
            sys.exit(f"{wheel.name} holds no kernel: it did not compile, or link; `pip wheel -v` shows why")
        if newest > GLIBC:
            sys.exit(f"the kernel needs glibc {newest[0]}.{newest[1]}, more than {GLIBC[0]}.{GLIBC[1]}")
        run("-m", "wheel", "tags", "--remove", "--platform-tag", f"manylinux2014_{machine}", str(wheel))
        (tagged,) = Path(built).glob("*.whl")
        target = Path(folder) / tagged.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(tagged.read_bytes())
    print(target)
    return 0


def newest_glibc(wheel: Path) -> tuple[int, int] | None:
    """The newest glibc whose symbols a shared library in the wheel wants; None where there is no library."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    versions = [(int(a), int(b)) for library in libraries for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    return max(versions, default=None)


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
