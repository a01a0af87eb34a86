"""Builds wheels that run on any Linux with glibc 2.17 or later (manylinux2014): `python tools/wheel.py [folder] [--machine x86_64,aarch64]`.

For this machine's processor the kernel is compiled by the system's compiler and linked by zig (from PyPI) against glibc 2.17's symbols; for another
zig compiles it too. So no container is needed. A wheel is of any Python 3 and any torch: the kernel links to neither. Of each is checked that its
libraries are for that processor, and want no newer symbols of glibc; auditwheel, where it is installed, has to agree.
"""

import argparse
import importlib
import importlib.util
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = (2, 17)
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine
NEEDED = ("ziglang", "wheel")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("dist"))
    parser.add_argument("--machine", default=platform.machine(), help=f"of {', '.join(ELF_MACHINES)} (default: %(default)s)")
    given = parser.parse_args()
    machines = given.machine.split(",")
    if unknown := set(machines) - ELF_MACHINES.keys():
        parser.error(f"argument --machine: {', '.join(sorted(unknown))} is none of {', '.join(ELF_MACHINES)}")
    run("-m", "pip", "install", "-q", *NEEDED)
    importlib.invalidate_caches()  # zig has only just arrived
    for machine in machines:
        print(build(machine, given.folder))
    return 0


def build(machine: str, folder: Path) -> Path:
    """The wheel for a processor, in `folder`."""
    with tempfile.TemporaryDirectory() as built:
        options = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines(machine).items()]
        run("-m", "pip", "wheel", "-q", "--no-deps", "-w", built, *options, str(ROOT), **compilers(machine))
        (wheel,) = Path(built).glob("*.whl")
        if wrong := why_not_portable(wheel, machine):
            sys.exit(f"{wheel.name}: {wrong}")
        run("-m", "wheel", "tags", "--remove", "--platform-tag", tag(machine), str(wheel))
        (tagged,) = Path(built).glob("*.whl")
        audit(tagged, machine)
        target = folder / tagged.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(tagged.read_bytes())
    return target


def tag(machine: str) -> str:
    return f"manylinux2014_{machine}"


def zig(command: str, machine: str) -> str:
    """zig in the place of a compiler for that processor and glibc 2.17."""
    program = Path(next(iter(importlib.util.find_spec("ziglang").submodule_search_locations))) / "zig"
    return f"{program} {command} -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"


def defines(machine: str) -> dict[str, str]:
    """CMake's variables."""
    other = {} if machine == platform.machine() else {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
    return {"TILEWISE_LINKER": zig("cc", machine), **other}


def compilers(machine: str) -> dict[str, str]:
    """Environment variables: none where the system's compiler is for that processor."""
    return {} if machine == platform.machine() else {"CC": zig("cc", machine), "CXX": zig("c++", machine)}


def why_not_portable(wheel: Path, machine: str) -> str:
    """What keeps the wheel from running wherever its tag says; empty where nothing does."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    if not libraries:
        return "there is no kernel in it: it did not compile, or link; `pip wheel -v` shows why"
    for name, library in libraries.items():
        (found,) = struct.unpack_from("<H", library, 18)  # e_machine of the ELF header
        if found != ELF_MACHINES[machine]:
            return f"{name} is for ELF machine {found}, not for {machine}"
        wanted = max(((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)), default=(0, 0))
        if wanted > GLIBC:
            return f"{name} needs glibc {wanted[0]}.{wanted[1]}, more than {GLIBC[0]}.{GLIBC[1]}"
    return ""


def audit(wheel: Path, machine: str) -> None:
    """Have auditwheel read the wheel, where it is installed."""
    if importlib.util.find_spec("auditwheel") is None:
        return
    found = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True)
    if found.returncode or f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}" not in found.stdout.replace("\n", " "):
        sys.exit(f"auditwheel does not find {tag(machine)}: {found.stdout}{found.stderr}")
    print(f"auditwheel: {tag(machine)}", file=sys.stderr)


def run(*arguments: str, **environment: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=os.environ | environment)


if __name__ == "__main__":
    sys.exit(main())
