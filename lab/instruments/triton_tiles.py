"""Tiles of the Triton backend's passes next to those that ship, on cells of the set `triton`, in turns in one process, on a machine with a GPU.

    python lab/instruments/triton_tiles.py "fwd: 64 softcap, 64 ALiBi: forward=128,64,8,3 | forward=64,64,4,3,168"
    python lab/instruments/triton_tiles.py --out rows.jsonl "bwd: 128 causal: dkdv=64,128,8,3 | dkdv=32,64,4,4 dq=64,64,4,2" "fwd: ..."

Each text has a direction, cells and trials. A cell: head_dim and full, causal, window, documents, softcap, ALiBi, bias or sink; or dropout, which is
causal and not of the set; or a name of the set `models`. A trial: passes, and tile_m, tile_n, warps, stages and registers of each; the rest is what
ships. Trials are compiled ahead, side by side, and their results compared with those of what ships. Of gradients the whole backward pass is timed.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/shared"))

import torch
from triton_facts import measured

from tilewise.backends.triton import bound as bounds
from tilewise.backends.triton.config import Config
from tilewise.backends.triton.targets import Target, of_device
from tilewise.bench.provenance import provenance
from tilewise.bench.sets import SETS, Workload
from tilewise.bench.tables.goals import kind_of
from tilewise.bench.timing import interleave
from tilewise.masks import Full
from tilewise.problem import Call, Dropout

PASSES = {"fwd": ("forward",), "bwd": ("dkdv", "dq")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="'DIRECTION: CELLS: TRIALS'")
    parser.add_argument("--budget", type=float, default=0.1, metavar="SECONDS", help="to time one of them (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the rows here, as JSON lines")
    arguments = parser.parse_args()
    groups = [job for text in arguments.groups for job in jobs_of(text)]
    todo = list(dict.fromkeys(job for group in groups for job in group))
    target = of_device(torch.device("cuda", torch.cuda.current_device()))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        takes = dict(zip(todo, pool.map(partial(compile_all, target=target), todo), strict=True))
    for group in groups:
        calls = {job: run(job) for job in group if not takes[job].startswith("not ")}
        base = calls[group[0]]()
        stats = interleave({job.tiles: call for job, call in calls.items()}, budget_s=arguments.budget, device="cuda", clock="events")
        for job in group:
            row = {"cell": job.cell, "direction": job.direction, "tiles": job.tiles or "ships", "takes": takes[job]}
            if job in calls:
                pairs = zip(calls[job](), base, strict=True)
                apart = max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs)
                row |= {"ms": round(1e3 * stats[job.tiles].median, 4), "apart": apart}
            print(row, flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row | {"environment": provenance("cuda")}) + "\n")


class Job(NamedTuple):
    direction: str
    cell: str
    tiles: str  # as in a trial; empty: what ships

    @property
    def workload(self) -> Workload:
        if named := [each for each in SETS["models"](direction=self.direction) if each.name == self.cell]:
            return named[0]
        dim, kind = self.cell.replace("dropout", "causal").split()
        cells = [each for each in SETS["triton"](direction=self.direction) if kind in kind_of(each).split()]
        found = next((each for each in cells if each.head_dim == int(dim)), cells[0])
        return replace(found, head_dim=int(dim), head_dim_v=int(dim), heads_q=2048 // int(dim), heads_k=2048 // int(dim))

    @property
    def call(self) -> Call:
        call = self.workload.call()
        return replace(call, dropout=Dropout(0.1, 0, 0)) if "dropout" in self.cell else call

    @property
    def chosen(self) -> dict[str, Config]:
        found = {}
        for name, numbers in re.findall(r"(forward|dkdv|dq)=([\d,]+)", self.tiles):
            tile_m, tile_n, warps, stages, *registers = map(int, numbers.split(","))
            found[name] = Config(tile_m, tile_n, warps, stages, registers=registers[0] if registers else 0)
        return found


def jobs_of(text: str) -> list[list[Job]]:
    """For each cell what ships, and the trials."""
    direction, cells, trials = (part.strip() for part in text.split(":"))
    tiles = ["", *(each.strip() for each in trials.split("|"))]
    return [[Job(direction, cell.strip(), each) for each in tiles] for cell in cells.split(",")]


def run(job: Job) -> Callable[[], Sequence[torch.Tensor]]:
    """What launches the passes, on random tensors."""
    inputs = job.workload.inputs(0, "cuda")
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | job.workload.extras(0, "cuda")
    call = replace(job.call, **{name: x.detach() for name, x in given.items()})
    bound = bounds.Bound(call, job.chosen)
    if job.direction == "fwd":
        return lambda: bound.results(call)
    o, lse = bound.results(call)
    return lambda: bound.backward(call.q, call.k, call.v, o, lse, inputs.d_o, None, call.extras, False)[:3]


def compile_all(job: Job, target: Target) -> str:
    """What the passes take, compiled into Triton's cache, or "not" and why."""
    bound, said = bounds.Bound(replace(job.call, mask=Full()), job.chosen, target), []
    try:
        for name in PASSES[job.direction]:
            facts, _ = (measured(kernel, target) for kernel in bound.kernels(name, bounds.kind_of(job.workload.mask)))
            if facts.shared > target.shared_bytes:
                return f"not {facts.shared} bytes of shared memory"
            said.append(f"{name}: {facts.registers} registers, {facts.stack} bytes of stack, {facts.shared} of shared memory")
    except Exception as error:  # of the compiler, which has many
        return f"not {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return "; ".join(said)


if __name__ == "__main__":
    main()
