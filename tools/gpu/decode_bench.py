"""Checks and tunes the decode kernel on one Hopper GPU: a sample checked first, what a call costs on the host, what options cost, the best tuning.

    python tools/gpu/decode_bench.py OUT.jsonl [--seconds 540] [--only check,host,append,short,shares,chunks,merge,fp8,latent,features,prefix,sweep]

How fast it is beside others is `tilewise bench --set decode`, whose caches are used here. Times are medians of CUDA-graph replays; a graph holds
calls on so many different caches that they do not fit the L2 cache, so every byte comes from memory. TB/s counts K and V once, a latent cache once
for both. Every row is printed and written to OUT.jsonl as soon as it is there.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/shared"))

import torch
from decode_problems import DecodeCase, held, made

import tilewise as tw
from tilewise.backends.hopper import warmup
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import prefix, repeat
from tilewise.bench.sets import decode as decode_cells
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import DecodeCall
from tilewise.testing import tolerance

DIM = 128
SWEPT = [(1, 8192), (1, 32768), (16, 1024), (4, 8192), (16, 8192), (64, 8192)]
LATENT, LATENT_HEADS = (576, 512), (16, 128)
LATENT_SHAPES = [(b, s) for s in (4096, 16384) for b in (1, 16, 64, 128)]
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
        self.halves = decode_cells.Pool(DEVICE, 2 * decode_cells.COLD_BYTES)  # of caches that take half of what the set's would

    def note(self, **row) -> None:
        row["at_s"] = round(time.monotonic() - START, 1)
        print(json.dumps(row), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def caches(self, cell: Cell, eight: bool = False, latent: bool = False) -> list[DecodeCall]:
        """Calls on as many different caches as it takes to be cold. eight: in e4m3, without scales."""
        dim = LATENT[0] if latent else DIM
        sizes = {"heads_q": cell.hq, "heads_k": cell.hk, "page": cell.page, "new": cell.q, "head_dim": dim}
        made = (self.halves if eight or latent else self.pool).caches(decode_cells.Cell(lengths=(cell.s,) * cell.b, **sizes))
        copies = made.copies
        if eight:
            copies = [tuple(x.to(torch.float8_e4m3fn) for x in copy) for copy in copies]
        if latent:
            copies = [(k, k[..., : LATENT[1]]) for k, _ in copies]
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
                scale=dim**-0.5,
            )
            for k, v in copies
        ]

    def ours(self, calls: list[DecodeCall], **tuning) -> float:
        return replayed_us([lambda call=call: decoding.decode(call, **tuning) for call in calls])

    def sweep(self, kind: str, cell: Cell, tunings: dict[str, dict]) -> None:
        """Every tuning, best first."""
        calls = self.caches(cell)
        size, found = 4 * cell.b * cell.s * cell.hk * DIM, {}
        for name, tuning in tunings.items():
            try:
                found[name] = round(self.ours(calls, **tuning), 2)
            except (RuntimeError, AssertionError, ValueError) as failure:
                found[name] = f"{type(failure).__name__}: {str(failure)[:120]}"
        ranked = dict(sorted(found.items(), key=lambda each: each[1] if isinstance(each[1], float) else 1e9))
        best = next(iter(ranked.values()))
        self.note(kind=kind, **vars(cell), best_TBps=round(size / best / 1e6, 3) if isinstance(best, float) else None, us=ranked)

    def compile(self, calls: list[DecodeCall], tunings: dict[str, dict]) -> None:
        """What a sweep of such calls needs, on all cores at once."""
        fields = [{name: value for name, value in tuning.items() if name != "cut"} for tuning in tunings.values()]
        todo = [warmup.Kernel(decoding.LAUNCH, decoding.arguments, decoding.config_of(call, **each)) for call in calls for each in fields]
        states = [outcome.state for outcome in warmup.warm(dict.fromkeys(todo))]
        self.note(kind="compile", **{state: states.count(state) for state in sorted(set(states))})


def features(bench: Bench) -> None:
    """What a fixed split, small pages, a tree and changes of the scores cost or save."""
    for cell in (Cell(1, 8192, 32, 8, 64), Cell(16, 8192, 32, 8, 64)):
        calls = bench.caches(cell)
        us = {"plain": bench.ours(calls)}
        for split in (512, 2048):
            us[f"split {split}"] = bench.ours([replace(call, split=split) for call in calls])
        us["softcap"] = bench.ours([replace(call, softcap=30.0) for call in calls])
        us["window 1024"] = bench.ours([replace(call, mask=SlidingWindow(1023, 0)) for call in calls])
        slopes = torch.linspace(0.1, 1.0, cell.hq, device=DEVICE)[None]
        us["alibi, sink"] = bench.ours([replace(call, alibi_slopes=slopes, sink=slopes[0]) for call in calls])
        more = bench.caches(replace(cell, q=8))
        us["8 queries"] = bench.ours(more)
        tree = torch.ones(1, 8, 8, dtype=torch.bool, device=DEVICE).tril()
        us["8 queries, tree"] = bench.ours([replace(call, tree=tree) for call in more])
        for page in (1, 4, 8):
            us[f"pages of {page}"] = bench.ours(bench.caches(replace(cell, page=page)))
        bench.note(kind="features", **vars(cell), us={name: round(each, 2) for name, each in us.items()})


PREFIXED = (64, 8192, 1024), (64, 8192, 64), (128, 4096, 256), (32, 8192, 1024), (16, 8192, 1024)  # sequences, tokens of the prefix, own


def prefixes(bench: Bench) -> None:
    """A common prefix: apart, with each sequence's copy of it; on the same pages; as a prefix, both launches, and each alone. Then how the prefix's
    launch could be cut.
    """
    tunings: dict[str, dict] = {f"{n} stages": {"kv_stages": n} for n in (2, 3, 4, 6)}
    tunings |= {"128 keys": {"tile_n": 128}, "one warpgroup": {"consumers": 1, "overlap": False}}
    tunings["two blocks of one warpgroup"] = {"consumers": 1, "overlap": False, "blocks": 2, "kv_stages": 3}
    four = {"no overlap": {"overlap": False}, "evict first": {"evict_first": True}, "units of 64 rows": {"cut": decoding.Cut(rows=64)}}
    four |= {f"{n} polls": {"cut": decoding.Cut(polls=n)} for n in (0, 128)}
    tunings |= {f"4 stages, {name}": {"kv_stages": 4, **tuning} for name, tuning in four.items()}
    for b, common, own in PREFIXED:
        cell = Cell(b, common + own, 32, 8, 64)
        calls = bench.caches(cell)
        row = {"apart_us": bench.ours(calls)}
        for call in calls:
            call.page_table[:, : common // cell.page] = call.page_table[:1, : common // cell.page]
        joint = [replace(call, shared_prefix=common) for call in calls]
        firsts = [prefix.of(call) for call in joint]
        rests = [
            replace(call, page_table=call.page_table[:, common // cell.page :].contiguous(), seqlens=call.seqlens - common)
            for call in calls
        ]
        both = decoding.decoder(joint[0])
        found = both.first(firsts[0])
        row["same_pages_us"] = bench.ours(calls)
        row["joint_us"] = replayed_us([partial(repeat.decode, call, decoding.decoder) for call in joint])
        row["prefix_us"] = replayed_us([partial(both.first, call) for call in firsts])
        row["prefix_warm_us"] = replayed_us([partial(both.first, firsts[0])] * 8)
        row["own_us"] = replayed_us([partial(both.rest, call, prefix.prior(call, *found)) for call in joint])
        row["own_alone_us"] = bench.ours(rests)
        row = {name: round(us, 2) for name, us in row.items()}
        whole, joined = decoding.decode(calls[0]), repeat.decode(joint[0], decoding.decoder)
        row["difference"] = max((x.float() - y.float()).abs().max().item() for x, y in zip(whole, joined, strict=True))
        bench.note(kind="prefix", **vars(cell), prefix=common, **row)
        lengths = [n for n in (512, 1024, 2048, 4096, 8192) if n <= common]
        of_length = {n: [prefix.of(replace(call, shared_prefix=n)) for call in calls] for n in lengths}
        us = {n: round(replayed_us([partial(both.first, call) for call in of_length[n]]), 2) for n in lengths}
        bench.note(kind="prefix of other lengths", **vars(cell), prefix=common, us=us)
        us = {}
        for name, tuning in tunings.items():
            try:
                us[name] = round(bench.ours(firsts, out=torch.float32, **tuning), 2)
            except (RuntimeError, AssertionError, ValueError, TypeError) as failure:
                us[name] = f"{type(failure).__name__}: {str(failure)[:120]}"
        bench.note(kind="prefix sweep", **vars(cell), prefix=common, us=us)


def tunings() -> dict[str, dict]:
    """The usual, then keys of a tile and stages, key heads of the same tokens side by side or not, and what the L2 cache does."""
    tiles, orders = ((64, 2), (64, 3), (128, 2)), itertools.product((True, False), (False, True))
    found: dict[str, dict] = {"usual": {}}
    for (aligned, first), (tile_n, stages) in itertools.product(orders, tiles):
        name = f"{tile_n}x{stages} {'aligned' if aligned else 'one row'}{' evict_first' * first}"
        found[name] = {"tile_n": tile_n, "kv_stages": stages, "cut": decoding.Cut(aligned), "evict_first": first}
    return found


def merges() -> dict[str, dict]:
    """The usual, then: for how many numbers of a piece a block has a tile more, rows of a unit, and for how long a block waits for others'
    pieces; and stages.
    """
    found: dict[str, dict] = {"usual": {}}
    for numbers, rows in itertools.product((1 << 20, 16384, 8192, 4096, 2048), (0, 32, 128)):
        name = f"{'one tile' if numbers == 1 << 20 else numbers}{f', units of {rows} rows' * (rows > 0)}"
        found[name] = {"cut": decoding.Cut(numbers=numbers, rows=rows)}
    for polls in (0, 8, 128, 1024):
        found[f"{polls} polls"] = {"cut": decoding.Cut(polls=polls)}
    for stages in (3, 4):
        found[f"{stages} stages"] = {"kv_stages": stages}
    return found


MERGED = [Cell(*each, 64) for each in itertools.product((1,), (1024, 8192, 32768, 131072), (32,), (1,))]
MERGED += [Cell(b, s, 32, 1, 64) for b, s in ((4, 8192), (16, 1024), (16, 8192), (64, 1024))]
MERGED += [Cell(1, 1024, 32, 8, 64), Cell(4, 1024, 32, 8, 64), Cell(1, 1024, 64, 8, 64), Cell(1, 1024, 32, 32, 64)]
MERGED += [Cell(1, s, hq, 8, 64, 4) for s in (1024, 8192) for hq in (32, 64)]
MERGED += [Cell(b, s, 32, 1, 64, 4) for b, s in ((1, 32768), (1, 131072), (4, 8192), (4, 32768), (4, 131072), (16, 8192), (64, 1024))]


SHORT = [Cell(1, s, 32, hk, page) for s in (1024, 8192) for hk, page in ((8, 0), (8, 64), (1, 64))]
SHORT += [
    Cell(1, 32768, 32, 1, 64),
    Cell(1, 1024, 8, 1, 64),
    Cell(1, 8192, 8, 1, 64),
    Cell(16, 1024, 32, 1, 64),
    Cell(1, 1024, 64, 8, 64, 4),
]
SHORT += [Cell(4, 1024, 32, 8, 64), Cell(16, 8192, 32, 8, 0)]


def shorts() -> dict[str, dict]:
    """The usual, then what a launch of little work may do without; and rows of a unit, where it has several."""
    found = {"usual": {}, "sums not in halves": {"halves": False}}
    return found | {f"units of {n} rows": {"cut": decoding.Cut(rows=n)} for n in (4, 8, 16, 32, 64)}


SHARED = [Cell(b, s, 32, 1, 0, q) for q in (1, 4) for b, s in ((64, 1024), (16, 1024), (4, 8192), (256, 1024), (64, 8192), (16, 8192))]
SHARED += [
    Cell(256, 8192, 32, 1, 0, 4),
    Cell(256, 32768, 32, 1, 64, 4),
    Cell(64, 32768, 32, 1, 0),
    Cell(7, 32768, 32, 1, 0),
    Cell(5, 1024, 32, 1, 0),
    Cell(140, 1024, 32, 1, 0),
    Cell(8, 4096, 32, 8, 0),
    Cell(1, 8192, 32, 1, 0),
]


def shares() -> dict[str, dict]:
    """The usual, equal shares, and what is chosen by how much faster a block is taken to be alone; and likewise with other rows of a unit."""
    found: dict[str, dict] = {"usual": {}, "equal": {"cut": decoding.Cut(alone=0)}}
    found |= {"not fitted": {"cut": decoding.Cut(fitted=False)}, "not fitted, equal": {"cut": decoding.Cut(fitted=False, alone=0)}}
    found |= {f"{n} quarters": {"cut": decoding.Cut(alone=n)} for n in (4, 5, 6, 8)}
    for rows in (64, 128):
        found |= {f"{name}, {rows} rows": {"cut": decoding.Cut(alone=n, rows=rows)} for name, n in (("equal", 0), ("chosen", None))}
    return found


CHUNKS = [Cell(1, 16384 + q, 32, 8, page, q) for q in (128, 512, 2048, 4096) for page in (0, 64)] + [Cell(8, 16384 + 512, 32, 8, 64, 512)]
CHUNKS += [Cell(1, 2048, 32, 8, 64, 2048), Cell(4, 16384, 32, 8, 64, 16)]


MIXED = (2048, 0), (1920, 128), (512, 128), (1, 255)  # tokens of one sequence, and of how many others one each


def tokens_of(bench: Bench, new: int, others: int) -> list[DecodeCall]:
    """Packed, over caches of 4,096 tokens."""
    cell, rows = Cell(1 + others, 4096, 32, 8, 64), new + others
    cu = torch.tensor([0, *range(new, rows + 1)], dtype=torch.int32, device=DEVICE)
    q = torch.randn(rows, cell.hq, DIM, dtype=torch.bfloat16, device=DEVICE)
    return [replace(call, q=q, cu_seqlens_q=cu, max_seqlen_q=rows) for call in bench.caches(cell)[:2]]


def chunk_tunings() -> dict[str, dict]:
    """The usual, then: without the softmax under the tile before; where Q is; tiles and stages; and what else is chosen."""
    found: dict[str, dict] = {
        "usual": {},
        "no overlap": {"overlap": False},
        "3 stages": {"kv_stages": 3},
        "Q in registers": {"q_in_smem": False},
    }
    found["Q in registers, 3 stages"] = {"q_in_smem": False, "kv_stages": 3}
    found |= {f"64 keys, {stages} stages": {"tile_n": 64, "kv_stages": stages} for stages in (2, 4)}
    found |= {"evict first": {"evict_first": True}, "one row": {"cut": decoding.Cut(aligned=False)}}
    found |= {f"a unit costs {n}": {"fixed": n} for n in (1, 4)}
    found["one warpgroup"] = {"consumers": 1}
    found["one warpgroup, all keys"] = {"consumers": 1, "rising": False, "overlap": False, "evict_first": True}
    return found


def in_turns(bench: Bench, calls: list[DecodeCall], tunings: dict[str, dict], rounds: int = 3) -> dict[str, float]:
    """Each tuning's median of so many rounds, in which each has its turn."""
    found = [{name: bench.ours(calls, **tuning) for name, tuning in tunings.items()} for _ in range(rounds)]
    return {name: round(statistics.median(each[name] for each in found), 2) for name in tunings}


