"""The table of docs/guide/serving.md, from the rows of tools/gpu/vllm_bench.py that benchmarks/results/vllm has: rewrites the page.

It stands between `<!-- vllm -->` and `<!-- /vllm -->`. A row's `block` is the tokens of a block of vLLM's cache.
"""

import json
import re
from pathlib import Path

from context_parallel_tables import markdown

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "benchmarks/results/vllm", ROOT / "docs/guide/serving.md"
MARKED = re.compile(r"(<!-- vllm -->\n).*?(<!-- /vllm -->)", re.DOTALL)
COLUMNS = {
    ("CUSTOM", 64): "tilewise",
    ("CUSTOM", 16): "tilewise, blocks of 16",
    ("FLASH_ATTN", 16): "FlashAttention-3",
}


def load() -> list[dict]:
    return [json.loads(line) for path in sorted(ROWS.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]


def prefill(rows: list[dict]) -> list[str]:
    """Thousands of prompt tokens a second, of the newest row of each cell."""
    found = [row for row in rows if "tokens_per_s" in row]
    cells = {(row["new"], row["cached"], row["backend"], row["block"]): row["tokens_per_s"] / 1e3 for row in found}
    body = [
        [
            f"{new:,} behind {cached:,}",
            *(f"{cells[new, cached, *column]:.1f}" if (new, cached, *column) in cells else "–" for column in COLUMNS),
        ]
        for cached, new in sorted({(row["cached"], row["new"]) for row in found})
    ]
    where = found[-1]["environment"]
    stamp = f"{where['device']}, vLLM {where['vllm']}, torch {where['torch']}, commit {where['commit']}, {where['date'][:10]}."
    return [*markdown(["thousand tokens a second", *COLUMNS.values()], body), "", stamp]


def refreshed(text: str, rows: list[dict]) -> str:
    return MARKED.sub(lambda match: match[1] + "\n" + "\n".join(prefill(rows)) + "\n\n" + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8"), load()), encoding="utf-8")
