"""Checks and tunes the decode kernel on one Hopper GPU: a sample checked first, what a call costs on the host, what options cost, the best tuning.

    python tools/gpu/decode_bench.py OUT.jsonl [--seconds 540] [--only check,host,features,sweep]

How fast it is beside others is `tilewise bench --set decode`, whose caches are used here. Times are medians of CUDA-graph replays; a graph holds
calls on so many different caches that they do not fit the L2 cache, so every byte comes from memory. TB/s counts K and V once. Every row is printed
and written to OUT.jsonl as soon as it is there.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/shared"))

import torch
from decode_problems import DecodeCase, held, made

import tilewise
from tilewise.backends.hopper import warmup
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import repeat
from tilewise.bench import decode_cells
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import DecodeCall
from tilewise.testing import tolerance

DIM = 128
SWEPT = [(1, 8192), (1, 32768), (16, 1024), (4, 8192), (16, 8192), (64, 8192)]
DEVICE = torch.device("cuda")
START = time.monotonic()


@dataclass(frozen=True)
class Cell:
    b: int
    s: int
    hq: int
    hk: int
    page: int
    q: int = 1


class Bench:
    def __init__(self, path: Path) -> None:
        self.path, self.pool = path, decode_cells.Pool(DEVICE)

    def note(self, **row) -> None:
        row["at_s"] = round(time.monotonic() - START, 1)
        print(json.dumps(row), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def caches(self, cell: Cell, lengths: list[int]) -> list[DecodeCall]:
        """Calls on as many different caches as it takes to be cold."""
        sizes = {"heads_q": cell.hq, "heads_k": cell.hk, "page": cell.page, "new": cell.q, "head_dim": DIM}
        made = self.pool.caches(decode_cells.Cell(lengths=tuple(lengths), **sizes))
        return [
            DecodeCall(
                q=made.q,
                k_cache=k,
                v_cache=v,
                seqlens=made.seqlens,
                page_table=made.table,
                cu_seqlens_q=None,
                max_seqlen_q=cell.q,
                cache_batch_idx=None,
                leftpad=None,
                tree=None,
                shared_prefix=0,
                split=None,
                mask=Causal(),
                scale=DIM**-0.5,
            )
            for k, v in made.copies
        ]

    def ours(self, calls: list[DecodeCall], **tuning) -> float:
        return replayed_us([lambda call=call: decoding.decode(call, **tuning) for call in calls])

    def sweep(self, cell: Cell) -> None:
        """Every tuning, best first; keys of `us` are tile x stages, and what else is not as usual."""
        calls = self.caches(cell, [cell.s] * cell.b)
        size, found = 4 * cell.b * cell.s * cell.hk * DIM, {}
        for tuning in tunings():
            try:
                found[short(tuning)] = round(self.ours(calls, **tuning), 2)
            except (RuntimeError, AssertionError, ValueError) as failure:
                found[short(tuning)] = f"{type(failure).__name__}: {str(failure)[:120]}"
        ranked = dict(sorted(found.items(), key=lambda each: each[1] if isinstance(each[1], float) else 1e9))
        best = next(iter(ranked.values()))
        self.note(kind="sweep", **vars(cell), best_TBps=round(size / best / 1e6, 3) if isinstance(best, float) else None, us=ranked)

    def compile(self, cells: list[Cell]) -> None:
        """What a sweep of the cells needs, on all cores at once."""
        todo = []
        for cell in cells:
            call, *_ = self.caches(cell, [cell.s] * cell.b)
            fields = [{name: value for name, value in tuning.items() if name != "aligned"} for tuning in tunings()]
            todo += [warmup.Kernel(decoding.LAUNCH, decoding.arguments, decoding.config_of(call, **each)) for each in fields]
        states = [outcome.state for outcome in warmup.warm(dict.fromkeys(todo))]
        self.note(kind="compile", **{state: states.count(state) for state in sorted(set(states))})


def short(tuning: dict) -> str:
    if not tuning:
        return "usual"
    order = "aligned" if tuning["aligned"] else "one row"
    return f"{tuning['tile_n']}x{tuning['kv_stages']} {order}{' evict_first' * tuning['evict_first']}"


def features(bench: Bench) -> None:
    """What a fixed split, small pages, a tree, changes of the scores and a common prefix cost or save."""
    for cell in (Cell(1, 8192, 32, 8, 64), Cell(16, 8192, 32, 8, 64)):
        calls = bench.caches(cell, [cell.s] * cell.b)
        us = {"plain": bench.ours(calls)}
        for split in (512, 2048):
            us[f"split {split}"] = bench.ours([replace(call, split=split) for call in calls])
        us["softcap"] = bench.ours([replace(call, softcap=30.0) for call in calls])
        us["window 1024"] = bench.ours([replace(call, mask=SlidingWindow(1023, 0)) for call in calls])
        slopes = torch.linspace(0.1, 1.0, cell.hq, device=DEVICE)[None]
        us["alibi, sink"] = bench.ours([replace(call, alibi_slopes=slopes, sink=slopes[0]) for call in calls])
        more = bench.caches(replace(cell, q=8), [cell.s] * cell.b)
        us["8 queries"] = bench.ours(more)
        tree = torch.ones(1, 8, 8, dtype=torch.bool, device=DEVICE).tril()
        us["8 queries, tree"] = bench.ours([replace(call, tree=tree) for call in more])
        for page in (1, 4, 8):
            us[f"pages of {page}"] = bench.ours(bench.caches(replace(cell, page=page), [cell.s] * cell.b))
        bench.note(kind="features", **vars(cell), us={name: round(each, 2) for name, each in us.items()})
    cell, prefix = Cell(64, 8192 + 1024, 32, 8, 64), 8192
    calls = bench.caches(cell, [cell.s] * cell.b)
    for call in calls:
        call.page_table[:, : prefix // cell.page] = call.page_table[:1, : prefix // cell.page]
    apart, joint = bench.ours(calls), bench.ours([replace(call, shared_prefix=prefix) for call in calls])
    whole, joined = decoding.decode(calls[0]), decoding.decode(replace(calls[0], shared_prefix=prefix))
    error = (whole[0].float() - joined[0].float()).abs().max().item()
    bench.note(
        kind="prefix", **vars(cell), apart_us=round(apart, 2), joint_us=round(joint, 2), times=round(apart / joint, 2), difference=error
    )


def tunings() -> list[dict]:
    """The usual, then keys of a tile and stages, key heads of the same tokens side by side or not, and what the L2 cache does."""
    tiles, orders = ((64, 2), (64, 3), (128, 2)), itertools.product((True, False), (False, True))
    found = [
        {"tile_n": tile_n, "kv_stages": stages, "aligned": aligned, "evict_first": first}
        for (aligned, first), (tile_n, stages) in itertools.product(orders, tiles)
    ]
    return [{}, *found]


def replayed_us(fns: list[Callable], budget: float = 0.03) -> float:
    """Median time of one of the calls in a graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fns[0]()
        torch.cuda.set_sync_debug_mode("error")
        try:
            fns[-1]()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for fn in fns:
            fn()
    return median_us(graph.replay, budget) / len(fns)