def chunks(bench: Bench) -> None:
    """Many new tokens of a sequence, behind those that it has: products a second, beside the forward pass of contiguous keys; then one chunk among
    single tokens of other sequences.
    """
    tunings, tokens = chunk_tunings(), [tokens_of(bench, *each) for each in MIXED]
    bench.compile([bench.caches(cell)[0] for cell in (*CHUNKS[:2], CHUNKS[-1])] + [calls[0] for calls in tokens], tunings)
    for cell in CHUNKS:
        calls = bench.caches(cell)
        found = in_turns(bench, calls[:3], tunings)
        products = 4 * cell.b * cell.hq * DIM * (cell.q * (cell.s - cell.q) + cell.q * (cell.q + 1) // 2)
        row = {
            "us": found,
            "TFps": {name: round(products / us / 1e6, 1) for name, us in found.items()},
            "error": spot_check(calls[0], cell.s),
        }
        if cell.page == 0:
            q, k, v = calls[0].q, calls[0].k_cache, calls[0].v_cache
            row["forward_us"] = round(replayed_us([lambda q=q, k=k, v=v: tw.attention(q, k, v, causal=True)]), 2)
        bench.note(kind="chunk", **vars(cell), **row)
    for (new, others), calls in zip(MIXED, tokens, strict=True):
        bench.note(kind="chunk among tokens", new=new, others=others, us=in_turns(bench, calls, tunings))


def spot_check(call: DecodeCall, length: int) -> float:
    """The largest difference from fp64 of the first and the last sequence, four heads each."""
    o, _ = decoding.decode(call)
    worst = 0.0
    for b in {0, len(call.seqlens) - 1}:
        k, v = (x.bfloat16() for x in (call.k_cache, call.v_cache))  # those of 8 bits have a scale of 1
        if call.page_table is not None:
            pages = call.page_table[b, : -(-length // k.shape[1])].long()
            k, v = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        else:
            k, v = (x[b, :length] for x in (k, v))
        for head in torch.linspace(0, call.q.shape[2] - 1, 4).long().tolist():
            of = head // (call.q.shape[2] // k.shape[1])
            q, keys, values = call.q[b, :, head].double(), k[:, of].double(), v[:, of].double()
            seen = torch.ones(len(q), len(keys), dtype=torch.bool, device=DEVICE).tril(len(keys) - len(q))
            want = (q @ keys.T * call.scale).masked_fill(~seen, -torch.inf).softmax(-1) @ values
            worst = max(worst, (o[b, :, head].double() - want).abs().max().item())
    if not worst < 0.02:
        raise AssertionError(f"wrong by {worst}")
    return float(f"{worst:.1e}")


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
    (call, *_) = bench.caches(cell)
    new = {name: torch.randn(1, 1, cell.hk, DIM, dtype=torch.bfloat16, device=DEVICE) for name in "kv"}
    shorter = call.seqlens - 1
    ways = {
        "public, new tokens": lambda: tw.decode(call.q, call.k_cache, call.v_cache, cache_seqlens=shorter, **new),
        "public": lambda: tw.decode(call.q, call.k_cache, call.v_cache, cache_seqlens=call.seqlens),
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


def appending(bench: Bench) -> None:
    """Decode alone, and with a new token for each sequence, plain and rotated: by `tw.decode`, as its callers have it; and `tw.append` alone."""
    for cell in (
        Cell(1, 1024, 32, 8, 0),
        Cell(1, 8192, 32, 8, 64),
        Cell(16, 1024, 32, 8, 16),
        Cell(16, 8192, 32, 8, 64),
        Cell(256, 1024, 32, 8, 64),
    ):
        calls = bench.caches(cell)
        k, v = (torch.randn(cell.b, 1, cell.hk, DIM, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        angles = torch.randn(cell.s, DIM // 2, dtype=torch.float32, device=DEVICE)
        rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        lengths = calls[0].seqlens - 1

        def steps(calls=calls, lengths=lengths, **words) -> list[Callable]:
            return [
                lambda call=call: tw.decode(call.q, call.k_cache, call.v_cache, page_table=call.page_table, cache_seqlens=lengths, **words)
                for call in calls
            ]

        def appends(calls=calls, lengths=lengths, k=k, v=v, **words) -> list[Callable]:
            return [
                lambda call=call: tw.append(call.k_cache, call.v_cache, k, v, page_table=call.page_table, cache_seqlens=lengths, **words)
                for call in calls
            ]

        timed = {"decode": steps(), "with k, v": steps(k=k, v=v), "rotated": steps(k=k, v=v, **rotary), "queries rotated": steps(**rotary)}
        timed |= {"append": appends(), "append rotated": appends(**rotary)}
        us = {name: round(replayed_us(fns), 2) for name, fns in timed.items()}
        bench.note(
            kind="append",
            **vars(cell),
            us=us,
            more=round(us["with k, v"] - us["decode"], 2),
            more_rotated=round(us["rotated"] - us["decode"], 2),
        )


EIGHT_BITS = [Cell(1, 32768, 32, 8, 64), Cell(16, 8192, 32, 8, 64), Cell(64, 8192, 32, 8, 64)]
EIGHT_BITS += [Cell(b, s, 32, hk, page) for b, s in ((1, 8192), (16, 1024), (4, 8192)) for hk, page in ((8, 64), (8, 16), (8, 0), (1, 64))]


def eight_bits(bench: Bench) -> None:
    """Caches in e4m3, with one scale and with tokens' own; then how tiles are cut, and what is in flight."""
    tunings: dict[str, dict] = {"usual": {}}
    for tile_n, stages, raw in ((64, 2, 2), (64, 2, 3), (64, 2, 6), (64, 2, 8), (64, 3, 4), (128, 1, 2), (128, 2, 2), (128, 2, 3)):
        tunings[f"{tile_n}x{stages}, {raw} in 8 bits"] = {"tile_n": tile_n, "kv_stages": stages, "raw_stages": raw}
    for cell in EIGHT_BITS:
        size = 2 * cell.b * cell.s * cell.hk * DIM
        try:
            calls = bench.caches(cell, eight=True)
            bf16 = bench.ours(bench.caches(cell))
            found = {}
            for name, tuning in tunings.items():
                try:
                    found[name] = round(bench.ours(calls, **tuning), 2)
                except (RuntimeError, AssertionError, ValueError) as failure:
                    found[name] = f"{type(failure).__name__}: {str(failure)[:120]}"
            tokens = [replace(call, k_scale=torch.ones(call.k_cache.shape[:3], device=DEVICE), v_scale=None) for call in calls[:8]]
            row = {
                "us": found["usual"],
                "TBps": round(size / found["usual"] / 1e6, 3),
                "bf16_us": round(bf16, 2),
            }
            row |= {
                "k_scale_of_tokens_us": round(bench.ours(tokens), 2),
                "caches": len(calls),
                "error": spot_check(calls[0], cell.s),
            }
            row["tunings"] = dict(sorted(found.items(), key=lambda each: each[1] if isinstance(each[1], float) else 1e9))
        except (RuntimeError, AssertionError) as failure:
            row = {"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}
        bench.note(kind="fp8kv", **vars(cell), MB=round(size / 1e6, 1), **row)


def latent(bench: Bench) -> None:
    """A latent cache (MLA): bytes of it, and products, a second; then what else a launch could be like. Keys of `us`: what is not as usual."""
    for case in (
        DecodeCase(lengths=(0, 1, 63, 64, 65, 1000, 5000), heads=(heads, 1), dims=LATENT, page=page, queries=queries, latent=True)
        for heads, page, queries in ((16, 0, 1), (128, 64, 1), (128, 16, 4))
    ):
        call = made(case, device="cuda")
        held(call, *decoding.decode(call))
    cells = [Cell(b, s, heads, 1, page, q) for q, page in ((1, 0), (1, 64), (4, 64)) for heads in LATENT_HEADS for b, s in LATENT_SHAPES]
    for cell in cells:
        calls, tokens = bench.caches(cell, latent=True), cell.b * cell.s
        us = bench.ours(calls)
        rates = {
            "TBps": round(2 * tokens * LATENT[0] / us / 1e6, 3),
            "TFps": round(2 * tokens * cell.q * cell.hq * sum(LATENT) / us / 1e6, 1),
        }
        bench.note(kind="latent", **vars(cell), us=round(us, 2), **rates, caches=len(calls), error=spot_check(calls[0], cell.s))
    others = {f"numbers {n}": {"cut": decoding.Cut(numbers=n)} for n in (512, 1024, 4096, 1 << 30)}
    others |= {"one row": {"cut": decoding.Cut(aligned=False)}, "kept in the L2 cache": {"evict_first": False}}
    others |= {f"{n} polls": {"cut": decoding.Cut(polls=n)} for n in (0, 128)}
    for cell in (Cell(b, s, heads, 1, 64) for heads in LATENT_HEADS for b, s in ((1, 4096), (1, 16384), (16, 4096), (64, 4096))):
        calls = bench.caches(cell, latent=True)
        bench.note(
            kind="latent sweep",
            **vars(cell),
            us={name: round(bench.ours(calls, **each), 2) for name, each in ({"usual": {}} | others).items()},
        )


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
    parser.add_argument("--only", default="check,host,append,short,shares,chunks,merge,fp8,latent,features,prefix,sweep")
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
    if "append" in only:
        guarded(bench, appending)
    if "short" in only:
        bench.compile([bench.caches(cell)[0] for cell in SHORT[:2]], shorts())
        for cell in SHORT:
            if left():
                bench.sweep("short", cell, shorts())
    if "shares" in only:
        bench.compile([bench.caches(cell)[0] for cell in SHARED], {"usual": {}})
        for cell in SHARED:
            if left():
                bench.sweep("shares", cell, shares())
    if "chunks" in only and left():
        guarded(bench, chunks)
    if "sweep" in only:
        cells = [Cell(b, s, 32, 8, page) for page in (0, 16, 64) for b, s in SWEPT]
        bench.compile([bench.caches(cell)[0] for cell in cells], tunings())
        for cell in cells:
            if left():
                bench.sweep("sweep", cell, tunings())
    if "merge" in only:
        bench.compile(bench.caches(MERGED[0])[:1], merges())
        for cell in MERGED:
            if left():
                bench.sweep("merge", cell, merges())
    if "fp8" in only and left():
        guarded(bench, eight_bits)
    if "latent" in only and left():
        guarded(bench, latent)
    if "features" in only and left():
        guarded(bench, features)
    if "prefix" in only and left():
        guarded(bench, prefixes)


if __name__ == "__main__":
    main()
