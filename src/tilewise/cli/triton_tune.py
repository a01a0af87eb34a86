"""What `tilewise tune --backend triton` does: the fastest tiles of each pass, for the table of backends/triton/config.py."""

import datetime
from argparse import Namespace
from collections.abc import Callable, Mapping

import torch
from rich.console import Console
from rich.table import Table

from tilewise.backends.triton import targets
from tilewise.backends.triton import tune as tuning
from tilewise.backends.triton.config import Config
from tilewise.bench import append
from tilewise.bench.provenance import provenance
from tilewise.bench.sets import Workload, workloads_from
from tilewise.bench.store import Row
from tilewise.bench.timing import interleave
from tilewise.cli.codes import FAILED, OK
from tilewise.cli.output import require_writable
from tilewise.errors import UnsupportedError

BUDGET_S = 0.1  # of timing for each configuration and workload
SHOWN = 8


def tune(options: Namespace, console: Console) -> int:
    """Search the fastest configuration of each pass; FAILED where none of a pass could be timed."""
    jobs = _jobs(options)
    if options.dry_run:
        for job in jobs:
            found = list(tuning.candidates(job))[: options.most]
            texts = ", ".join(map(_text, found))
            console.print(f"{_title(job)}: {len(found)} configurations: {texts}", highlight=False, soft_wrap=True)
        return OK
    if not torch.cuda.is_available():
        raise UnsupportedError("torch finds no GPU here; --dry-run lists the candidates")
    if why := targets.why_not(None if torch.version.hip else torch.cuda.get_device_capability()):
        raise UnsupportedError(why)
    require_writable(options.out)
    device = torch.device("cuda", torch.cuda.current_device())
    environment = provenance(device)
    found = tuning.search(jobs, _timed, options.most, options.processes)
    note = f"timed, {torch.cuda.get_device_name(device)}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    for job, ranked in found.items():
        append(options.out, (row for each in ranked for row in _rows(job, each, environment)))
        console.print(_table(job, ranked))
        if ranked:
            console.print(tuning.row(job, ranked[0].config, note), highlight=False, markup=False, soft_wrap=True)
    console.print(f"rows appended to {options.out}", highlight=False, soft_wrap=True)
    return OK if all(found.values()) else FAILED


def _jobs(options: Namespace) -> list[tuning.Job]:
    """A job for each pass, dtype, head_dim and length, with all masks."""
    defaults = {"head_dim": "64,128", "dtype": "bf16", "mask": "full,causal", "seqlen": "8192"}
    asked = workloads_from({name: getattr(options, name, None) or text for name, text in defaults.items()} | {"heads": "1"})
    precisions = tuple(dict.fromkeys((options.precision or "").split(",")))
    if options.precision and not set(precisions) <= set(tuning.IN_INT8):
        held = "e4m3 is held in fp16 and has the tiles of 16 bits"
        raise ValueError(f"precision must be of {', '.join(tuning.IN_INT8)}, one or both with a comma, got {options.precision!r}; {held}")
    if options.precision and any(each.dtype == torch.float32 for each in asked):
        raise ValueError(f"precision={options.precision!r} quantises bf16 and fp16, not fp32; give dtype without it")
    masks = tuple({each.mask: None for each in asked})
    if uneven := [each for each in asked if each.head_dim != each.head_dim_v]:
        raise ValueError(f"head_dim is {uneven[0].head_dim}/{uneven[0].head_dim_v}; configurations are sought for equal ones")
    cells = dict.fromkeys((each.dtype, each.head_dim, each.seqlen_q) for each in asked)
    if options.precision:
        return [tuning.Job("forward", *cell, masks=masks, precisions=precisions) for cell in cells]
    return [tuning.Job(name, *cell, masks=masks) for cell in cells for name in tuning.PASSES]


def _timed(calls: Mapping[Config, Callable[[], object]]) -> dict[Config, float]:
    """Seconds of each call, in turns."""
    stats = interleave({_text(config): call for config, call in calls.items()}, budget_s=BUDGET_S, device="cuda", clock="events")
    return {config: stats[_text(config)].median for config in calls}


def _rows(job: tuning.Job, found: tuning.Found, environment: dict) -> list[Row]:
    """One of each mask and precision; of dkdv and dq the time of the whole backward pass."""
    heads, direction = max(1, job.hidden // job.head_dim), "fwd" if job.purpose == "forward" else "bwd"
    rows = []
    for (mask, precision), seconds in zip(job.workloads, found.seconds, strict=True):
        sizes = {"batch": 1, "seqlen_q": job.seqlen, "heads_q": heads, "head_dim": job.head_dim, "dtype": job.dtype}
        cell = Workload(name="tune", mask=mask, direction=direction, **sizes)
        name, flops = f"triton[{' '.join(filter(None, (job.purpose, precision, _text(found.config))))}]", cell.flops
        times = {"clock": "events", "median_s": seconds, "flops": flops, "flops_per_s": flops / seconds}
        rows.append(Row(impl=name, name=cell.name, case={**cell.case}, environment=environment, **times))
    return rows


def _table(job: tuning.Job, ranked: list[tuning.Found]) -> Table:
    table = Table(title=_title(job), title_justify="left")
    for column in ("tiles", "warps", "stages", *(", ".join(filter(None, ("us", repr(mask), way))) for mask, way in job.workloads)):
        table.add_column(column, justify="right")
    for each in ranked[:SHOWN]:
        config, times = each.config, (f"{1e6 * seconds:,.0f}" for seconds in each.seconds)
        table.add_row(f"{config.tile_m} x {config.tile_n}", str(config.warps), str(config.stages), *times)
    return table


def _title(job: tuning.Job) -> str:
    words = job.purpose, f"head_dim {job.head_dim}", str(job.dtype).removeprefix("torch."), *job.precisions, f"{job.seqlen} tokens"
    return ", ".join(filter(None, words))


def _text(config: Config) -> str:
    return f"{config.tile_m}x{config.tile_n} w{config.warps} s{config.stages}"
