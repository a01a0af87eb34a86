"""README's tables: a few lines each of what other pages show whole."""

from collections.abc import Iterable

from tilewise.bench.compare import MINE, Pair, ahead, geometric_mean, pairs, ratios
from tilewise.bench.sets import title_of, tokens
from tilewise.bench.store import Row, latest
from tilewise.bench.tables.best_peer import cells_of_decode, kinds, longest_of
from tilewise.bench.tables.ladder import MASKS, at_place, caption, day, rate, title
from tilewise.bench.tables.rows import MISSING, escaped, header, in_common, line, where
from tilewise.ladder import RUNGS, VARIANTS

# Of the set decode, by `title_of`: caches in pages of 64 tokens, 32 query and 8 key heads, one new token.
DECODED = ("b1 8k", "b256 8k", "b64 ragged-64k", "b64 prefix-9k")
EIGHT_BITS = {  # of the set fp8
    "tilewise": "bf16",
    "tilewise:int8": '`"int8"`',
    "tilewise:fp8": '`"fp8"`',
    "tilewise:e4m3": "e4m3 given",
    "fa3:fp8": "FlashAttention-3, e4m3 given",
}


def papers(rows: Iterable[Row]) -> str:
    """A line a head_dim and mask: TFLOP/s at the longest length, the fastest peer's, and the mean ratio over all lengths, in each direction."""
    rows = [row for row in latest(rows) if row.median_s is not None and row.case["direction"] in ("fwd", "bwd")]
    found = kinds(rows)
    lines = header("head_dim, mask", *(text for way in ("forward", "backward") for text in (way, "best peer", "ratio")))
    for head_dim, mask in dict.fromkeys(kind[1:] for kind in found):
        groups = (found.get((way, head_dim, mask), []) for way in ("fwd", "bwd"))
        lines.append(line((f"{head_dim}, {escaped(MASKS.get(mask, mask))}", *(text for group in groups for text in _paper(group)))))
    of_way = {way: [pair.ratio for kind, group in found.items() if kind[0] == way for pair in group] for way in ("fwd", "bwd")}
    said = f"tilewise is ahead in {ahead(of_way['fwd'])} cells forward and {ahead(of_way['bwd'])} backward."
    return "\n".join([*lines, "", f"{said} {where(rows)}."])


def _paper(group: list[Pair]) -> tuple[str, str, str]:
    if not group:
        return MISSING, MISSING, MISSING
    longest = longest_of(group)
    mean = geometric_mean([pair.ratio for pair in group])
    return rate(longest.mine), f"{rate(longest.best)} {longest.best.impl}", f"{mean:.2f}"


def ladder(rows: Iterable[Row]) -> str:
    """`ladder_markdown` of full masks, without variants, rungs that have a later one of the same number, and peers of other days than ours."""
    found = {name: row for name, masks in at_place(rows).items() if (row := masks.get("full"))}
    if not found:
        return "Not measured yet."
    last = {name.partition("_")[0]: name for name in RUNGS}.values()
    peers = [name for name in found if name not in RUNGS | VARIANTS and (MINE not in found or day(found[name]) == day(found[MINE]))]
    shown = {name: found[name] for name in (*last, *peers) if name in found}
    lines = header("", "idea", "TFLOP/s", "measured", left=2)
    lines += [line((name, title(name), rate(row), day(row))) for name, row in shown.items()]
    return "\n".join([*lines, "", caption(list(shown.values()))])


def decode(rows: Iterable[Row]) -> str:
    """DECODED: microseconds, TB/s, and the fastest peer's; below, in how many cells of the whole set ours is ahead."""
    compared = cells_of_decode(rows)
    by_title = {title_of(pair.case): pair for pair in pairs(compared)}
    if not by_title:
        return "Not measured yet."
    lines = header("sequences x tokens", "us", "TB/s", "best peer, us", "ratio")
    shown = [pair for name in DECODED if (pair := by_title.get(f"{name} 32:8 p64 q1"))]
    for pair in shown:
        mine, best = pair.mine, pair.best
        ours = f"{mine.seconds * 1e6:,.1f}", f"{mine.bytes / mine.seconds * 1e-12:.2f}"
        theirs = f"{best.seconds * 1e6:,.1f} {best.impl}"
        lines.append(line((_caches(pair.case), *ours, theirs, f"{pair.ratio:.2f}")))
    numbers = ratios(compared)
    said = f"tilewise is ahead in {ahead(numbers)} cells in all; geometric mean of the ratios {geometric_mean(numbers):.2f}."
    return "\n".join([*lines, "", f"{said} {where([pair.mine for pair in shown])}."])


def _caches(case: dict) -> str:
    if case["kind"] == "even":
        return f"{case['batch']} x {tokens(case['seqlen_k'])}"
    words = "of many lengths" if case["kind"] == "ragged" else "behind one prefix"
    return f"{case['batch']} {words}, {case['tokens']:,} in all"


def eight_bits(rows: Iterable[Row]) -> str:
    """The longest causal case of each head_dim: TFLOP/s of EIGHT_BITS."""
    rows = [row for row in latest(rows) if row.impl in EIGHT_BITS and row.median_s is not None and row.case["mask"] == "Causal()"]
    longest = max((int(row.case["seqlen_k"]) for row in rows), default=0)
    rows = [row for row in rows if row.case["seqlen_k"] == longest]
    lines = header(f"TFLOP/s, causal, {tokens(longest)} tokens", *EIGHT_BITS.values())
    for head_dim in dict.fromkeys(row.case["head_dim"] for row in rows):
        found = {row.impl: row for row in rows if row.case["head_dim"] == head_dim}
        lines.append(line((f"head_dim {head_dim}", *(rate(found.get(name)) for name in EIGHT_BITS))))
    return "\n".join([*lines, "", f"{where(rows)}."])


def cpu(rows: Iterable[Row], contenders: tuple[str, ...] = (MINE, "sdpa", "naive")) -> str:
    """The longest case of each mask and direction: time and peak extra memory of each contender."""
    rows = [row for row in latest(rows) if row.impl in contenders and row.median_s is not None]
    longest: dict[tuple, int] = {}
    for row in rows:
        kind = row.case["mask"], row.case["direction"]
        longest[kind] = max(longest.get(kind, 0), int(row.case["seqlen_k"]))
    rows = [row for row in rows if row.case["seqlen_k"] == longest[row.case["mask"], row.case["direction"]]]
    shared, own = in_common([row.case for row in rows])
    lines = header(shared, *contenders)
    for case in dict.fromkeys(own):
        mine = {row.impl: row for row, words in zip(rows, own, strict=True) if words == case}
        lines.append(line((escaped(case), *(_time_and_memory(mine.get(name)) for name in contenders))))
    return "\n".join([*lines, "", f"Time, peak extra memory. {where(rows)}."])


def _time_and_memory(row: Row | None) -> str:
    if row is None:
        return MISSING
    memory = "" if row.peak_extra_bytes is None else f", {row.peak_extra_bytes / 1e6:,.0f} MB"
    return f"{row.seconds * 1e3:,.1f} ms{memory}"
