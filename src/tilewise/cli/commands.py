"""What each command of the command line does, but those of plain.py: it calls the library, and prints what comes back."""

import glob
import math
from argparse import Namespace
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewise.cli.codes import FAILED, OK, UNUSABLE
from tilewise.cli.output import console_for_tables, require_writable
from tilewise.cli.plain import require

SHOWN_FAILURES = 20
MOST_LINES = 60  # of a table with all numbers; of the ladder's sweep rates alone are shown beyond it


def demo(options: Namespace) -> int:
    from tilewise.demo import job, serve

    if options.device is not None:
        require(options.device)
    if options.ranks is not None:
        from tilewise.demo import several

        given = {name: x for name in ("batch", "context", "seed") if (x := getattr(options, name)) is not None}
        wanted = several.Options(ranks=options.ranks, steps=min(options.steps, several.MOST_STEPS), **given)
        return OK if several.run(wanted, console_for_tables()) else FAILED
    if options.serve:
        return OK if serve.run(serve.ServeOptions(device=options.device, seed=options.seed), console_for_tables()) else FAILED
    require_writable(options.out)
    names = ("device", "steps", "batch", "context", "seqlens", "seed", "budget_s", "out")
    same = job.run(job.options(**{name: getattr(options, name) for name in names}, line=_demo_line(options)), console_for_tables())
    return OK if same else FAILED


def _demo_line(options: Namespace) -> str:
    """The command that makes this report again, without where it is written: the page is sent to others."""
    given = {name: getattr(options, name) for name in ("device", "steps", "batch", "context", "seqlens", "seed", "budget_s", "threads")}
    changed = {name: value for name, value in given.items() if value not in (None, options.usual.get(name))}
    words = {name: ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value) for name, value in changed.items()}
    return " ".join(["tilewise demo", *(f"--{name.removesuffix('_s')} {word}" for name, word in words.items())])


def check(options: Namespace) -> int:
    """Run the grid; FAILED when a check fails, UNUSABLE when none could run."""
    from tilewise.display.progress import progress
    from tilewise.runtime import dispatch
    from tilewise.testing import checks

    console = console_for_tables()
    require(options.device)
    backends = [dispatch.named(name) for name in options.backend.split(",")] if options.backend else dispatch.backends()
    todo = checks.plan(backends, full=options.full, contains=options.case, seed=options.seed, device=options.device)
    if not todo:
        raise ValueError(f"--case {options.case!r} is in no check's name; see the names with: tilewise check --list")
    if options.list:
        console.print("\n".join(dict.fromkeys(check.name for check in todo)), highlight=False, markup=False, soft_wrap=True)
        return OK
    outcomes = []
    with progress(console) as bars:
        task = bars.add_task("Checking", total=len(todo), note="")
        for outcome in checks.run(todo):
            outcomes.append(outcome)
            failed = sum(each.state == "failed" for each in outcomes)
            bars.update(task, advance=1, note=f"{outcome.backend}" + (f", [red]{failed} failed[/]" if failed else ""))
    console.print(_check_table(outcomes))
    _print_reasons(console, outcomes)
    states = Counter(outcome.state for outcome in outcomes)
    if states["failed"]:
        return FAILED
    return OK if states["passed"] else UNUSABLE


def _check_table(outcomes: list) -> Table:
    from tilewise.testing.checks import STATES

    table = Table(title="Correctness on this machine", title_justify="left")
    table.add_column("backend")
    for column in (*STATES, "seconds"):
        table.add_column(column, justify="right")
    by_backend = defaultdict(list)
    for outcome in outcomes:
        by_backend[outcome.backend].append(outcome)
    for backend, mine in by_backend.items():
        states = Counter(outcome.state for outcome in mine)
        style = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
        cells = (f"[{style[state]}]{states[state]}[/]" if states[state] else "0" for state in STATES)
        table.add_row(backend, *cells, f"{sum(outcome.seconds for outcome in mine):.1f}")
    return table


def _print_reasons(console: Console, outcomes: list) -> None:
    failures = [outcome for outcome in outcomes if outcome.state == "failed"]
    for outcome in failures[:SHOWN_FAILURES]:
        console.print(f"failed: {outcome.backend}, {outcome.name}: {outcome.reason}", highlight=False, markup=False, soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"and {len(failures) - SHOWN_FAILURES} more failures")
    for reason, count in Counter(outcome.reason for outcome in outcomes if outcome.state == "skipped").items():
        console.print(f"skipped {count}: {reason}", highlight=False, markup=False, soft_wrap=True)


