"""Run contenders on workloads: check each, then time those that passed against each other, then measure their memory."""

import gc
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.bench.ceiling import ceiling
from tilewise.bench.distributions import NORMAL, Inputs
from tilewise.bench.errors import Exact
from tilewise.bench.gate import Gate
from tilewise.bench.impls import Attend, Impl, ours
from tilewise.bench.memory import peak_extra_bytes
from tilewise.bench.provenance import provenance
from tilewise.bench.store import Row
from tilewise.bench.timing import GRAPH_BELOW_S, Clock, Stats, interleave
from tilewise.bench.workloads import Workload

Progress = Callable[[int, int, str], None]  # workloads done, of how many, what is running now
Calls = dict[str, Callable[[], object]]

CHECK_SEED, TIME_SEED = 1, 2


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How contenders are timed. `clocks`: which of the device's, in this order; none: they are checked only."""

    budget_s: float = 1.0  # for each contender by each clock
    clocks: tuple[Clock, ...] = ("events", "wall")
    once_above_s: float = math.inf  # a call that takes longer is timed once


def run(
    workloads: Iterable[Workload],
    impls: Iterable[Impl],
    *,
    budget_s: float = 1.0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    memory: bool = True,
    keep: Callable[[list[Row]], object] | None = None,
    timing: Timing | None = None,
    limit_s: float = math.inf,
) -> list[Row]:
    """Measure every contender on every workload: a row each (and on a GPU one for each clock), in that order.

    A contender is timed only after its result on fresh inputs passed the tolerance; else its row says why not. Where inputs are not normal ones,
    peers are timed whatever comes out, and their rows say what; ours is timed in turns with itself on normal inputs, too (`over_normal`). About
    `budget_s` seconds go to timing each contender by each clock, besides the check. `progress(done, total, text)` is called before each workload
    and at the end, `keep(rows)` after each workload with its rows, so that an interrupted run need not lose them: `keep=partial(append, path)`.
    `timing` says more than `budget_s` about how to time, and takes its place. After `limit_s` seconds no workload is begun. A contender or a workload
    that fails stops nothing: its rows say why.
    """
    workloads, impls, device = list(workloads), list(impls), torch.device(device)
    timing, began = timing or Timing(budget_s=budget_s), time.monotonic()
    environment = provenance(device)
    rows: list[Row] = []
    for done, workload in enumerate(workloads):
        if time.monotonic() - began > limit_s:
            break
        if progress:
            progress(done, len(workloads), workload.id)
        new = [replace(row, environment=environment) for row in _rows_of(workload, impls, timing, device, memory)]
        rows += new
        if keep:
            keep(new)
    if progress:
        progress(len(workloads), len(workloads), "done")
    return rows


def _rows_of(workload: Workload, impls: list[Impl], timing: Timing, device: torch.device, memory: bool) -> list[Row]:
    """`_run_one`, or where that fails as a whole, as where the reference's memory is not there, rows that say so."""
    try:
        return _run_one(workload, impls, timing, device, memory)
    except Exception as failure:
        reason = f"this workload cannot be measured: {type(failure).__name__}: {_first_line(failure)}"
    _give_back_memory(device)
    return [replace(_blank(impl, workload), reason=reason) for impl in impls]


def _give_back_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _run_one(workload: Workload, impls: list[Impl], timing: Timing, device: torch.device, memory: bool) -> list[Row]:
    references = Gate(workload, CHECK_SEED, device), Exact(workload, TIME_SEED, device)
    checked = [(impl, *_check(impl, workload, device, *references)) for impl in impls]
    if not timing.clocks:
        return [row for _, _, row in checked]
    del references
    prepared = [(impl, attend) for impl, attend, _ in checked if attend is not None]
    (calls, failed), usual = _calls(workload, prepared, device), {}
    if workload.data != NORMAL:
        usual, _ = _calls(replace(workload, data=NORMAL), [each for each in prepared if ours(each[0].name)], device)
    timed = _timed(calls, timing, device)
    peaks = {name: peak_extra_bytes(call, device)[1] for name, call in calls.items()} if memory else {}
    most = ceiling(device, workload.dtype) if calls else None
    rows = []
    for impl, attend, row in checked:
        if attend is None or impl.name in failed:
            rows.append(replace(row, reason=failed.get(impl.name, row.reason)))
            continue
        row = replace(row, peak_extra_bytes=peaks.get(impl.name), ceiling_flops_per_s=most.matmul, ceiling_bytes_per_s=most.copy)
        for clock, stats in timed[impl.name].items():
            over = _over_normal(calls[impl.name], usual.get(impl.name), clock, timing, device) if usual else None
            timed_row = _with_time(row, clock, stats, most.share(row.flops, row.bytes, stats.median))
            rows.append(replace(timed_row, over_normal=over))
    return rows


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
            failed[impl.name] = f"cannot be timed beside the others: {type(failure).__name__}: {_first_line(failure)}"
            _give_back_memory(device)
    return calls, failed


