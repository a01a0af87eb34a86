"""Times tiles of the forward kernel on short sequences under full masks, beside what ships and the peers: rows as JSON lines, and the best.

    python tools/gpu/short_tiles.py out.jsonl [head_dim ...]

On an H100 or H200. `tilewise tune` seeks the best tile for lengths together; here each shape is on its own, since short sequences differ in how much
of their last tiles they fill.
"""

import sys
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from tilewise.backends.hopper.forward import plan
from tilewise.backends.hopper.forward.config import Config
from tilewise.bench import impls, tune
from tilewise.bench.runner import Timing, run
from tilewise.bench.store import append
from tilewise.bench.workloads import Workload
from tilewise.problem import Call

# head_dim: (batch, queries, keys, heads)
SHAPES = {
    64: [
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
    72: [(16, 729, 729, 16), (32, 256, 256, 16)],
    80: [(32, 257, 257, 16), (32, 197, 197, 16), (32, 577, 577, 16), (8, 1024, 1024, 8), (4, 4096, 4096, 8), (8, 4096, 77, 8)],
    128: [(64, 128, 128, 16), (64, 197, 197, 16), (64, 256, 256, 8), (32, 384, 384, 8), (32, 577, 577, 8), (8, 4096, 77, 8)],
    160: [(32, 256, 256, 8), (32, 257, 257, 8), (8, 1024, 1024, 8), (8, 4096, 77, 8)],
    256: [(32, 256, 256, 8), (16, 729, 729, 8), (8, 1024, 1024, 8)],
}
TILES = {
    64: [*product((128,), (96, 112, 128, 144, 160, 208)), *product((192,), (96, 112, 128)), *product((64,), (64, 96))],
    96: [*product((128,), (64, 80, 96, 112, 128, 144, 160)), *product((192,), (80, 96, 112))],
    128: product((128,), (64, 80, 96, 112, 128, 144, 160)),
    192: product((128,), (64, 80, 96, 112)),
    256: product((128,), (48, 64, 80)),
}


def call_of(workload: Workload) -> Call:
    """A call of the workload's shapes, without memory."""
    sizes = (workload.seqlen_q, workload.head_dim), (workload.seqlen_k, workload.head_dim), (workload.seqlen_k, workload.head_dim_v)
    q, k, v = (torch.empty((workload.batch, rows, workload.heads_q, dim), dtype=workload.dtype, device="meta") for rows, dim in sizes)
    return Call(q=q, k=k, v=v, mask=workload.mask, scale=1.0)


def candidates(shipped: Config) -> list[Config]:
    """What ships, then its tiles and manners that fit."""
    found = [shipped]
    for (tile_m, tile_n), pingpong, kv_stages in product(TILES[shipped.head_dim], (True, False), (2, 3)):
        blocks = 3 if tile_m == 64 else 1
        if pingpong and tile_m == 64:
            continue
        for q_stages, cluster in {(2, 1), (1, 1), (shipped.q_stages, shipped.cluster)}:
            changed = {"tile_m": tile_m, "tile_n": tile_n, "pingpong": pingpong, "kv_stages": kv_stages, "blocks": blocks}
            config = replace(shipped, **changed, q_stages=q_stages, cluster=cluster)
            if not tune.why_not(config):
                found.append(config)
                break  # two stages for Q where they fit
    return list(dict.fromkeys(found))


def main() -> int:
    out, *dims = sys.argv[1:]
    peers = [impl for impl in impls.find("fa4,sdpa:cudnn")]
    for dim in map(int, dims or map(str, SHAPES)):
        workloads = [
            Workload(name="short", batch=batch, seqlen_q=seqlen_q, heads_q=heads, head_dim=dim, seqlen_k=seqlen_k, dtype=torch.bfloat16)
            for batch, seqlen_q, seqlen_k, heads in SHAPES[dim]
        ]
        shipped = {workload: plan.config_of(call_of(workload)) for workload in workloads}
        todo = list(dict.fromkeys(config for each in shipped.values() for config in candidates(each)))
        made = list(tune.compile_all(todo))
        for each in made:
            if each.wrong:
                print(dim, tune.label(each.config), "; ".join(each.wrong), flush=True)
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
