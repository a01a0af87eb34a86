"""What this machine can do at most, measured beside the attention it is compared with: the rate of a large matmul, and of a copy."""

from dataclasses import dataclass
from functools import cache

import torch

from tilewise.bench.timing import interleave


@dataclass(frozen=True)
class Ceiling:
    """`matmul`: FLOP/s of one large square product. `copy`: bytes/s of a large copy, the read and the write both counted."""

    matmul: float
    copy: float

    def share(self, flops: float, moved_bytes: float, seconds: float) -> float:
        """The fraction of the roofline reached: the least time these rates allow for the work, over the time taken."""
        return max(flops / self.matmul, moved_bytes / self.copy) / seconds


def ceiling(device: torch.device | str, dtype: torch.dtype) -> Ceiling:
    """Measure once a process for each device, dtype and number of threads; about a second. The shortest of the samples counts.

    The product is measured in the dtype as any caller would get it: on a CPU that computes it by conversion that is slower than fp32's.
    """
    return _measure(torch.device(device), dtype, torch.get_num_threads())


@cache
def _measure(device: torch.device, dtype: torch.dtype, threads: int) -> Ceiling:
    cpu_side = 1024 if threads <= 4 else 2048  # outgrows the caches, yet ends in tens of milliseconds
    side, copied = (8192, 1 << 30) if device.type == "cuda" else (cpu_side, 256 << 20)
    a, b = (torch.randn(side, side, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = "events" if device.type == "cuda" else "wall"
    taken = interleave(
        {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}, budget_s=0.4, device=device, clock=clock
    )
    return Ceiling(matmul=2 * side**3 / taken["matmul"].best, copy=2 * copied / taken["copy"].best)
