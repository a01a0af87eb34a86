"""Run contenders: check each, then time those that passed against each other, then measure their memory; on workloads, and on batches that decode.

Decoding is timed with caches that come from memory, by two clocks. "graph": the replay of a CUDA graph that holds one call for each copy of the
caches, over their number. Nothing else is between replays: a flush of the L2 cache would leave it full of lines to be written back, which took
10 us of each replay, and 40 of kernels that read without keeping. "wall": one call after another, each with the next copy, until its result is
there. A CPU has the latter only.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from tilewise.bench.gate import DecodeGate, Exact, Gate
from tilewise.bench.memory import peak_extra_bytes
from tilewise.bench.peers import DecodeImpl, Impl, ours
from tilewise.bench.provenance import provenance
from tilewise.bench.sets import DECODE, NORMAL, Attend, Cell, Inputs, Pool, Workload
from tilewise.bench.store import Row
from tilewise.bench.timing import GRAPH_BELOW_S, Ceiling, Clock, Stats, ceiling, interleave

Progress = Callable[[int, int, str], object]  # workloads done, of how many, what is running now
Keep = Callable[[list[Row]], object]
Calls = dict[str, Callable[[], object]]
Item = TypeVar("Item")
Result = TypeVar("Result")
Times = dict[Clock, Stats]

CHECK_SEED, TIME_SEED = 1, 2


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How contenders are timed. `clocks`: which of the device's, in this order; none: they are checked only."""

    budget_s: float = 1.0  # for each contender by each clock
    clocks: tuple[Clock, ...] = ("events", "wall")
    once_above_s: float = math.inf  # a call that takes longer is timed once

    def interleave(self, calls: Calls, device: torch.device, clock: Clock, flush: bool = True) -> dict[str, Stats]:
        return interleave(calls, budget_s=self.budget_s, device=device, clock=clock, once_above_s=self.once_above_s, flush=flush)


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a run goes from one item to the next: no item is begun after `limit_s` seconds; `progress(done, total, text)` is called before each and
    at the end, `keep(rows)` after each with its rows, so that an interrupted run need not lose them."""

    device: torch.device
    limit_s: float = math.inf
    keep: Keep | None = None
    progress: Progress | None = None

    def rows(self, items: Iterable[Item], title: Callable[[Item], str], measure: Callable[[Item], list[Row]], blank) -> list[Row]:
        """`measure` of every item, with the environment; where it fails as a whole, the rows `blank(item)` with the reason."""
        items, began, environment = list(items), time.monotonic(), provenance(self.device)
        tell = self.progress or (lambda done, total, text: None)
        rows: list[Row] = []
        for done, item in enumerate(items):
            if time.monotonic() - began > self.limit_s:
                break
            tell(done, len(items), title(item))
            new, failed = [], None
            try:
                new = measure(item)
            except Exception as failure:  # as where the reference's memory is not there
                failed = f"this workload cannot be measured: {named(failure)}"
            if failed:  # after the exception is gone, which holds what it was raised in
                give_back_memory(self.device)
                new = [replace(row, reason=failed) for row in blank(item)]
            new = [replace(row, environment=environment) for row in new]
            rows += new
            if self.keep:
                self.keep(new)
        tell(len(items), len(items), "done")
        return rows


def attempt(row: Row, device: torch.device, check: Callable[[], Result]) -> tuple[Result | None, Row]:
    """What `check` returns, and the row: passed, or with the reason. Each peer refuses in its own way, and none may take the others' rows with it."""
    try:
        return check(), replace(row, passed=True)
    except AssertionError as failure:
        return None, replace(row, passed=False, reason=f"missed the tolerance: {first_line(failure)}")
    except Exception as refusal:
        if isinstance(refusal, torch.OutOfMemoryError):
            give_back_memory(device)
        return None, replace(row, reason=f"cannot run this: {named(refusal)}")


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def give_back_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed_row(row: Row, clock: str, stats: Stats, most: Ceiling) -> Row:
    """The row with its times and rates, and what the machine can do at most."""
    return replace(
        row,
        clock=clock,
        median_s=stats.median,
        p10_s=stats.p10,
        p90_s=stats.p90,
        samples=stats.samples,
        flops_per_s=row.flops / stats.median,
        paper_flops_per_s=None if row.paper_flops is None else row.paper_flops / stats.median,
        ceiling_share=most.share(row.flops, row.bytes, stats.median),
        ceiling_flops_per_s=most.matmul,
        ceiling_bytes_per_s=most.copy,
    )


def run(
    workloads: Iterable[Workload],
    impls: Iterable[Impl],
    *,
    budget_s: float = 1.0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    memory: bool = True,
    keep: Keep | None = None,
    timing: Timing | None = None,
    limit_s: float = math.inf,
) -> list[Row]:
    """Measure every contender on every workload: a row each (and on a GPU one for each clock), in that order.

    A contender is timed only after its result on fresh inputs passed the tolerance; else its row says why not. Where inputs are not normal ones,
    peers are timed whatever comes out, and their rows say what; ours is timed in turns with itself on normal inputs, too (`over_normal`). About
    `budget_s` seconds go to timing each contender by each clock, besides the check. `timing` says more than `budget_s` about how to time, and takes
    its place. A contender or a workload that fails stops nothing: its rows say why. For `limit_s`, `keep` and `progress` see `Course`.
    """
    impls, device, timing = list(impls), torch.device(device), timing or Timing(budget_s=budget_s)
    return Course(device=device, limit_s=limit_s, keep=keep, progress=progress).rows(
        workloads,
        title=lambda workload: workload.id,
        measure=lambda workload: _rows_of(workload, impls, timing, device, memory),
        blank=lambda workload: [_blank(impl, workload) for impl in impls],
    )


