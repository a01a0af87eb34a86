"""What `tilewise warmup` and `tilewise tune` do, with the kernels of the Hopper backend."""

from argparse import Namespace
from functools import partial

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.hopper import coverage, forecast
from tilewise.backends.hopper import warmup as warming
from tilewise.backends.hopper.forward.config import TILES
from tilewise.bench import append
from tilewise.bench import tune as tuning
from tilewise.bench.sets import Workload, workloads_from
from tilewise.cli.codes import FAILED, OK
from tilewise.cli.output import require_writable
from tilewise.display.progress import progress
from tilewise.errors import UnsupportedError
from tilewise.sm90 import cache, jit


def warmup(options: Namespace, console: Console) -> int:
    """Compile kernels into the cache; FAILED when one does not compile."""
    if others := [name for name in ("arch", "groups") if getattr(options, name)]:
        raise ValueError(f"{others[0]} goes with --backend triton; Hopper's kernels are for one GPU and any group")
    if options.clear:
        warming.require_cache()
        console.print(f"removed: {cache.clear()} kernels from {cache.folder()}", highlight=False, soft_wrap=True)
        return OK
    todo = _of_sets(options) if options.set else _of_cells(options)
    if options.list:
        console.print(_kernels_table([(*warming.describe(kernel), "", "", "") for kernel in todo]))
        return OK
    warming.require_compiler()
    warming.require_cache()
    outcomes = []
    with progress(console) as bars:
        task = bars.add_task("Compiling", total=len(todo), note="")
        for outcome in warming.warm(todo, options.processes):
            outcomes.append(outcome)
            bars.update(task, advance=1)
    shown = [(each.state, f"{each.seconds:.1f}" if each.state != "cached" else "", f"{each.bytes / 1e3:.0f}") for each in outcomes]
    console.print(_kernels_table([(*warming.describe(each.kernel), *rest) for each, rest in zip(outcomes, shown, strict=True)]))
    for each in outcomes:
        if each.state == "failed":
            console.print(
                f"failed: {' '.join(warming.describe(each.kernel))}: {each.reason}", highlight=False, markup=False, soft_wrap=True
            )
    console.print(cache.describe(), highlight=False, soft_wrap=True)
    return FAILED if any(outcome.state == "failed" for outcome in outcomes) else OK


def _of_cells(options: Namespace) -> list[warming.Kernel]:
    """The kernels of calls of any length, and those that decode."""
    asked = _workloads(options, dtype="bf16,fp16", mask="full,causal,window:1", seqlen="1")
    plain, extras = [(each.head_dim, each.head_dim_v, each.dtype, each.mask) for each in asked], warming.extras_from(options.extras or "")
    cells = [warming.Cell(*each, names, *way) for each in plain for names in extras for way in ways(options, extras)]
    return [*warming.kernels(cells), *warming.of_decode([cell for cell in cells if cell.precision is None])]


def ways(options: Namespace, extras: list[tuple[str, ...]]) -> list[tuple[bool, str | None]]:
    """(grad, precision) of the cells. What --precision names comes with 16 bits, in which gradients are computed, but for --forward."""
    sixteen: list[tuple[bool, str | None]] = [(not options.forward, None)]
    if options.precision is None:
        return sixteen
    given = dict.fromkeys(options.precision.split(","))
    if not given.keys() <= RECIPES.keys():
        raise ValueError(f"precision must be of {', '.join(RECIPES)}, one or several with commas, got {options.precision!r}")
    if refused := [name for names in extras for name in names if name in ("bias", "dropout")]:
        raise ValueError(f"precision cannot be combined with {refused[0]}; give them to two calls")
    return [*([] if options.forward else sixteen), *((False, name) for name in given)]


def _of_sets(options: Namespace) -> list[warming.Kernel]:
    """The kernels of the sets' own calls, each once. ValueError where options name what a set fixes."""
    if others := [name for name in ("head_dim", "mask", "extras", "precision") if getattr(options, name)]:
        raise ValueError(f"set fixes what is computed, so {', '.join(others)} cannot be given with it; dtype and forward can")
    chosen = {"set": options.set, "dtype": options.dtype or "bf16", "direction": "fwd" if options.forward else "fwd,bwd"}
    asked = [each for each in workloads_from(chosen) if not coverage.refused(each.problem(torch.device("cuda")))]
    return list(dict.fromkeys(kernel for each in asked for kernel in coverage.kernels(each.call())))


def _workloads(options: Namespace, **defaults: str) -> list[Workload]:
    """What the options name, all tiles of config.TILES where they name no head_dim."""
    defaults["head_dim"] = ",".join(f"{qk}/{v}" for qk, v in TILES)
    return workloads_from({name: getattr(options, name, None) or text for name, text in defaults.items()} | {"heads": "1"})


def _kernels_table(rows: list[tuple[str, ...]]) -> Table:
    style = {"failed": "bold red", "compiled": "green"}
    table = Table(title="Kernels for Hopper GPUs", title_justify="left")
    for column in ("kernel", "head_dim", "dtype", "configuration", "state"):
        table.add_column(column)
    for column in ("seconds", "KB"):
        table.add_column(column, justify="right")
    for kernel, head_dim, dtype, configuration, state, seconds, size in sorted(rows):
        table.add_row(kernel, head_dim, dtype, configuration, f"[{style.get(state, 'none')}]{state}[/]", seconds, size)
    return table


