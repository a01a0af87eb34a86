"""What an additive bias costs: tilewise with and without one, and torch's SDPA with it as `attn_mask`, in turns in one process.

python tools/biases.py [--out ROWS.jsonl] [--device cuda] [--direction bwd] [--only PATTERN ...] [--sdpa cudnn,efficient] [--budget 0.3]

The cells: scores of relative positions (a bias a head, query and key), of keys (a bias a key and sequence), and those whose gradient is asked for,
too. Results have to be within CLOSE of each other before anything is timed. To compare two states of the source, run it once with each, in turns
(PYTHONPATH, TILEWISE_COMMIT).
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.bench.provenance import provenance
from tilewise.bench.sets import Workload
from tilewise.bench.store import Row, append
from tilewise.bench.timing import interleave
from tilewise.machine.roofline import DIRECTIONS
from tilewise.masks import Causal, Full, Mask

CLOSE = 2**-6  # of the largest number: results and gradients are rounded to eight bits
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


@dataclass(frozen=True)
class Cell:
    workload: Workload
    shape: tuple[int, int, int, int]  # of the bias: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k)
    grad: bool  # of the bias

    @property
    def id(self) -> str:
        return f"{self.workload.id} bias {'x'.join(map(str, self.shape))}{' with its gradient' if self.grad else ''}"


def cells(direction: str) -> list[Cell]:
    found = []

    def add(batch: int, seqlens: tuple[int, int], heads: int, dims: tuple[int, int], mask: Mask, varies: str, grad: bool = False) -> None:
        sizes = {
            "batch": batch,
            "seqlen_q": seqlens[0],
            "seqlen_k": seqlens[1],
            "heads_q": heads,
            "head_dim": dims[0],
            "head_dim_v": dims[1],
        }
        workload = Workload(name="biases", mask=mask, dtype=torch.bfloat16, direction=direction, **sizes)
        shape = tuple(size if name in varies else 1 for name, size in zip("bhq", (batch, heads, seqlens[0]), strict=True))
        found.append(Cell(workload, (*shape, seqlens[1]), grad))

    for dims, heads in ((64, 64), 32), ((128, 128), 16), ((192, 128), 16), ((256, 256), 8):
        for mask in Full(), Causal():
            add(4, (4096, 4096), heads, dims, mask, "hq")
    add(4, (4096, 77), 16, (128, 128), Full(), "hq")
    add(4, (4096, 77), 32, (64, 64), Full(), "b")
    if direction != "fwd":
        add(4, (1024, 1024), 16, (128, 128), Full(), "b", grad=True)
        add(4, (4096, 4096), 16, (128, 128), Full(), "bh", grad=True)
        add(1, (1024, 1024), 8, (64, 64), Full(), "q", grad=True)
        add(4, (2048, 2048), 16, (128, 128), Causal(), "hq", grad=True)
    return found


def contenders(cell: Cell, bias: Tensor, sdpa: list[str]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """attend(q, k, v) of each; "tilewise, no bias" is another result, for its time."""
    mask, hidden = cell.workload.mask, bias
    if isinstance(mask, Causal):  # SDPA has one argument for both
        seen = torch.ones(cell.workload.seqlen_q, cell.workload.seqlen_k, dtype=torch.bool, device=bias.device).tril()
        hidden = bias.masked_fill(~seen, -torch.inf)

    def of_torch(kernel: str):
        def attend(q, k, v):
            with sdpa_kernel(KERNELS[kernel]) if kernel else nullcontext():
                return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=hidden).transpose(1, 2)

        return attend

    found = {
        "tilewise": lambda q, k, v: tilewise.attention(q, k, v, mask=mask, bias=bias),
        "tilewise, no bias": lambda q, k, v: tilewise.attention(q, k, v, mask=mask),
    }
    return found | {f"sdpa:{kernel}".rstrip(":"): of_torch(kernel) for kernel in sdpa}


def call_of(attend, inputs, leaves: list[Tensor], direction: str) -> Callable[[], list[Tensor]]:
    """What is timed; returns O, or gradients of the leaves."""
    q, k, v, d_o = inputs
    if direction == "fwd":
        return lambda: [attend(q, k, v)]
    if direction == "fwd+bwd":
        return lambda: list(torch.autograd.grad(attend(q, k, v), leaves, d_o, retain_graph=True))  # that of SDPA's mask stays
    o = attend(q, k, v)
    return lambda: list(torch.autograd.grad(o, leaves, d_o, retain_graph=True))


def measure(cell: Cell, device: torch.device, sdpa: list[str], budget_s: float) -> list[Row]:
    workload, calls, results = cell.workload, {}, {}
    inputs = workload.inputs(seed=0, device=device)
    generator = torch.Generator(device).manual_seed(1)
    bias = torch.randn(cell.shape, generator=generator, device=device).to(workload.dtype).requires_grad_(cell.grad)
    blank = {"name": workload.name, "case": {**workload.case, "bias": "x".join(map(str, cell.shape)), "bias_grad": int(cell.grad)}}
    rows = []
    for name, attend in contenders(cell, bias, sdpa).items():
        leaves = [*inputs[:3], *([bias] if cell.grad and name != "tilewise, no bias" else [])]
        try:
            call = call_of(attend, inputs, leaves, workload.direction)
            results[name] = call()
        except RuntimeError as refused:
            rows.append(Row(impl=name, clock="none", reason=str(refused).splitlines()[0], **blank))
            continue
        calls[name] = call
    far = {name: distance(found, results["tilewise"]) for name, found in results.items() if name != "tilewise, no bias"}
    if max(far.values()) > CLOSE:
        raise SystemExit(f"{cell.id}: results differ, by so much of the largest number: {far}")
    clock, environment = "events" if device.type == "cuda" else "wall", provenance(device)
    for name, stats in interleave(calls, budget_s=budget_s, device=device, clock=clock).items():
        times = {"median_s": stats.median, "p10_s": stats.p10, "p90_s": stats.p90, "samples": stats.samples}
        rates = {"flops": workload.flops, "flops_per_s": workload.flops / stats.median, "passed": True}
        rows.append(Row(impl=name, clock=clock, environment=environment, **blank, **times, **rates))
    return rows


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, over the tensors, of their largest difference in terms of the largest number."""
    return max(float((x.float() - y.float()).abs().max() / y.float().abs().max()) for x, y in zip(found, expected, strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="the JSON lines that rows are added to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--direction", default="bwd", choices=DIRECTIONS)
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cells whose ids match one of these")
    parser.add_argument(
        "--sdpa", default="cudnn,efficient", help='kernels of torch, "" for its own choice (default: %(default)s); none: leave it out'
    )
    parser.add_argument("--budget", type=float, default=0.3, metavar="SECONDS", help="to time one of them (default: %(default)s)")
    given = parser.parse_args(argv)
    sdpa = [] if given.sdpa == "none" else given.sdpa.split(",")
    for cell in cells(given.direction):
        if given.only and not any(fnmatch(cell.id, pattern) for pattern in given.only):
            continue
        rows = measure(cell, torch.device(given.device), sdpa, given.budget)
        for row in rows:
            took = row.reason or f"{row.median_s * 1e3:8.3f} ms  {row.flops_per_s / 1e12:6.1f} TFLOP/s"
            print(f"{cell.id:72s} {row.impl:18s} {took}", flush=True)
        if given.out:
            append(given.out, rows)


if __name__ == "__main__":
    main()
