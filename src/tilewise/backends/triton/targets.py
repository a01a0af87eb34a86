"""The GPUs that kernels are compiled for, and what each has."""

import functools
import importlib.util
import math
import os
from typing import NamedTuple

import torch

KIB = 1024
SHARED_KIB = {"sm80": 163, "sm86": 99, "sm90": 227, "sm100": 227, "sm120": 99, "cdna": 64, "gfx950": 160, "rdna": 64}
FAMILIES = {"sm_80": "sm80", "sm_86": "sm86", "sm_87": "sm80", "sm_89": "sm86", "sm_90": "sm90", "sm_100": "sm100", "sm_103": "sm100"}
FAMILIES |= dict.fromkeys(("sm_120", "sm_121"), "sm120") | {"gfx90a": "cdna", "gfx942": "cdna", "gfx950": "gfx950"}
FAMILIES |= dict.fromkeys(("gfx1100", "gfx1101", "gfx1200", "gfx1201"), "rdna")
"""Architecture to family: those of one family have the same tensor cores, as much shared memory, and an assembler that needs the same registers."""
SMALLER = {"sm80": "sm86", "sm90": "sm86", "sm100": "sm120", "gfx950": "cdna"}
"""The next family by shared memory, in which an architecture that is not in FAMILIES is looked for where its blocks may have less than the first."""
COMPILED = "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"
"""Those that the compile gate compiles for (tests/backends/triton/test_compile.py)."""


class Target(NamedTuple):
    """An architecture by its name, such as "sm_90" or "gfx942"."""

    arch: str
    limit: int = 0  # bytes of shared memory that a block may have; 0: as its family's. Of an architecture that is not in FAMILIES

    @property
    def nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def family(self) -> str:
        """As FAMILIES has it; of an architecture that is not there, that of the nearest older one, or RDNA, or the first SMALLER one that fits."""
        found = self._nearest()
        while self.limit and self.limit < SHARED_KIB[found] * KIB and found in SMALLER:
            found = SMALLER[found]
        return found

    def _nearest(self) -> str:
        if self.arch in FAMILIES:
            return FAMILIES[self.arch]
        if not self.nvidia:
            return "cdna" if self.arch.startswith("gfx9") else "rdna"
        older = [arch for arch in FAMILIES if arch.startswith("sm_") and int(arch[3:]) <= int(self.arch[3:])]
        return FAMILIES[max(older, key=lambda arch: int(arch[3:]), default="sm_80")]

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one thread block may have."""
        return self.limit or SHARED_KIB[self.family] * KIB

    @property
    def knows_e4m3(self) -> bool:
        """Whether it converts float8_e4m3fn by instructions of its own."""
        return self.nvidia and int(self.arch[3:]) >= 89

    def gpu(self):
        """As Triton names it."""
        from triton.backends.compiler import GPUTarget

        if self.nvidia:
            return GPUTarget("cuda", int(self.arch[3:]), 32)
        return GPUTarget("hip", self.arch, 64 if self.family in ("cdna", "gfx950") else 32)


@functools.cache
def of_device(device: torch.device) -> Target:
    """The GPU's own; "sm_80" for CPU tensors, which Triton's interpreter takes."""
    if device.type == "cpu":
        return Target("sm_80")
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName.partition(":")[0] if torch.version.hip else "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return Target(arch, 0 if arch in FAMILIES else getattr(properties, "shared_memory_per_block_optin", 0))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of the CPU as many as Triton's interpreter stands for."""
    return 8 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors; decided when they are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


LEAST_TRITON = 3, 6
LEAST_TRITON_OF_BLACKWELL = 3, 9  # before it, products with bounds known at run time differ from run to run
LEAST_PTXAS = 13, 3  # on Hopper: older ones use a product's operands in registers too early, and give wrong results


@functools.cache
def why_not(capability: tuple[int, int] | None) -> str:
    """A sentence where Triton cannot be used for this machine's GPUs, or not for one of this capability."""
    if not installed():
        return "it needs Triton, which comes with torch for GPUs on Linux"
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < LEAST_TRITON:
        return f"it needs Triton {_text(LEAST_TRITON)} or newer, not {triton.__version__}: pip install --upgrade triton"
    if torch.version.hip or capability is None:
        return ""
    if capability < (8, 0):
        return f"it needs an NVIDIA GPU from Ampere on (compute capability 8.0), not {_text(capability)}"
    if capability >= (10, 0) and version < LEAST_TRITON_OF_BLACKWELL:
        return f"for Blackwell it needs Triton {_text(LEAST_TRITON_OF_BLACKWELL)} or newer, not {triton.__version__}"
    if capability[0] == 9 and (found := _ptxas_version()) < LEAST_PTXAS:
        return (
            f"Triton {triton.__version__} assembles for Hopper by ptxas {_text(found)}, whose products may be wrong: install Triton 3.9, or set "
            f"TRITON_PTXAS_PATH to the ptxas of CUDA {_text(LEAST_PTXAS)} or newer (in the package nvidia-cuda-nvcc)"
        )
    return ""


def shared_bytes(capability: tuple[int, int] | None) -> float:
    """Shared memory of a thread block on an NVIDIA GPU; without a bound on AMD's, where operands are in registers, and where no GPU is named."""
    return math.inf if torch.version.hip or capability is None else Target("sm_{}{}".format(*capability)).shared_bytes


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _ptxas_version() -> tuple[int, ...]:
    """Of the assembler that Triton uses for Hopper; (0,) where there is none."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return tuple(map(int, get_ptxas(90).version.split(".")))
    except (RuntimeError, AttributeError, ValueError):
        return (0,)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
