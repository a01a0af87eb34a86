"""The search that fills config.TILES: compile what may be fast, check it, time it against what ships: `tilewise tune`.

A kernel is chosen for a tile's head dimensions and what its rows see; the lengths that it is timed at count equally, by their geometric mean.
First every shape that fits is timed shortly, then the manners of the best, then the best few at length. Which shapes fit is known before they
are compiled, by arithmetic on `Config`; whether the compiler kept all in registers and left products in flight, it says itself.
"""

import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from itertools import product

import torch
from torch import Tensor

from tilewise.backends.hopper import forecast
from tilewise.backends.hopper.forward import call as forward
from tilewise.backends.hopper.forward.config import REGISTERS, Config
from tilewise.bench.runner import Timing, run
from tilewise.bench.sets import Workload
from tilewise.bench.store import Row
from tilewise.problem import Call
from tilewise.sm90 import cache, jit

SHAPES = {"tile_m": (128, 192), "tile_n": tuple(range(64, 257, 16)), "kv_stages": (2, 3), "pingpong": (True, False)}
MANNERS = {"late": (False, True), "dynamic": (True, False), "cluster": (1, 2), "q_stages": (1, 2)}  # tried on the best shapes
SPARE = 24  # registers that a computing thread needs besides what it accumulates, at least
REMARKS = "remarks{ptx}"  # the compiler says what it used
LEADERS = 3  # shapes that are tried in all manners
FINAL = 6  # timed at length
TOKENS, WIDTH = 16384, 2048
SHORT_S, LONG_S = 0.04, 0.4  # of timing for each kernel and length


def choices() -> dict[str, tuple]:
    """What is chosen, by field of Config."""
    return SHAPES | {name: values for name, values in MANNERS.items() if name in {each.name for each in fields(Config)}}


def why_not(config: Config) -> list[str]:
    """Sentences that say why this kernel cannot be, or cannot be fast; empty where it is worth compiling."""
    if (config.consumers, config.blocks) not in REGISTERS or config.tile_m % 64:
        known = " or ".join(str(consumers) for consumers, blocks in REGISTERS if blocks == config.blocks)
        return [f"registers are handed out for {known} computing warpgroups"]
    wrong = []
    if forecast.smem_bytes(config) > config.shared_bytes:
        wrong.append("the operands do not fit the shared memory")
    if registers(config) > config.registers[1]:
        wrong.append("the sums do not fit the registers")
    return wrong


def registers(config: Config) -> int:
    """What a computing thread holds at least: a row's share of S, of P at half the size, and of O."""
    return config.tile_n // 2 + config.tile_n // 4 + config.head_dim_v // 2 + SPARE


def shapes(shipped: Config) -> tuple[list[Config], Counter]:
    """`shipped`, then its other shapes, the most promising first; and why the rest are not tried."""
    found, refused = [], Counter()
    for values in product(*SHAPES.values()):
        config = replace(shipped, **dict(zip(SHAPES, values, strict=True)))
        wrong = why_not(config)
        refused.update(wrong[:1])
        if not wrong and config != shipped:
            found.append(config)
    return [shipped, *sorted(found, key=_promise)], refused


def manners(leaders: Iterable[Config]) -> list[Config]:
    """The leaders, each in all manners that fit."""
    names = {name: values for name, values in choices().items() if name in MANNERS}
    found = (replace(config, **dict(zip(names, values, strict=True))) for config in leaders for values in product(*names.values()))
    return [config for config in found if not why_not(config)]


def _promise(config: Config) -> tuple:
    """Ascending from the best: clocks a number of S, to a percent; larger tiles, which begin and end less often; then what takes least."""
    numbers = config.tile_m * config.tile_n
    return round(100 * forecast.clocks(config).most / numbers), -numbers, forecast.smem_bytes(config), label(config)


def label(config: Config) -> str:
    return " ".join(f"{name}={getattr(config, name)}" for name in choices())


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a candidate; `wrong` says why it is not timed."""

    config: Config
    seconds: float
    registers: int = 0
    wrong: tuple[str, ...] = ()


def compile_all(todo: Sequence[Config], processes: int | None = None) -> Iterator[Compiled]:
    """Each candidate as it is compiled, in up to `processes` processes (default: one a core); it is then in the cache."""
    workers = max(1, min(processes or os.cpu_count() or 1, len(todo)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(_compile, config) for config in todo]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(config: Config) -> Compiled:
    start = time.perf_counter()
    try:
        kernel, remarks = _with_output(lambda: jit.build(forward.LAUNCH, forward.arguments, config, REMARKS))
    except Exception as error:  # of the compiler, which has many; said in the table
        return Compiled(config, time.perf_counter() - start, wrong=(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}",))
    used, wrong = judge(remarks)
    if not wrong and (path := cache.entry(forward.LAUNCH, config, jit.arch())):
        cache.store(path, kernel)
    return Compiled(config, time.perf_counter() - start, used, tuple(wrong))


def judge(remarks: str) -> tuple[int, list[str]]:
    """Registers of a thread at launch, and what is wrong with the code, from what the assembler says."""
    used = [int(number) for number in re.findall(r"Used (\d+) registers", remarks)]
    if not used:
        return 0, ["the compiler said nothing of registers"]
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", remarks))
    wrong = [f"{spilled} bytes are spilled or on a stack"] if spilled else []
    if codes := sorted(set(re.findall(r"\((C7\d+)\)", remarks))):
        wrong.append(f"warpgroup products are serialised, or registers not handed out ({', '.join(codes)})")
    return max(used), wrong


def _with_output(work: Callable):
    """(what it returns, what it and the libraries below it wrote to the standard outputs)."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as written:
        kept = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in kept:
                os.dup2(written.fileno(), number)
            result = work()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, original in kept:
                os.dup2(original, number)
                os.close(original)
        written.seek(0)
        return result, written.read().decode(errors="replace")


