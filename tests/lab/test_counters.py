"""lab/instruments/counters.py and energy.py on a made-up report: columns found whatever their names, rows, and tables in pages."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from tilewise.ladder import BACKWARD_RUNGS, RUNGS

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [*(str(Path(__file__).parents[2] / each) for each in ("lab/instruments", "tools")), *sys.path])
    import counter_tables as tables
    import counters as profile
    import energy

HEADER = {
    "ID": ("", "0"),
    "Kernel Name": ("", "kernel_cutlass_kernel_LoadsQ"),
    "gpu__time_duration.sum": ("ns", "2,500,000"),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("%", "71.5"),
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": ("%", "3"),
    "sm__inst_executed_pipe_fmaheavy.avg.pct_of_peak_sustained_active": ("%", "12.25"),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("%", "41"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "20"),
    "dram__bytes_read.sum": ("byte", "1e+08"),
    "smsp__issue_active.avg.per_cycle_active": ("inst/cycle", "0.35"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": ("", "800"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "200"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "3"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1"),
    "smsp__pcsamp_warps_issue_stalled_barrier": ("", "99"),
    "device__attribute_display_name": ("", "NVIDIA H100"),
}


def report(*kernels):
    """The CSV that Nsight Compute prints, chatter included; kernels: what differs from HEADER."""

    def line(values):
        return ",".join(f'"{value}"' for value in values)

    lines = ["==PROF== a line of its own", line(HEADER), line(unit for unit, _ in HEADER.values())]
    values = {name: value for name, (_, value) in HEADER.items()}
    return "\n".join([*lines, *(line({**values, **each}.values()) for each in kernels)])


@pytest.fixture
def rows():
    environment = {"device": "NVIDIA H100", "date": "2026-11-21T06:00:00", "commit": "abc", "ncu": "Version 1"}
    slow = {"gpu__time_duration.sum": "5000000", "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "50"}
    return profile.rows(list(map(profile.described, (RUNGS["k5"], RUNGS["k6"]))), profile.parse(report(slow, {})), environment)


def test_measures(rows):
    assert [row["rung"] for row in rows] == ["k5", "k6"] and rows[1]["time_us"] == 2500
    assert rows[1]["case"] == {"batch": 4, "seqlen": 4096, "heads": 16, "head_dim": 128, "mask": "Full()", "dtype": "bf16"}
    assert rows[1]["numbers"]["registers"] == 168 and rows[1]["numbers"]["dram_read_bytes"] == 1e8
    assert tables.pipe(rows[1], "tensor") == 71.5 and tables.pipe(rows[1], "^fma") == 12.25
    assert rows[1]["stalls_percent"] == {"gmma": 75.0, "long_scoreboard": 25.0}
    assert tables.conflicts(rows[1]) == 25


def test_samples_stand_in_for_missing_stall_ratios():
    columns = {name: value for name, value in profile.parse(report({}))[0].items() if "average_warps" not in name}
    assert profile.measures(columns)["stalls_percent"] == {"barrier": 100.0}


def test_metrics_that_exist_are_asked_for():
    query = (
        "Device NVIDIA H100 (GH100)\n---- ----\nsm__pipe_tensor_op_gmma_cycles_active  Counter  %  words\nsm__inst_executed_pipe_xu  Counter\n"
        "sm__inst_executed_pipe_uniform  Counter\nl1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld  Counter\n"
    )
    assert profile.extra(query, profile.EXTRA) == [
        "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    ]
    assert profile.extra("", profile.EXTRA) == []


def test_k1_is_three_kernels():
    names = [{"Kernel Name": f"kernel_cutlass_{name}_tensorptr"} for name in profile.KERNELS["k1"]]
    rows = profile.rows([profile.described(RUNGS["k1"])], profile.parse(report(*names)), {})
    assert [row["kernel"] for row in rows] == list(profile.KERNELS["k1"]) and rows[0]["case"]["seqlen"] == 2048
    with pytest.raises(ValueError, match="not \\['k1 compute_S'"):
        profile.rows([profile.described(RUNGS["k1"])], profile.parse(report(*names[:2])), {})
    with pytest.raises(ValueError, match="the report holds the kernels"):
        profile.rows([profile.described(RUNGS["k1"])], profile.parse(report(*reversed(names))), {})


def test_torch_s_kernels_around_a_rung_s_are_left_out():
    names = (
        "void at::native::vectorized_elementwise_kernel<4>",
        "kernel_cutlass_prepare_Given",
        "kernel_cutlass_kernel_Loads",
        "void at::unrolled_elementwise_kernel",
    )
    kernels = profile.parse(report(*({"Kernel Name": name} for name in names)))
    rows = profile.rows([profile.described(BACKWARD_RUNGS["b2"])], kernels, {})
    assert [(row["rung"], row["kernel"]) for row in rows] == [("b2", "prepare"), ("b2", "kernel")]


def test_table_beside_the_rung_before(rows):
    page = "# K6\n\n<!-- profile:k6 -->\nold\n<!-- /profile -->\n\ntext\n<!-- profile:k2 -->\n<!-- /profile -->\n"
    written = tables.refreshed(page, rows)
    assert "| head_dim 128, full | k5 | k6 |" in written and "| time, us | 5,000 | 2,500 |" in written
    assert "| tensor cores, % of their cycles | 50 | 72 |" in written and "| issue slots used, % | 35 | 35 |" in written
    assert "| why warps wait, most | gmma 75 % | gmma 75 % |" in written and "HBM written" not in written
    assert "old" not in written and written.endswith("text\n" + written[written.index("<!-- profile:k2") :])
    assert tables.refreshed(written, rows) == written
    assert "| k6 | k5 |" in tables.refreshed("<!-- profile:k6,k5 -->\n<!-- /profile -->", rows)


def test_counters_that_were_kept_are_read_again(tmp_path, capsys):
    kept = {"what": [profile.described(RUNGS["k6"])], "environment": {"device": "NVIDIA H100"}, "csv": report({})}
    (tmp_path / "raw.json").write_text(json.dumps(kept))
    for _ in range(2):
        assert profile.main(["reread", str(tmp_path / "raw.json"), "--out", str(tmp_path / "rows.jsonl")]) == 0
    assert [row["time_us"] for row in tables.load(tmp_path / "rows.jsonl")] == [2500, 2500]
    assert "| k6 |" in capsys.readouterr().out


def chosen(*more):
    arguments = profile.argparse.Namespace(
        set="papers", dtype="bf16", direction="fwd,bwd", only="* b1 s16384 h16 d128 Causal*", impls="tilewise,fa4"
    )
    return [profile.described(each) for each in profile.calls_of(arguments)]


@pytest.fixture
def calls():
    """The made-up report of a forward and a backward pass, ours and FlashAttention-4's: markers, then kernels, the backward's three."""
    mark = {"Kernel Name": "void at::cuda::spin_kernel(long)"}
    names = {"Kernel Name": "prepare", "gpu__time_duration.sum": "1000"}, {"Kernel Name": "main"}, {"Kernel Name": "finish"}
    forward, backward = [mark, {}], [mark, names[0], {**names[1], "gpu__time_duration.sum": "4000000"}, {**names[2], **names[0], "ID": "9"}]
    environment = {"device": "NVIDIA H200", "date": "2026-11-22T03:42:00", "commit": "abc", "ncu": "Version 1"}
    return profile.rows(chosen(), profile.parse(report(*forward, *forward, *backward, *backward)), environment)


def test_calls_are_told_apart_by_the_kernel_between_them(calls):
    assert [(row["impl"], row["case"]["direction"], row["kernel"]) for row in calls] == [
        ("tilewise", "fwd", HEADER["Kernel Name"][1]),
        ("fa4", "fwd", HEADER["Kernel Name"][1]),
        ("tilewise", "bwd", "main"),
        ("fa4", "bwd", "main"),
    ]
    assert calls[2]["time_us"] == 4000 and [time_us for _, time_us in calls[2]["others_us"]] == [1, 1]
    with pytest.raises(ValueError, match="kernels of 3 calls, not of 4"):
        profile.rows(chosen(), profile.parse(report(*3 * [{"Kernel Name": "spin_kernel"}, {}])), {})
    with pytest.raises(ValueError, match="kernels of 3 calls, not of 4"):
        profile.rows(chosen(), profile.parse(report(*3 * [{"Kernel Name": "spin_kernel"}, {}], {"Kernel Name": "spin_kernel"})), {})


def test_calls_in_a_page(calls):
    energy = {key: calls[0][key] for key in ("impl", "name", "id", "case", "environment")}
    energy |= {"time_us": 3000.0, "clock_mhz": 1500.0, "watts": 700.0, "joules": 2.1, "flops": 2e12}
    page = "# The forward\n\n<!-- counters:fwd -->\nold\n<!-- /counters -->\n<!-- counters:fwd+bwd -->\nkept\n<!-- /counters -->\n"
    written = tables.refreshed(page, [*calls, energy])
    assert "| | | us | tensor cores, % |" in written and "| papers b1 s16384 h16 d128 Causal() bf16 fwd | fa4 | 2,500 | 71.5 |" in written
    assert "| papers b1 s16384 h16 d128 Causal() bf16 fwd | tilewise | 3,000 | 1,500 | 700 | 2.100 | 1.050 |" in written
    assert "other kernels" not in written and " bwd " not in written and "old" not in written and "kept" in written
    assert tables.refreshed(written, [*calls, energy]) == written
    assert "| other kernels, us |" in tables.refreshed(page.replace("counters:fwd -->", "counters:bwd -->"), calls)


class Clockwork:
    """A board that takes 100 W at 1,500 MHz, and whose meter moves every 20 ms."""

    def clock_mhz(self):
        return 1500

    def throttled(self):
        return 4

    def joules(self):
        return 100 * (time.perf_counter() // 0.02 * 0.02)


def test_power_is_read_where_the_meter_moves(monkeypatch):
    """On a GPU that does one batch after another, 1 ms a call."""
    busy_until = [0.0]

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at = busy_until[0]

        def query(self):
            return time.perf_counter() >= self.at

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    def launch():
        busy_until[0] = max(busy_until[0], time.perf_counter()) + 1e-3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = energy.keep_busy(launch, Clockwork(), 0.4)
    assert 85 < found["watts"] < 115 and set(found["clocks"]) == {1500} and found["throttled"] == 4
    assert 0.3 < found["seconds"] < 0.8 and found["calls"] / found["seconds"] == pytest.approx(1000, rel=0.2)


def test_committed_tables_are_what_the_rows_make():
    rows = [row for path in sorted(tables.PROFILES.glob("*.jsonl")) for row in tables.load(path)]
    for page in tables.PAGES.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert tables.refreshed(text, rows) == text, f"{page.name}: run `python tools/counter_tables.py`"


def test_unknown_names(capsys):
    for given, sentence in (
        (["rungs", "k9"], "no rung is called k9; there are k1"),
        (["cells", "--only", "*d12345*"], "only is '*d12345*', which matches none of the workloads papers, "),
        (["cells", "--impls", "fa9"], "impl is 'fa9'"),
        (["cells", "--set", "paper"], "set is 'paper'"),
    ):
        with pytest.raises(SystemExit):
            profile.main(given)
        assert sentence in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_a_sentence():
    for main, given in ((profile.main, ["rungs"]), (profile.main, ["cells"]), (energy.main, [])):
        with pytest.raises(SystemExit, match="Hopper's kernels cannot be measured here: "):
            main(given)
