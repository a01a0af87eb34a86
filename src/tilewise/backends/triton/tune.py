"""The search that fills config.TABLE: compile what may be fast, drop what spills or does not fit, time the rest in turns on this GPU.

A configuration is chosen for a pass, the bytes of an element and a head class; workloads that it is timed at count equally, by the geometric mean.
In 8 bits q and k are what has one byte: recipes that multiply these in int8 share their tiles, and are timed with their quantisers.
"""

import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from tilewise.backends.eight_bits import INT8, RECIPES
from tilewise.backends.triton.bound import Bound, kind_of
from tilewise.backends.triton.config import CLASSES, Config, Instead, config_of, head_class
from tilewise.backends.triton.eight_bits import Quantiser
from tilewise.backends.triton.launch import Kernel, compiled
from tilewise.backends.triton.targets import Target, of_device
from tilewise.masks import Causal, Full, Mask
from tilewise.problem import Call

PASSES = "forward", "dkdv", "dq"
TILES = {"forward": ((64, 128), (32, 64, 128)), "dkdv": ((16, 32, 64, 128), (32, 64, 128)), "dq": ((32, 64, 128), (16, 32, 64, 128))}
WARPS, STAGES = (4, 8), (1, 2, 3, 4)
MOST_SUMS = 192  # elements that a thread accumulates at most: beyond that everything spills
LEAST_SUMS = 16
SPILLED_BYTES = 64  # a thread's stack, at most
MASKS: tuple[Mask, ...] = (Full(), Causal())
IN_INT8 = tuple(name for name, recipe in RECIPES.items() if recipe.qk == INT8)


class Job(NamedTuple):
    """What a configuration is sought for."""

    purpose: str
    dtype: torch.dtype
    head_dim: int
    seqlen: int = 8192
    hidden: int = 2048
    masks: tuple[Mask, ...] = MASKS
    precisions: tuple[str | None, ...] = (None,)  # or recipes with int8 products of q and k, of the forward pass

    @property
    def multiplied(self) -> torch.dtype:
        """q's and k's in products."""
        return self.dtype if self.precisions == (None,) else INT8

    @property
    def kind(self) -> str:
        """Of its masks, where they have one."""
        kinds = set(map(kind_of, self.masks))
        return kinds.pop() if len(kinds) == 1 else "band"

    @property
    def workloads(self) -> list[tuple[Mask, str | None]]:
        """What it is timed at, with all masks of a recipe together."""
        return [(mask, precision) for precision in self.precisions for mask in self.masks]

    def calls(self, device: torch.device | str) -> list[Call]:
        """On random tensors, one for each of `workloads`."""
        shape = 1, self.seqlen, self.hidden // self.head_dim, self.head_dim
        q, k, v = (torch.randn(shape, dtype=torch.float32, device=device).to(self.dtype) for _ in range(3))
        grad = self.purpose != "forward"
        more = {"scale": self.head_dim**-0.5, "grad": grad}
        return [Call(q=q, k=k, v=v, mask=mask, precision=precision, **more) for mask, precision in self.workloads]


def candidates(job: Job) -> Iterator[Config]:
    """Configurations that registers may hold."""
    dim = max(job.head_dim, 16)
    for tile_m, tile_n, warps, stages in itertools.product(*TILES[job.purpose], WARPS, STAGES):
        own, sums = (tile_n, 2 * dim) if job.purpose == "dkdv" else (tile_m, dim)
        products = tile_m * tile_n * (1 if job.purpose == "forward" else 2)
        threads = 32 * warps
        if own * sums // threads >= LEAST_SUMS and (own * sums + products) // threads <= MOST_SUMS and own >= 16 * warps // 2:
            yield Config(tile_m, tile_n, warps, stages)


def passes(job: Job, config: Config, call: Call) -> Callable[[], object]:
    """What runs the pass, with all that the others leave for it."""
    bound = Bound(call, {job.purpose: config})
    if job.purpose == "forward":
        return lambda: bound.results(call)
    o, lse = bound.results(call)
    d_o = torch.randn_like(o)
    return lambda: bound.backward(call.q, call.k, call.v, o, lse, d_o, None, call.extras, False)


