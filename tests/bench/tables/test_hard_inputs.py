"""The tables of hard inputs, from made-up rows."""

from dataclasses import replace

from tilewise.bench import tables
from tilewise.bench.store import Row
from tilewise.bench.tables.hard_inputs import hard_tables, hard_verdicts

CASE = {
    **{"batch": 1, "seqlen_q": 8192, "seqlen_k": 8192, "heads_q": 16, "heads_k": 16, "head_dim": 128, "head_dim_v": 128},
    **{"mask": "Causal()", "dtype": "bf16", "direction": "fwd"},
}
ENVIRONMENT = {"device": "a GPU", "torch": "2.11.0", "date": "2026-11-25T10:00:00+00:00"}


def row(impl, ms, data=None, o=2e-3, normal_ms=None, **other):
    case = CASE | other.pop("case", {}) | ({} if data is None else {"data": data})
    made = {"clock": "events", "passed": True, "places_agree": True, "rms_error": {"o": o}, **other}
    seconds = None if ms is None else ms * 1e-3
    rate = None if ms is None else 1e12 / seconds
    over = None if normal_ms is None or data is None else ms / normal_ms
    times = {"median_s": seconds, "flops_per_s": rate, "over_normal": over}
    return Row(impl=impl, name="hard-inputs", case=case, **times, environment=ENVIRONMENT, **made)


ROWS = [
    row("tilewise", 2.0, normal_ms=2.0),
    row("fa4", 2.5),
    row("sdpa:cudnn", 4.0, o=1.9e-3),
    row("naive", 1.0, o=1e-5),
    row("tilewise:tiled", 1.0, o=1e-5),
    row("tilewise", 3.0, "q x64", normal_ms=2.0, o=2.2e-3),
    row("fa4", 1.0, "q x64", passed=False, reason="missed the tolerance: o"),
    row("sdpa:cudnn", 4.0, "q x64"),
    row("tilewise", 5.0, "nan in v", normal_ms=2.0, rms_error={}),
    row("fa4", 2.5, "nan in v", passed=False, places_agree=False, o=1e-9),
    row("tilewise", None, "cauchy", passed=False, clock="none", reason="missed the tolerance: o"),
    row("tilewise", 1.9, "tiny", normal_ms=2.0, o=1.0),
    row("fa4", 2.5, "tiny", o=1e-8),
]


def lines_of(rows):
    return hard_tables(rows).splitlines()


def test_a_line_for_each_distribution_in_their_order():
    lines = [line for line in lines_of(ROWS) if line.startswith("|")]
    assert lines == [
        "| d128 fwd bf16, 8192 tokens | Causal(): TFLOP/s | over normal | error |",
        "|---|---:|---:|---:|",
        "| normal | 500.0 / 400.0 fa4 | – | 2.0e-03 / 1.9e-03 |",
        "| q x64 | 333.3 / 250.0 sdpa:cudnn | 1.50 | 2.2e-03 / 2.0e-03 |",
        "| cauchy | wrong | – | 2.0e-03 / – |",
        "| tiny | 526.3 / 400.0 fa4 | 0.95 | 1.0e+00 / 1.0e-08 |",
        "| nan in v | 200.0 / 400.0 fa4* | 2.50 | – |",
    ]


def test_verdicts():
    (line,) = hard_verdicts(ROWS).splitlines()
    assert line == (
        "d128 fwd Causal() bf16, 8192 tokens: finite inputs at most 1.50 times the normal time (q x64), beyond 1.25; "
        "not finite at most 2.50 times (nan in v), within 3; error at most 1.10 times the best peer's (q x64), beyond 1.05; wrong: cauchy"
    )
    assert f"- {line}" in lines_of(ROWS)
    assert lines_of(ROWS)[-1] == "Measured on a GPU, torch 2.11.0, 2026-11-25; medians, side by side in one process."


def test_the_gradient_that_compares_worst_counts_and_each_condition_has_its_place():
    backward = {"case": {"direction": "bwd"}}
    grads = {"o": 1e-3, "dq": 2e-3, "dk": 3e-3, "dv": 1e-3}
    peer = {"o": 1e-9, "dq": 2e-3, "dk": 2.4e-3, "dv": 1e-3}
    window = {"case": {"mask": "SlidingWindow(1023,0)", "direction": "bwd"}}
    rows = [
        *(row("tilewise", 5.0, normal_ms=5.0, rms_error=grads, **where) for where in (backward, window)),
        row("fa4", 6.0, rms_error=peer, **backward),
    ]
    lines = lines_of([*ROWS, *rows])
    head = "| d128 bwd bf16, 8192 tokens | Causal(): TFLOP/s | over normal | error | SlidingWindow(1023,0): TFLOP/s | over normal | error |"
    assert head in lines
    assert any(line.startswith("| normal | 200.0 / 166.7 fa4 | – | 3.0e-03 / 2.4e-03 dk | 200.0 | – | ") for line in lines)
    assert len(hard_verdicts([*ROWS, *rows]).splitlines()) == 3


def test_clocks_do_not_mix():
    walls = [replace(each, clock="wall", median_s=each.median_s and each.median_s * 10) for each in ROWS]
    assert lines_of([*walls, *ROWS])[:9] == lines_of(ROWS)[:9]


def test_markers_take_it_with_rows_and_without():
    text = "<!-- tilewise:begin hard-inputs:hard-inputs::gpu -->\n\n<!-- tilewise:end hard-inputs:hard-inputs::gpu -->\n"
    assert "| q x64 | 333.3" in tables.fill(text, ROWS)
    assert "no rows yet" in tables.fill(text, [])
    elsewhere = [replace(each, environment={**ENVIRONMENT, "device": "a CPU"}) for each in ROWS]
    assert tables.fill(text, [*elsewhere, *ROWS]) == tables.fill(text, ROWS)
