"""What the compile gate asks of a Triton kernel, measured on what Triton compiles without a GPU, and the committed table of it, triton/kernels.json.

A row is found by the kernel's name, and holds as long as the digest of what the kernel is made from; `python tools/triton_table.py` renews the table.
"""

import ast
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import triton
from code_digest import plain, short
from triton.backends import nvidia
from triton_inventory import Case

from tilewise.backends.triton import kernels
from tilewise.backends.triton.launch import Kernel, compiled
from tilewise.backends.triton.targets import Target

TABLE = Path(__file__).parents[1] / "backends/triton/kernels.json"
INSPECTOR = Path(nvidia.__file__).parent / "bin/cuobjdump"  # comes with Triton
PRODUCTS = {  # in PTX and in AMD's assembly: the instructions that multiply tiles
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mfma": r"\bv_mfma_",
    "wmma": r"\bv_s?wmmac?_",
}


@dataclass(frozen=True)
class Facts:
    """Of one compiled kernel."""

    registers: int  # 32-bit registers a thread
    stack: int  # bytes a thread, spilled registers among them
    spilled: int  # vector registers that AMD's compiler spilled; 0 on NVIDIA, where they are on the stack
    shared: int  # bytes a thread block
    products: dict[str, int]  # instructions, by the names of PRODUCTS that occur
    turned: int  # transpositions of what a product of tiles has a part in, but for dropout's booleans


def measured(kernel: Kernel, target: Target) -> Facts:
    """Compiled here, or found in Triton's cache."""
    found = compiled(kernel, target)
    code = found.asm["ptx" if target.nvidia else "amdgcn"]
    registers, stack, spilled = _of_nvidia(found.asm["cubin"]) if target.nvidia else _of_amd(code)
    counts = {name: len(re.findall(pattern, code)) for name, pattern in PRODUCTS.items()}
    used = {name: count for name, count in counts.items() if count}
    return Facts(registers, stack, spilled, found.metadata.shared, used, turned(found.asm["ttir"]))


def _of_nvidia(cubin: bytes) -> tuple[int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([INSPECTOR, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    return int(found[1]), int(found[2]), 0


def _of_amd(code: str) -> tuple[int, int, int]:
    names = "vgpr_count", "private_segment_fixed_size", "vgpr_spill_count"
    return tuple(int(re.search(rf"\.{name}:\s+(\d+)", code)[1]) for name in names)


def turned(ttir: str) -> int:
    """How many transpositions have a product of tiles among what they are computed from, in the same round of a loop."""
    found, multiplied = 0, set()
    for line in ttir.splitlines():
        names, operation, rest = re.match(r"\s*(?:(%\w+)(?::\d+)? = )?(\S+)(.*)", line).groups() if line.strip() else ("", "", "")
        given = multiplied.intersection(re.findall(r"%\w+", rest))
        found += operation == "tt.trans" and bool(given)
        if operation in ("scf.for", "scf.while", "scf.if"):  # its results and arguments are those of several rounds
            multiplied.difference_update([names, *re.findall(r"(%\w+) = ", rest)])
        elif operation == "tt.dot" or given:
            multiplied.add(names)
        else:
            multiplied.discard(names)
    return found


# What a kernel is made from


def source(kernel: Kernel, target: Target) -> str:
    """A digest of the kernel's module and of what it imports of kernels/, its constants and signature, the compiler's options and its version."""
    given = repr(kernel.constants), repr(kernel.signature()), repr(sorted(kernel.config.options(target).items()))
    return short(
        triton.__version__, target.arch, kernel.name, *given, *(code_of(name) for name in sorted(reached(kernel.function.__module__)))
    )


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(Path(import_module(name).__file__).read_text())


@cache
def code_of(name: str) -> str:
    return short(plain(parsed(name)))


@cache
def reached(name: str) -> frozenset[str]:
    """The module and those of kernels/ that it imports, and what these import."""
    nodes = [node for node in ast.walk(parsed(name)) if isinstance(node, ast.ImportFrom)]
    of_package = (f"{kernels.__name__}.{each.name}" for node in nodes if node.module == kernels.__name__ for each in node.names)
    imported = {node.module for node in nodes}.union(of_package)
    return frozenset({name}.union(*(reached(each) for each in imported if each.startswith(f"{kernels.__name__}."))))


# The table


def rows() -> dict[str, dict]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def known(case: Case, table: dict[str, dict]) -> Facts | None:
    """The row's facts, where the row is of the sources as they are."""
    row = table.get(case.name)
    return Facts(**row["facts"]) if row and row["source"] == source(case.built(), case.target) else None


def row(case: Case) -> dict:
    """A row of a kernel compiled now."""
    kernel = case.built()
    tiles = {"config": list(kernel.config), "triton": triton.__version__}
    return tiles | {"source": source(kernel, case.target), "facts": asdict(measured(kernel, case.target))}


def written(table: dict[str, dict]) -> str:
    """The table's text, one row a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(table[name], sort_keys=True)}" for name in sorted(table))
    return "{\n" + ",\n".join(lines) + "\n}\n"
