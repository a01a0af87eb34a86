"""Compile what contenders need before anything is measured, in processes side by side: kernels compiled one after the other would take longer than
timing them.

Ours are known by name, so a job is a kernel. Of other contenders a job runs one once on one kind of workload, with a batch of one, and leaves what it
compiled in that contender's own cache on disk: torch.compile's, and FlashAttention-4's, which an environment variable switches on.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilewise.backends.hopper import coverage, warmup
from tilewise.bench.peers import Impl
from tilewise.bench.runner import call_of
from tilewise.bench.sets import Workload
from tilewise.masks import Documents

CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}  # read when FlashAttention-4 is imported
COMPILING = ("tilewise", "fa4", "flex")  # contenders that compile, by the first word of their names


@dataclass(frozen=True)
class Compiled:
    """What became of one job; `reason` is empty where it went well."""

    impl: str
    what: str  # a kernel, or the id of a workload
    seconds: float
    reason: str = ""


Job = Callable[[], Compiled]  # that can be carried to another process


def jobs(workloads: Iterable[Workload], impls: Iterable[Impl], device: torch.device) -> list[Job]:
    """What is to be compiled for the contenders that can run these workloads, each once."""
    found: dict[Hashable, Job] = {}
    for workload in workloads:
        one = workload if isinstance(workload.mask, Documents) else replace(workload, batch=1)
        for impl in impls:
            if impl.name.partition(":")[0] not in COMPILING or impl.why_not(workload, device):
                continue
            if _on_hopper(impl, workload, device):
                for kernel in coverage.kernels(workload.call()):
                    found.setdefault(kernel, partial(_kernel, impl.name, kernel))
            else:
                found.setdefault((impl.name, *_kind(impl, one)), partial(_once, impl, one, device))
    return list(found.values())


def _on_hopper(impl: Impl, workload: Workload, device: torch.device) -> bool:
    return impl.name in ("tilewise", "tilewise:hopper") and device.type == "cuda" and not coverage.refused(workload.problem(device))


def _kind(impl: Impl, workload: Workload) -> tuple:
    """What kernels depend on: FlashAttention-4's do not on lengths, torch.compile's are of one shape."""
    kind = (workload.head_dim, workload.head_dim_v, type(workload.mask).__name__, workload.dtype, workload.direction, str(workload.changes))
    if impl.name.partition(":")[0] == "fa4":
        return *kind, workload.heads_q // workload.heads_k
    return *kind, workload.heads_q, workload.heads_k, workload.seqlen_q, workload.seqlen_k, str(workload.case["mask"])


def compile_ahead(todo: Iterable[Job], processes: int | None = None) -> Iterator[Compiled]:
    """Do the jobs, up to `processes` at once (default: one a core; 0: in this process), each outcome as it comes; failures are outcomes, too.

    Call it before FlashAttention-4 is imported, so that this process reads the cache as well.
    """
    os.environ.update({name: value for name, value in CACHES.items() if name not in os.environ})
    todo = list(todo)
    if processes == 0 or not todo:
        yield from (job() for job in todo)
        return
    workers = min(processes or os.cpu_count() or 1, len(todo))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(job) for job in todo]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _kernel(name: str, kernel: warmup.Kernel) -> Compiled:
    outcome = warmup.one(kernel)
    return Compiled(name, " ".join(warmup.describe(kernel)), outcome.seconds, outcome.reason)


def _once(impl: Impl, workload: Workload, device: torch.device) -> Compiled:
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
