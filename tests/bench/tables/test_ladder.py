"""The ladder's tables say what the rows say, and those that are committed are what the rows make."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from tilewise.bench import store
from tilewise.bench.store import Row
from tilewise.bench.tables import fill, ladder, readme, verdicts
from tilewise.ladder import RUNGS, VARIANTS

ROOT = Path(__file__).parents[3]
NONE = "No measurement of the ladder is committed yet."


def row(impl, rate, *, head_dim=128, mask="Full()", seqlen=8192, clock="events", **changes):
    case = {"batch": 16384 // seqlen, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": 2048 // head_dim, "heads_k": 2048 // head_dim}
    case |= {"head_dim": head_dim, "head_dim_v": head_dim, "mask": mask, "dtype": "bf16", "direction": "fwd"}
    where = {"device": "an H100", "torch": "2.13", "nvidia-cutlass-dsl": "4.8.1", "date": "2026-11-21T08:00:00+00:00"}
    fields = {"passed": True, "median_s": 1e-3, "flops_per_s": rate * 1e12, "ceiling_flops_per_s": 8e14, "environment": where}
    return Row(**({"impl": impl, "name": "ladder", "case": case, "clock": clock} | fields | changes))


ROWS = [
    row("k5", 584.2),
    row("k5", 450.0, mask="Causal()"),
    row("k6", 600.0),
    row("k6", 659.4),  # measured again
    row("k6", 100.0, clock="wall"),
    row("k6", 480.0, seqlen=512),
    row("k1", 1.34),
    row("sdpa:cudnn", 671.0),
    row("fa4", 662.0),
    row("fa4", 500.0, seqlen=512),
    row("fa3", 0.0, median_s=None, clock="none", reason="not installed"),
    row("k6", 999.0, name="papers"),
]


def test_one_number_a_rung():
    lines = ladder.ladder_markdown(ROWS).splitlines()
    assert "| k1 | three kernels, the score matrix in global memory | 1.3 | – | 0.2% | 2026-11-21 |" in lines
    assert "| k5 | two or three consumers share wider tiles and the producer's registers | 584 | 450 | 73% | 2026-11-21 |" in lines
    assert "| k6 | the next scores under this softmax as well | 659 | – | 82% | 2026-11-21 |" in lines
    assert "| sdpa:cudnn | peer | 671 | – | 84% | 2026-11-21 |" in lines and not any("fa3" in line for line in lines)
    assert [line.split(" | ")[0] for line in lines[2:17]] == [f"| {name}" for name in (*RUNGS, *VARIANTS)]
    assert lines[-1] == (
        "Forward, batch 2, 8k tokens, 16 heads, head_dim 128, bf16. an H100, torch 2.13, CuTe DSL 4.8.1. "
        "Rungs of one day, and peers of one day, ran in turns in one process."
    )


def test_rungs_in_eight_bits_are_named():
    last = ladder.ladder_markdown([*ROWS, row("k8", 950.0), row("k7", 1000.0)]).splitlines()[-1]
    assert "head_dim 128, bf16 (k7, k8: e4m3, quantised beforehand). an H100" in last
    assert last.endswith(" of the data sheet's 1,979 TFLOP/s in e4m3 they reach: k7 51%, k8 48%.")


def test_a_rung_in_eight_bits_has_no_share_of_a_matmul_in_bf16():
    """No matmul in 8 bits is timed in the run, and none in bf16 is a limit of its."""
    lines = ladder.ladder_markdown([*ROWS, row("k7", 1000.0)]).splitlines()
    assert any(line.startswith("| k7 |") and line.endswith(" | 1000 | – | – | 2026-11-21 |") for line in lines)
    elsewhere = [row("k7", 1000.0, environment={"device": "a GPU without a sheet", "date": "2026-11-21T08:00:00+00:00"})]
    assert "data sheet" not in ladder.ladder_markdown(elsewhere)


def later(impl, rate, device="an H100", **changes):
    return row(impl, rate, name="papers", environment={"device": device, "date": "2026-11-25T08:00:00+00:00"}, **changes)


NEWER = [
    row("tilewise:hopper", 654.0),
    later("fa4", 743.0),
    later("tilewise", 777.0),
    later("fa4", 999.0, "an H200"),
    later("fa4", 999.0, seqlen=512),
]


def test_peers_and_the_production_kernel_are_of_the_newest_rows_of_the_case():
    lines = ladder.ladder_markdown([*ROWS, *NEWER]).splitlines()
    own = lines.index("| tilewise | the library's own kernel | 777 | – | 97% | 2026-11-25 |")
    assert lines[own + 1 : own + 3] == ["| sdpa:cudnn | peer | 671 | – | 84% | 2026-11-21 |", "| fa4 | peer | 743 | – | 93% | 2026-11-25 |"]
    assert "| tilewise | the library's own kernel | 654 " in ladder.ladder_markdown([*ROWS, *NEWER[:1]])


def test_readme_has_the_last_rung_of_each_number_and_the_peers_of_our_day():
    lines = readme.ladder([*ROWS, row("k6_1", 600.0), *NEWER]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:-2]] == ["| k1", "| k5", "| k6", "| tilewise", "| fa4"]
    assert lines[-3] == "| fa4 | peer | 743 | 2026-11-25 |"


def test_a_rung_between_the_one_before_and_the_best_peer():
    assert ladder.rung_markdown(ROWS, "k6").splitlines()[:8] == [
        "| TFLOP/s | | 512 | 8k |",
        "|---|---|---:|---:|",
        "| 128 full | k5 | – | 584 |",
        "| 128 full | k6 | **480** | **659** |",
        "| 128 full | best peer | 500 fa4 | 671 sdpa:cudnn |",
        "| 128 causal | k5 | – | 450 |",
        "| 128 causal | k6 | **–** | **–** |",
        "| 128 causal | best peer | – | – |",
    ]
    assert "k0" not in ladder.rung_markdown(ROWS, "k1")
    assert "| 128 full | k6 |" in ladder.rung_markdown([*ROWS, row("k6:overlap", 600.0)], "k6:overlap")
    assert "| 128 full | k6_1 | **–** | **640** |" in ladder.rung_markdown([*ROWS, row("k6:turns", 640.0)], "k6_1")
    assert ladder.rung_markdown(ROWS, "k5_1") == "k5_1 is not measured yet."
    with pytest.raises(ValueError, match="k9 is no rung; there are k1, k2"):
        ladder.rung_markdown(ROWS, "k9")


def test_rungs_of_the_backward_pass_have_rows_of_their_own():
    def backward(impl, rate):
        made = row(impl, rate)
        return replace(made, case=made.case | {"direction": "bwd"})

    assert ladder.rung_markdown(ROWS, "b1") == ladder.rung_markdown([], "b1") == "b1 is not measured yet."
    rows = [backward("b1", 300.0), backward("b2", 400.0), backward("fa4", 500.0), backward("tilewise", 600.0)]
    assert ladder.rung_markdown([*ROWS, *rows], "b2").splitlines()[2:5] == [
        "| 128 full | b1 | 300 |",
        "| 128 full | b2 | **400** |",
        "| 128 full | best peer | 500 fa4 |",
    ]
    assert ladder.rung_markdown([*ROWS, *rows], "k6") == ladder.rung_markdown(ROWS, "k6")
    assert ladder.rung_markdown([*ROWS, *rows], "b3") == "b3 is not measured yet."
    other = replace(backward("b3", 300.0), name="backward-ladder", environment={"device": "an H200"})
    assert ladder.rung_markdown([other], "b3") == "The ladder's sweep has no row of b3 yet. Sets that have: backward-ladder on an H200."
    assert ladder.ladder_table(rows).row_count == 4 and ladder.cells_of(rows) == {}


def test_a_table_is_of_one_machine():
    """Of the first that has the rung: an H200's rows show where there are none of an H100, and never next to them."""
    there = {"device": "an H200", "torch": "2.13", "date": "2026-11-29T08:00:00+00:00"}
    elsewhere = [row("k5_1", 444.0, environment=there), row("k5", 888.0, environment=there), row("fa4", 999.0, environment=there)]
    assert ladder.rung_markdown([*ROWS, *elsewhere], "k5") == ladder.rung_markdown(ROWS, "k5")
    assert ladder.ladder_markdown([*ROWS, *elsewhere]) == ladder.ladder_markdown(ROWS)
    shown = ladder.rung_markdown([*ROWS, *elsewhere], "k5_1")
    assert shown.splitlines()[2:4] == ["| 128 full | k5_1 | **444** |", "| 128 full | best peer | 999 fa4 |"]
    assert "Measured on an H200, torch 2.13, 2026-11-29" in shown


