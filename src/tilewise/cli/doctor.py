"""What this machine has, which backends it can use, and why not the others."""

import os
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

import torch

from tilewise import compat
from tilewise.machine import environment
from tilewise.problem import Problem
from tilewise.sm90 import cache, prebuilt
from tilewise.sm90.jit import why_no_compiler
from tilewise.sm90.versions import untested

PACKAGES = {  # distribution: what it is for here
    "torch": "required",
    "numpy": "required",
    "rich": "the command line",
    "matplotlib": "charts and pictures",
    "nvidia-cutlass-dsl": "the backend for Hopper",
    "apache-tvm-ffi": "the backend for Hopper",
    "flash-attn": "a peer in benchmarks",
    "flash-attn-3": "a peer in benchmarks",
    "flash-attn-4": "a peer in benchmarks",
    "hypothesis": "the tests",
    "pytest": "the tests",
}
INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


@dataclass(frozen=True, kw_only=True)
class BackendStatus:
    """Whether a backend can run plain attention, forward and backward, on a device; `reasons` is empty where it can.

    `description` is what the backend says of itself, empty where it says nothing or cannot run.
    """

    name: str
    device: str
    reasons: tuple[str, ...]
    description: str = ""

    @property
    def usable(self) -> bool:
        return not self.reasons


def packages() -> dict[str, str | None]:
    """The version of each package that tilewise uses or knows, None where it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def integrations() -> list[compat.Integration]:
    """What people already call that tilewise answers, and whether it is here."""
    return compat.status()


def machine() -> dict[str, str]:
    """Python, system, processor, memory, compilers, and where compiled GPU kernels are kept, variables of ours; what is empty is left out."""
    facts = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "processor": f"{_cpuinfo('model name') or platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "instruction sets": _instruction_sets(),
        "torch threads": str(torch.get_num_threads()),
        "memory": _memory(),
        "C++ compiler": next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), "none"),
        "kernel compiler": untested(),
        "kernel cache": "" if why_no_compiler() else cache.describe(),
        "prebuilt kernels": prebuilt.describe(),
        "environment": "; ".join((*environment.given(), *environment.misspelt())),
    }
    return {name: value for name, value in facts.items() if value}


def devices() -> dict[str, str]:
    """Every device that torch sees here, by name, with what it is."""
    found = {"cpu": f"torch kernels for {torch.backends.cpu.get_cpu_capability()}"}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = properties.gcnArchName if torch.version.hip else f"compute capability {properties.major}.{properties.minor}"
            found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"
    return found


def why_no_gpu() -> str:
    """Why torch sees no GPU; empty where it sees one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA and ROCm"
    return "torch is built for a GPU, but finds none (or no driver)"


def backends(device_names: Iterable[str]) -> list[BackendStatus]:
    """Each backend on each type of device, on plain causal attention with gradients: fp32 on a CPU, bf16 elsewhere."""
    from tilewise.runtime.dispatch import backends as installed

    statuses = []
    for device in dict.fromkeys(torch.device(name).type for name in device_names):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        problem = Problem(device=device, dtype=dtype, head_dim=64, head_dim_v=64, group=1, mask="band", grad=True)
        for backend in installed():
            reasons = tuple(backend.why_not(problem))
            about = "" if reasons else backend.describe()
            statuses.append(BackendStatus(name=backend.name, device=device, reasons=reasons, description=about))
    return statuses


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpuinfo(field: str) -> str:
    """The first value of a field of /proc/cpuinfo; empty where there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == field), "")
    except OSError:
        return ""


def _instruction_sets() -> str:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return ", ".join(name for name in INSTRUCTION_SETS if name in flags)


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, OSError, ValueError):
        return ""
