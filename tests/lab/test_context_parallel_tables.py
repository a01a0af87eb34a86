"""docs/context-parallel.md says what the committed rows say."""

import sys
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "tools"), *sys.path])
    import context_parallel_tables as tables


def test_the_page_is_what_the_rows_make():
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.refreshed(text, tables.load()) == text, "run `python tools/context_parallel_tables.py`"
    assert text.count("ms |") >= 1 and "512k tokens" in text


def test_a_rank_as_fast_as_one_gpu_is_a_hundred_per_cent():
    where = {"device": "X", "torch": "1", "cuda": "1", "commit": "c", "date": "2026-01-01T00"}
    row = {"mask": "full", "seqlen": 1 << 14, "heads": [8, 8], "direction": "forward", "world": 2, "environment": where}
    found = tables.times(
        [row | {"scheme": "tilewise", "seconds": 1e-3}, row | {"scheme": "ring", "seconds": 2e-3}, row | {"scheme": "one", "seconds": 2e-3}]
    )
    assert found[2] == "| full, 16k, 8:8 heads, forward | 2.00 | **1.00** | – | – | – | – | – | 2.00 | – | – | 100 % |"
