"""The tables of docs/worklog, from numbers that tilewise computes: `python tools/worklog_tables.py` rewrites the pages that changed.

A table NAME stands between `<!-- worklog:begin NAME -->` and `<!-- worklog:end NAME -->`, so that no number in it is typed by hand.
"""

import re
from collections.abc import Callable
from heapq import heapreplace
from pathlib import Path

from worklog_figures import SHAPE, length, score_memory

from tilewise.machine.roofline import Launch, Shape, Tile, fa1_blocks, fa2_blocks, flops, hbm_bytes
from tilewise.machine.sheets import H100, KB
from tilewise.masks import Causal
from tilewise.masks.tiles import lower

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


TABLES: dict[str, Callable[[], str]] = {
    "score-memory": score_memory_table,
    "units": units_table,
    "traffic": traffic_table,
    "causal": causal_table,
    "blocks": blocks_table,
    "schedule": schedule_table,
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
