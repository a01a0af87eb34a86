"""The tables of docs/context-parallel.md, from the rows of tools/gpu/context_parallel.py that benchmarks/results/distributed has: rewrites the page.

They stand between `<!-- context-parallel:times -->`, or `decode`, `checked`, `predicted`, and `<!-- /context-parallel -->`.
"""

import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilewise import Causal, Documents, Full, Mask, SlidingWindow, distributed
from tilewise.distributed.reporting import Report
from tilewise.testing.packs import pack

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "benchmarks/results/distributed", ROOT / "docs/context-parallel.md"
SCHEMES = "tilewise", "stages", "contiguous", "zigzag", "ulysses", "all-gather", "ring", "torch:flash", "torch:cudnn"


CELL = "world", "check", "scheme", "mask", "seqlen", "heads", "head_dim", "dtype", "direction", "decode", "interleave"


def load() -> list[dict]:
    """The newest row of each cell."""
    rows = [json.loads(line) for path in sorted(ROWS.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({tuple(str(row.get(name)) for name in CELL): row for row in rows}.values())


def markdown(head: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", *(f"| {' | '.join(line)} |" for line in body)]


def stamp(rows: list[dict]) -> str:
    where, world = rows[-1]["environment"], max(row["world"] for row in rows)
    runs = sorted({(row["environment"]["date"][:10], row["environment"]["commit"]) for row in rows})
    said = "; ".join(f"commit {commit}, {date}" for date, commit in runs)
    return f"{world} x {where['device']}, torch {where['torch']}, CUDA {where['cuda']}; {said}."


def times(rows: list[dict]) -> list[str]:
    """Milliseconds of each scheme, the fastest one bold; the rate of a GPU beside that of one alone."""
    cells: dict[tuple, dict[str, float]] = {}
    found = [row for row in rows if "direction" in row]
    for row in found:
        cell = cells.setdefault((row["mask"], row["seqlen"], tuple(row["heads"]), row["direction"]), {})
        cell[row["scheme"]] = row["seconds"] * 1e3
    body = []
    for (mask, seqlen, heads, direction), cell in cells.items():
        best, one = min(cell[each] for each in SCHEMES if each in cell), cell.get("one")
        took = [f"{'**' * (cell[each] == best)}{cell[each]:.2f}{'**' * (cell[each] == best)}" if each in cell else "–" for each in SCHEMES]
        rate = "–" if one is None else f"{100 * one / 2 / cell['tilewise']:.0f} %"
        name = f"{mask}, {seqlen >> 10}k, {heads[0]}:{heads[1]} heads, {direction}"
        body.append([name, "–" if one is None else f"{one:.2f}", *took, rate])
    return [*markdown(["ms", "one GPU", *SCHEMES, "rate of a GPU, against one alone"], body), "", stamp(found)]


def decode(rows: list[dict]) -> list[str]:
    """Microseconds of one new token."""
    found = [row for row in rows if "decode" in row]
    body = [
        [
            f"{row['decode'] >> 10}k tokens, {row['heads'][0]}:{row['heads'][1]} heads, turns of {row['interleave']}",
            *(f"{row[name] * 1e6:,.0f}" for name in ("one_s", "kernel_s", "seconds", "one_graph_s", "kernel_graph_s", "graph_s")),
            f"{row['one_graph_s'] / row['graph_s']:.2f}",
        ]
        for row in found
    ]
    names = "one GPU", "a rank's own part", "merged"
    return [*markdown(["us", *names, *(f"{name}, as a CUDA graph" for name in names), "times one GPU's rate"], body), "", stamp(found)]


class Constants(NamedTuple):
    """Of two GPUs: what one call takes beyond its work."""

    pairs_per_s: dict[
        tuple[str, str], float
    ]  # by mask and direction: pairs of a query head and a key, of the kernel at the longest sequence measured
    latency_s: float  # of an exchange
    bytes_per_s: float
    host_s: dict[str, float]  # by direction


def constants(rows: list[dict]) -> Constants:
    """From the rows of tilewise's own scheme."""
    found = [row for row in rows if row.get("scheme") == "tilewise" and "direction" in row]
    rates, latest = {}, sorted(found, key=lambda row: row["seqlen"])
    for row in latest:
        rates[row["mask"], row["direction"]] = max(report_of(row["mask"], row["seqlen"], row["world"], row["heads"]).pairs) / kernel_of(row)
    crossed = [
        (report_of(row["mask"], row["seqlen"], 2, row["heads"]).forward_bytes[0], row["gather_s"])
        for row in latest
        if row["mask"] == "full"
    ]
    (few, short), (many, long) = crossed[0], crossed[-1]
    bytes_per_s = (many - few) / (long - short)
    others = {
        direction: statistics.median(
            row["seconds"] - kernel_of(row) - row["gather_s"] - row.get("return_s", 0.0) for row in found if row["direction"] == direction
        )
        for direction in ("forward", "backward")
    }
    return Constants(rates, short - few / bytes_per_s, bytes_per_s, {each: max(seconds, 0.0) for each, seconds in others.items()})


def kernel_of(row: dict) -> float:
    return row["kernel_s" if row["direction"] == "forward" else "kernel_backward_s"]


def mask_of(name: str, n: int) -> Mask:
    """As tools/gpu/context_parallel.py has it."""
    if name == "documents":
        return Documents(pack(n, np.random.default_rng(n)), inner=Causal())
    return {"full": Full(), "causal": Causal(), "window": SlidingWindow(1023, 0)}[name]


def report_of(mask: str, n: int, world: int, heads: list[int]) -> Report:
    return distributed.plan(mask_of(mask, n), n, (0, world), heads=tuple(heads), head_dim=128).report()


def prediction(
    mask: str, n: int, world: int, heads: list[int], direction: str, known: Constants, bytes_per_s: float | None = None
) -> tuple[float, float]:
    """Seconds of the slowest rank, and the rate of a GPU beside one alone that does nothing but compute."""
    report = report_of(mask, n, world, heads)
    rate, crossing = known.pairs_per_s[mask, direction], report.forward_bytes if direction == "forward" else report.backward_bytes
    exchanges = 1 if direction == "forward" else 2  # keys and values once more, and their gradients
    exchange = exchanges * known.latency_s + max(crossing) / (bytes_per_s or known.bytes_per_s)
    seconds = max(report.pairs) / rate + exchange + known.host_s[direction]
    return seconds, sum(report.pairs) / rate / world / seconds


def checked(rows: list[dict]) -> list[str]:
    """What the constants say of the rows that they come from."""
    known, body = constants(rows), []
    for row in rows:
        if row.get("scheme") == "tilewise" and "direction" in row:
            seconds, _ = prediction(row["mask"], row["seqlen"], row["world"], row["heads"], row["direction"], known)
            name = f"{row['mask']}, {row['seqlen'] >> 10}k, {row['heads'][0]}:{row['heads'][1]} heads, {row['direction']}"
            body.append([name, f"{seconds * 1e3:.2f}", f"{row['seconds'] * 1e3:.2f}", f"{seconds / row['seconds']:.2f}"])
    return markdown(["two GPUs, ms", "by the constants", "measured", "ratio"], body)


NETWORK = 50e9  # bytes a second of a GPU between nodes of eight: 400 Gbit/s, by its data sheet


def predicted(rows: list[dict]) -> list[str]:
    """Milliseconds forward and backward, and the share of one GPU's rate that each of them keeps."""
    known, body = constants(rows), []
    for n in (1 << 17, 1 << 20):
        for mask in ("full", "causal", "documents", "window"):
            line = [f"{mask}, {n >> 10}k tokens"]
            for world, bytes_per_s in ((8, None), (64, NETWORK)):
                for direction in ("forward", "backward"):
                    seconds, rate = prediction(mask, n, world, [64, 8], direction, known, bytes_per_s)
                    line.append(f"{seconds * 1e3:,.1f} ({100 * rate:.0f} %)")
            body.append(line)
    return markdown(["predicted, ms", "8 GPUs, forward", "backward", "64 GPUs, forward", "backward"], body)


def refreshed(text: str, rows: list[dict]) -> str:
    """`text` with its tables written anew."""
    made = {each.__name__: each for each in (times, decode, checked, predicted)}
    pattern = r"(<!-- context-parallel:(\w+) -->\n).*?(<!-- /context-parallel -->)"

    def written(found: re.Match) -> str:
        return "\n".join([found[1].rstrip(), "", *made[found[2]](rows), "", found[3]])

    return re.sub(pattern, written, text, flags=re.DOTALL)


def main() -> None:
    before = PAGE.read_text(encoding="utf-8")
    after = refreshed(before, load())
    if after != before:
        PAGE.write_text(after, encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
