"""Timing contenders against each other: interleaved in one process, so that whatever slows the machine slows them all.

Three clocks. "wall": the Python call until its result exists (on a GPU: is computed). "events": what lies between two CUDA events, with the
L2 cache flushed before each sample, and the launch given a head start so that it is not timed; where that was too short, as after a contender
that takes long, the sample is taken again. "graph": the same around the replay of a captured CUDA graph, for calls shorter than their own
launch.

`ceiling` times what the machine can do at most by the same means: a large matmul, and a copy.
"""

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch

Clock = Literal["wall", "events", "graph"]
CLOCKS = ("wall", "events", "graph")

SHORTEST_SAMPLE_S = 1e-3  # a CPU sample repeats a shorter call until this much is measured at once
GRAPH_BELOW_S = 50e-6
L2_FLUSH_BYTES = 256 << 20
LEAST_HEAD_START_S = 5e-4  # a host that does other work, too, may be late by that
LONGEST_HEAD_START_S, CYCLES_PER_S = 2e-3, 2e9  # of the GPU's clock, roughly
LATE_IN_A_ROW = 4  # samples without a head start, after which a call is timed with its launch
MOST_ROUNDS = 200
REST_S = 0.3  # the driver clears memory that it was given back, 2.5 ms a GB on an H100, in which everything else reads 17 % slower


