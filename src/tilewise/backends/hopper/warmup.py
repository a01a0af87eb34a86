"""Fill the cache of compiled kernels ahead of time, in parallel processes: `tilewise warmup`. Needs the DSL, but no GPU."""

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch

from tilewise.backends.hopper import coverage
from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.eight_bits.config import FEW_KEYS, LONG
from tilewise.backends.hopper.forward import config
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Documents, Full, Mask, PrefixLM, SlidingWindow
from tilewise.problem import Call, Dropout, Problem
from tilewise.sm90 import cache, jit
from tilewise.sm90.jit import Kernel

GROUP = 256  # query heads of a key head, with which walks of every length read much
FEW = 1  # keys, of which a pass knows shorter ways
FAR = 1 << 20  # as far as a window reaches, or a document goes, so that no Choice takes it for short
WINDOWS = SlidingWindow(1, 0), SlidingWindow(FAR, 0)
DOCUMENTS = Documents([0, 1, 2], inner=Causal()), Documents([0, FAR], inner=Causal())
MASKS = {"full": (Full(),), "band": (Full(), Causal(), *WINDOWS), "runs": (*DOCUMENTS, PrefixLM(1)), "bitmap": (PrefixLM(1),)}
"""By Mask.kind: one mask for each way that kernels see. One query of a band sees all of some keys (packing.py)."""
EXTRAS = ("softcap", "bias", "alibi", "sink", "dropout")  # what changes scores and probabilities; a bias is of the call's dtype


class Cell(NamedTuple):
    """What the kernels of a call depend on, besides a Choice by its length and whether a group's heads are apart; batch is none of it, nor is how far
    a window reaches.
    """

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    mask: Mask
    extras: tuple[str, ...] = ()  # of EXTRAS
    grad: bool = False  # with the backward pass, where there is one
    precision: str | None = None  # the recipe in 8 bits


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
    return _kernels(cells, [(n, n) for n in _lengths()])


def of_decode(cells: Iterable[Cell]) -> list[Kernel]:
    """The kernels that decode calls of these kinds, each once: of contiguous caches and of pages; none where decoding does not cover a kind."""
    found = (coverage.of_decode(cell.dtype, cell.head_dim, cell.head_dim_v, cell.mask, cell.extras) for cell in cells)
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _lengths() -> list[int]:
    return sorted({*config.lengths(), *backward_config.lengths(), LONG, LONG + 1, FEW_KEYS + 1})


def _kernels(cells: Iterable[Cell], lengths: Iterable[tuple[int, int]]) -> list[Kernel]:
    """Each once; lengths: of queries and of keys."""
    calls = (_call(cell, *pair) for cell, pair in itertools.product(cells, lengths))
    return list(dict.fromkeys(kernel for call in calls for kernel in (*coverage.kernels(call), *_of_groups(call))))


def of_problem(problem: Problem) -> list[Kernel]:
    """The kernels that calls of that problem may need, also those of lengths that seldom meet: many queries and few keys.

    Raises:
        UnsupportedError: the backend does not cover it.
    """
    extras = tuple(name for name in EXTRAS if getattr(problem, name))
    dims = problem.head_dim, problem.head_dim_v
    cells = [Cell(*dims, problem.dtype, mask, extras, problem.grad, problem.precision) for mask in MASKS[problem.mask]]
    return _kernels(cells, [pair for n in _lengths() for pair in ((n, n), (n, FEW))])


def _of_groups(call: Call) -> list[Kernel]:
    """What the backward pass of grouped queries needs where their heads are apart."""
    grouped = replace(call, q=call.q.expand(-1, -1, GROUP, -1))
    return gradients.kernels(grouped) if call.grad and call.bias is None else []


def extras_from(text: str) -> list[tuple[str, ...]]:
    """Combinations of EXTRAS from such as "softcap,alibi+sink"; an empty text is the plain kernels.

    Raises ValueError for anything else.
    """
    found = [tuple(dict.fromkeys(each.split("+"))) if each else () for each in text.split(",")]
    if wrong := [name for names in found for name in names if name not in EXTRAS]:
        raise ValueError(f"extras is {text!r}; it takes {', '.join(EXTRAS)}, or several of them with +, and no {wrong[0]!r}")
    return found


def require_compiler() -> None:
    """Raise UnsupportedError where nothing can be compiled."""
    if missing := jit.why_no_compiler():
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


def one(kernel: Kernel) -> Outcome:
    """Compile a kernel in this process, where the cache does not have it."""
    start, entry = time.perf_counter(), _entry(kernel)
    if cache.whole(entry):
        return Outcome(kernel, "cached", time.perf_counter() - start, entry.stat().st_size)
    return _compile(kernel)


def describe(kernel: Kernel) -> tuple[str, str, str, str]:
    """(module, head_dim, dtype, what else is not as it is by default) for a table."""
    config, dims, dtype = kernel.config, "", ""
    others = [each for each in fields(config) if each.name not in ("head_dim", "head_dim_v", "dtype")]
    if hasattr(config, "head_dim"):
        dims, dtype = (
            "/".join(map(str, dict.fromkeys((config.head_dim, getattr(config, "head_dim_v", config.head_dim))))),
            str(getattr(config, "dtype", "")).removeprefix("torch."),
        )
    values = " ".join(f"{each.name}={value}" for each in others if (value := getattr(config, each.name)) != each.default)
    *_, package, module = kernel.launch.partition(":")[0].split(".")
    return package if module == "kernel" else module, dims, dtype, values


def _call(cell: Cell, seqlen_q: int, seqlen_k: int) -> Call:
    """A call of that kind, on tensors that hold nothing."""
    shapes = (seqlen_q, cell.head_dim), (seqlen_k, cell.head_dim), (seqlen_k, cell.head_dim_v)
    q, k, v = (torch.empty((1, seqlen, 1, dim), dtype=cell.dtype, device="meta") for seqlen, dim in shapes)
    one = torch.empty(1, 1, 1, 1, dtype=cell.dtype, device="meta")
    values = {
        "softcap": 1.0,
        "bias": one.expand(1, 1, 1, seqlen_k),
        "alibi": one[0, 0].float(),
        "sink": one[0, 0, 0],
        "dropout": Dropout(0.5, 0, 0),
    }
    names = {"alibi": "alibi_slopes"}
    extras = {names.get(name, name): values[name] for name in cell.extras}
    call = Call(q=q, k=k, v=v, mask=cell.mask, scale=1.0, grad=cell.grad, precision=cell.precision, **extras)
    if cell.grad and gradients.why_not(call.problem):
        call = replace(call, grad=False)
    if wrong := coverage.refused(replace(call.problem, device="cuda")):
        raise UnsupportedError(f"hopper has no kernel for head_dim {cell.head_dim}/{cell.head_dim_v}, {cell.dtype}: {'; '.join(wrong)}")
    return call


def _entry(kernel: Kernel):
    return cache.entry(*kernel.identity, jit.arch())


def _compile(kernel: Kernel) -> Outcome:
    """In a process of its own."""
    start, entry = time.perf_counter(), _entry(kernel)
    try:
        made = jit.build(*kernel, runs=False)
    except Exception as error:  # of the compiler, which has many; said in the table
        return Outcome(kernel, "failed", time.perf_counter() - start, reason=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    if not cache.store(entry, made) or not cache.whole(entry):
        return Outcome(kernel, "failed", seconds, reason=f"it could not be kept at {entry}")
    return Outcome(kernel, "compiled", seconds, entry.stat().st_size)
