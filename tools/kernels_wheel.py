"""Builds the wheel tilewise-kernels-sm90: kernels for H100 and H200 that need no compiler where they run. Needs the DSL and zig, but no GPU.

    python tools/kernels_wheel.py                                      # all that ships, into dist/
    python tools/kernels_wheel.py --head-dim 64,128 --dtype bf16       # less

A kernel takes a core four to five seconds, all of them 45 minutes of one core; as many as there are cores are compiled at once. What is compiled is
kept in build/kernels under a digest of what it is made from, so that a run that was stopped goes on, and after a change only what it reached is
compiled.

The DSL compiles a launch function for the processor that it runs on, and to call its runtime library, which may not be handed on. So the function
leaves the DSL as LLVM's text, and zig (from PyPI) compiles it for any x86-64-v2 processor and glibc 2.17, together with kernels/launch.c in place of
that library. What such an entry needs to be used is said in src/tilewise/sm90/prebuilt.py.
"""

import argparse
import base64
import hashlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache as kept
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/shared"))

import kernel_facts
import pool
import torch
from kernel_inventory import Kernel

import tilewise
from tilewise.backends.hopper import warmup
from tilewise.machine import sealed
from tilewise.problem import Problem
from tilewise.sm90 import cache, jit, prebuilt

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 40_000_000
HEAD_DIMS, DTYPES, MASKS = "64,96,128,192/128,256", "bf16,fp16", "full,band,runs"
LATENT = "576/512"  # of caches, which decoding alone takes
IN_EIGHT_BITS, PRECISIONS = ("64", "128", "256"), ("int8", "fp8")  # head dims and recipes of attention, forward, under one band
LAUNCH = ROOT / "tools/kernels/launch.c"
BUILD = ROOT / "build/kernels"
TARGET = ["-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v2", "-fPIC"]
TAG = "py3-none-manylinux2014_x86_64"
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file: the same kernels make the same wheel

METADATA = """Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: Compiled kernels of tilewise for NVIDIA's H100 and H200
License-Expression: Apache-2.0
License-File: LICENSE
License-File: NOTICE
License-File: LICENSE.zig
Requires-Python: >=3.11
Requires-Dist: tilewise=={version}
Requires-Dist: apache-tvm-ffi>={tvm_ffi}

{kernels} kernels, compiled from tilewise's sources by NVIDIA's CuTe DSL {dsl} for CUDA {toolkit}. Nothing to import: tilewise finds them.
"""


def problems(head_dims: str = HEAD_DIMS, dtypes: str = DTYPES, masks: str = MASKS, grad: bool = True) -> Iterator[Problem]:
    """What the wheel is for; the arguments list what `tilewise warmup` takes, and kinds of masks."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for dtype, dims, mask in itertools.product(dtypes.split(","), head_dims.split(","), masks.split(",")):
        head_dim, _, head_dim_v = dims.partition("/")
        sizes = {"head_dim": int(head_dim), "head_dim_v": int(head_dim_v or head_dim)}
        yield Problem(device="cuda", dtype=names[dtype], **sizes, group=1, mask=mask, grad=grad)


def kernels(wanted: Iterable[Problem]) -> list[warmup.Kernel]:
    """Each once."""
    return list(dict.fromkeys(kernel for problem in wanted for kernel in warmup.of_problem(problem)))


def of_eight_bits(wanted: Iterable[Problem]) -> list[warmup.Kernel]:
    """The kernels of the forward pass in 8 bits, quantiser and all, for those of the problems that are often computed so."""
    dims = [(int(dim), int(dim)) for dim in IN_EIGHT_BITS]
    alike = [replace(each, grad=False) for each in wanted if (each.head_dim, each.head_dim_v) in dims and each.mask in ("full", "band")]
    return kernels(replace(each, precision=precision) for each in alike for precision in PRECISIONS)


def of_decode(wanted: Iterable[Problem]) -> list[warmup.Kernel]:
    """The kernels that decode, where the problems' masks are such as they take."""
    return warmup.of_decode(
        warmup.Cell(each.head_dim, each.head_dim_v, each.dtype, mask) for each in wanted for mask in warmup.MASKS[each.mask]
    )


def table(wanted: list[Problem], latent: Iterable[Problem] = ()) -> list[warmup.Kernel]:
    """All that the wheel holds for these problems, each once; latent: those of which there are kernels that decode only."""
    return list(dict.fromkeys([*kernels(wanted), *of_eight_bits(wanted), *of_decode([*wanted, *latent])]))


def zig() -> Path:
    """The compiler, which is installed where it is missing."""
    if find_spec("ziglang") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "ziglang"], check=True, stdout=subprocess.DEVNULL)
        importlib.invalidate_caches()
    return Path(next(iter(find_spec("ziglang").submodule_search_locations))) / "zig"


def license_of_zig() -> Path:
    """The license of what zig may link into a library."""
    zig()
    named = [path for path in metadata.files("ziglang") if path.name == "LICENSE" and path.parent.name == "ziglang"]
    return Path(min(named, key=lambda path: len(path.parts)).locate())


