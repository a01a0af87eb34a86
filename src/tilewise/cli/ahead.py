"""What `--ahead` does before `tilewise bench` and `tilewise bench train` measure."""

import time

import torch
from rich.console import Console

from tilewise.bench.ahead import compile_ahead, jobs
from tilewise.display.progress import progress


def run(console: Console, workloads: list, impls: list, device: torch.device, processes: int | None) -> None:
    """Fill the contenders' caches; what fails is said, and the run goes on."""
    todo, began = jobs(workloads, impls, device), time.monotonic()
    with progress(console) as bars:
        task = bars.add_task("Compiling", total=len(todo), note="")
        for each in compile_ahead(todo, processes):
            bars.update(task, advance=1, note=each.impl)
            if each.reason:
                console.print(f"not compiled ahead: {each.impl}, {each.what}: {each.reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"compiled ahead: {len(todo)} in {time.monotonic() - began:.0f} s", highlight=False)