def median_us(run: Callable, budget: float) -> float:
    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    run()
    begin, end = event(), event()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    pairs = [(event(), event()) for _ in range(max(5, min(60, int(budget / max(begin.elapsed_time(end) * 1e-3, 1e-6)))))]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3


def check(bench: Bench) -> None:
    """A sample by the one tolerance, with caches whose unused tokens are NaN."""
    lengths, dims = (0, 1, 63, 64, 65, 1000, 5000), ((128, 128), (64, 64), (96, 96), (192, 128), (256, 256), (72, 40))
    cases = [DecodeCase(lengths=lengths, heads=(8, 2), dims=each, page=page) for each in dims for page in (0, 16)]
    cases += [
        DecodeCase(lengths=lengths, heads=heads, dims=(128, 128), page=page, queries=queries, mask=mask)
        for heads in ((4, 4), (32, 1))
        for page, queries, mask in ((64, 1, Full()), (256, 4, Causal()), (0, 30, SlidingWindow(500, 0)))
    ]
    cases.append(DecodeCase(lengths=lengths, queries=(1, 3, 0, 7, 1, 40, 2), heads=(8, 2), dims=(128, 128), page=48))
    cases += [DecodeCase(lengths=(100_000,), heads=(32, 1), dims=(128, 128)), DecodeCase(lengths=lengths, page=5, dims=(128, 128))]
    cases.append(DecodeCase(lengths=lengths, heads=(8, 2), dims=(128, 128), page=64, split=300))
    cases.append(DecodeCase(lengths=lengths, heads=(8, 2), dims=(128, 128), page=64, queries=5, tree=5))
    for case in cases:
        before = time.monotonic()
        try:
            call = made(case, device="cuda")
            found = decoding.decode(call)
            held(call, *found)
            again = decoding.decode(call)
            told = "ok" if all(map(torch.equal, found, again)) else "other bits the second time"
        except (RuntimeError, AssertionError, TypeError) as failure:
            told = f"{type(failure).__name__}: {str(failure)[:300]}"
        bench.note(kind="check", case=str(case), told=told, seconds=round(time.monotonic() - before, 1))


def host(bench: Bench) -> None:
    """What a call costs on the host, beside a kernel that takes next to no time: rounds of 100 calls, of which a process's first may cost more."""
    cell = Cell(1, 64, 8, 8, 0)
    (call, *_) = bench.caches(cell, [64])
    ways = {
        "public": lambda: tilewise.decode(call.q, call.k_cache, call.v_cache, cache_seqlens=call.seqlens),
        "repeated": lambda: repeat.decode(call, decoding.decoder),
        "first": lambda: decoding.decode(call),
    }
    for name, run in ways.items():
        run()
        rounds = []
        for _ in range(30):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                run()
            rounds.append(round((time.perf_counter() - begin) * 1e4, 2))
        of_rounds = {"us": statistics.median(rounds), "least_us": min(rounds), "first_rounds_us": rounds[:8]}
        bench.note(kind="host", way=name, **of_rounds, graph_us=round(replayed_us([run] * 20), 2))


def guarded(bench: Bench, run: Callable[[Bench], None]) -> None:
    """So that what fails keeps nothing else from being measured."""
    try:
        run(bench)
    except (RuntimeError, AssertionError, TypeError) as failure:
        bench.note(kind=run.__name__, failed=f"{type(failure).__name__}: {str(failure)[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--only", default="check,host,features,sweep")
    given = parser.parse_args()
    only = given.only.split(",")
    bench = Bench(given.out)
    bench.note(kind="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, tolerance=tolerance.__name__)

    def left() -> bool:
        return time.monotonic() - START < given.seconds

    if "check" in only:
        guarded(bench, check)
    if "host" in only:
        guarded(bench, host)
    if "sweep" in only:
        cells = [Cell(b, s, 32, 8, page) for page in (0, 16, 64) for b, s in SWEPT]
        bench.compile(cells)
        for cell in cells:
            if left():
                bench.sweep(cell)
    if "features" in only and left():
        guarded(bench, features)


if __name__ == "__main__":
    main()
