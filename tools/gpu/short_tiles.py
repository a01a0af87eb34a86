"""Times tiles of the forward kernel on short sequences and on chunks, beside what ships and the peers: rows as JSON lines, and the best.

    python tools/gpu/short_tiles.py out.jsonl [head_dim ...]           # under full masks
    python tools/gpu/short_tiles.py out.jsonl causal:96 causal:128

On an H100 or H200. `tilewise tune` seeks the best tile for lengths together; here each shape is on its own, since short sequences differ in how much
of their last tiles they fill.
"""

import itertools
import sys
from dataclasses import replace
from functools import partial

import torch

from tilewise.backends.hopper.forward import plan
from tilewise.backends.hopper.forward.config import Config
from tilewise.bench import peers as impls
from tilewise.bench import tune
from tilewise.bench.runner import Timing, run
from tilewise.bench.sets import Workload
from tilewise.bench.store import append
from tilewise.masks import Causal, Full
from tilewise.problem import Call

# what: (batch, queries, keys, heads, and where it differs, heads of keys)
SHAPES = {
    "64": [
        (64, 128, 128, 16),
        (128, 197, 197, 12),
        (64, 256, 256, 16),
        (32, 257, 257, 16),
        (32, 384, 384, 16),
        (32, 512, 512, 12),
        (32, 577, 577, 16),
        (16, 729, 729, 16),
        (16, 1024, 1024, 16),
        (8, 2048, 2048, 16),
        (8, 448, 1500, 20),
        (8, 4096, 77, 10),
    ],
    "40": [(8, 4096, 77, 8), (2, 4096, 77, 8)],
    "72": [(16, 729, 729, 16), (32, 256, 256, 16)],
    "80": [(32, 257, 257, 16), (32, 197, 197, 16), (32, 577, 577, 16), (8, 1024, 1024, 8), (4, 4096, 4096, 8), (8, 4096, 77, 8)],
    "128": [(64, 128, 128, 16), (64, 197, 197, 16), (64, 256, 256, 8), (32, 384, 384, 8), (32, 577, 577, 8), (8, 4096, 77, 8)],
    "160": [(32, 256, 256, 8), (32, 257, 257, 8), (8, 1024, 1024, 8), (8, 4096, 77, 8)],
    "256": [(32, 256, 256, 8), (16, 729, 729, 8), (8, 1024, 1024, 8)],
    "192": [(4, 2048, 2048, 8), (2, 4096, 4096, 8), (1, 8192, 8192, 16)],
    "causal:80": [(32, 512, 512, 16), (8, 2048, 2048, 32), (2, 4096, 4096, 32)],
    "causal:96": [(16, 1024, 1024, 16), (2, 4096, 4096, 32), (1, 16384, 16384, 16)],
    "causal:128": [(4, 512, 16384, 32, 8), (1, 2048, 32768, 64, 8), (1, 1024, 8192, 28, 4), (2, 256, 4096, 32, 8), (3, 3001, 3001, 28, 4)],
}
# by head_dim of the tile: tile_m, and numbers of keys
TILES = {
    64: {128: (96, 128, 208), 192: (96, 128), 64: (64, 96)},
    96: {128: (96, 112, 128), 192: (96, 112)},
    128: {128: (96, 128, 160)},
    192: {128: (64, 80, 96, 112)},
    256: {128: (48, 64, 80)},
}


def call_of(workload: Workload) -> Call:
    """A call of the workload's shapes, without memory."""
    sizes = (workload.seqlen_q, workload.head_dim), (workload.seqlen_k, workload.head_dim), (workload.seqlen_k, workload.head_dim_v)
    q, k, v = (torch.empty((workload.batch, rows, workload.heads_q, dim), dtype=workload.dtype, device="meta") for rows, dim in sizes)
    return Call(q=q, k=k, v=v, mask=workload.mask, scale=1.0)


def candidates(shipped: Config) -> list[Config]:
    """What ships, then its tiles and manners that fit."""
    found = [shipped]
    tiles = [(tile_m, tile_n) for tile_m, keys in TILES[shipped.head_dim].items() for tile_n in keys]
    for (tile_m, tile_n), pingpong, kv_stages in itertools.product(tiles, (True, False), (2, 3)):
        blocks = 3 if tile_m == 64 else 1
        if pingpong and tile_m == 64:
            continue
        for q_stages, cluster in itertools.product((2, 1), (1, 2) if tile_m == 128 else (1,)):
            changed = {"tile_m": tile_m, "tile_n": tile_n, "pingpong": pingpong, "kv_stages": kv_stages, "blocks": blocks}
            config = replace(shipped, **changed, q_stages=q_stages, cluster=cluster)
            if not tune.why_not(config):
                found.append(config)
    return list(dict.fromkeys(found))


def workloads_of(what: str) -> list[Workload]:
    """Those of an entry of SHAPES, in bf16."""
    mask, dim = (Causal(), what.removeprefix("causal:")) if what.startswith("causal:") else (Full(), what)
    sizes = [dict(zip(("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k"), shape, strict=False)) for shape in SHAPES[what]]
    return [Workload(name="short", head_dim=int(dim), mask=mask, dtype=torch.bfloat16, **size) for size in sizes]


def main() -> int:
    out, *wanted = sys.argv[1:]
    peers = [impl for impl in impls.find("fa4,sdpa:cudnn")]
    for what in wanted or SHAPES:
        workloads = workloads_of(what)
        shipped = {workload: plan.config_of(call_of(workload)) for workload in workloads}
        todo = list(dict.fromkeys(config for each in shipped.values() for config in candidates(each)))
        made = list(tune.compile_all(todo))
        for each in made:
            if each.wrong:
                print(what, tune.label(each.config), "; ".join(each.wrong), flush=True)
        sound = [each.config for each in made if not each.wrong]
        for workload in workloads:
            timing = Timing(budget_s=tune.SHORT_S, clocks=("events",))
            contenders = [*map(tune.Contender, sound), *peers]
            rows = run([workload], contenders, device="cuda", memory=False, timing=timing, keep=partial(append, out))
            times = sorted((row.median_s * 1e3, row.impl) for row in rows if row.median_s)
            mine = f"hopper[{tune.label(shipped[workload])}]"
            of = {impl: time for time, impl in times}
            print(
                f"{workload.id}: ships {of.get(mine, 0):.4f}",
                *(f"{impl} {of.get(impl, 0):.4f}" for impl in ("fa4", "sdpa:cudnn")),
                flush=True,
            )
            for time, impl in [each for each in times if each[1].startswith("hopper")][:5]:
                print(f"    {time:.4f} {impl}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
