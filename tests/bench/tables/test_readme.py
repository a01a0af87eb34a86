"""README's tables say what the rows say."""

from tilewise.bench.store import Row
from tilewise.bench.tables import readme

WHERE = {"device": "a GPU", "torch": "2.11", "date": "2026-11-26T00:00:00", "threads": 2}
CASE = {
    "batch": 2,
    "heads_q": 32,
    "heads_k": 8,
    "head_dim": 128,
    "head_dim_v": 128,
    "mask": "Causal()",
    "dtype": "bf16",
    "direction": "fwd",
}


def row(impl, ms, name="papers", seqlen=8192, clock="events", **changes):
    case = (
        CASE
        | {"seqlen_q": seqlen, "seqlen_k": seqlen}
        | {key: changes.pop(key) for key in (*CASE, "seqlen_q", "page", "tokens", "kind") & changes.keys()}
    )
    fields = {"passed": True, "median_s": ms * 1e-3, "flops_per_s": 1e12 / ms, "bytes": 2_000_000_000, "environment": WHERE}
    return Row(impl=impl, name=name, case=case, clock=clock, **(fields | changes))


def test_both_directions_in_a_line():
    rows = [row("tilewise", 2.0, seqlen=512), row("fa4", 2.0, seqlen=512), row("tilewise", 2.0), row("fa4", 8.0), row("sdpa", 9.0)]
    rows += [row("tilewise", 4.0, direction="bwd", environment=WHERE | {"date": "2026-11-24"}), row("fa4", 2.0, direction="bwd")]
    assert readme.papers(rows).splitlines()[2:] == [
        "| 128, causal | 0.5 | 0.1 fa4 | 2.00 | 0.2 | 0.5 fa4 | 0.50 |",
        "",
        "tilewise is ahead in 2 of 2 cells forward and 0 of 1 backward. a GPU, 2 threads, torch 2.11, 2026-11-24 to 2026-11-26.",
    ]
    assert readme.papers(rows[:5]).splitlines()[2] == "| 128, causal | 0.5 | 0.1 fa4 | 2.00 | – | – | – |"


def test_a_few_cells_of_decode_and_the_mean_of_all():
    def cell(impl, ms, kind="even", **changes):
        return row(impl, ms, "decode", clock="graph", direction="decode", seqlen_q=1, page=64, tokens=9000, kind=kind, **changes)

    rows = [cell("tilewise", 1.0, batch=1), cell("fa4", 2.0, batch=1), cell("tilewise", 1.0, batch=3), cell("fa4", 0.5, batch=3)]
    rows += [cell(impl, ms, "prefix", batch=64, seqlen=9216) for impl, ms in (("tilewise", 1.0), ("fa4", 1.0))]
    assert readme.decode(rows).splitlines()[2:] == [
        "| 1 x 8k | 1,000.0 | 2.00 | 2,000.0 fa4 | 2.00 |",
        "| 64 behind one prefix, 9,000 in all | 1,000.0 | 2.00 | 1,000.0 fa4 | 1.00 |",
        "",
        "tilewise is ahead in 2 of 3 cells in all; geometric mean of the ratios 1.00. a GPU, 2 threads, torch 2.11, 2026-11-26.",
    ]


def test_eight_bits_at_the_longest_length():
    rows = [
        row("tilewise:int8", 1.0, "fp8", seqlen=512),
        row("tilewise", 2.0, "fp8"),
        row("fa3:fp8", 4.0, "fp8"),
        row("fa3:vllm", 1.0, "fp8"),
    ]
    assert readme.eight_bits(rows).splitlines()[0::2][:2] == [
        '| TFLOP/s, causal, 8k tokens | bf16 | `"int8"` | `"fp8"` | e4m3 given | FlashAttention-3, e4m3 given |',
        "| head_dim 128 | 0.5 | – | – | – | 0.2 |",
    ]


def test_cpus_have_the_longest_case_of_each_mask():
    rows = [row("tilewise", 1.0, "cpu", seqlen=512), row("tilewise", 8.0, "cpu", peak_extra_bytes=12_300_000), row("naive", 1500.0, "cpu")]
    rows += [row("tilewise", 2.0, "cpu", mask="A()|B()", peak_extra_bytes=12_300_000)]
    assert readme.cpu(rows).splitlines() == [
        "| b2 s8192 h32/8 d128 bf16 fwd | tilewise | sdpa | naive |",
        "|---|---:|---:|---:|",
        "| Causal() | 8.0 ms, 12 MB | – | 1,500.0 ms |",
        "| A()\\|B() | 2.0 ms, 12 MB | – | – |",
        "",
        "Time, peak extra memory. a GPU, 2 threads, torch 2.11, 2026-11-26.",
    ]
