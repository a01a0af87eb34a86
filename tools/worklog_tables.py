"""The tables of docs/worklog, from numbers that tilewise computes: `python tools/worklog_tables.py` rewrites the pages that changed.

A table NAME stands between `<!-- worklog:begin NAME -->` and `<!-- worklog:end NAME -->`, so that no number in it is typed by hand.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from heapq import heapreplace
from pathlib import Path

import torch
from torch import Tensor
from worklog_figures import RESULTS, SHAPE, ladder, length, score_memory, splits

from tilewise.bench.store import load
from tilewise.bench.tables.ladder import at_place
from tilewise.ladder import RUNGS, VARIANTS, Rung
from tilewise.ladder.operands import KEYS, Operands, incoherent, per_tensor
from tilewise.ladder.rung import HEAD_DIMS
from tilewise.machine.roofline import STATISTIC_BYTES, Launch, Shape, Tile, fa1_blocks, fa2_blocks, flops, hbm_bytes
from tilewise.machine.sheets import A100, H100, KB, MACHINES
from tilewise.masks import Causal
from tilewise.masks.tiles import lower
from tilewise.sm90.key_order import ORDER
from tilewise.testing import eight_bits

PAGES = Path(__file__).parents[1] / "docs" / "worklog"


def score_memory_table() -> str:
    data = score_memory()
    rows = [
        (length(n), size(operands), size(bf16), size(fp32), f"{2 * bf16 / operands:,.0f}")
        for n, operands, bf16, fp32 in zip(*data.values(), strict=True)
        if n in (1 << 10, 1 << 13, 1 << 16, 1 << 20)
    ]
    return table(("seqlen", "Q, K, V, O, LSE", "S in bf16", "S in fp32", "(S + P) / operands, bf16"), rows)


def units_table() -> str:
    """How long an SM's units are busy with one 128 x 128 tile of scores."""
    rows = []
    for head_dim in (64, 128, 256):
        tile = Shape(batch=1, seqlen_q=128, seqlen_k=128, heads_q=1, heads_k=1, head_dim=head_dim)
        products = flops(tile) / (H100.peak[tile.dtype] / H100.sms)
        exponentials = tile.pairs / (H100.exp_peak / H100.sms)
        scalar = flops(tile) / (H100.scalar_peak / H100.sms)
        rows.append((head_dim, *(f"{seconds * 1e9:,.0f} ns" for seconds in (products, exponentials, scalar))))
    return table(("head_dim", "both products, tensor cores, bf16", "exponentials", "both products in fp32 outside the tensor cores"), rows)


def traffic_table() -> str:
    work, rows = flops(SHAPE), []
    for tile_m in (64, 128, 192, 256):
        moved = hbm_bytes(SHAPE, "fa2", tiles=(tile_m, 128))
        tile = Tile(tile_m=tile_m, tile_n=128, threads=2 * tile_m, kv_stages=2)
        registers = sum(tile.accumulators(SHAPE).values()) * tile.threads
        rows.append(
            (
                tile_m,
                f"{moved / 1e6:,.0f} MB",
                f"{work / moved:,.0f}",
                f"{moved / H100.hbm_bandwidth * 1e3:,.2f} ms",
                f"{tile.smem_bytes(SHAPE) / KB:,.0f} KB",
                f"{registers:,}",
            )
        )
    return table(("tile_m", "HBM traffic", "FLOP/byte", "at 3.35 TB/s", "shared memory", "accumulator registers"), rows)


def causal_table() -> str:
    rows = []
    for seqlen in (1 << 10, 1 << 13, 1 << 16):
        region = Causal().resolve(seqlen, seqlen)
        full, partial, skipped = lower(region, 128, 128).tiles()
        computed = (full + partial) * 128 * 128
        rows.append((length(seqlen), *(f"{n:,}" for n in (full, partial, skipped)), f"{computed / region.pairs() - 1:.1%}"))
    return table(("seqlen", "full", "partial", "skipped", "pairs computed in vain"), rows)


