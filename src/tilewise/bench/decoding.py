"""Measuring decoding: each contender checked on a sample of the batch, then timed with caches that come from memory: `tilewise bench --set decode`.

Two clocks. "graph": the replay of a CUDA graph that holds one call for each copy of the caches, over their number. Nothing else is between replays: a
flush of the L2 cache would leave it full of lines to be written back, which took 10 us of each replay, and 40 of kernels that read without keeping.
"wall": one call after another, each with the next copy, until its result is there. A CPU has the latter only.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from tilewise.bench.ceiling import ceiling
from tilewise.bench.decode_cells import NAME, Caches, Cell, Pool
from tilewise.bench.decode_impls import Attend, DecodeImpl
from tilewise.bench.provenance import provenance
from tilewise.bench.runner import Timing
from tilewise.bench.store import Row
from tilewise.bench.timing import Stats, interleave
from tilewise.masks import Causal
from tilewise.problem import Call
from tilewise.testing import tolerance

MOST_SEQUENCES = 3  # that are checked


def measure(
    cells: Iterable[Cell],
    impls: Iterable[DecodeImpl],
    *,
    device: torch.device | str = "cpu",
    timing: Timing | None = None,
    limit_s: float = math.inf,
    keep: Callable[[list[Row]], object] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Row]:
    """Measure every contender on every cell: a row for each clock, or one with the reason why there is no time.

    `keep(rows)` after each cell with its rows; `progress(done, total, text)` before each. After `limit_s` seconds no cell is begun. What fails
    stops nothing.
    """
    cells, impls, device = list(cells), list(impls), torch.device(device)
    timing, began, pool, environment = timing or Timing(), time.monotonic(), Pool(device), provenance(device)
    rows: list[Row] = []
    for done, cell in enumerate(cells):
        if time.monotonic() - began > limit_s:
            break
        if progress:
            progress(done, len(cells), cell.title)
        new = [replace(row, environment=environment) for row in _rows_of(cell, impls, pool, timing)]
        rows += new
        if keep:
            keep(new)
    if progress:
        progress(len(cells), len(cells), "done")
    return rows


def _rows_of(cell: Cell, impls: list[DecodeImpl], pool: Pool, timing: Timing) -> list[Row]:
    """`_cell`, or where that fails as a whole rows that say so."""
    try:
        return _cell(cell, impls, pool, timing)
    except Exception as failure:
        reason = f"this cell cannot be measured: {type(failure).__name__}: {_first_line(failure)}"
    pool.numbers.clear()
    _give_back(pool.device)
    return [replace(_blank(impl.name, cell), reason=reason) for impl in impls]


def _cell(cell: Cell, impls: list[DecodeImpl], pool: Pool, timing: Timing) -> list[Row]:
    caches = pool.caches(cell)
    gate = Gate(caches)
    checked = {impl.name: _checked(impl, caches, gate) for impl in impls}
    calls = {name: attend for name, (attend, _) in checked.items() if attend is not None}
    timed, failed = _timed(calls, len(caches.copies), timing, pool.device)
    most = ceiling(pool.device, cell.dtype) if calls else None
    rows = []
    for name, (_, row) in checked.items():
        if name in failed:
            row = replace(row, reason=failed[name])
        by_clock = timed.get(name, {})
        rows += [_with_time(row, clock, stats, most) for clock, stats in by_clock.items()] or [row]
    return rows


def _blank(name: str, cell: Cell) -> Row:
    return Row(impl=name, name=NAME, case=cell.case, clock="none", flops=cell.flops, bytes=cell.bytes)


class Gate:
    """What every contender must reach on a sample: a key head, with the heads that read it, of the shortest, the longest and the last sequence."""

    def __init__(self, caches: Caches) -> None:
        self.caches, cell = caches, caches.cell
        by_length = sorted(range(cell.batch), key=lambda b: cell.lengths[b])
        self.sequences = list(dict.fromkeys((by_length[-1], by_length[0], cell.batch - 1)))[:MOST_SEQUENCES]
        group = cell.heads_q // cell.heads_k
        self.heads_k = slice(cell.heads_k - 1, cell.heads_k)
        self.heads_q = slice(cell.heads_q - group, cell.heads_q)
        self.want = [tolerance.expected(self._call(b)).o for b in self.sequences]

    def _call(self, b: int) -> Call:
        k, v = self.caches.keys(0, b, self.heads_k)
        return Call(q=self.caches.q[b : b + 1, :, self.heads_q], k=k[None], v=v[None], mask=Causal(), scale=self.caches.cell.head_dim**-0.5)

    def verify(self, attend: Attend) -> float:
        """The largest error; AssertionError beyond the tolerance."""
        poison = torch.full_like(self.caches.q, torch.nan)  # what an output is likely to be allocated on
        del poison
        o, worst = attend(0), 0.0
        if o.shape != self.caches.q.shape:
            raise AssertionError(f"O is {tuple(o.shape)}, not {tuple(self.caches.q.shape)}")
        for b, want in zip(self.sequences, self.want, strict=True):
            got = o[b : b + 1, :, self.heads_q]
            tolerance.hold("o", got, want)
            worst = max(worst, float((got.double() - want.ref).abs().max()))
        return worst


def _checked(impl: DecodeImpl, caches: Caches, gate: Gate) -> tuple[Attend | None, Row]:
    """What to time, or None; and the row so far."""
    row = _blank(impl.name, caches.cell)
    if why_not := impl.why_not(caches.cell, caches.q.device):
        return None, replace(row, reason="; ".join(why_not))
    try:
        attend = torch.no_grad()(impl.prepare(caches))
        return attend, replace(row, passed=True, error=gate.verify(attend))
    except AssertionError as failure:
        return None, replace(row, passed=False, reason=f"missed the tolerance: {_first_line(failure)}")
    except Exception as refusal:  # each peer refuses in its own way, and none may take the others' rows with it
        if isinstance(refusal, torch.OutOfMemoryError):
            _give_back(caches.q.device)
        return None, replace(row, reason=f"cannot run this: {type(refusal).__name__}: {_first_line(refusal)}")


def _timed(
    calls: dict[str, Attend], copies: int, timing: Timing, device: torch.device
) -> tuple[dict[str, dict[str, Stats]], dict[str, str]]:
    """Times of one call by contender and clock, and why others have none."""
    how = {"budget_s": timing.budget_s, "device": device, "once_above_s": timing.once_above_s}
    timed: dict[str, dict[str, Stats]] = {name: {} for name in calls}
    failed = {}
    for name, attend in calls.items() if device.type == "cuda" and "events" in timing.clocks else ():
        try:
            of_all = interleave({name: _all(attend, copies)}, clock="graph", flush=False, **how)[name]
            timed[name]["graph"] = _divided(of_all, copies)
        except Exception as failure:  # it synchronises, or allocates outside torch
            failed[name] = f"no CUDA graph of it can be made: {type(failure).__name__}: {_first_line(failure)}"
    if timing.clocks and (device.type == "cpu" or "wall" in timing.clocks):
        rotating = {name: _next(attend, copies) for name, attend in calls.items() if name not in failed}
        for name, stats in interleave(rotating, clock="wall", **how).items():
            timed[name]["wall"] = stats
    return timed, failed


def _all(attend: Attend, copies: int) -> Callable[[], None]:
    def run() -> None:
        for copy in range(copies):
            attend(copy)

    return run


def _next(attend: Attend, copies: int) -> Callable[[], object]:
    turn = itertools.cycle(range(copies))
    return lambda: attend(next(turn))


def _divided(stats: Stats, calls: int) -> Stats:
    return Stats(*(getattr(stats, name) / calls for name in ("median", "p10", "p90", "best")), stats.samples)


def _with_time(row: Row, clock: str, stats: Stats, most) -> Row:
    times = {"median_s": stats.median, "p10_s": stats.p10, "p90_s": stats.p90, "samples": stats.samples}
    rates = {"flops_per_s": row.flops / stats.median, "ceiling_share": most.share(row.flops, row.bytes, stats.median)}
    return replace(row, clock=clock, **times, **rates, ceiling_flops_per_s=most.matmul, ceiling_bytes_per_s=most.copy)


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
