"""What dropout costs on a GPU: ours without it and with it, and torch's flash attention likewise. JSON lines; within a minute.

    python tools/gpu/dropout_bench.py [> rows.jsonl]

Of each cell: `gpu_ms`, the median between two events around one call, and `wall_ms`, the median of a call that is waited for; forward and backward.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.backends.hopper import Hopper, warmup
from tilewise.masks import Causal, Full
from tilewise.problem import Call, Dropout

SHAPES = ((4, 4096, 16, 64, True), (4, 4096, 16, 128, True), (4, 4096, 16, 128, False), (16, 1024, 16, 128, True))  # the last: causal
RATES = (0.0, 0.1)
SECONDS = 0.25  # for each figure


def kernels(shape: tuple, p: float) -> list[warmup.Kernel]:
    batch, seqlen, heads, dim, causal = shape
    x = torch.empty(batch, seqlen, heads, dim, dtype=torch.bfloat16, device="meta")
    dropout = Dropout(p, 0, 0) if p else None
    call = Call(q=x, k=x, v=x, mask=Causal() if causal else Full(), scale=dim**-0.5, grad=True, dropout=dropout)
    return [warmup.Kernel(*kernel) for kernel in Hopper().kernels(call)]


def ours(q, k, v, causal: bool, p: float):
    return tw.attention(q, k, v, causal=causal, dropout_p=p, backend="hopper")


def torchs(q, k, v, causal: bool, p: float):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=p).transpose(1, 2)


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """(gpu_ms, wall_ms)"""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    found, begin = [], time.perf_counter()
    while time.perf_counter() - begin < SECONDS or len(found) < 5:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        found.append((first.elapsed_time(last), 1e3 * (time.perf_counter() - start)))
    return tuple(statistics.median(column) for column in zip(*found, strict=True))


def rows(shape: tuple):
    batch, seqlen, heads, dim, causal = shape
    q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    flops = 4 * batch * heads * seqlen**2 * dim / (2 if causal else 1)
    for name, attend in (("tilewise", ours), ("torch flash", torchs)):
        for p in RATES:
            o = attend(q, k, v, causal, p)
            d_o = torch.randn_like(o)
            passes = {
                "fwd": (flops, lambda attend=attend, p=p: attend(q.detach(), k.detach(), v.detach(), causal, p)),
                "bwd": (2.5 * flops, lambda o=o, d_o=d_o: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)),
            }
            for direction, (work, function) in passes.items():
                gpu, wall = timed(function)
                row = {"impl": name, "pass": direction, "b": batch, "s": seqlen, "h": heads, "d": dim, "causal": causal, "dropout_p": p}
                yield row | {"gpu_ms": round(gpu, 4), "wall_ms": round(wall, 4), "tflops": round(work / gpu / 1e9, 1)}


def main() -> int:
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    wanted = dict.fromkeys(kernel for shape in SHAPES for p in RATES for kernel in kernels(shape, p))
    failed = [outcome.reason for outcome in warmup.warm(wanted) if outcome.state == "failed"]
    for shape in SHAPES:
        for row in rows(shape):
            print(json.dumps(row), flush=True)
    print(*failed, sep="\n", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