def schedule_table(heads: int = 16) -> str:
    """Thread blocks of a causal call, each as long as its tiles are many, in two orders."""
    rows = []
    for seqlen in (1 << 10, 1 << 13, 1 << 16):
        blocks = [tiles for tiles in range(1, seqlen // 128 + 1) for _ in range(heads)]
        even = sum(blocks) / H100.sms
        over = (f"{finish(order, H100.sms) / even - 1:.1%}" for order in (blocks, blocks[::-1]))
        rows.append((length(seqlen), f"{len(blocks):,}", *over))
    return table(("seqlen", "thread blocks", "short ones first", "long ones first"), rows)


def finish(costs: list[int], sms: int) -> int:
    """When the last block ends, if each goes to the SM that is free first."""
    free = [0] * sms
    for cost in costs:
        heapreplace(free, free[0] + cost)
    return max(free)


def blocks_table() -> str:
    rows = []
    for seqlen, batch in ((1 << 10, 16), (1 << 13, 2), (1 << 14, 1)):
        shape = Shape(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=16, heads_k=16, head_dim=128)
        cells = []
        for blocks in (fa1_blocks(shape), fa2_blocks(shape, 128)):
            launch = Launch.of(blocks, H100)
            cells += [f"{blocks:,}", launch.waves, f"{launch.tail_efficiency:.0%}"]
        rows.append((length(seqlen), batch, *cells))
    return table(("seqlen", "batch", "FA1 blocks", "waves", "SM time used", "FA2 blocks", "waves", "SM time used"), rows)


def non_matmul_table(tile: int = 128, head_dim: int = 128) -> str:
    """Clocks of an SM for one step's work, by unit: a unit does what its peak over SMs and clock says."""
    rates = {"A100": (A100, 1.41e9, 1.41e9), "H100": (H100, 1.83e9, 1.98e9)}  # clocks of the tensor cores' and of the fp32 lanes' peak
    columns = []
    for machine, tensor_clock, clock in rates.values():
        products = 4 * tile * tile * head_dim / (machine.peak[SHAPE.dtype] / machine.sms / tensor_clock)
        lanes = machine.scalar_peak / machine.sms / clock / 2  # an instruction a lane, two FLOPs
        touch = tile * head_dim / lanes
        columns.append(
            (
                f"{machine.peak[SHAPE.dtype] / 1e12:,.0f} TFLOP/s",
                f"{machine.scalar_peak / 1e12:.1f} TFLOP/s",
                f"{machine.peak[SHAPE.dtype] / machine.scalar_peak:.1f}",
                f"{products:,.0f}",
                f"{tile * tile / 16:,.0f}",
                f"{touch:,.0f} ({touch / products:.0%})",
                f"{2 * touch:,.0f} ({2 * touch / products:.0%})",
            )
        )
    names = (
        "tensor cores, bf16",
        "fp32 outside of them",
        "a FLOP outside takes as long as how many within",
        "clocks of a step's products",
        "clocks of its exponentials",
        "clocks to touch O once: FA2's rescale",
        "clocks to touch O twice: FA1's rescale and division",
    )
    return table(("a step of 128 x 128, head_dim 128", *rates), list(zip(names, *columns, strict=True)))


def tile_sizes_table() -> str:
    rows = []
    for head_dim in (64, 128, 256):
        shape = Shape(batch=1, seqlen_q=8192, seqlen_k=8192, heads_q=1, heads_k=1, head_dim=head_dim)
        for tile_m, tile_n in ((64, 64), (128, 64), (128, 128)):
            tile = Tile(tile_m=tile_m, tile_n=tile_n, threads=2 * tile_m)
            fits = (tile.blocks_per_sm(shape, machine) or "does not fit" for machine in (A100, H100))
            registers = sum(tile.accumulators(shape).values())
            rows.append((head_dim, f"{tile_m} x {tile_n}", f"{tile.smem_bytes(shape) / KB:,.0f} KB", f"{registers} of 255", *fits))
    heading = ("head_dim", "tile", "shared memory", "registers a thread, S, P and O", "blocks an SM, A100", "blocks an SM, H100")
    return table(heading, rows)


def causal_gain_table() -> str:
    rates = ladder()["rates"]
    shown = ("k2", "k4_2", "k5", "k6", "sdpa:flash", "fa3:vllm", "tilewise")
    found = at_place(row for path in sorted(RESULTS.glob("*.jsonl")) for row in load(path))
    rates |= {"sdpa:flash": [found["sdpa:flash"][mask].flops_per_s / 1e12 for mask in ("full", "causal")]}
    return table(("", *shown), [("time without a mask / causal", *(f"{2 * rates[name][1] / rates[name][0]:.2f}" for name in shown))])


def versions_table() -> str:
    """What FlashAttention-2 changed: numbers of one head of SHAPE with 128 x 128 tiles, or of the call where the row says so."""
    head = Shape(batch=1, seqlen_q=8192, seqlen_k=8192, heads_q=1, heads_k=1, head_dim=128)
    steps = head.seqlen_k // 128
    launches = [Launch.of(blocks, A100) for blocks in (fa1_blocks(SHAPE), fa2_blocks(SHAPE, 128))]
    traffic = {name: sum(counted["bytes"].values()) / KB for name, counted in splits().items()}
    statistics = [numbers * head.seqlen_q * 4 / KB for numbers in (2, 1)]
    rows = [
        ("result", "exact", "the same"),
        ("outer loop, forward", "keys", "queries"),
        ("HBM traffic, forward", *(size(hbm_bytes(head, name)) for name in ("fa1", "fa2"))),
        ("its growth", "N^2 d^2 / M", "the same"),
        ("divisions of a row of O by l", steps, 1),
        ("kept for the backward pass", f"m and l, {statistics[0]:,.0f} KB", f"LSE, {statistics[1]:,.0f} KB"),
        ("thread blocks of the call", *(f"{each.blocks:,}" for each in launches)),
        ("of 108 SMs idle", *(each.idle_sms for each in launches)),
        ("warps of a block share", "keys of a tile (split-K)", "queries (split-Q)"),
        ("shared memory, a step", *(f"{traffic[name]:,.0f} KB" for name in ("split-K", "split-Q"))),
        ("barriers among warps, a step", *(f"{counted['barriers']:.0f}" for counted in splits().values())),
        ("dQ, backward", "one block adds", "all blocks of keys add, by atomics"),
    ]
    return table(("", "FlashAttention-1", "FlashAttention-2"), rows)


def explore_data() -> str:
    """What docs/javascripts/explore.js chooses from: GPUs by their data sheets, and the tiles of the rungs from k2 on, which needs the DSL."""
    dtypes = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
    machines = {
        name: {
            **{field: getattr(machine, field) for field in SHEET},
            "peak": {key: machine.peak[dtype] for key, dtype in dtypes.items() if dtype in machine.peak},
        }
        for name, machine in MACHINES.items()
    }
    rungs = {rung.name: of_rung(rung) for rung in (*RUNGS.values(), *VARIANTS.values()) if rung.name != "k1"}
    return f'\n<script type="application/json" id="explore-data">{json.dumps({"machines": machines, "rungs": rungs})}</script>\n\n'


SHEET = ("name", "sms", "exp_peak", "hbm_bandwidth", "smem_bytes", "smem_block_bytes", "registers", "threads")


def of_rung(rung: Rung) -> dict:
    held, threads = rung.code.Smem._fields, rung.code.THREADS
    configs = {head_dim: rung.code.configure(head_dim, False, **rung.choice) for head_dim in HEAD_DIMS}
    return {
        "dtype": "e4m3" if rung.in_eight_bits else "bf16",
        "scores_bytes": STATISTIC_BYTES if "S" in held else 0,
        "kv_shared": "KV" in held,
        "tiles": {
            head_dim: {
                "tile_m": config.tile_m,
                "tile_n": config.tile_n,
                "stages": getattr(config, "kv_stages", 1),
                "threads": getattr(config, "consumers", 1) * threads,
            }
            for head_dim, config in configs.items()
        },
    }


FORWARD_ROWS, STEP_LENGTHS = Path(__file__).parents[1] / "lab/rows/hopper-h200.jsonl", (512, 1024, 2048, 8192)
STEPS = (  # what a step adds, the run, whether under a causal mask, and the names of the two that ran in turns
    ("blocks stay", 1, False, "a block a tile", "blocks stay and draw (after the last load)"),
    ("blocks stay", 1, True, "a block a tile", "stay and draw, head by head"),
    ("longest first, within sections of heads", 1, True, "stay and draw, head by head", "stay and draw, sections of 32 MB, longest first"),
    ("a fixed order in place of the queue", 3, False, "pairs that draw", "pairs, fixed step"),
    ("clusters: pairs of blocks, multicast", 1, False, "blocks stay, fixed step", "pairs stay, fixed step"),
    ("clusters: pairs of blocks, multicast", 3, True, "turns", "turns, pairs"),
    ("a second stage of Q", 4, False, "pairs, fixed step", "pairs, fixed step, q_stages 2"),
    ("a second stage of Q", 4, True, "turns", "turns, q_stages 2"),
)


def production_table() -> str:
    """What each step from K6 to the production kernel gained when it was taken: TFLOP/s before and after, in one process."""
    rows = [json.loads(line) for line in FORWARD_ROWS.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["what"] == "forward" and row["head_dim"] == row["head_dim_v"] == 128]
    lines = []
    for step, run, causal, before, after in STEPS:
        found = {row["seqlen"]: row["paper_tflops"] for row in rows if (row["run"], row["causal"]) == (run, causal)}
        cells = [gain(found[n][before], found[n][after]) if n in found else "no row" for n in STEP_LENGTHS]
        lines.append((step, "causal" if causal else "full", *cells, run))
    return table(("step", "mask", *(length(n) if n >= 1024 else n for n in STEP_LENGTHS), "run"), lines)


def gain(before: float, after: float) -> str:
    return f"{before} → {after} ({after / before - 1:+.0%})"


def eight_bits_factor_table() -> str:
    """How much larger K7's error of O is than K8's, by length: RMS, on FlashAttention-3's inputs with outliers, products in fp64."""
    rows = []
    for keys in (512, 1024, 2048, 4096, 8192):
        k7, k8 = eight_bit_errors(keys)
        rows.append((length(keys) if keys >= 1024 else keys, f"{k7:.1e}", f"{k8:.1e}", f"{k7 / k8:.1f}"))
    return table(("keys", "error, k7", "error, k8", "factor"), rows)


@cache
def eight_bit_errors(keys: int, heads: int = 4, rows: int = 256, head_dim: int = 128, seed: int = 0) -> tuple[float, float]:
    """RMS errors of O under K7's and K8's operands, of `rows` rows a head; what is rounded is the whole of Q, K and V."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        plain, wide = torch.randn(2, heads, keys, head_dim, generator=generator, dtype=torch.float32)
        return plain + 10 * wide * (torch.rand(wide.shape, generator=generator, dtype=torch.float32) < 1e-3)

    q, k, v = drawn(), drawn(), drawn()
    at, scale = torch.arange(0, keys, keys // rows), head_dim**-0.5
    exact = (scale * q[:, at].double() @ k.double().mT).softmax(2) @ v.double()
    k7, k8 = (float((in_eight_bits(recipe, q, k, v, at, scale) - exact).square().mean().sqrt()) for recipe in (per_tensor, incoherent))
    return k7, k8


def in_eight_bits(recipe: Callable[..., Operands], q: Tensor, k: Tensor, v: Tensor, at: Tensor, scale: float) -> Tensor:
    """O (heads, rows, head_dim) of the rows `at` in fp64, from what the kernel is given; P rounded relative to the row's maximum."""
    (q8, k8, v8), others = recipe(q, k, v, scale)
    s = q8[:, at].double() @ k8.double().mT
    if recipe is per_tensor:
        s, scale_v, centre = s * others[0], others[1], 0.0
    else:
        rows, keys, channels = others
        s, scale_v, centre = s * rows[:, 0, at, None] * keys.repeat_interleave(KEYS, 1)[:, None], channels[:, :1], channels[:, 1:]
    p = torch.exp2(s - s.amax(2, keepdim=True))
    back = torch.tensor([16 * group + key for group in range(k.shape[1] // 16) for key in ORDER]).argsort()
    return eight_bits.rounded(p, 1 / 256) @ v8.double().mT[:, back] * scale_v / p.sum(2, keepdim=True) + centre


TABLES: dict[str, Callable[[], str]] = {
    "score-memory": score_memory_table,
    "units": units_table,
    "traffic": traffic_table,
    "causal": causal_table,
    "blocks": blocks_table,
    "schedule": schedule_table,
    "non-matmul": non_matmul_table,
    "tile-sizes": tile_sizes_table,
    "causal-gain": causal_gain_table,
    "versions": versions_table,
    "explore-data": explore_data,
    "production": production_table,
    "eight-bits-factor": eight_bits_factor_table,
}


def table(heading: tuple, rows: list[tuple]) -> str:
    lines = [heading, ["---:"] * len(heading), *rows]
    return "\n" + "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines).replace(" ---: ", "---:") + "\n"


def size(count: float) -> str:
    """Bytes in decimal units, as data sheets count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def with_tables(text: str) -> str:
    """A page with its tables written anew. Raises KeyError for a table that is not there."""
    marked = re.compile(r"(<!-- worklog:begin (\S+) -->\n).*?(<!-- worklog:end \2 -->)", re.DOTALL)
    return marked.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def refresh() -> list[Path]:
    """Rewrite the tables of the pages; the pages that changed."""
    written = []
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if with_tables(text) != text:
            path.write_text(with_tables(text), encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    for path in refresh():
        print(path)
