"""The tables of docs/context-parallel.md, from the rows of tools/gpu/context_parallel.py that benchmarks/results/distributed has: rewrites the page.

They stand between `<!-- context-parallel:times -->`, or `decode`, and `<!-- /context-parallel -->`.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "benchmarks/results/distributed", ROOT / "docs/context-parallel.md"
SCHEMES = "tilewise", "stages", "contiguous", "zigzag", "ulysses", "all-gather", "ring"


def load() -> list[dict]:
    return [json.loads(line) for path in sorted(ROWS.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]


def markdown(head: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", *(f"| {' | '.join(line)} |" for line in body)]


def stamp(rows: list[dict]) -> str:
    where, world = rows[-1]["environment"], max(row["world"] for row in rows)
    return f"{world} x {where['device']}, torch {where['torch']}, CUDA {where['cuda']}, commit {where['commit']}, {where['date'][:10]}."


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
    return [*markdown(["ms", "one GPU", *SCHEMES, "rate of a GPU beside one alone"], body), "", stamp(found)]


def decode(rows: list[dict]) -> list[str]:
    """Microseconds of one new token."""
    found = [row for row in rows if "decode" in row]
    body = [
        [
            f"{row['decode'] >> 10}k tokens, {row['heads'][0]}:{row['heads'][1]} heads, turns of {row['interleave']}",
            *(f"{row[name] * 1e6:,.0f}" for name in ("one_s", "kernel_s", "seconds")),
        ]
        for row in found
    ]
    return [*markdown(["us", "one GPU", "a rank's own part", "merged"], body), "", stamp(found)]


def refreshed(text: str, rows: list[dict]) -> str:
    """`text` with its tables written anew."""
    made = {each.__name__: each for each in (times, decode)}
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
