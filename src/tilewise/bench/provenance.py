"""Where a number comes from: the machine, the software and the commit that made it, stamped on every row."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from tilewise import __version__

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "flash-attn", "flash-attn-4")
COMMIT = "TILEWISE_COMMIT"  # an environment variable: the commit of a copy that came without its history, or with an older one


def provenance(device: torch.device | str) -> dict[str, str | int | bool | None]:
    """Names and versions, the number of threads, the git commit (and whether the tree has changes), and the time in UTC; JSON-ready."""
    device = torch.device(device)
    return {
        **_machine(device),
        "tilewise": __version__,
        **{name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        **_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _machine(device: torch.device) -> dict[str, str | None]:
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()
        where = {"device": torch.cuda.get_device_name(device), "driver": _driver(), "cuda": torch.version.cuda or torch.version.hip}
        return {**where, "cudnn": None if cudnn is None else str(cudnn)}
    return {"device": f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}", "driver": None, "cuda": None}


@cache
def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@cache
def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _commit() -> dict[str, str | bool | None]:
    """As TILEWISE_COMMIT says, or of the checkout that holds this package; all None when it is installed without either."""
    if said := os.environ.get(COMMIT):
        return {"commit": said[:12], "dirty": None}
    here = Path(__file__).parent
    tracked = _output("git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name)
    commit = _output("git", "-C", str(here), "rev-parse", "--short=12", "HEAD") if tracked else None
    status = _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if commit is None else bool(status)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