def tune(options: Namespace, console: Console) -> int:
    """Search the fastest kernel of each cell; FAILED where one that ships is wrong or does not compile."""
    if options.precision:
        raise ValueError("precision goes with --backend triton; Hopper's tiles in 8 bits are found by hand")
    asked = _workloads(options, dtype="bf16", mask="full,causal,window:1023", seqlen="1024,4096,16384")
    searches = tuning.searches(map(tuning.sized, asked))
    if options.dry_run:
        for search in searches:
            console.print(_candidates_table(search, options.most))
        return OK
    if missing := jit.why_not_here():
        raise UnsupportedError(f"{'; '.join(missing)}. Without one, --dry-run lists the candidates")
    warming.require_compiler()
    warming.require_cache()
    require_writable(options.out)
    sound = [_tune_one(console, search, options) for search in searches]
    console.print(f"rows appended to {options.out}", highlight=False, soft_wrap=True)
    return OK if all(sound) else FAILED


def _tune_one(console: Console, search, options: Namespace) -> bool:
    """Whether the kernel that ships compiled and passed."""
    ships, compiled, short = tuning.Contender(search.shipped).name, {}, []

    def leaders(most: int) -> list:
        return [compiled[name].config for name in tuning.survivors(tuning.rank(short), ships, most)]

    for todo in (lambda: tuning.shapes(search.shipped)[0][: options.most], lambda: tuning.manners(leaders(tuning.LEADERS))):
        new = [config for config in todo() if tuning.Contender(config).name not in compiled]
        for each in _compiled(console, search, new, options.processes):
            compiled[tuning.Contender(each.config).name] = each
        good = [compiled[tuning.Contender(config).name] for config in new]
        short += tuning.measure(search, [each.config for each in good if not each.wrong], tuning.SHORT_S)
    rows = tuning.measure(search, leaders(tuning.FINAL), tuning.LONG_S, partial(append, options.out))
    ranked = tuning.rank(rows)
    console.print(_tuned_table(search, compiled, short, rows))
    if ranked:
        console.print(tuning.literal(compiled[ranked[0][0]].config, rows), highlight=False, markup=False, soft_wrap=True)
    return ships in dict(ranked)


def _compiled(console: Console, search, todo: list, processes: int | None) -> list:
    done = []
    with progress(console) as bars:
        task = bars.add_task(f"Compiling {search.title}", total=len(todo), note="")
        for each in tuning.compile_all(todo, processes):
            done.append(each)
            bars.update(task, advance=1)
    return done


def _candidates_table(search, most: int | None) -> Table:
    found, refused = tuning.shapes(search.shipped)
    shown, manners = found[:most], len(tuning.manners([search.shipped]))
    left = "; ".join(f"{count:,} others: {why}" for why, count in refused.most_common())
    table = Table(
        title=f"{search.title}: {len(shown)} shapes, the best in {manners} manners",
        caption=left,
        title_justify="left",
        caption_justify="left",
    )
    for column in (*tuning.SHAPES, "KiB", "registers", "products", "exponentials", "shared memory"):
        table.add_column(column, justify="right")
    for config in shown:
        clocks, names = forecast.clocks(config), [str(getattr(config, name)) for name in tuning.SHAPES]
        used = f"{tuning.registers(config)} of {config.registers[1]}", *(f"{value:,.0f}" for value in vars(clocks).values())
        table.add_row(*names, f"{forecast.smem_bytes(config) / 1024:.0f}", *used, style="bold" if config == search.shipped else "")
    return table


def _tuned_table(search, compiled: dict, short: list, rows: list) -> Table:
    """Every candidate from the best down: its score at length, else shortly, else why it was not timed."""
    first, final = dict(tuning.rank(short)), dict(tuning.rank(rows))
    failures = {row.impl: row.reason for row in [*rows, *short] if row.reason}
    lengths = [workload.seqlen_q for workload in search.workloads]
    table = Table(title=search.title, title_justify="left")
    for column in (*tuning.choices(), "registers", *(f"TFLOP/s {n}" for n in lengths), "short", "final", "compiled in"):
        table.add_column(column, justify="right")
    table.add_column("not timed")

    def order(each) -> tuple:
        name = tuning.Contender(each.config).name
        return -final.get(name, 0.0), -first.get(name, 0.0), name

    for each in sorted(compiled.values(), key=order):
        name = tuning.Contender(each.config).name
        rates = {row.case["seqlen_q"]: row.flops_per_s for row in [*short, *rows] if row.impl == name and row.flops_per_s}
        cells = [*(str(getattr(each.config, choice)) for choice in tuning.choices()), str(each.registers or "")]
        cells += [f"{rates[n] / 1e12:.0f}" if n in rates else "" for n in lengths]
        cells += [f"{score[name]:.3f}" if name in score else "" for score in (first, final)]
        why = "; ".join(each.wrong) or failures.get(name, "")
        table.add_row(*cells, f"{each.seconds:.0f} s", escape(why), style="bold" if each.config == search.shipped else "")
    return table
