"""What the compile gate asks of a kernel, measured on the compiled object, and a committed table of it by digests of what the kernel is made from.

Tracing and compiling a kernel takes three to ten seconds; reading the sources that reach it, some milliseconds. So a kernel whose sources are those
of its row in kernels.json is not compiled again: the row's facts are what the gate asserts on. `python tools/gpu/kernel_table.py` renews the table.
"""

import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from unittest import mock

from code_digest import plain, short
from kernel_inventory import Kernel

from tilewise.sm90 import cache as kernels_on_disk
from tilewise.sm90 import jit

TABLE = Path(__file__).parents[1] / "backends/hopper/kernels.json"
REMARKS = "remarks{ptx}"  # the compiler's notes, where it has something to say about warpgroup products; they take time
DEBUGGING = re.compile(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", re.MULTILINE)
NAMES = re.compile(r"\b\w*(?:cutlass|tilewise)\w*")  # hold modules and classes of Python
BLANK = re.compile(r"\s+")


@dataclass(frozen=True)
class Facts:
    """Of one compiled object, which has one kernel or several."""

    ptx: str  # `digest`
    usage: list[dict[str, int]]  # registers, stack and local memory, a kernel each
    counts: dict[str, int]  # instructions, by the patterns of COUNTED
    moved: int  # numbers moved to uniform registers within a group of products, at most
    registers: list[int]  # operands of USETMAXREG, sorted
    spills: list[str]  # the compiler's sentences on stack and spills, each once; none where it was not asked
    serialised: list[str]  # its remarks that it had to serialise or to order warpgroup products
    exponentials_first: bool  # all ahead of the first wait for all products


COUNTED = {
    "HGMMA": "HGMMA",
    "QGMMA": "QGMMA",
    "IGMMA": "IGMMA",
    "gsb0": "[HQI]GMMA.*gsb0",
    "E4M3": r"F2FP\.SATFINITE\.E4M3",
    "PRMT": "PRMT",
    "ARRIVE": r"WARPGROUP\.ARRIVE",
    "DEPBAR": r"WARPGROUP\.DEPBAR",
    "DEPBAR 0": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0",
    "WARPGROUP": "WARPGROUP",
    "UTMALDG": "UTMALDG",
    "LDL, STL": "LDL|STL",
}


def digest(ptx: str) -> str:
    """Of the code alone: without comments, lines for debuggers, and names that come from Python."""
    seen: dict[str, str] = {}
    code = NAMES.sub(lambda found: seen.setdefault(found[0], f"name{len(seen)}"), DEBUGGING.sub("", ptx))
    return hashlib.sha256(BLANK.sub(" ", code).encode()).hexdigest()[:16]


@cache
def inspector() -> Path | None:
    """NVIDIA's cuobjdump of the package nvidia-cuda-cuobjdump, or of a toolkit on the path."""
    try:
        files = distribution("nvidia-cuda-cuobjdump").files or []
    except PackageNotFoundError:
        files = []
    packaged = [Path(file.locate()) for file in files if file.name == "cuobjdump"]
    found = packaged[0] if packaged else shutil.which("cuobjdump")
    return Path(found) if found else None


def measured(kernel: Kernel, output: Callable[[], str]) -> Facts:
    """Compiled here and now. `output` returns what was written to stdout and stderr since it was last called."""
    from cutlass.base_dsl import dsl

    # Asked for remarks, the DSL looks for the line of Python that each operation comes from: a third of the time. ptxas's name none.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(dsl, "_set_enable_frame_filtering", lambda enable: None):
        output()
        options = f"{REMARKS if kernel.remarks else ''} --keep-ptx --keep-cubin --dump-dir {folder}"
        built = jit.build(kernel.launch, kernel.arguments, kernel.config, options)
        remarks = output()
        return facts_of(built.__ptx__, disassembled(built.__cubin__, Path(folder)), remarks)


def disassembled(cubin: bytes, folder: Path) -> str:
    for name in ("cuobjdump", "nvdisasm"):  # the wheel may leave them without the right to execute
        if (source := inspector().with_name(name)).exists():
            shutil.copyfile(source, folder / name)
            (folder / name).chmod(0o755)
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command, environment = [folder / "cuobjdump", "--dump-resource-usage", "-sass", path], {"PATH": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def facts_of(ptx: str, dump: str, remarks: str) -> Facts:
    usage = [
        {name: int(n) for name, n in re.findall(r"(\w+):(\d+)", line) if name in ("REG", "STACK", "LOCAL")}
        for line in dump.splitlines()
        if "REG:" in line
    ]
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][^;]*);", dump, re.MULTILINE)
    waits = [i for i, each in enumerate(code) if re.match(COUNTED["DEPBAR 0"], each)]
    exponentials = [i for i, each in enumerate(code) if each.startswith("MUFU.EX2")]
    operands = (each.strip() for each in code if each.startswith("USETMAXREG"))
    return Facts(
        ptx=digest(ptx),
        usage=usage,
        counts={name: sum(re.match(pattern, each) is not None for each in code) for name, pattern in COUNTED.items()},
        moved=_most_moved(code),
        registers=sorted(int(each.rpartition(" ")[2] or each.split()[-1], 16) for each in operands),
        spills=sorted(set(re.findall(r"\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads", remarks))),
        serialised=sorted(set(re.findall(r"\(C7\d+\).*", remarks))),
        exponentials_first=bool(waits) and max(exponentials, default=-1) < min(waits),
    )


