"""Where the demo computes and in which dtype: fp32 on a CPU, bf16 on a GPU that has it, with weights and their sums in fp32 (autocast)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tilewise.bench.timing import Clock

SAME_LOSS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""For each dtype of the attention the largest relative difference between two losses of one step that counts as the same training. Rounding differs,
and training magnifies it: in bf16 torch's own ways of attention come to be 2.3e-2 apart within 120 steps (H200, two seeds, 2026-11-22:
lab/rows/demo-h200.jsonl).
"""
SAME_FIRST_LOSS = 1e-3
"""The same for the first loss, when the weights are still equal."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Place:
    """A device, and the dtype that attention gets there: fp32, or bf16 under autocast."""

    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return NAMES[self.dtype]

    @property
    def same_loss(self) -> float:
        return SAME_LOSS[self.dtype]

    @property
    def clock(self) -> "Clock":
        """The clock of `bench.timing.interleave`."""
        return "events" if self.device.type == "cuda" else "wall"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


CPU = Place(torch.device("cpu"), torch.float32)


def place_of(device: torch.device | None = None) -> Place:
    """The place on `device`; by default a GPU where there is one."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # ROCm has bf16 on every device, and numbers of its own for a capability.
    halves = device.type == "cuda" and (bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0))
    return Place(device, torch.bfloat16 if halves else torch.float32)
