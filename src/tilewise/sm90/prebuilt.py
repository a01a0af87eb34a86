"""Kernels that were compiled elsewhere: the package tilewise_kernels_sm90, from a wheel of its own, which is only ever read.

With it a fresh machine compiles nothing of what the wheel holds, and needs no DSL for that. tools/kernels_wheel.py makes it. Its entries are those
of cache.py but for two things: they load and launch kernels by the CUDA driver alone, and their code for the host runs on any x86-64-v2 processor.

What has to be as it was when the wheel was made, or nothing of it is used:
- this package's device code, since an entry is found by its configuration and gets the operands that today's host code passes (`code`);
- tvm-ffi's series 0.x, in which its binary interface stays, and a version no older than the wheel's, as an entry may call what came with that;
- nothing of CUTE_DSL_*: who sets one of these wants other code, compiled with it.
The CUDA driver must be as new as the toolkit, by the first number: it runs what toolkits with its own or an older number made. Python, torch and
the DSL may be of any version: no entry calls them, and operands come as DLPack has them.

The package is trusted as Python trusts what it imports from that place, which whoever may write there could change too.
"""

import hashlib
import json
import os
import platform
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from tilewise.machine import environment, sealed
from tilewise.sm90 import identity

PACKAGE, DISTRIBUTION = "tilewise_kernels_sm90", "tilewise-kernels-sm90"
FACTS = "facts.json"  # what the package was made from
TILEWISE = Path(__file__).parent.parent
SOURCES = ("sm90", "backends/hopper", "backends/tables")
LEAST_DRIVER = 12  # the entries call its functions


def entry(launch: str, config, arch: str) -> Path | None:
    """Where the package has the kernel of `launch` ("module:function") and `config` for `arch`, whole; None where it has not, or is not used."""
    if not launch.startswith("tilewise.backends.") or why_not():
        return None
    path = folder() / f"{identity.name_of(launch, config, arch)}.so"
    return path if sealed.whole(path) else None


def owns(path: Path) -> bool:
    """Whether an entry is one of the package's."""
    return folder() is not None and path.parent == folder()


def why_no_kernel(launch: str, config) -> str:
    """What to say of a kernel that the package has not, on a machine that cannot compile it."""
    without = f"{DISTRIBUTION} has none" if not why_not() else why_not()
    return (
        f"there is no kernel at hand for {launch.partition(':')[0].removeprefix('tilewise.backends.')} with {config}: {without}, and "
        "NVIDIA's CuTe DSL, which compiles it, is not installed: pip install 'tilewise[hopper]'"
    )


def why_no_gpu(capability: tuple[int, int] | None = None) -> list[str]:
    """Sentences that say why no kernel can run on torch's current GPU, or on one of that compute capability, where nothing need be compiled."""
    if not torch.cuda.is_available():
        return ["torch sees no GPU here: run it on a machine with an H100 or H200"]
    if torch.version.hip:
        return ["it needs a Hopper GPU of NVIDIA's, and this torch is built for AMD's (ROCm)"]
    capability = capability or torch.cuda.get_device_capability()
    return [] if capability == (9, 0) else [f"it needs a Hopper GPU (compute capability 9.0), and this is {capability[0]}.{capability[1]}"]


@cache
def folder() -> Path | None:
    """Where the package lies; None where it is not installed."""
    spec = find_spec(PACKAGE)
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def why_not() -> str:
    """Why no kernel is taken from the package; empty where some can be."""
    if folder() is None:
        return f"{DISTRIBUTION} is not installed"
    name = f"{DISTRIBUTION} {facts().get('version', '')}".strip()
    if environment.switched_off("TILEWISE_CACHE"):
        return f"{name} is not used, because TILEWISE_CACHE is {os.environ['TILEWISE_CACHE']!r}"
    wrong = [*_differences(facts())]
    return f"{name} is not used: {'; '.join(wrong)}" if wrong else ""


def facts() -> dict:
    """What the package was made from; empty where it does not say."""
    try:
        found = json.loads((folder() / FACTS).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe() -> str:
    """Where prebuilt kernels lie and how many, or why they are not used; empty where there are none."""
    if folder() is None or why_not():
        return why_not() if folder() else ""
    size = sum(path.stat().st_size for path in _entries())
    return f"{folder()}: {len(_entries())} kernels, {size / 1e6:.1f} MB, of CUDA {facts()['toolkit']}"


@cache
def code() -> str:
    """A digest of the device code, and of what decides what it is given."""
    digest = hashlib.sha256()
    for path in sorted(path for source in SOURCES for path in (TILEWISE / source).rglob("*.py")):
        digest.update(f"\0{path.relative_to(TILEWISE).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def made_with(toolkit: int, version: str) -> dict:
    """What `facts` will say of a package that is made now, with the DSL's libraries for that toolkit."""
    return {
        "version": version,
        "code": code(),
        "toolkit": toolkit,
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
        "dsl": metadata.version("nvidia-cutlass-dsl"),
    }


def _differences(made: dict) -> list[str]:
    """Sentences: what of `made` does not fit this process."""
    if not {"code", "toolkit", "tvm_ffi"} <= made.keys():
        return [f"its {FACTS} is missing or damaged; install it again"]
    wrong = []
    if platform.machine() != "x86_64":
        wrong.append(f"it is made for x86_64, and this is {platform.machine()}")
    if made["code"] != code():
        wrong.append("it was made from other device code than this tilewise has: install the two of one version")
    if not (installed := _installed("apache-tvm-ffi")):
        wrong.append("apache-tvm-ffi is not installed, which its kernels are called through")
    elif installed[:2] != (needed := _numbers(made["tvm_ffi"]))[:2] or installed < needed:
        wrong.append(
            f"it needs apache-tvm-ffi {needed[0]}.{needed[1]} from {made['tvm_ffi']} on, and this is {metadata.version('apache-tvm-ffi')}"
        )
    driver, least = identity.driver(), max(LEAST_DRIVER, made["toolkit"])
    if driver is not None and driver < least:
        wrong.append(f"it needs a driver for CUDA {least}, and this machine's is for CUDA {driver}")
    if given := identity.settings():
        wrong.append(f"{', '.join(given)} may change what is compiled")
    return wrong


def _installed(distribution: str) -> tuple[int, ...]:
    try:
        return _numbers(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return ()


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 1, 15) of "0.1.15.post2"."""
    parts = version.split(".")[:3]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def _entries() -> list[Path]:
    return list(folder().glob("*.so"))
