"""GPUs by their data sheets: what the roofline is drawn from."""

from dataclasses import dataclass, field

import torch

KB = 1024


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU by its data sheet: dense rates (no sparsity) in FLOP/s, bandwidth in bytes/s, on-chip sizes in bytes."""

    name: str
    sms: int
    peak: dict[torch.dtype, float] = field(hash=False)
    scalar_peak: float  # fp32 outside the tensor cores
    exp_peak: float  # exponentials/s: 16 a clock on every SM's special-function units
    hbm_bandwidth: float
    l1_bytes: int  # an SM's L1 cache and shared memory together
    smem_bytes: int  # the part of it that can be shared memory
    smem_block_bytes: int  # what one thread block may take
    registers: int = 65536  # 32-bit, per SM
    threads: int = 2048  # resident per SM

    def ridge(self, dtype: torch.dtype) -> float:
        """FLOP/byte at which compute and memory take equally long; below it a kernel is memory-bound."""
        return self.peak[dtype] / self.hbm_bandwidth

    def attainable(self, intensity: float, dtype: torch.dtype) -> float:
        """FLOP/s the roofline allows at `intensity` (FLOP/byte)."""
        return min(self.peak[dtype], intensity * self.hbm_bandwidth)


A100 = Machine(
    name="A100 SXM 80GB",
    sms=108,
    peak={torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12, torch.float64: 19.5e12},
    scalar_peak=19.5e12,
    exp_peak=108 * 16 * 1.41e9,
    hbm_bandwidth=2.0e12,  # as FA2 section 2.1 rounds it; the data sheet says 2.039
    l1_bytes=192 * KB,
    smem_bytes=164 * KB,
    smem_block_bytes=163 * KB,
)
H100 = Machine(
    name="H100 SXM 80GB",
    sms=132,
    peak={
        torch.float8_e4m3fn: 1979e12,
        torch.bfloat16: 989.4e12,
        torch.float16: 989.4e12,
        torch.float32: 66.9e12,
        torch.float64: 66.9e12,
    },
    scalar_peak=66.9e12,
    exp_peak=3.9e12,  # FA3 section 3.1
    hbm_bandwidth=3.35e12,
    l1_bytes=256 * KB,
    smem_bytes=228 * KB,
    smem_block_bytes=227 * KB,
)
H200 = Machine(**{**vars(H100), "name": "H200 SXM 141GB", "hbm_bandwidth": 4.8e12})
MACHINES = {"A100": A100, "H100": H100, "H200": H200}


def machine_for(device: torch.device | str) -> Machine | None:
    """The preset of a CUDA device, by its name; None for a CPU and for a GPU without a preset."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip:
        return None
    name = torch.cuda.get_device_name(device)
    if "PCIe" in name or "NVL" in name:  # other clocks and bandwidths than the SXM parts above
        return None
    return next((machine for key, machine in MACHINES.items() if key in name), None)