def _rows_of(workload: Workload, impls: list[Impl], timing: Timing, device: torch.device, memory: bool) -> list[Row]:
    references = Gate(workload, CHECK_SEED, device), Exact(workload, TIME_SEED, device)
    checked = [(impl, *_check(impl, workload, device, *references)) for impl in impls]
    if not timing.clocks:
        return [row for _, _, row in checked]
    del references
    prepared = [(impl, attend) for impl, attend, _ in checked if attend is not None]
    (calls, failed), usual = _calls(workload, prepared, device), {}
    if workload.data != NORMAL:
        usual, _ = _calls(replace(workload, data=NORMAL), [each for each in prepared if ours(each[0].name)], device)
    timed = _timed(calls, timing, device, graphs=workload.direction != "bwd")
    peaks = {name: peak_extra_bytes(call, device)[1] for name, call in calls.items()} if memory else {}
    rows = []
    for impl, attend, row in checked:
        name = impl.name
        if attend is None or name in failed:
            rows.append(replace(row, reason=failed.get(name, row.reason)))
            continue
        eight = getattr(impl, "in_eight_bits", False) and device.type == "cuda"
        most = ceiling(device, torch.float8_e4m3fn if eight else workload.dtype)
        row = replace(row, ceiling_dtype="e4m3" if eight else None)
        for clock, stats in timed[name].items():
            over = _over_normal(calls[name], usual[name], clock, timing, device) if name in usual else None
            rows.append(replace(timed_row(row, clock, stats, most), over_normal=over, peak_extra_bytes=peaks.get(name)))
    return rows


def _check(impl: Impl, workload: Workload, device: torch.device, gate: Gate, exact: Exact) -> tuple[Attend | None, Row]:
    """What to time, or None; and the row so far."""
    row = _blank(impl, workload)
    if why_not := impl.why_not(workload, device):
        return None, replace(row, reason="; ".join(why_not))
    attend, found = None, {}

    def check() -> float:
        nonlocal attend
        attend = impl.prepare(workload, device)
        if workload.rms:
            found["rms_error"], found["places_agree"] = exact.errors(attend, _heads_first(impl))
        error = gate.verify(attend, _heads_first(impl), getattr(impl, "in_eight_bits", False))
        if found.get("places_agree") is False and not workload.finite:
            raise AssertionError("NaN or infinities are not where fp64 has them")
        return error

    error, row = attempt(row, device, check)
    forgiven = row.passed is False and workload.data != NORMAL and not ours(impl.name)
    return attend if row.passed or forgiven else None, replace(row, error=error, **found)


def _calls(workload: Workload, prepared: list[tuple[Impl, Attend]], device: torch.device) -> tuple[Calls, dict[str, str]]:
    """What is timed of each, and why that of others cannot be, as where they do not fit into memory side by side; each runs once."""
    inputs = {first: workload.inputs(TIME_SEED, device, first) for first in {_heads_first(impl) for impl, _ in prepared}}
    extras = workload.extras(TIME_SEED, device)
    calls, failed = {}, {}
    for impl, attend in prepared:
        try:
            call = call_of(attend, workload, inputs[_heads_first(impl)], extras)
            call()
            calls[impl.name] = call
        except Exception as failure:
            failed[impl.name] = f"cannot be timed beside the others: {named(failure)}"
            give_back_memory(device)
    return calls, failed


def _over_normal(call: Callable[[], object], normal: Callable[[], object], clock: Clock, timing: Timing, device: torch.device) -> float:
    """The two alone, in turns: what else a contender followed would count for one of them, and not for the other."""
    stats = timing.interleave({"hard": call, "normal": normal}, device, clock)
    return stats["hard"].median / stats["normal"].median


def _heads_first(impl: Impl) -> bool:
    return getattr(impl, "heads_first", False)


def _blank(impl: Impl, workload: Workload) -> Row:
    return Row(
        impl=impl.name,
        name=workload.name,
        case=workload.case,
        clock="none",
        flops=workload.flops,
        paper_flops=workload.paper_flops,
        bytes=workload.bytes,
    )


def call_of(attend: Attend, workload: Workload, inputs: Inputs, extras: dict[str, Tensor] | None = None) -> Callable[[], object]:
    """What is timed of a prepared contender, on `inputs` and on `extras`, in place of Workload.extras of TIME_SEED."""
    q, k, v, d_o = inputs
    extras = workload.extras(TIME_SEED, q.device) if extras is None else extras
    wanted = (q, k, v, *(x for x in extras.values() if x.requires_grad))
    if workload.direction == "fwd":
        return torch.no_grad()(lambda: attend(q, k, v, **extras))
    if workload.direction == "bwd":
        o = attend(q, k, v, **extras)
        return lambda: torch.autograd.grad(o, wanted, d_o, retain_graph=True)
    return lambda: torch.autograd.grad(attend(q, k, v, **extras), wanted, d_o)


