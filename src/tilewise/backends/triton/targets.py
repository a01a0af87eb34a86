"""The GPUs that kernels are compiled for, and what each has."""

import functools
from typing import NamedTuple

import torch

KIB = 1024
SHARED_KIB = {"sm80": 163, "sm86": 99, "sm90": 227, "sm100": 227, "cdna": 64, "gfx950": 160, "rdna": 64}
FAMILIES = {"sm_80": "sm80", "sm_86": "sm86", "sm_87": "sm80", "sm_89": "sm86", "sm_90": "sm90", "sm_100": "sm100", "sm_103": "sm100"}
FAMILIES |= dict.fromkeys(("sm_120", "sm_121"), "sm86") | {"gfx90a": "cdna", "gfx942": "cdna", "gfx950": "gfx950"}
FAMILIES |= dict.fromkeys(("gfx1100", "gfx1101", "gfx1200", "gfx1201"), "rdna")
"""Architecture to family: those of one family have the same tensor cores and as much shared memory."""
COMPILED = "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"
"""Those that the gate compiles for (tools/triton_gate.py)."""


class Target(NamedTuple):
    """An architecture by its name, such as "sm_90" or "gfx942"."""

    arch: str

    @property
    def nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def family(self) -> str:
        """As FAMILIES has it; of an architecture that is not there, that of the nearest older one, or RDNA."""
        if self.arch in FAMILIES:
            return FAMILIES[self.arch]
        if not self.nvidia:
            return "cdna" if self.arch.startswith("gfx9") else "rdna"
        older = [arch for arch in FAMILIES if arch.startswith("sm_") and int(arch[3:]) <= int(self.arch[3:])]
        return FAMILIES[max(older, key=lambda arch: int(arch[3:]), default="sm_80")]

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one thread block may have."""
        return SHARED_KIB[self.family] * KIB

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
    if torch.version.hip:
        return Target(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return Target(f"sm_{major}{minor}")