class Compiled(NamedTuple):
    """A candidate, and why it is not timed; empty where it is."""

    job: Job
    config: Config
    wrong: str


def compile_all(todo: Sequence[tuple[Job, Config]], processes: int | None = None) -> list[Compiled]:
    """Each candidate compiled for this GPU into Triton's cache, in processes."""
    workers = max(1, min(processes or os.cpu_count() or 1, len(todo)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile, *zip(*todo, strict=True)))


def kernels(job: Job, config: Config, device: torch.device | str) -> tuple[list[Kernel], list[Kernel]]:
    """The pass of each workload, and all others that depend on the configuration: what mends a result, and what quantises."""
    passes, others = [], []
    for call in job._replace(seqlen=16, hidden=job.head_dim, masks=(Full(),)).calls(device):
        bound = Bound(call, {job.purpose: config})
        for kind in map(kind_of, job.masks):
            first, mends = bound.kernels(job.purpose, kind)
            passes.append(first)
            others.append(mends)
        others += bound.quantiser.kernels() if isinstance(bound.quantiser, Quantiser) else []
    return list(dict.fromkeys(passes)), list(dict.fromkeys(others))


def _compile(job: Job, config: Config) -> Compiled:
    """Everything that is timed; of a configuration that spills the pass alone, unless it is the one that ships."""
    try:
        passes, others = kernels(job, config, "cuda")
        spills = []
        for kernel in passes:
            loaded = compiled(kernel, _target())
            loaded._init_handles()
            spills.append(loaded.n_spills)
        spilled = 4 * max(spills) > SPILLED_BYTES
        for kernel in [] if spilled and config != shipped(job) else others:
            compiled(kernel, _target())
    except Exception as error:  # of the compiler, which has many; said in the table
        return Compiled(job, config, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
    return Compiled(job, config, f"{max(spills)} numbers spilled" if spilled else "")


class Found(NamedTuple):
    """A configuration, the geometric mean of its times, and each workload's, in seconds."""

    config: Config
    mean: float
    seconds: list[float]


def search(
    jobs: Sequence[Job],
    time: Callable[[Mapping[Config, Callable[[], object]]], Mapping[Config, float]],
    most: int | None = None,
    processes: int | None = None,
) -> dict[Job, list[Found]]:
    """Each job's configurations from the fastest on, the one that ships among them, whatever it spills; `time` measures calls in turns. Of `most`
    other candidates a job, compiled by `processes` processes.
    """
    todo = [(job, config) for job in jobs for config in dict.fromkeys([shipped(job), *itertools.islice(candidates(job), most)])]
    able = [each for each in compile_all(todo, processes) if not each.wrong or each.config == shipped(each.job)]
    found = {}
    for job in jobs:
        seconds: dict[Config, list[float]] = {each.config: [] for each in able if each.job == job}
        for call in job.calls("cuda"):
            for config, taken in time({config: passes(job, config, call) for config in seconds}).items():
                seconds[config].append(taken)
        means = [Found(config, math.exp(sum(map(math.log, each)) / len(each)), each) for config, each in seconds.items() if each]
        found[job] = sorted(means, key=lambda row: row.mean)
    return found


def shipped(job: Job) -> Config:
    """The table's."""
    return config_of(_target(), job.purpose, job.multiplied, job.head_dim, job.head_dim, mask=job.kind)


def row(job: Job, config: Config, note: str) -> str:
    """The line for config.TABLE, or with a kind of mask for config.INSTEAD."""
    most = head_class(job.head_dim, job.head_dim)
    key = _target().family, job.purpose, job.multiplied.itemsize
    if job.kind == "band":
        found = f"{(*key, most)}: ({config!r}, {note!r})"
    else:
        above = max((each for each in CLASSES if each < most), default=0)
        found = repr(Instead(*key, above, most, "plain", (job.kind,), config, note))
    return f"    {found},".replace("'", '"')


def _target() -> Target:
    """This machine's GPU."""
    return of_device(torch.device("cuda", torch.cuda.current_device()))
