"""Fill the cache of compiled kernels ahead of time, in parallel processes: `tilewise warmup`. Needs the DSL, but no GPU."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch

from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.config import lengths
from tilewise.errors import UnsupportedError
from tilewise.hopper import cache
from tilewise.hopper import compile as hopper
from tilewise.masks import Mask
from tilewise.problem import Call


class Cell(NamedTuple):
    """What the kernels of a call depend on, besides a Choice by its length; batch and heads are none of it, nor is how far a window reaches."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    mask: Mask


class Kernel(NamedTuple):
    """What `compile.compiled` takes."""

    launch: str  # "module:function"
    arguments: Callable
    config: object


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel; `reason` says why it failed."""

    kernel: Kernel
    state: Literal["cached", "compiled", "failed"]
    seconds: float
    bytes: int = 0
    reason: str = ""


def kernels(cells: Iterable[Cell]) -> list[Kernel]:
    """The kernels that calls of these kinds, of any length, need, each once.

    Raises:
        UnsupportedError: the backend does not cover one of them.
    """
    calls = (_call(cell, seqlen) for cell in cells for seqlen in lengths())
    return list(dict.fromkeys(Kernel(*kernel) for call in calls for kernel in Hopper().kernels(call)))


def require_compiler() -> None:
    """Raise UnsupportedError where nothing can be compiled."""
    if missing := hopper.why_no_compiler():
        raise UnsupportedError("; ".join(missing))


def require_cache() -> None:
    """Raise UnsupportedError where what is compiled cannot be kept."""
    if why := cache.why_not():
        raise UnsupportedError(f"compiled kernels cannot be kept: {why}")


def warm(todo: Iterable[Kernel], processes: int | None = None) -> Iterator[Outcome]:
    """Compile those that are not in the cache, up to `processes` at once (default: one a core); each outcome as it comes."""
    missing = []
    for kernel in todo:
        start = time.perf_counter()
        entry = _entry(kernel)
        if cache.whole(entry):
            yield Outcome(kernel, "cached", time.perf_counter() - start, entry.stat().st_size)
        else:
            missing.append(kernel)
    if not missing:
        return
    workers = min(processes or os.cpu_count() or 1, len(missing))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(_compile, kernel) for kernel in missing]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def describe(kernel: Kernel) -> tuple[str, str, str, str]:
    """(module, head_dim, dtype, what else tells it from others) for a table."""
    config = kernel.config
    dims = dict.fromkeys(getattr(config, name) for name in ("head_dim", "head_dim_v") if hasattr(config, name))
    others = (each.name for each in fields(config) if each.name not in ("head_dim", "head_dim_v", "dtype"))
    module = kernel.launch.partition(":")[0].rpartition(".")[2]
    return (
        module,
        "/".join(map(str, dims)),
        str(getattr(config, "dtype", "")).removeprefix("torch."),
        " ".join(f"{name}={getattr(config, name)}" for name in others),
    )


def _call(cell: Cell, seqlen: int) -> Call:
    """A call of that kind, on tensors that hold nothing."""
    q, k, v = (torch.empty((1, seqlen, 1, dim), dtype=cell.dtype, device="meta") for dim in (cell.head_dim, cell.head_dim, cell.head_dim_v))
    call = Call(q=q, k=k, v=v, mask=cell.mask, scale=1.0)
    here = hopper.why_not_here()
    if wrong := [why for why in Hopper().why_not(replace(call.problem, device="cuda")) if why not in here]:
        raise UnsupportedError(f"hopper has no kernel for head_dim {cell.head_dim}/{cell.head_dim_v}, {cell.dtype}: {'; '.join(wrong)}")
    return call


def _entry(kernel: Kernel):
    return cache.entry(kernel.launch, kernel.config, hopper.arch())


def _compile(kernel: Kernel) -> Outcome:
    """In a process of its own."""
    start, entry = time.perf_counter(), _entry(kernel)
    try:
        made = hopper.build(*kernel)
    except Exception as error:  # of the compiler, which has many; said in the table
        return Outcome(kernel, "failed", time.perf_counter() - start, reason=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    if not cache.store(entry, made) or not cache.whole(entry):
        return Outcome(kernel, "failed", seconds, reason=f"it could not be kept at {entry}")
    return Outcome(kernel, "compiled", seconds, entry.stat().st_size)