def bench(options: Namespace) -> int:
    """Measure; FAILED when a result of tilewise's own missed the tolerance, UNUSABLE when nothing could be timed (or passed --check)."""
    import tilewise.bench as harness
    from tilewise.cli import ahead
    from tilewise.cli.ladder import backward
    from tilewise.display.progress import progress
    from tilewise.ladder import RUNGS, VARIANTS

    console = console_for_tables()
    if options.list:
        console.print("\n".join(harness.known()), highlight=False)
        return OK
    if options.names[:1] == ["train"]:
        from tilewise.cli import training

        device = options.device or torch.device("cuda")
        require(device)
        return training.run(options, console, device)
    if options.set == "decode":
        from tilewise.cli import decoding

        device = options.device or torch.device("cuda")
        require(device)
        return decoding.run(options, console, device)
    if of_train := [name for name in ("model", "layers", "tokens", "autocast", "compiled") if getattr(options, name)]:
        raise ValueError(f"{', '.join(of_train)}: an option of `bench train` alone; write `tilewise bench train --{of_train[0]} ...`")
    impls = _contenders(options)
    rungs = {*RUNGS, *VARIANTS}
    climbing = backward(impls) or any(impl.name in rungs for impl in impls)
    device = options.device or torch.device("cuda" if climbing else "cpu")
    require(device)
    names = ("batch", "seqlen", "heads", "head_dim", "mask", "causal", "dtype", "direction", "data", "set")
    selected = {name: value for name in names if (value := getattr(options, name)) is not None}
    if backward(impls):
        selected.setdefault("direction", "bwd")
    climbing = climbing and not selected.keys() & {"batch", "heads", "mask"}
    if selected.get("set") == "ladder" or (climbing and "set" not in selected):
        workloads = harness.ladder_from({name: value for name, value in selected.items() if name != "set"})
    else:
        small = harness.ON_A_CPU if selected.get("set") == "hard-inputs" and device.type == "cpu" else {}
        workloads = harness.workloads_from(small | selected)
    workloads = harness.chosen(workloads, options.only)
    part, parts = options.part
    if part > len(workloads):
        raise ValueError(f"part is {part}/{parts}, and there are {len(workloads)} workloads; give no more parts than that")
    if options.out:
        require_writable(options.out)
    workloads = workloads[part - 1 :: parts]
    if options.ahead:
        ahead.run(console, workloads, impls, device, options.processes)
    with progress(console) as bars:
        rows = harness.run(
            workloads,
            impls,
            device=device,
            progress=_bench_progress(bars),
            memory=not options.no_memory,
            keep=partial(harness.append, options.out) if options.out else None,
            timing=harness.Timing(
                budget_s=options.budget_s, clocks=() if options.check else options.clock, once_above_s=options.once_above or math.inf
            ),
            limit_s=options.limit or math.inf,
        )
    if options.check:
        console.print(harness.verdicts(rows))
    elif len(rows) > MOST_LINES and harness.cells_of_models(rows):
        console.print(harness.models_table(rows), highlight=False, markup=False, soft_wrap=True)
    elif len(rows) <= MOST_LINES or not (harness.cells_of(rows) or harness.cells_of(rows, "bwd")):
        console.print(harness.table(rows, console.width))
    else:
        console.print(harness.ladder_table(rows))
    if any(row.over_normal is not None for row in rows):
        console.print(harness.hard_verdicts(rows), highlight=False, markup=False, soft_wrap=True)
    if options.out:
        console.print(f"{len(rows)} rows appended to {options.out}", highlight=False, soft_wrap=True)
    if any(row.passed is False and harness.ours(row.impl) for row in rows):
        return FAILED
    return OK if any(row.passed if options.check else row.median_s is not None for row in rows) else UNUSABLE


def _contenders(options: Namespace) -> list:
    from tilewise.bench import find

    if options.names and options.impl:
        raise ValueError("the contenders are named twice, as arguments and by --impl; give one of them")
    return find(",".join(options.names) or options.impl or "tilewise,sdpa,naive")


def _bench_progress(bars: Progress):
    task = bars.add_task("Measuring", total=None, note="")
    return lambda done, total, text: bars.update(task, completed=done, total=total, note=text)


def report(options: Namespace) -> int:
    """Rewrite tables and plots from rows, or make a page of them."""
    from tilewise import bench as harness
    from tilewise.bench import plots
    from tilewise.bench.scheme_plot import save_schemes

    console = console_for_tables()
    files = options.rows or sorted(glob.glob("benchmarks/results/*.jsonl"))
    if not files:
        raise FileNotFoundError("no rows: benchmarks/results/*.jsonl is empty; name a file that `tilewise bench --out` made")
    rows = harness.load(*files)
    console.print(f"{len(rows)} rows from {len(files)} files", highlight=False)
    if options.html:
        from tilewise.demo.bench_page import render

        options.html.write_text(render(rows), encoding="utf-8")
        console.print(f"written: {options.html}", highlight=False, soft_wrap=True)
        return OK
    documents = options.docs or [path for path in [Path("README.md"), *sorted(Path("docs").rglob("*.md"))] if path.exists()]
    tabled = {
        "ladder",
        "hard-inputs",
        "training",
        "decode",
        *(each.name for each in harness.model_shapes()),
    }  # and more than a chart can show
    charted = [row for row in rows if row.name not in tabled]
    on_gpus = [row for row in charted if row.clock in ("events", "graph")]  # in units of their own
    drawn = plots.save([row for row in charted if row not in on_gpus], options.plots)
    for device in sorted({row.device for row in on_gpus}):
        drawn += plots.save([row for row in on_gpus if row.device == device], options.plots / plots.folder_of(device), ("throughput",))
    drawn += plots.save_overview(rows, options.plots)
    drawn += plots.save_trainings(rows, options.plots)
    drawn += plots.save_decoding(rows, options.plots)
    if not options.rows:
        drawn += save_schemes("benchmarks/results/distributed", options.plots)
    for path in (*harness.refresh(documents, rows), *drawn):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return OK


def warmup(options: Namespace) -> int:
    """Compile kernels into the cache; FAILED when one does not compile."""
    if options.backend == "triton":
        from tilewise.cli.triton_warmup import warmup
    else:
        from tilewise.cli.kernels import warmup
    return warmup(options, console_for_tables())


def tune(options: Namespace) -> int:
    """Search the fastest kernel of each cell; FAILED where one that ships is wrong or does not compile."""
    if options.backend == "triton":
        from tilewise.cli.triton_tune import tune
    else:
        from tilewise.cli.kernels import tune
    return tune(options, console_for_tables())
