"""The table of errors by recipe in docs/numerics.md: computed once, kept as rows, and written between markers.

python tools/eight_bits.py measure   compute the rows (some ten minutes on two cores; the same on every machine, but for a sum's last bits)
python tools/eight_bits.py fill      write the table into docs/numerics.md
"""

import json
import re
import sys
from pathlib import Path

from tilewise.bench.eight_bits import INPUTS, PER_TENSOR, UNQUANTISED, WAYS, errors

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "lab" / "rows" / "eight-bits-errors.jsonl", ROOT / "docs" / "numerics.md"
MARKED = re.compile(r"(<!-- eight-bits -->\n).*?(<!-- /eight-bits -->)", re.DOTALL)
SIZES = ((128, 8192), (128, 2048), (64, 8192), (256, 8192))  # head_dim, keys
HEADS, QUERIES = 16, 64


def measure() -> None:
    with ROWS.open("w") as file:
        for head_dim, seqlen_k in SIZES:
            for kind in INPUTS:
                sizes = {"head_dim": head_dim, "seqlen_k": seqlen_k, "heads": HEADS, "queries": QUERIES}
                print(json.dumps({"inputs": kind, **sizes, "rms": errors(kind, **sizes)}), file=file, flush=True)


def table(rows: list[dict]) -> str:
    """Markdown: RMS errors where nothing is done against outliers, and how many times less wrong each recipe is."""
    recipes = [name for name in WAYS if name not in (UNQUANTISED, PER_TENSOR)]
    heads = " | ".join(f"`{name}`" for name in recipes)
    lines = [f"| inputs | d | keys | {UNQUANTISED} | e4m3, {PER_TENSOR} | {heads} |", f"|---|---:|---:|---:|---:|{'---:|' * len(recipes)}"]
    for row in rows:
        rms = row["rms"]
        ratios = " | ".join(f"{rms[PER_TENSOR] / rms[name]:.2f}" for name in recipes)
        sizes = f"{row['head_dim']} | {row['seqlen_k']:,}"
        lines.append(f"| {row['inputs']} | {sizes} | {rms[UNQUANTISED]:.1e} | {rms[PER_TENSOR]:.1e} | {ratios} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The page with the table of the rows that are kept."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert MARKED.search(text), f"{PAGE.name} has no markers"
    return MARKED.sub(lambda found: f"{found[1]}{table(rows)}\n{found[2]}", text)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    elif sys.argv[1:] == ["fill"]:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        sys.exit(__doc__)
