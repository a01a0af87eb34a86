"""What `tilewise warmup --backend triton` does: kernels for one GPU, in Triton's own cache."""

from argparse import Namespace

import torch
from rich.console import Console
from rich.table import Table

from tilewise.backends import triton
from tilewise.backends.hopper import warmup as of_hopper
from tilewise.backends.triton import bound, targets
from tilewise.backends.triton import warmup as warming
from tilewise.backends.triton.config import decodes
from tilewise.bench.sets import Workload, workloads_from
from tilewise.cli.codes import FAILED, OK
from tilewise.cli.kernels import ways
from tilewise.display.progress import progress
from tilewise.errors import UnsupportedError

GROUPS = "1,4,8"


def warmup(options: Namespace, console: Console) -> int:
    """Compile kernels into Triton's cache; FAILED when one does not compile."""
    if unknown := [name for name in ("set", "clear") if getattr(options, name)]:
        raise ValueError(f"{unknown[0]} is of Hopper's kernels; Triton keeps its own cache, in the folder that TRITON_CACHE_DIR names")
    target, cells = _target(options.arch), _cells(options)
    if options.list:
        todo = dict.fromkeys(kernel for each in cells for kernel in warming.kernels(each, target))
        console.print(_table([(kernel, "", "") for kernel in todo], target))
        return OK
    outcomes = []
    with progress(console) as bars:
        task = bars.add_task("Compiling", total=None, note="")
        for outcome in warming.warm(cells, target, options.processes):
            outcomes.append(outcome)
            bars.update(task, advance=1)
    console.print(_table([(each.kernel, "failed" if each.reason else "compiled", f"{each.seconds:.1f}") for each in outcomes], target))
    failed = [each for each in outcomes if each.reason]
    for each in failed:
        console.print(f"failed: {each.kernel.name}: {each.reason}", highlight=False, markup=False, soft_wrap=True)
    return FAILED if failed else OK


def _target(arch: str | None) -> targets.Target:
    """The architecture asked for, or this machine's."""
    if arch is not None:
        if arch not in targets.COMPILED:
            raise ValueError(f"arch must be one of {', '.join(targets.COMPILED)}, got {arch!r}")
        return targets.Target(arch)
    if not torch.cuda.is_available():
        raise UnsupportedError(f"torch finds no GPU here; --arch names one: {', '.join(targets.COMPILED)}")
    return targets.of_device(torch.device("cuda", torch.cuda.current_device()))


def _cells(options: Namespace) -> list[warming.Cell]:
    defaults = {"head_dim": "64,128", "dtype": "bf16,fp16", "mask": "full", "seqlen": "1"}
    asked = workloads_from({name: getattr(options, name, None) or text for name, text in defaults.items()} | {"heads": "1"})

    def known(each: Workload) -> bool:
        dims = each.head_dim, each.head_dim_v
        return each.dtype in triton.DTYPES and (max(dims) <= triton.MOST_DIM or decodes(each.dtype, *dims))

    if wrong := [each for each in asked if not known(each)]:
        raise ValueError(f"triton has no kernel for head_dim {wrong[0].head_dim}/{wrong[0].head_dim_v} in {wrong[0].dtype}")
    groups = [int(text) if text.isdecimal() else 0 for text in (options.groups or GROUPS).split(",")]
    if 0 in groups:
        raise ValueError(f"groups must be numbers of query heads for each key head, such as {GROUPS}, got {options.groups!r}")
    if options.precision and (wide := [each for each in asked if each.dtype == torch.float32]):
        raise ValueError(f"precision={options.precision!r} quantises bf16 and fp16, not {wide[0].dtype}; give dtype without it")
    plain = dict.fromkeys((each.head_dim, each.head_dim_v, each.dtype, bound.kind_of(each.mask)) for each in asked)
    extras = of_hopper.extras_from(options.extras or "")
    found = [(*each, names, *way) for each in plain for names in extras for way in ways(options, extras)]
    return [warming.Cell(*each, group) for each in found for group in groups]


def _table(rows: list[tuple], target: targets.Target) -> Table:
    table = Table(title=f"Triton's kernels for {target.arch}", title_justify="left")
    for column in ("kernel", "constants", "tiles", "state"):
        table.add_column(column)
    table.add_column("seconds", justify="right")
    for kernel, state, seconds in sorted(rows, key=lambda row: (row[0].name, str(row[0].constants))):
        shown = " ".join(f"{name}={value}" for name, value in kernel.constants if value and name not in ("TILE_M", "TILE_N", "STAGES"))
        config = kernel.config
        table.add_row(kernel.name, shown, f"{config.tile_m} x {config.tile_n}, {config.warps} warps", state, seconds)
    return table
