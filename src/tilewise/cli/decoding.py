"""What `tilewise bench --set decode` does: every contender on batches of sequences with caches."""

from argparse import Namespace
from fnmatch import fnmatchcase
from functools import partial

import torch
from rich.console import Console

from tilewise.bench import append, ours
from tilewise.bench.memory import available_bytes
from tilewise.bench.peers import FOR_DECODE, find_for_decode
from tilewise.bench.runner import Timing, run_decode
from tilewise.bench.sets.decode import Cell, decode_cells, title_of
from tilewise.bench.tables.best_peer import decode_tables
from tilewise.cli.codes import FAILED, OK, UNUSABLE
from tilewise.cli.output import require_writable
from tilewise.display.progress import progress

FIXED = ("batch", "seqlen", "heads", "head_dim", "mask", "causal", "dtype", "direction", "data")
SHARE, SHARE_OF_A_CPU = 0.85, 0.01  # of the memory that is free, which caches may take


def run(options: Namespace, console: Console, device: torch.device) -> int:
    """Measure; FAILED when ours is wrong, UNUSABLE when nothing was timed."""
    if given := [name for name in FIXED if getattr(options, name) is not None]:
        raise ValueError(
            f"the set decode fixes its cells, so {', '.join(given)} cannot be given with it; choose some with --only 'b16 8k 32:8 *'"
        )
    if options.ahead:
        raise ValueError("ahead: the set decode compiles few kernels, as it comes to them; leave --ahead out")
    named, cells = ",".join(options.names) or options.impl, _chosen(options.only, device)
    impls = find_for_decode(named or FOR_DECODE)
    if not named:  # those that take none of the cells have no rows; where all are such, theirs say why
        impls = [impl for impl in impls if any(not impl.why_not(cell, device) for cell in cells)] or impls
    part, parts = options.part
    if options.out:
        require_writable(options.out)
    with progress(console) as bars:
        task = bars.add_task("Measuring", total=None, note="")
        rows = run_decode(
            cells[part - 1 :: parts],
            impls,
            device=device,
            timing=Timing(
                budget_s=options.budget_s, clocks=() if options.check else options.clock, once_above_s=options.once_above or float("inf")
            ),
            limit_s=options.limit or float("inf"),
            keep=partial(append, options.out) if options.out else None,
            progress=lambda done, total, text: bars.update(task, completed=done, total=total, note=text),
        )
    if options.check:
        for row in rows:
            verdict = "passed" if row.passed else f"{'FAILED' if row.passed is False else 'skipped'}: {row.reason}"
            console.print(f"{row.impl}, {title_of(row.case)}: {verdict}", highlight=False, markup=False, soft_wrap=True)
    else:
        console.print(decode_tables(rows), highlight=False, markup=False, soft_wrap=True)
    if options.out:
        console.print(f"{len(rows)} rows appended to {options.out}", highlight=False, soft_wrap=True)
    if any(row.passed is False and ours(row.impl) for row in rows):
        return FAILED
    return OK if any(row.passed if options.check else row.median_s is not None for row in rows) else UNUSABLE


def _chosen(patterns: str | None, device: torch.device) -> list[Cell]:
    """Cells with caches that fit into memory and titles that match one of the patterns; ValueError where none does."""
    free = available_bytes(device)
    share = SHARE_OF_A_CPU if device.type == "cpu" else SHARE
    cells = decode_cells(None if free is None else int(share * free))
    if patterns is not None:
        wanted = [pattern.strip() for pattern in patterns.split(",")]
        cells = [cell for cell in cells if any(fnmatchcase(cell.title, pattern) for pattern in wanted)]
        if not cells:
            raise ValueError(
                f"only is {patterns!r}, which matches no cell whose caches fit into memory; titles are such as 'b16 8k 32:8 p64 q1'"
            )
    return cells
