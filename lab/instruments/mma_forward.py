"""The forward pass of mma_kernel.py, which has sm_80's instructions alone, beside FlashAttention-2 and Triton. For a GPU of NVIDIA's from Ampere on.

python lab/instruments/mma_forward.py --out rows.jsonl, and

    --variant "wide: tile_n=64, ring=3"    fields of its Config other than those that `configure` chooses, timed beside them
    --dtype fp16, --budget 0.5             what is timed, and seconds for a workload
    --resources --arch sm_80               compile, print registers and the stack's bytes; needs no GPU

Before anything is timed, every variant is held to the fp64 oracle: odd lengths, groups of heads, poisoned memory, two runs with the same bits.
Workloads are the papers' sweep at head_dim 64 and 128.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

if "--arch" in sys.argv[:-1]:
    os.environ["CUTE_DSL_ARCH"] = sys.argv[sys.argv.index("--arch") + 1]
elif torch.cuda.is_available():  # the DSL reads it as it is imported, and a GPU runs its own architecture's code alone
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("CUTE_DSL_ARCH", f"sm_{major}{minor}{'a' if major >= 9 else ''}")

from choices import named
from mma_kernel import arguments, attention, configure, launch

from tilewise.bench import find
from tilewise.bench.provenance import provenance
from tilewise.bench.runner import call_of
from tilewise.bench.sets.named import ladder_cells
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, Full
from tilewise.sm90 import jit
from tilewise.testing import conformance
from tilewise.testing.cases import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIELDS = "tile_m", "tile_n", "warps", "ring", "q_in_registers", "ahead"
OTHERS = "sdpa:flash", "tilewise:triton"
CLOSE = 2**-7  # of the largest number: outputs are rounded to eight bits


class Checked:
    """A choice as the conformance checks call it."""

    def __init__(self, choice: dict) -> None:
        self.choice = choice

    def why_not(self, problem) -> list[str]:
        return []

    def forward(self, call) -> tuple[Tensor, Tensor]:
        return attention(call.q, call.k, call.v, call.mask == Causal(), call.scale, **self.choice)


def check(choice: dict, dtype: str) -> float:
    """AssertionError unless it is right on the GPU; else the largest share of an allowance that it uses."""
    lengths = (1, 1), (1, 300), (63, 63), (130, 200), (200, 130), (500, 1023)
    sizes = [(*each, head_dim, mask) for each in lengths for head_dim in (64, 128) for mask in (Full(), Causal())]
    return max(
        conformance.run_forward(Checked(choice), Case(seqlen_q=m, seqlen_k=n, head_dim=d, mask=mask, dtype=dtype), device="cuda")
        for m, n, d, mask in sizes
    )


def measure(workload, variants: dict[str, dict], budget: float) -> dict:
    """A row: milliseconds and TFLOP/s of each, whether runs had the same bits, how far each is from FlashAttention-2 (a share of the largest)."""
    device = torch.device("cuda")
    inputs = workload.inputs(2, device)
    causal, calls = workload.mask == Causal(), {}
    for name, choice in variants.items():
        calls[name] = lambda choice=choice: attention(*inputs[:3], causal, **choice)[0]
    for impl in find(",".join(OTHERS)):
        if reasons := impl.why_not(workload, device):
            print(f"{impl.name}: {'; '.join(reasons)}", file=sys.stderr)
        else:
            calls[impl.name] = call_of(impl.prepare(workload, device), workload, inputs)
    outputs = {name: call() for name, call in calls.items()}
    known = outputs.get(OTHERS[0], outputs[next(iter(variants))])
    off = {name: ((o - known).abs().max() / known.abs().max()).item() for name, o in outputs.items()}
    if not all(each <= CLOSE for each in off.values()):
        raise AssertionError(f"{workload.id}: outputs differ: {off}")
    same = {name: all(torch.equal(outputs[name], calls[name]()) for _ in range(3)) for name in variants}
    stats = interleave(calls, budget_s=budget, device=device, clock="events")
    times = {name: {"ms": 1e3 * x.median, "p10": 1e3 * x.p10, "p90": 1e3 * x.p90} for name, x in stats.items()}
    for each in times.values():
        each["tflops"] = workload.paper_flops / each["ms"] / 1e9
    configs = {name: str(configure(workload.dtype, workload.head_dim, causal, **choice)) for name, choice in variants.items()}
    of_row = {"workload": workload.id, "arch": jit.arch(), "configs": configs, "results": times, "same": same, "off": off}
    return of_row | {"samples": min(each.samples for each in stats.values()), "environment": provenance(device)}


def resources(variants: dict[str, dict]) -> None:
    """A line for each kernel: registers of a thread and bytes of its stack."""
    inspector = shutil.which("cuobjdump") or str(Path(import_module("triton.backends.nvidia").__file__).parent / "bin/cuobjdump")
    for (name, choice), dtype, head_dim, causal in itertools.product(variants.items(), DTYPES.values(), (64, 128), (False, True)):
        config = configure(dtype, head_dim, causal, **choice)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(jit.build(launch, arguments, config, f"--keep-cubin --dump-dir {tempfile.gettempdir()}", runs=False).__cubin__)
            file.flush()
            said = subprocess.run([inspector, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
        usage = {what: int(n) for what, n in re.findall(r"(REG|STACK):(\d+)", said.stdout + said.stderr)}
        print(
            json.dumps({"variant": name, "arch": jit.arch(), "config": str(config), "smem_bytes": config.smem_bytes, **usage}), flush=True
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variant", action="append", default=[], type=lambda text: named(text, FIELDS, "Config"), metavar="'NAME: FIELD=VALUE, ...'"
    )
    parser.add_argument("--arch", help="compile for it (default: the GPU here; sm_90a without one)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--budget", type=float, default=0.3, metavar="SECONDS", help="to time a workload (default: %(default)s)")
    parser.add_argument("--resources", action="store_true")
    parser.add_argument("--out", type=Path, help="append a row for each workload, as JSON lines")
    options = parser.parse_args(argv)
    variants = {"mma": {}, **dict(options.variant)}
    if options.resources:
        resources(variants)
        return 0
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here: run it on a machine with one, or with --resources")
    for name, choice in variants.items():
        print(f"{name}: right, {check(choice, options.dtype):.0%} of what is allowed", flush=True)
    for workload in ladder_cells(dtype=DTYPES[options.dtype]):
        row = measure(workload, variants, options.budget)
        print(workload.id, *(f"{name} {each['tflops']:.0f}" for name, each in row["results"].items()), "TFLOP/s", flush=True)
        if not all(row["same"].values()):
            print(f"two runs differ: {row['same']}", flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