def test_tables_in_the_terminal():
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(ladder.ladder_table(ROWS))
    console.print(verdicts([*ROWS[:1], replace(ROWS[0], impl="k2", passed=False, reason="missed [o]", error=None)]))
    text = console.export_text()
    assert "659" in text and "128 causal" in text and text.index("k1 ") < text.index("k5 ") < text.index("sdpa:cudnn")
    assert "passed" in text and "wrong: missed [o]" in text
    assert ladder.ladder_table([]).row_count == 0


DOCUMENT = """<!-- ladder:begin -->
old
<!-- ladder:end -->
between
<!-- table:k6 -->
<!-- /table -->
<!-- table:k1 -->
old
<!-- /table -->
"""


def test_markers():
    text = fill(DOCUMENT, ROWS)
    assert "old" not in text and "\nbetween\n" in text and "| k6 | the next" in text and "| 128 full | k6 | **480**" in text
    assert fill(text, ROWS) == text
    assert fill(DOCUMENT, []).count(NONE) == 3
    for wrong in ("<!-- ladder:begin -->\n", "<!-- table:k6 -->\nno end", "<!-- table:k9 -->\n<!-- /table -->"):
        with pytest.raises(ValueError, match=r"page.md: 1|k9 is no rung"):
            fill(wrong, ROWS, "page.md")


def test_the_committed_tables_are_what_the_rows_make():
    rows = store.load(*sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    marked = 0
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        marked += "<!-- ladder:begin -->" in text or "<!-- tilewise:begin readme-ladder:" in text
        assert fill(text, rows, path.name) == text, f"{path.name}: run `tilewise report`"
    assert marked >= 2
