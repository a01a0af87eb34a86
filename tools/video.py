"""The errors in docs/guide/video.md: computed once, kept as rows, and written as a table between markers and as a picture.

python tools/video.py measure   compute the rows (some five minutes on two cores; the same on every machine, but for a sum's last bits)
python tools/video.py fill      write the table into docs/guide/video.md, and docs/plots/video-errors.svg
"""

import json
import re
import sys
from pathlib import Path

from tilewise.bench.eight_bits import PER_TENSOR, SAGE, UNQUANTISED, video_errors

ROOT = Path(__file__).parents[1]
ROWS, PAGE, PICTURE = ROOT / "lab/rows/video-errors.jsonl", ROOT / "docs/guide/video.md", ROOT / "docs/plots/video-errors.svg"
MARKED = re.compile(r"(<!-- video -->\n).*?(<!-- /video -->)", re.DOTALL)
MEANS, TOKENS = (0, 1, 3, 10, 30), (8192, 163_840)
WAYS = {
    PER_TENSOR: "e4m3, a scale a tensor",
    SAGE: "SageAttention 2's recipe",
    "int8": 'tilewise, "int8"',
    "int8_qk": 'tilewise, "int8_qk"',
    UNQUANTISED: "bf16, O rounded to it",
}


def measure() -> None:
    with ROWS.open("w") as file:
        for tokens in TOKENS:
            for mean in MEANS:
                print(json.dumps({"tokens": tokens, "mean": mean, "rms": video_errors(mean, tokens)}), file=file, flush=True)


def rows() -> list[dict]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def table() -> str:
    lines = [f"| keys | mean of V | {' | '.join(WAYS.values())} |", f"|---:|---:|{'---:|' * len(WAYS)}"]
    for row in rows():
        errors = " | ".join(f"{row['rms'][way]:.4f}" for way in WAYS)
        lines.append(f"| {row['tokens']:,} | {row['mean']} | {errors} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The page with the table of the rows that are kept."""
    assert MARKED.search(text), f"{PAGE.name} has no markers"
    return MARKED.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tilewise"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 3.2), layout="constrained")
    longest = [row for row in rows() if row["tokens"] == max(TOKENS)]
    for way, label in WAYS.items():
        style = "--" if way == UNQUANTISED else "-"
        axes.plot([row["mean"] for row in longest], [row["rms"][way] for row in longest], style, marker="o", label=label)
    axes.set(xlabel="mean of V (its deviation is 1)", ylabel="RMS error of O", yscale="log", title=f"{max(TOKENS):,} keys, head_dim 128")
    axes.legend(fontsize="small")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    elif sys.argv[1:] == ["fill"]:
        PAGE.write_text(filled(PAGE.read_text()))
        draw()
    else:
        sys.exit(__doc__)