def linked(text: Path, library: Path) -> None:
    """Make a shared library of a launch function in LLVM's text."""
    import tvm_ffi.libinfo

    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig"), "ZIG_LOCAL_CACHE_DIR": str(BUILD / "zig")}
    command = [
        zig(),
        "cc",
        *TARGET,
        "-shared",
        "-s",
        "-O2",
        "-Wno-override-module",
        "-Wl,-z,defs",
        text,
        LAUNCH,
        tvm_ffi.libinfo.find_libtvm_ffi(),
    ]
    done = subprocess.run([*command, "-o", library], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{text.name} does not link: {done.stderr[-2000:]}")


@kept
def linker() -> str:
    """A digest of all that makes a library of LLVM's text."""
    made_with = *TARGET, metadata.version("ziglang"), metadata.version("apache-tvm-ffi"), LAUNCH.read_text()
    return hashlib.sha256("\0".join(made_with).encode()).hexdigest()[:8]


def place(kernel: warmup.Kernel) -> Path:
    """Where its shared library is kept, whole once it is there; without what `sealed.sealed` puts behind it."""
    return BUILD / f"{kernel_facts.source(Kernel('', *kernel))}-{linker()}.so"


def entry(kernel: warmup.Kernel) -> bytes:
    """The kernel's shared library: from its place, or compiled now, and put there."""
    if not (path := place(kernel)).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            text, library = Path(aside) / "kernel.ll", Path(aside) / "kernel.so"
            jit.build(*kernel, runs=False).export_to_c(str(text), cache.FUNCTION, export_only_tvm_ffi_symbols=True)
            linked(text, library)
            library.replace(path)
    return path.read_bytes()


def named(kernel: warmup.Kernel) -> str:
    return " ".join(warmup.describe(kernel))


def build(todo: list[warmup.Kernel], workers: int = 0) -> dict[warmup.Kernel, bytes]:
    """Every kernel's shared library; those that are not in their places are compiled, `workers` at once (0: one a core)."""
    found = {kernel: entry(kernel) for kernel in todo if place(kernel).exists()}
    missing = [kernel for kernel in todo if kernel not in found]
    print(f"{len(found)} kernels are in {BUILD}, {len(missing)} to compile", flush=True)
    found |= pool.each(entry, missing, workers, named=named)
    return {kernel: found[kernel] for kernel in todo}


def write(folder: Path, entries: dict[warmup.Kernel, bytes]) -> Path:
    """The wheel of these entries."""
    made = prebuilt.made_with(int(cache.toolkit_of(cache.library())[2:]), tilewise.__version__)
    files = {f"{prebuilt.PACKAGE}/__init__.py": b'"""Compiled kernels of tilewise, which it finds here."""\n'}
    files[f"{prebuilt.PACKAGE}/{prebuilt.FACTS}"] = json.dumps(made, indent=1).encode()
    for kernel, content in entries.items():
        path = Path(f"{prebuilt.PACKAGE}/{cache.name_of(kernel.launch, kernel.config, jit.arch())}.so")
        files[path.as_posix()] = sealed.sealed(path, content)
    about = f"{prebuilt.PACKAGE}-{tilewise.__version__}.dist-info"
    files[f"{about}/METADATA"] = METADATA.format(name=prebuilt.DISTRIBUTION, kernels=len(entries), **made).encode()
    files[f"{about}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tilewise\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
    licenses = {"LICENSE": ROOT / "LICENSE", "NOTICE": ROOT / "tools/kernels/NOTICE", "LICENSE.zig": license_of_zig()}
    files |= {f"{about}/licenses/{name}": path.read_bytes() for name, path in licenses.items()}
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{prebuilt.PACKAGE}-{tilewise.__version__}-{TAG}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            about_file = zipfile.ZipInfo(name, EPOCH)
            about_file.external_attr = 0o644 << 16  # for all users to read, wherever it is unpacked
            archive.writestr(about_file, content, zipfile.ZIP_DEFLATED, 9)
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("dist"))
    parser.add_argument("--head-dim", default=HEAD_DIMS, help="head_dim, or head_dim / head_dim_v (default: %(default)s)")
    parser.add_argument("--dtype", default=DTYPES, help="default: %(default)s")
    parser.add_argument("--mask", default=MASKS, help="kinds of masks (default: %(default)s)")
    parser.add_argument("--forward", action="store_true", help="without the kernels of the backward pass")
    parser.add_argument("--workers", type=int, default=0, help="kernels at once (default: one a core)")
    parser.add_argument("--list", action="store_true", help="print the kernels, and build none")
    given = parser.parse_args()
    os.environ["TILEWISE_CACHE"] = "0"
    wanted = list(problems(given.head_dim, given.dtype, given.mask, not given.forward))
    todo = table(wanted, [*problems(LATENT, given.dtype, "full", grad=False)] if given.head_dim == HEAD_DIMS else [])
    if given.list:
        for kernel in todo:
            print(named(kernel))
        return 0
    warmup.require_compiler()
    prebuilt.code()  # the sources' digest as they are now, whoever edits them while this runs
    zig()  # before several processes want it
    entries = build(todo, given.workers)
    wheel = write(given.folder, entries)
    size = wheel.stat().st_size
    print(f"{wheel}: {len(entries)} kernels, {size / 1e6:.1f} MB ({sum(map(len, entries.values())) / 1e6:.1f} MB installed)")
    if size > MOST_BYTES:
        print(f"more than {MOST_BYTES / 1e6:.0f} MB: build fewer head_dims or dtypes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
