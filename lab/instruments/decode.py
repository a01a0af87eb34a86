"""What a decode call costs, by what is asked of it, on one Hopper GPU; how fast it is beside others is `tilewise bench --set decode`.

    python lab/instruments/decode.py OUT.jsonl [--only features,append,prefix,sweep] [--cell "b16 8k 32:8 p64 q1" ...]
    python lab/instruments/decode.py OUT.jsonl --only sweep --tuning "equal shares: cut.solo_speedup_x4=0" --tuning "three: kv_stages=3, tile_n=64"

features  a fixed split, a window, changes of scores, more queries, a tree, small pages
append    new tokens with the call, plain and rotated, and `tilewise.append` alone
prefix    tokens that all sequences share: each with a copy, on the same pages, and said to be a prefix
sweep     the kernel with fields of decode.config.Config, or of decode.call.Cut as cut.FIELD, in place of the usual; --kind e4m3 or latent for
          caches in 8 bits, or latent ones of 576 / 512; `difference` is the largest from the usual's O

Microseconds of a call, medians of replays of a CUDA graph of calls on so many caches that they do not fit the L2 cache, in turns. TB/s counts K and
V once, a latent cache once for both. `--device cpu` rehearses all but the sweep, by the wall clock.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from choices import named
from rows import Rows, compile_ahead

import tilewise as tw
from tilewise.bench.provenance import provenance
from tilewise.bench.sets import decode as decode_cells
from tilewise.bench.sets.decode import Caches, Cell
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, SlidingWindow
from tilewise.problem import DecodeCall

LATENT = 576, 512
PREFIX = 8  # of so many tokens of nine
KINDS = "bf16", "e4m3", "latent"
USUAL_CELLS = "b1 8k 32:8 p64 q1", "b16 8k 32:8 p64 q1", "b64 8k 32:1 p0 q1"


def cell_from(title: str) -> Cell:
    """As the bench writes it; ArgumentTypeError for anything else."""
    match = re.fullmatch(r"b(\d+) (\d+)(k?) (\d+):(\d+) p(\d+) q(\d+)", title)
    if match is None:
        raise argparse.ArgumentTypeError(f"{title!r} is no cell; cells are such as {USUAL_CELLS[0]!r}")
    batch, length, heads_q, heads_k, page, new = (int(match[i]) for i in (1, 2, 4, 5, 6, 7))
    return Cell(lengths=(length * (1024 if match[3] else 1),) * batch, heads_q=heads_q, heads_k=heads_k, page=page, new=new)


def tuning_from(text: str) -> tuple[str, dict]:
    """ArgumentTypeError for what is no tuning."""
    from tilewise.backends.hopper.decode.call import Cut
    from tilewise.backends.hopper.decode.config import Config

    known = [*(each.name for each in fields(Config)), *(f"cut.{name}" for name in Cut._fields)]
    return named(text, known, "decode.config.Config and decode.call.Cut")


class Bench:
    def __init__(self, rows: Rows, device: torch.device, budget_s: float) -> None:
        self.rows, self.device, self.budget_s = rows, device, budget_s
        self.pool = decode_cells.Pool(device)

    def timed(self, calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
        """Microseconds of one call of each list."""
        clock = "graph" if self.device.type == "cuda" else "wall"
        whole = {name: partial(all_of, each) for name, each in calls.items()}
        with torch.no_grad():
            found = interleave(whole, budget_s=self.budget_s, device=self.device, clock=clock, flush=False)
        return {name: round(1e6 * stats.median / len(calls[name]), 2) for name, stats in found.items()}

    def public(self, caches: Caches, table: torch.Tensor | None = None, **options) -> list[Callable[[], object]]:
        """`tilewise.decode` on each copy; by another table where one is given."""
        given = {"cache_seqlens": caches.seqlens, "page_table": caches.table if table is None else table} | options
        return [partial(tw.decode, caches.q, *copy, **given) for copy in caches.copies]

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)


def all_of(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def features(bench: Bench, cell: Cell) -> None:
    caches, more = bench.pool.caches(cell), bench.pool.caches(replace(cell, new=8))
    slopes = torch.linspace(0.1, 1.0, cell.heads_q, device=bench.device)
    tree = torch.ones(1, 8, 8, dtype=torch.bool, device=bench.device).tril()
    calls = {"plain": bench.public(caches)}
    calls |= {f"split {n}": bench.public(caches, split=n) for n in (512, 2048)}
    calls |= {"softcap": bench.public(caches, softcap=30.0), "window 1024": bench.public(caches, mask=SlidingWindow(1023, 0))}
    calls |= {"alibi, sink": bench.public(caches, alibi_slopes=slopes, sink=slopes)}
    calls |= {"8 queries": bench.public(more), "8 queries, tree": bench.public(more, tree=tree)}
    calls |= {f"pages of {n}": bench.public(bench.pool.caches(replace(cell, page=n))) for n in (1, 4, 8)}
    bench.rows.note(what="features", cell=cell.title, us=bench.timed(calls))


def append(bench: Bench, cell: Cell) -> None:
    caches = bench.pool.caches(cell)
    new = {name: bench.random(cell.batch, cell.new, cell.heads_k, cell.head_dim) for name in "kv"}
    angles = bench.random(cell.longest, cell.head_dim // 2, dtype=torch.float32)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    before = {"cache_seqlens": caches.seqlens - cell.new}

    def alone(**options) -> list[Callable[[], object]]:
        return [partial(tw.append, *copy, *new.values(), page_table=caches.table, **before, **options) for copy in caches.copies]

    calls = {
        "decode": bench.public(caches),
        "with k, v": bench.public(caches, **new, **before),
        "rotated": bench.public(caches, **new, **before, **rotary),
        "queries rotated": bench.public(caches, **rotary),
        "append": alone(),
        "append rotated": alone(**rotary),
    }
    bench.rows.note(what="append", cell=cell.title, us=bench.timed(calls))


def prefix(bench: Bench, cell: Cell) -> None:
    """Eight tokens of nine of each sequence are the prefix, in whole pages; a cell without pages has none."""
    if not cell.page:
        return
    caches, common = bench.pool.caches(cell), cell.longest * PREFIX // (PREFIX + 1) // cell.page * cell.page
    shared = caches.table.clone()
    shared[:, : common // cell.page] = shared[:1, : common // cell.page]
    calls = {
        "copies": bench.public(caches),
        "the same pages": bench.public(caches, shared),
        "a prefix": bench.public(caches, shared, shared_prefix=common),
    }
    bench.rows.note(what="prefix", cell=cell.title, prefix=common, us=bench.timed(calls))


def calls_of(caches: Caches, kind: str) -> list[DecodeCall]:
    """The problem of each copy; e4m3 has no scales."""
    cell, copies = caches.cell, caches.copies
    if kind == "e4m3":
        copies = [tuple(x.to(torch.float8_e4m3fn) for x in copy) for copy in copies]
    if kind == "latent":
        copies = [(k, k[..., : LATENT[1]]) for k, _ in copies]
    none = dict.fromkeys(("cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "split"))
    shared = {"q": caches.q, "seqlens": caches.seqlens, "page_table": caches.table, "max_seqlen_q": cell.new, "shared_prefix": 0, **none}
    return [DecodeCall(k_cache=k, v_cache=v, mask=Causal(), scale=cell.head_dim**-0.5, **shared) for k, v in copies]


def sweep(bench: Bench, cell: Cell, kind: str, tunings: list[tuple[str, dict]]) -> None:
    from tilewise.backends.hopper.decode import call as decoding

    if kind == "latent":
        cell = replace(cell, head_dim=LATENT[0], heads_k=1)
    pool = bench.pool if kind == "bf16" else decode_cells.Pool(bench.device, 2 * decode_cells.COLD_BYTES)  # which take half
    problems, ways, ahead = calls_of(pool.caches(cell), kind), {}, []
    for name, tuning in [("usual", {}), *tunings]:
        cut = decoding.Cut(**{field.removeprefix("cut."): value for field, value in tuning.items() if field.startswith("cut.")})
        given = {field: value for field, value in tuning.items() if not field.startswith("cut.")}
        config = decoding.config_of(problems[0], **given)
        ahead.append(decoding.kernel_of(config))
        ways[name] = partial(decoding.bind, cut=cut, **given)
    compile_ahead(ahead)
    runs = {name: [partial(bind(each), each.tensors, each.seqlens) for each in problems] for name, bind in ways.items()}
    usual = runs["usual"][0]()[0].float()
    difference = {name: (each[0]()[0].float() - usual).abs().max().item() for name, each in runs.items()}
    us = bench.timed(runs)
    size = cell.bytes // (1 if kind == "bf16" else 2)
    flops = cell.flops * (sum(LATENT) / (2 * LATENT[0]) if kind == "latent" else 1)
    rates = {"TBps": {name: round(size / each / 1e6, 3) for name, each in us.items()}}
    rates |= {"TFps": {name: round(flops / each / 1e6, 1) for name, each in us.items()}}
    bench.rows.note(what="sweep", cell=cell.title, kind=kind, us=us, **rates, difference=difference)


def main(argv: list[str] | None = None) -> int:
    parts = {"features": features, "append": append, "prefix": prefix}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join([*parts, "sweep"]))
    parser.add_argument("--cell", action="append", type=cell_from, metavar="CELL", help=f"(default: {', '.join(USUAL_CELLS)})")
    parser.add_argument("--tuning", action="append", default=[], type=tuning_from, metavar="'NAME: FIELD=VALUE, ...'")
    parser.add_argument("--kind", default=KINDS[0], choices=KINDS, help="of the sweep's caches")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--budget", type=float, default=0.1, metavar="SECONDS", help="to time one of them (default: %(default)s)")
    given = parser.parse_args(argv)
    only = given.only.split(",")
    if unknown := [name for name in only if name not in (*parts, "sweep")]:
        parser.error(f"only names {', '.join(unknown)}; there are {', '.join([*parts, 'sweep'])}")
    bench = Bench(Rows(given.out), given.device, given.budget)
    bench.rows.note(what="environment", environment=provenance(given.device))
    for cell in given.cell or map(cell_from, USUAL_CELLS):
        for name, part in parts.items():
            if name in only:
                part(bench, cell)
        if "sweep" in only and given.device.type == "cuda":
            sweep(bench, cell, given.kind, given.tuning)
    return 0


if __name__ == "__main__":
    sys.exit(main())
