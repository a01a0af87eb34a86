"""Compile what contenders need before anything is measured, in processes side by side: kernels compiled one after the other would take longer than
timing them.

Each job runs one contender once on one kind of workload, with a batch of one, and leaves what it compiled in that contender's own cache on disk:
ours (sm90/cache.py), torch.compile's, and FlashAttention-4's, which an environment variable switches on.
"""

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from tilewise.bench.impls import Impl
from tilewise.bench.runner import call_of
from tilewise.bench.workloads import Workload
from tilewise.masks import Documents

CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}  # read when FlashAttention-4 is imported
COMPILING = ("tilewise", "fa4", "flex")  # contenders that compile, by the first word of their names


@dataclass(frozen=True)
class Compiled:
    """What became of one job; `reason` is empty where it ran."""

    impl: str
    workload: str  # its id
    seconds: float
    reason: str = ""


def jobs(workloads: Iterable[Workload], impls: Iterable[Impl], device: torch.device) -> list[tuple[Impl, Workload]]:
    """A contender that compiles, with one workload of each kind that it can run; those that share their kernels are one kind."""
    found: dict[tuple, tuple[Impl, Workload]] = {}
    for workload in workloads:
        one = workload if isinstance(workload.mask, Documents) else replace(workload, batch=1)
        for impl in impls:
            if impl.name.partition(":")[0] in COMPILING:
                found.setdefault((impl.name, *_kind(impl, one)), (impl, one))
    return [(impl, workload) for impl, workload in found.values() if not impl.why_not(workload, device)]


def _kind(impl: Impl, workload: Workload) -> tuple:
    """What kernels depend on. Ours are chosen by length, too, and torch.compile's are of one shape."""
    kind = (workload.head_dim, workload.head_dim_v, type(workload.mask).__name__, workload.dtype, workload.direction, str(workload.changes))
    if impl.name.partition(":")[0] == "fa4":
        return *kind, workload.heads_q // workload.heads_k
    return *kind, workload.heads_q, workload.heads_k, workload.seqlen_q, workload.seqlen_k, str(workload.case["mask"])


def compile_ahead(
    workloads: Iterable[Workload], impls: Iterable[Impl], device: torch.device | str, processes: int | None = None
) -> Iterator[Compiled]:
    """Run the `jobs`, up to `processes` at once (default: one a core; 0: in this process), each outcome as it comes; failures are outcomes, too.

    Call it before FlashAttention-4 is imported, so that this process reads the cache as well.
    """
    os.environ.update({name: value for name, value in CACHES.items() if name not in os.environ})
    device = torch.device(device)
    todo = jobs(workloads, list(impls), device)
    if processes == 0 or not todo:
        yield from (_once(impl, workload, device) for impl, workload in todo)
        return
    workers = min(processes or os.cpu_count() or 1, len(todo))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(_once, impl, workload, device) for impl, workload in todo]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _once(impl: Impl, workload: Workload, device: torch.device) -> Compiled:
    """In a process of its own."""
    start, reason = time.perf_counter(), ""
    try:
        inputs = workload.inputs(0, device, getattr(impl, "heads_first", False))
        call_of(impl.prepare(workload, device), workload, inputs)()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    except Exception as refusal:  # the run itself will say it in a row
        reason = f"{type(refusal).__name__}: {(str(refusal).strip().splitlines() or [''])[0]}"
    return Compiled(impl.name, workload.id, time.perf_counter() - start, reason)
