"""tilewise itself: attention by a backend of its choice or by one that is named, in 8 bits, and decode."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import tilewise
from tilewise.bench.peers.contender import Eight, not_in_eight_bits, quantised_ahead, too_large
from tilewise.bench.sets import Attend, Caches, Cell, Workload
from tilewise.errors import UnsupportedError
from tilewise.problem import Problem
from tilewise.runtime import dispatch

E4M3 = torch.float8_e4m3fn
EMULATION = "tiled"


@dataclass(frozen=True)
class Tilewise:
    """`tilewise.attention`, with its own choice of backend or the one named; with `precision` in 8 bits, quantising included."""

    backend: str | None = None
    precision: str | None = None

    @property
    def name(self) -> str:
        return ":".join(filter(None, ("tilewise", self.backend, self.precision)))

    @property
    def in_eight_bits(self) -> bool:
        return self.precision is not None

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        if self.precision is not None:
            wrong = not_in_eight_bits(workload) + workload.lacking("scale", "softcap", "sink", "alibi")
            return wrong or _no_kernel(replace(workload.problem(device), precision=self.precision))
        try:
            chosen = dispatch.choose(workload.problem(device), self.backend)
        except UnsupportedError as error:
            return [str(error)]
        return too_large(workload, device, matrices=6, itemsize=8) if chosen.name == "reference" else []

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        options = {"mask": workload.mask, "scale": workload.scale, "softcap": workload.softcap}
        options |= {"backend": self.backend, "precision": self.precision}
        return lambda q, k, v, **extras: tilewise.attention(q, k, v, **options, **extras)


def _no_kernel(problem: Problem) -> list[str]:
    """Why tilewise has none for it; on a CPU its emulation is what there is."""
    try:
        chosen = dispatch.choose(problem)
    except UnsupportedError as error:
        return [str(error)]
    emulated = chosen.name == EMULATION and problem.device != "cpu"
    return ["there is no kernel for that, and the emulation is no contender"] if emulated else []


@dataclass(frozen=True)
class TilewiseE4M3:
    """`tilewise.attention` of e4m3 tensors with a scale a head."""

    name: str = "tilewise:e4m3"
    in_eight_bits = True

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        problem = replace(workload.problem(device), dtype=E4M3, out_dtype=torch.bfloat16, scales=("head", "head", "head"))
        return not_in_eight_bits(workload) + workload.lacking("scale", "softcap") or _no_kernel(problem)

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        options = {"mask": workload.mask, "scale": workload.scale, "softcap": workload.softcap}

        def attend(x: Eight) -> Tensor:
            a, b, c = x.scales
            return tilewise.attention(x.q, x.k, x.v, q_scale=a, k_scale=b, v_scale=c, **options)

        return quantised_ahead(attend)


@dataclass(frozen=True)
class TilewiseDecode:
    """`tilewise.decode`, with its own choice of backend or the one named."""

    backend: str | None = None

    @property
    def name(self) -> str:
        return "tilewise" if self.backend is None else f"tilewise:{self.backend}"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        return []

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]:
        options = {"cache_seqlens": caches.seqlens, "page_table": caches.table, "shared_prefix": caches.cell.prefix}
        return lambda copy: tilewise.decode(caches.q, *caches.copies[copy], **options, backend=self.backend)
