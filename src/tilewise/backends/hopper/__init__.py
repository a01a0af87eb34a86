"""The Hopper backend: forward passes on an H100 or H200 by the kernel of forward.py, in NVIDIA's CuTe DSL.

The DSL is imported when the first kernel is compiled; without it, or without such a GPU, `why_not` says so.
"""

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

from tilewise.backends.hopper import forecast
from tilewise.backends.hopper.config import TILES, configure, tile_dims
from tilewise.backends.hopper.repeat import Repeat
from tilewise.hopper import compile as hopper
from tilewise.machines import H100, machine_for
from tilewise.masks import Causal, Mask
from tilewise.problem import Call, Gradients, Problem

__all__ = ["Hopper"]

SECTION_BYTES = 32 << 20  # of the L2 cache's 50 MB, for keys and values that are read at the same time
FAR = 1 << 30  # beyond every key, and far from overflowing when a row is added


class Hopper:
    """The kernels of the ladder's end, for every shape that they cover."""

    name = "hopper"

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences that say why this backend cannot run the problem; empty when it can."""
        if problem.device != "cuda":
            return [f"it computes on Hopper GPUs, the tensors are on {problem.device}"]
        wrong = []
        if problem.dtype not in (torch.bfloat16, torch.float16):
            wrong.append(f"it computes bf16 and fp16, not {problem.dtype}")
        dims = problem.head_dim, problem.head_dim_v
        if tile_dims(*dims) is None or any(dim % hopper.ALIGNMENT for dim in dims):
            wrong.append(
                f"it takes head_dim and head_dim_v up to {max(TILES)[0]} that are multiples of {hopper.ALIGNMENT}, not {dims[0]} and {dims[1]}"
            )
        if problem.mask not in ("full", "band"):
            wrong.append(f"it takes full masks and single bands (causal, window), not {problem.mask}")
        wrong += [f"it has no {name} yet" for name in ("softcap", "bias", "alibi", "sink", "dropout") if getattr(problem, name)]
        if problem.grad:
            wrong.append("it has no backward pass yet")
        return wrong or hopper.why_not_here()

    def tile(self, call: Call) -> tuple[int, int]:
        """(tile_m, tile_n) of the kernel."""
        config = self._config(call)
        return config.tile_m, config.tile_n

    def describe(self) -> str:
        return "" if hopper.why_not_here() else f"CuTe DSL kernels for {hopper.ARCH}"

    def details(self, call: Call) -> list[str]:
        return forecast.lines(self._config(call), call, machine_for(call.q.device) or H100)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32."""
        batch, seqlen_q, heads_q, _ = call.q.shape
        o = torch.empty((batch, seqlen_q, heads_q, call.head_dim_v), dtype=call.q.dtype, device=call.q.device)
        lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=call.q.device)
        if lse.numel() == 0 or call.seqlen_k == 0:
            return o.zero_(), lse.fill_(-math.inf)
        q, scale = _positive_scale(call.q, call.scale)
        config = self._config(call)
        kernel = hopper.compiled(_launch(), arguments, config)
        with torch.cuda.device(q.device):
            tensors = [hopper.aligned(x) for x in (q, call.k, call.v)]
            kernel(*tensors, o, lse, _counter(q.device), *_rest(call, config, scale))
        return o, lse

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        raise NotImplementedError("hopper has no backward pass yet")  # why_not says so before

    def repeat(self, call: Call) -> Repeat | None:
        """The short way for more calls like this one (see `repeats`)."""
        tensors, config = (call.q, call.k, call.v), self._config(call)
        if call.scale <= 0.0 or call.q.numel() == 0 or call.k.numel() == 0 or not all(map(hopper.strided, tensors)):
            return None
        kernel = hopper.compiled(_launch(), arguments, config)
        device = call.q.device
        return Repeat(call, kernel, _rest(call, config, call.scale), lambda: (_counter(device),), self.backward)

    def kernels(self, call: Call) -> list[tuple]:
        """What `compile.compiled` takes, for every kernel that the call launches."""
        return [(_launch(), arguments, self._config(call))]

    def _config(self, call: Call):
        sees = "all" if call.mask.kind == "full" else "until" if isinstance(call.mask, Causal) else "interval"
        return configure(call.q.dtype, call.head_dim, call.head_dim_v, sees)


def arguments(config) -> list:
    """Stand-ins for `forward.launch`'s tensors, band and scale."""
    from tilewise.hopper.dsl import BFloat16, Float16, Float32, Int32

    dtype = {torch.bfloat16: BFloat16, torch.float16: Float16}[config.dtype]
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v = (hopper.size() for _ in range(7))
    q, k = (hopper.tensor(dtype, batch, *sizes, dim) for sizes in ((seqlen_q, heads_q), (seqlen_k, heads_k)))
    v, o = (hopper.tensor(dtype, batch, *sizes, dim_v) for sizes in ((seqlen_k, heads_k), (seqlen_q, heads_q)))
    lse = hopper.tensor(Float32, batch, heads_q, seqlen_q, aligned=False)
    counter = hopper.tensor(Int32, 1, aligned=False)
    return [q, k, v, o, lse, counter, *(Int32(0) for _ in range(8)), Float32(1.0)]


def _launch() -> str:
    """By name, so that a kernel from the cache needs no DSL."""
    return "tilewise.backends.hopper.forward:launch"


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_COUNTERS: dict[tuple, Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """What the thread blocks of a launch draw from: one a stream, since launches on one stream do not overlap; a graph gets its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _COUNTERS[key]


def _section(call: Call, config) -> int:
    """Heads whose tiles are mixed, longest first: as many as share the L2 cache; one where all tiles are alike."""
    if config.sees != "until":
        return 1
    a_head = call.seqlen_k * (config.head_dim + config.head_dim_v) * 2
    return max(1, min(SECTION_BYTES // a_head, call.batch * call.heads_k)) * call.group


def _rest(call: Call, config, scale: float) -> tuple:
    """What the kernel takes after its counter; none of it depends on what the tensors hold."""
    band = _band(call.mask, call.seqlen_q, call.seqlen_k)
    return *band, _section(call, config), _multiprocessors(call.q.device), scale / math.log(2)


@lru_cache(maxsize=4096)
def _band(mask: Mask, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """(q0, q1, k0, k1, lo, hi) of the mask's one band; nothing visible gives an empty one."""
    (plane,) = mask.planes(seqlen_q, seqlen_k, 1, 1)
    bands = list(plane.region)
    if not bands:
        return 0, 0, 0, 0, -FAR, FAR
    (band,) = bands
    return *band[:4], max(band.lo, -FAR), min(band.hi, FAR)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernel takes maxima of unscaled scores, so its scale is positive."""
    if scale > 0.0:
        return q, scale
    return (-q, -scale) if scale < 0.0 else (torch.zeros_like(q), 1.0)