@dataclass(frozen=True)
class Contender:
    """A candidate among the benchmark's contenders (bench.peers)."""

    config: Config

    @property
    def name(self) -> str:
        return f"hopper[{label(self.config)}]"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        return []

    def prepare(self, workload: Workload, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        mask, scale = workload.mask, workload.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return forward.forward(Call(q=q, k=k, v=v, mask=mask, scale=scale), self.config)[0]

        return attend


@dataclass
class Search:
    """Workloads that run the same kernel, the one sought."""

    shipped: Config
    workloads: list[Workload] = field(default_factory=list)

    @property
    def title(self) -> str:
        dims = self.shipped.head_dim, self.shipped.head_dim_v
        return f"{dims} {self.shipped.mask_kind!r}, {str(self.shipped.dtype).removeprefix('torch.')}"


def searches(workloads: Iterable[Workload]) -> list[Search]:
    """The workloads by the kernel that ships for them."""
    found: dict[Config, Search] = {}
    for workload in workloads:
        dims = workload.head_dim, workload.head_dim, workload.head_dim_v
        q, k, v = (torch.empty((1, workload.seqlen_q, 1, dim), dtype=workload.dtype, device="meta") for dim in dims)
        *_, (_, _, config) = forward.kernels(Call(q=q, k=k, v=v, mask=workload.mask, scale=1.0))
        found.setdefault(config, Search(config)).workloads.append(workload)
    return list(found.values())


def sized(workload: Workload) -> Workload:
    """The workload at the papers' size: TOKENS in all, of which a sequence has `seqlen_q`, and WIDTH elements a token."""
    heads = max(1, WIDTH // workload.head_dim)
    return replace(workload, name="tune", batch=max(1, TOKENS // workload.seqlen_q), heads_q=heads, heads_k=heads)


def measure(search: Search, configs: Sequence[Config], budget_s: float, keep: Callable[[list[Row]], object] | None = None) -> list[Row]:
    """Check and time the kernels of `configs` on the search's workloads, in turns; on this process's GPU."""
    timing = Timing(budget_s=budget_s, clocks=("events",))
    return run(search.workloads, map(Contender, configs), device="cuda", memory=False, timing=timing, keep=keep)


def rank(rows: Iterable[Row]) -> list[tuple[str, float]]:
    """(contender, rate) from the best down: the geometric mean over the cases of its rate, in units of the best of each case.

    Only contenders that were timed in every case take part.
    """
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.flops_per_s:
            case = repr(sorted(row.case.items()))
            rates[case][row.impl] = max(row.flops_per_s, rates[case].get(row.impl, 0.0))
    everywhere = set.intersection(*map(set, rates.values())) if rates else set()
    best = {case: max(of_case.values()) for case, of_case in rates.items()}
    scores = {
        impl: math.exp(sum(math.log(of_case[impl] / best[case]) for case, of_case in rates.items()) / len(rates)) for impl in everywhere
    }
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def survivors(ranked: list[tuple[str, float]], shipped: str, most: int = FINAL) -> list[str]:
    """The best, and what ships where it ran at all."""
    names = [name for name, _ in ranked]
    return names[:most] + [shipped] * (shipped in names[most:])


def literal(config: Config, rows: Iterable[Row]) -> str:
    """The line of config.TILES, with its provenance."""
    defaults = {each.name: each.default for each in fields(Config)}
    chosen = {name: getattr(config, name) for name in choices()}
    given = ", ".join(f"{name}={value}" for name, value in chosen.items() if value != defaults[name])
    mine = [row for row in rows if row.impl == f"hopper[{label(config)}]" and row.flops_per_s]
    rates = ", ".join(f"{row.case['seqlen_q']}: {row.rate / 1e12:.0f}" for row in mine)
    environment = mine[0].environment if mine else {}
    where = f"{environment.get('device', '?')}, {environment.get('date', '?')[:10]}"
    dims = config.head_dim, config.head_dim_v
    return f"{dims}: {{{config.mask_kind!r}: any_length({given})}},  # {where}: TFLOP/s at {rates}"