@dataclass(frozen=True)
class Stats:
    """Seconds a call takes: median, the 10th and 90th percentile, the shortest, and how many samples they come from."""

    median: float
    p10: float
    p90: float
    best: float
    samples: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Stats":
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], ordered[0], len(ordered))

    def over(self, calls: int) -> "Stats":
        """Of one call, where these are of `calls` equal ones."""
        return Stats(self.median / calls, self.p10 / calls, self.p90 / calls, self.best / calls, self.samples)


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    device: torch.device | str = "cpu",
    clock: Clock = "wall",
    once_above_s: float = math.inf,
    flush: bool = True,
) -> dict[str, Stats]:
    """Time each of `calls` in turn, round after round, for about `budget_s` seconds a call; at least three rounds.

    Every call runs once beforehand, untimed. The order rotates, so that none always follows the same neighbour. A call with a first
    sample of more than `once_above_s` seconds has that one only, and its time does not count against the others' budget. Without `flush` the L2 cache
    keeps what is in it: for calls that read far more than it holds. A flush leaves it full of lines that are to be written back, during the call.
    Raises ValueError for a clock the device does not have.
    """
    device = torch.device(device)
    if clock not in CLOCKS:
        raise ValueError(f"clock is {clock!r}; it must be one of {', '.join(CLOCKS)}")
    if clock != "wall" and device.type != "cuda":
        raise ValueError(f"clock {clock!r} needs a CUDA device, and this is {device}; use clock='wall'")
    samplers = {name: _sampler(call, device, clock, flush) for name, call in calls.items()}
    _rest(device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    collecting = gc.isenabled()
    gc.disable()
    try:
        deadline = time.perf_counter() + budget_s * len(calls)
        for done in range(MOST_ROUNDS):
            if done >= 3 and time.perf_counter() > deadline:
                break
            start = done % max(1, len(names))
            for name in names[start:] + names[:start]:
                seconds[name].append(samplers[name]())
                if done == 0 and seconds[name][0] > once_above_s:
                    deadline += seconds[name][0]
            names = [name for name in names if seconds[name][0] <= once_above_s]
    finally:
        if collecting:
            gc.enable()
    return {name: Stats.of(taken) for name, taken in seconds.items()}


_FREED: dict[torch.device, int] = {}  # how often memory had been given back to the driver


def _rest(device: torch.device) -> None:
    """Wait where torch has given memory back to the driver: whoever was timed first would be slow (lab/rows/decode-after-freeing-h100.jsonl)."""
    freed = torch.cuda.memory_stats(device).get("num_device_free", 0) if device.type == "cuda" else 0
    if freed > _FREED.get(device, 0):
        _FREED[device] = freed
        torch.cuda.synchronize(device)
        time.sleep(REST_S)


def _sampler(call: Callable[[], object], device: torch.device, clock: Clock, flush: bool) -> Callable[[], float]:
    call()
    if clock == "wall":
        return _wall_sampler(call, device)
    if clock == "graph":
        call = _captured(call)
    return _event_sampler(call, device, flush)


def _wall_sampler(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    synchronize = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)

    def sample(repeats: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
            synchronize()
        return (time.perf_counter() - start) / repeats

    repeats = max(1, round(SHORTEST_SAMPLE_S / max(sample(1), 1e-7)))
    return lambda: sample(repeats)


def _event_sampler(call: Callable[[], object], device: torch.device, flush: bool) -> Callable[[], float]:
    evicting = torch.empty(L2_FLUSH_BYTES if flush else 0, dtype=torch.int8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    head_start = int(min(LEAST_HEAD_START_S + 2 * (time.perf_counter() - began), LONGEST_HEAD_START_S) * CYCLES_PER_S)
    late = 0

    def sample() -> float:
        nonlocal late
        while True:
            torch.cuda._sleep(head_start)  # the GPU waits while Python enqueues the call, so that launching it is not timed
            evicting.zero_()  # the operands
            start.record()
            call()
            in_time = not start.query()
            end.record()
            end.synchronize()
            late = 0 if in_time else late + 1
            if in_time or late >= LATE_IN_A_ROW:
                return start.elapsed_time(end) * 1e-3

    return sample


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    """What replays it from a CUDA graph. RuntimeError where none can be made of it, and the process is then as it was before."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:
        torch.cuda.set_stream(current)  # where torch left the capture's own
        _end_capture()
        raise
    return graph.replay


def _end_capture() -> None:
    """After a capture that failed torch's generator of random numbers still waits for its end, and refuses every call: an empty one ends it."""
    with warnings.catch_warnings(action="ignore"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        pass


@dataclass(frozen=True)
class Ceiling:
    """`matmul`: FLOP/s of one large square product. `copy`: bytes/s of a large copy, the read and the write both counted."""

    matmul: float
    copy: float

    def share(self, flops: float, moved_bytes: float, seconds: float) -> float:
        """The fraction of the roofline reached: the least time these rates allow for the work, over the time taken."""
        return max(flops / self.matmul, moved_bytes / self.copy) / seconds


def ceiling(device: torch.device | str, dtype: torch.dtype) -> Ceiling:
    """Measure once a process for each device, dtype and number of threads; about a second. The shortest of the samples counts.

    The product is measured in the dtype as any caller would get it: on a CPU that computes it by conversion that is slower than fp32's. In e4m3, for
    a CUDA device alone, it has a scale for each matrix, and its result is bf16.
    """
    return _measure(torch.device(device), dtype, torch.get_num_threads())


@cache
def _measure(device: torch.device, dtype: torch.dtype, threads: int) -> Ceiling:
    cpu_side = 1024 if threads <= 4 else 2048  # outgrows the caches, yet ends in tens of milliseconds
    side, copied = (8192, 1 << 30) if device.type == "cuda" else (cpu_side, 256 << 20)
    a, b = (torch.randn(side, side, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = "events" if device.type == "cuda" else "wall"
    if dtype == torch.float8_e4m3fn:
        by_columns, one = b.t(), torch.ones((), dtype=torch.float32, device=device)  # what cuBLAS takes
        scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  (torch's stubs do not list it)
        matmul = partial(scaled_mm, a, by_columns, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        matmul = partial(torch.mm, a, b, out=torch.empty_like(a))
    taken = interleave({"matmul": matmul, "copy": lambda: target.copy_(source)}, budget_s=0.4, device=device, clock=clock)
    return Ceiling(matmul=2 * side**3 / taken["matmul"].best, copy=2 * copied / taken["copy"].best)