def _most_moved(code: list[str]) -> int:
    """R2UR between a group's begin and its last product."""
    groups, in_group = [0], False
    for instruction in code:
        if instruction.startswith("WARPGROUP.ARRIVE"):
            groups.append(0)
            in_group = True
        elif in_group:
            groups[-1] += instruction.startswith("R2UR")
        in_group = in_group and not re.match(COUNTED["gsb0"], instruction)
    return max(groups)


# What a kernel is made from


def key(kernel: Kernel) -> str:
    """A row's: the name, and a digest of what identifies the kernel."""
    function = kernel.launch.partition(":")[2] if isinstance(kernel.launch, str) else kernel.launch.__qualname__
    return f"{kernel.name} {short(f'{module_of(kernel.launch)}:{function}', repr(kernel.config))[:8]}"


def module_of(launch: str | Callable) -> str:
    return launch.partition(":")[0] if isinstance(launch, str) else launch.__module__


def source(kernel: Kernel) -> str:
    """A digest of what can change the device code: modules of ours that the launch function's or the configuration's module imports, without
    comments and docstrings; the stand-ins for arguments; the configuration; the compiler's version.
    """
    given = kernel.arguments(kernel.config)
    roots = {module_of(kernel.launch), type(kernel.config).__module__, jit.__name__, *(type(each).__module__ for each in given)}
    modules = sorted(set().union(*map(reached, roots & MODULES.keys())))
    compiler = version("nvidia-cutlass-dsl"), kernels_on_disk.toolkit_of(kernels_on_disk.library()), jit.arch()
    stated = repr(kernel.launch) if isinstance(kernel.launch, str) else kernel.launch.__qualname__
    return short(*compiler, stated, repr(kernel.config), "\n".join(described(given)), *(code_of(name) for name in modules))


def _modules() -> dict[str, Path]:
    """Of the packages that device code lies in, by the rule of the cache of kernels (sm90/cache.py)."""
    found = {}
    for path in (path for each in kernels_on_disk.SOURCES for path in (kernels_on_disk.PACKAGE / each).rglob("*.py")):
        parts = ("tilewise", *path.relative_to(kernels_on_disk.PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def text_of(name: str) -> str:
    return MODULES[name].read_text()


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(text_of(name))


@cache
def code_of(name: str) -> str:
    """A digest of a module's code."""
    return short(plain(parsed(name)))


@cache
def reached(root: str) -> frozenset[str]:
    """The module and what it imports of ours, and what that imports; jit only calls the compiler, and what it imports besides writes files."""
    found, ahead = set(), [root]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += [] if name == jit.__name__ else imported(name)
    return frozenset(found)


@cache
def imported(name: str) -> frozenset[str]:
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {full if (full := f"{node.module}.{each.name}") in MODULES else node.module for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in MODULES}
    return frozenset(found)


def described(given, seen: dict[int, int] | None = None) -> Iterator[str]:
    """Stand-ins for arguments: their types, strides and alignment, and which sizes are the same."""
    seen = {} if seen is None else seen
    for each in given:
        if isinstance(each, tuple | list):
            yield f"{type(each).__name__}("
            yield from described(each, seen)
            yield ")"
        elif is_dataclass(each):
            yield from described([(field.name, getattr(each, field.name)) for field in fields(each)], seen)
        elif hasattr(each, "shape"):
            sizes = [seen.setdefault(id(size), len(seen)) if not isinstance(size, int) else size for size in each.shape]
            yield f"{each} {sizes} {getattr(each, '_assumed_align', '')}"
        elif " at 0x" in repr(each):
            yield f"{type(each).__name__} {getattr(each, 'value', '')}"
        else:
            yield f"{type(each).__name__} {each!r}"


# The table


def rows() -> dict[str, dict]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def known(kernel: Kernel, table: dict[str, dict]) -> Facts | None:
    """The row's facts, where the row is of the sources as they are."""
    row = table.get(key(kernel))
    return Facts(**row["facts"]) if row and row["source"] == source(kernel) else None


def row(kernel: Kernel, facts: Facts) -> dict:
    return {"source": source(kernel), "facts": asdict(facts)}


def written(table: dict[str, dict]) -> str:
    """The table's text, one row a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(table[name], sort_keys=True)}" for name in sorted(table))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def shuffled(kernels: Iterable[Kernel]) -> list[Kernel]:
    """In an order that is another one whenever the table or a module changes."""
    seed = short(TABLE.read_text() if TABLE.exists() else "", *(code_of(name) for name in sorted(MODULES)))
    return sorted(kernels, key=lambda kernel: short(seed, key(kernel)))


def main_output() -> Callable[[], str]:
    """For `measured` in a process whose stdout and stderr can be moved to a file."""
    import os

    file = tempfile.TemporaryFile("w+")  # noqa: SIM115 it lives as long as the process
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)

    def output() -> str:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        file.seek(0)
        text = file.read()
        file.seek(0)
        file.truncate()
        return text

    return output