def _over_normal(call: Callable[[], object], normal: Callable[[], object] | None, clock: Clock, timing: Timing, device) -> float | None:
    """The two alone, in turns: what else a contender followed would count for one of them, and not for the other."""
    if normal is None:
        return None
    how = {"budget_s": timing.budget_s, "device": device, "clock": clock, "once_above_s": timing.once_above_s}
    stats = interleave({"hard": call, "normal": normal}, **how)
    return stats["hard"].median / stats["normal"].median


def _heads_first(impl: Impl) -> bool:
    return getattr(impl, "heads_first", False)


def _blank(impl: Impl, workload: Workload) -> Row:
    counts = {"flops": workload.flops, "paper_flops": workload.paper_flops, "bytes": workload.bytes}
    return Row(impl=impl.name, name=workload.name, case=workload.case, clock="none", **counts)


def _check(impl: Impl, workload: Workload, device: torch.device, gate: Gate, exact: Exact) -> tuple[Attend | None, Row]:
    """What to time, or None; and the row so far."""
    row = _blank(impl, workload)
    if why_not := impl.why_not(workload, device):
        return None, replace(row, reason="; ".join(why_not))
    try:
        attend = impl.prepare(workload, device)
        if workload.rms:
            errors = exact.errors(attend, _heads_first(impl))
            row = replace(row, rms_error=errors.rms, places_agree=errors.places)
        error = gate.verify(attend, _heads_first(impl), getattr(impl, "in_eight_bits", False))
        if row.places_agree is False and not workload.finite:
            raise AssertionError("NaN or infinities are not where fp64 has them")
    except AssertionError as failure:
        forgiven = workload.data != NORMAL and not ours(impl.name)
        return attend if forgiven else None, replace(row, passed=False, reason=f"missed the tolerance: {_first_line(failure)}")
    except Exception as refusal:  # each peer refuses in its own way, and none may take the others' rows with it
        if isinstance(refusal, torch.OutOfMemoryError):
            _give_back_memory(device)
        return None, replace(row, reason=f"cannot run this: {type(refusal).__name__}: {_first_line(refusal)}")
    return attend, replace(row, passed=True, error=error)


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


def _timed(calls: Calls, timing: Timing, device: torch.device) -> dict[str, dict[str, Stats]]:
    """For every call, its times by clock. On a GPU all are timed again as the replay of a graph, if one of them is shorter than its own launch."""
    clocks = timing.clocks if device.type == "cuda" else ("wall",)
    timed: dict[str, dict[str, Stats]] = {name: {} for name in calls}
    for clock in clocks:
        stats = interleave(calls, budget_s=timing.budget_s, device=device, clock=clock, once_above_s=timing.once_above_s)
        for name in calls:
            timed[name][clock] = stats[name]
    short = any(stats["events"].median < GRAPH_BELOW_S for stats in timed.values() if "events" in stats)
    for name, call in calls.items() if short else ():
        try:
            graph = interleave({name: call}, budget_s=timing.budget_s, device=device, clock="graph")[name]
        except RuntimeError:  # it synchronises, or allocates outside torch: no graph of it exists, and the events stand
            continue
        timed[name] = {"graph": graph, **{clock: stats for clock, stats in timed[name].items() if clock != "events"}}
    return timed


def _with_time(row: Row, clock: str, stats: Stats, share: float) -> Row:
    return replace(
        row,
        clock=clock,
        median_s=stats.median,
        p10_s=stats.p10,
        p90_s=stats.p90,
        samples=stats.samples,
        flops_per_s=row.flops / stats.median,
        paper_flops_per_s=None if row.paper_flops is None else row.paper_flops / stats.median,
        ceiling_share=share,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
