"""`python -m tilewise.ladder [NAME ...]`: list the rungs, then check and time them on this machine's Hopper GPU.

Without names every rung of the forward pass runs over the sweep; those of the backward pass where they are named (b1..b3), and then gradients are
timed. SEQLEN, HEADDIM and CAUSAL in the environment (comma-separated) choose cells of it, DEVICE the GPU (cuda or cuda:N), and CHECK=1 prints what
the checks said. `k1..k8` is a range, k3, k4 and k4_qk answer as well, and peers are named as for `tilewise bench`. With `--measured` nothing runs:
the cells are those that benchmarks/results of this checkout has, and no GPU is needed.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from tilewise import bench
from tilewise.ladder import ALIASES, BACKWARD_RUNGS, RUNGS, VARIANTS
from tilewise.sm90.jit import why_not_here

OK, WRONG, UNUSABLE = 0, 1, 2
SELECTORS = {"SEQLEN": "seqlen", "HEADDIM": "head_dim", "CAUSAL": "causal"}
MEASURED, RESULTS = "--measured", Path("benchmarks/results")
TIMING = bench.Timing(budget_s=0.15, clocks=("events",), once_above_s=0.3)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run; the exit code."""
    console = Console() if sys.stdout.isatty() else Console(width=140)
    measured, arguments = MEASURED in arguments, [name for name in arguments if name != MEASURED]
    if any(name.startswith("-") for name in arguments):
        console.print(__doc__, highlight=False, markup=False)
        return OK if {"-h", "--help"} & set(arguments) else UNUSABLE
    try:
        contenders = bench.find(",".join(arguments) or ",".join(RUNGS))
        selected = {option: environment[name] for name, option in SELECTORS.items() if name in environment}
        cells = bench.ladder_from(selected | ({"direction": "bwd"} if backward(contenders) else {}))
        device = _device(environment.get("DEVICE", "cuda"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    if measured:
        return _show_measured(
            {each.name for each in contenders}, {(cell.head_dim, cell.seqlen_k, str(cell.mask)) for cell in cells}, console
        )
    if not arguments:
        for rung in (*RUNGS.values(), *VARIANTS.values(), *BACKWARD_RUNGS.values()):
            console.print(f"{rung.name:13} {rung.title}", highlight=False, markup=False)
    if reasons := why_not_here():
        print(f"The ladder cannot run here: {'; '.join(reasons)}.", file=sys.stderr)
        return UNUSABLE
    rows = bench.run(cells, contenders, device=device, memory=False, timing=TIMING)
    if environment.get("CHECK", "0") != "0":
        console.print(bench.verdicts(rows))
    console.print(bench.ladder_table(rows))
    for reason in dict.fromkeys(f"{row.impl}: {row.reason}" for row in rows if row.reason):
        console.print(reason, highlight=False, markup=False)
    return WRONG if any(row.passed is False for row in rows) else OK


def _show_measured(names: set[str], places: set[tuple], console: Console) -> int:
    rows = [
        row for row in bench.load(*sorted(RESULTS.glob("*.jsonl"))) if row.name == "ladder" and ALIASES.get(row.impl, row.impl) in names
    ]
    rows = [row for row in rows if (row.case["head_dim"], row.case["seqlen_k"], row.case["mask"]) in places]
    if not rows:
        print(f"{RESULTS} has no such rows here: run this in a checkout, and name rungs and cells of the ladder's sweep", file=sys.stderr)
        return UNUSABLE
    console.print(bench.ladder_table(rows))
    return OK


def backward(contenders: Sequence) -> bool:
    """Whether a rung of the backward pass is among them, so that it is gradients that are timed."""
    return any(each.name in BACKWARD_RUNGS for each in contenders)


def _device(name: str) -> str:
    """The name of a GPU. ValueError for another device, and for what names none."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"DEVICE is {name!r}; it must be a device as torch names it, such as cuda or cuda:1") from None
    if kind != "cuda":
        raise ValueError(f"DEVICE is {name!r}; the rungs run on a Hopper GPU: cuda, or cuda:N for the N-th")
    return name