def _timed(calls: Calls, timing: Timing, device: torch.device, graphs: bool) -> dict[str, Times]:
    """For every call, its times by clock. On a GPU all are timed again as the replay of a graph, if one of them is shorter than its own launch.
    graphs: whether one can be made; of gradients alone none can, for autograd launches these in the stream of their forward pass.
    """
    clocks: tuple[Clock, ...] = timing.clocks if device.type == "cuda" else ("wall",)
    timed: dict[str, Times] = {name: {} for name in calls}
    for clock in clocks:
        stats = timing.interleave(calls, device, clock)
        for name in calls:
            timed[name][clock] = stats[name]
    short = graphs and any(stats["events"].median < GRAPH_BELOW_S for stats in timed.values() if "events" in stats)
    for name, call in calls.items() if short else ():
        try:
            graph = timing.interleave({name: call}, device, "graph")[name]
        except RuntimeError:  # it synchronises, or allocates outside torch: no graph of it exists, and the events stand
            continue
        timed[name] = {"graph": graph, **{clock: stats for clock, stats in timed[name].items() if clock != "events"}}
    return timed


def run_decode(
    cells: Iterable[Cell],
    impls: Iterable[DecodeImpl],
    *,
    device: torch.device | str = "cpu",
    timing: Timing | None = None,
    limit_s: float = math.inf,
    keep: Keep | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Measure every contender on every cell: a row for each clock, or one with the reason why there is no time. The rest is as of `run`."""
    impls, device, timing = list(impls), torch.device(device), timing or Timing()
    pool = Pool(device)

    def measure(cell: Cell) -> list[Row]:
        try:
            return _rows_of_cell(cell, impls, pool, timing)
        except Exception:
            pool.numbers.clear()
            raise

    return Course(device=device, limit_s=limit_s, keep=keep, progress=progress).rows(
        cells, title=lambda cell: cell.title, measure=measure, blank=lambda cell: [_blank_of_cell(impl, cell) for impl in impls]
    )


def _blank_of_cell(impl: DecodeImpl, cell: Cell) -> Row:
    return Row(impl=impl.name, name=DECODE, case=cell.case, clock="none", flops=cell.flops, bytes=cell.bytes)


def _rows_of_cell(cell: Cell, impls: list[DecodeImpl], pool: Pool, timing: Timing) -> list[Row]:
    caches = pool.caches(cell)
    gate, calls, checked = DecodeGate(caches), {}, []
    for impl in impls:
        row = _blank_of_cell(impl, cell)
        if why_not := impl.why_not(cell, pool.device):
            checked.append(replace(row, reason="; ".join(why_not)))
            continue

        def check(impl: DecodeImpl = impl) -> tuple[Callable[[int], Tensor], float]:
            attend = torch.no_grad()(impl.prepare(caches))
            return attend, gate.verify(attend)

        passed, row = attempt(row, pool.device, check)
        if passed is not None:
            calls[impl.name], error = passed
            row = replace(row, error=error)
        checked.append(row)
    if not calls:
        return checked
    timed, failed = _timed_on_copies(calls, len(caches.copies), timing, pool.device)
    most = ceiling(pool.device, cell.dtype)
    rows = []
    for row in checked:
        row = replace(row, reason=failed.get(row.impl, row.reason))
        rows += [timed_row(row, clock, stats, most) for clock, stats in timed.get(row.impl, {}).items()] or [row]
    return rows


def _timed_on_copies(
    calls: dict[str, Callable[[int], Tensor]], copies: int, timing: Timing, device: torch.device
) -> tuple[dict[str, Times], dict[str, str]]:
    """Times of one call by contender and clock, and why others have none."""
    timed: dict[str, Times] = {name: {} for name in calls}
    failed = {}
    for name, attend in calls.items() if device.type == "cuda" and "events" in timing.clocks else ():
        try:
            of_all = timing.interleave({name: _all(attend, copies)}, device, "graph", flush=False)[name]
            timed[name]["graph"] = of_all.over(copies)
        except Exception as failure:  # it synchronises, or allocates outside torch
            failed[name] = f"no CUDA graph of it can be made: {named(failure)}"
    if timing.clocks and (device.type == "cpu" or "wall" in timing.clocks):
        rotating = {name: _next(attend, copies) for name, attend in calls.items() if name not in failed}
        for name, stats in timing.interleave(rotating, device, "wall").items():
            timed[name]["wall"] = stats
    return timed, failed


def _all(attend: Callable[[int], Tensor], copies: int) -> Callable[[], None]:
    def run() -> None:
        for copy in range(copies):
            attend(copy)

    return run


def _next(attend: Callable[[int], Tensor], copies: int) -> Callable[[], object]:
    turn = itertools.cycle(range(copies))
    return lambda: attend(next(turn))
