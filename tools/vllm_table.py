"""The tables of docs/guide/serving.md, from the rows of tools/gpu/vllm_bench.py that benchmarks/results/vllm has: rewrites the page.

They stand between `<!-- vllm:prefill -->`, `<!-- vllm:decode -->` (of eight layers), `<!-- vllm:whole -->` (of 32) or `<!-- vllm:busy -->` (how long
the GPU runs kernels in a step of 32) and `<!-- /vllm -->`. A row's `block` is the tokens of a block of vLLM's cache.
"""

import json
import re
from pathlib import Path

from context_parallel_tables import markdown

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "benchmarks/results/vllm", ROOT / "docs/guide/serving.md"
MARKED = re.compile(r"(<!-- vllm:(\w+) -->\n).*?(<!-- /vllm -->)", re.DOTALL)
WHOLE = 32  # layers of a model of 8 billion numbers
COLUMNS = {
    ("CUSTOM", 64): "tilewise",
    ("CUSTOM", 16): "tilewise, blocks of 16",
    ("FLASH_ATTN", 16): "FlashAttention-3",
}


def load() -> list[dict]:
    return [json.loads(line) for path in sorted(ROWS.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]


def table(part: str, rows: list[dict]) -> list[str]:
    """Of the newest row of each cell: "prefill", thousands of prompt tokens a second, or "decode", "whole" and "busy", milliseconds of a step."""
    found = [row for row in rows if part_of(row) == part]
    a, b, value, first, digits = {
        "prefill": ("cached", "new", lambda row: row["tokens_per_s"] / 1e3, "thousand tokens a second", 1),
        "decode": ("length", "sequences", lambda row: row["ms"], "ms a step", 2),
        "whole": ("length", "sequences", lambda row: row["ms"], "ms a step of 32 layers", 2),
        "busy": ("length", "sequences", lambda row: row["busy_ms"], "ms of the GPU a step", 2),
    }[part]
    newest = {(row[a], row[b], row["backend"], row["block"]): row for row in found}
    cells = {cell: value(row) for cell, row in newest.items()}
    columns = {column: title for column, title in COLUMNS.items() if any(cell[2:] == column for cell in cells)}
    body = [
        [
            f"{b:,} behind {a:,}" if part == "prefill" else f"{b:,} of {a:,}",
            *(f"{cells[a, b, *column]:.{digits}f}" if (a, b, *column) in cells else "–" for column in columns),
        ]
        for a, b in sorted({cell[:2] for cell in cells})
    ]
    where = found[-1]["environment"]
    runs = dict.fromkeys(f"commit {each['commit']}, {each['date'][:10]}" for each in (row["environment"] for row in newest.values()))
    stamp = f"{where['device']}, vLLM {where['vllm']}, torch {where['torch']}; {'; '.join(runs)}."
    return [*markdown([first, *columns.values()], body), "", stamp]


def part_of(row: dict) -> str:
    if row["part"] != "decode":
        return row["part"]
    return "busy" if "busy_ms" in row else "whole" if row["layers"] == WHOLE else "decode"


def refreshed(text: str, rows: list[dict]) -> str:
    return MARKED.sub(lambda match: match[1] + "\n" + "\n".join(table(match[2], rows)) + "\n\n" + match[3], text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8"), load()), encoding="utf-8")
