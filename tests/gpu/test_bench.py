"""The harness on a GPU: its clocks, its memory counter, and every contender that torch brings."""

import time
from dataclasses import replace

import pytest
import torch
from alone import ALONE

from tilewise import bench
from tilewise.bench.memory import available_bytes, peak_extra_bytes
from tilewise.bench.sets import Workload
from tilewise.bench.timing import ceiling, interleave
from tilewise.bench.training import SIZES, Plan, train
from tilewise.masks import Causal, Full

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MB = 1 << 20


def ones(megabytes):
    return torch.ones(megabytes * MB, dtype=torch.uint8, device="cuda")


def median(call, clock):
    return interleave({"call": call}, budget_s=0.1, device="cuda", clock=clock)["call"].median


def test_peak_memory_is_exact():
    held = ones(64)
    result, peak = peak_extra_bytes(lambda: ones(32), "cuda")
    assert peak == 32 * MB == result.numel() and held[0] == 1
    assert peak_extra_bytes(lambda: torch.cat([ones(32), ones(32)]), "cuda")[1] == 128 * MB
    assert available_bytes("cuda") > 0


@ALONE
def test_clocks_agree_on_a_long_kernel_and_order_on_a_short_one():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    assert median(lambda: a @ a, "events") == pytest.approx(median(lambda: a @ a, "wall"), rel=0.2)
    b = torch.randn(64, device="cuda")
    assert median(lambda: b + 1, "graph") < median(lambda: b + 1, "wall")


def test_the_host_is_not_waited_for_by_the_event_clock():
    b = torch.randn(64, device="cuda")

    def slow_to_launch():
        time.sleep(100e-6)
        return b + 1

    assert median(slow_to_launch, "events") < 20e-6


def test_a_host_that_is_late_at_times_is_not_timed():
    b, calls = torch.randn(64, device="cuda"), []

    def late_at_times():
        calls.append(0)
        time.sleep(5e-3 if len(calls) % 3 == 0 else 0)
        return b + 1

    stats = interleave({"call": late_at_times}, budget_s=0.2, device="cuda", clock="events")["call"]
    assert stats.p90 < 20e-6 and len(calls) > 1.3 * stats.samples


def test_a_call_that_waits_for_the_gpu_is_timed_with_its_launch():
    b = torch.randn(64, device="cuda")
    stats = interleave({"call": lambda: (b + 1).sum().item()}, budget_s=0.05, device="cuda", clock="events")["call"]
    assert stats.samples > 3 and stats.median < 1e-3


def test_a_call_that_cannot_be_captured_leaves_nothing_behind():
    b, before = torch.randn(64, device="cuda"), torch.cuda.current_stream()
    for call in (lambda: (b + 1).sum().item(), lambda: torch.randn(64, device="cuda").sum().item()):
        with pytest.raises(RuntimeError):
            median(call, "graph")
        assert torch.cuda.current_stream() == before and torch.isfinite(torch.randn(64, device="cuda")).all()
    assert median(lambda: b + 1, "graph") > 0


def test_the_ceiling_is_below_the_data_sheet():
    from tilewise.machine.sheets import machine_for

    roof, sheet = ceiling("cuda", torch.bfloat16), machine_for("cuda")
    if sheet is None:
        pytest.skip("no preset for this GPU")
    assert 0.4 * sheet.peak[torch.bfloat16] < roof.matmul < sheet.peak[torch.bfloat16]
    assert 0.4 * sheet.hbm_bandwidth < roof.copy < sheet.hbm_bandwidth


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_contenders(direction):
    options = {"seqlen": "1024", "heads": "8", "head_dim": "64", "mask": "full,causal,window:127", "dtype": "bf16", "direction": direction}
    impls = bench.find("tilewise,sdpa,sdpa:flash,sdpa:math,sdpa:efficient,sdpa:cudnn,flex,naive")
    rows = bench.run(bench.workloads_from(options), impls, budget_s=0.05, device="cuda")
    for name in ("tilewise", "sdpa", "sdpa:math", "naive", "flex"):
        mine = bench.select(rows, impl=name)
        assert mine and all(row.passed for row in mine), [row.reason for row in mine]
        assert {row.clock for row in mine} <= {"wall", "events", "graph"} and {"wall"} < {row.clock for row in mine}
    assert all(row.passed is not False for row in rows), [row.reason for row in rows]
    assert rows[0].environment["driver"] and rows[0].environment["device"] == torch.cuda.get_device_name()


CHANGED = [{"softcap": 30.0}, {"sink": True}, {"scale": 1.0, "bias": "hqk", "bias_grad": True}]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("changes", CHANGED, ids=str)
def test_contenders_for_changed_scores(changes, direction):
    sizes = {"batch": 2, "seqlen_q": 512, "heads_q": 4, "head_dim": 64, "mask": Causal() if "bias" not in changes else Full()}
    workload = Workload(name="changed", **sizes, dtype=torch.bfloat16, direction=direction, **changes)
    rows = bench.run(
        [workload], bench.find("tilewise,fa4,sdpa:efficient,sdpa:cudnn,flex,naive"), budget_s=0.02, device="cuda", memory=False
    )
    assert {"tilewise", "flex", "naive"} <= {row.impl for row in rows if row.passed}, [row.reason for row in rows]
    assert all(row.passed is not False for row in rows), [row.reason for row in rows]
    assert all({"wall"} < {each.clock for each in rows if each.impl == row.impl} for row in rows if row.passed)


def test_training():
    size = replace(SIZES["1.3B"], layers=2, vocabulary=1024)
    ours, math = train([size], [1024], bench.find("tilewise,sdpa:math"), device="cuda", plan=Plan(budget_s=0.1, tokens=2048))
    for row in (ours, math):
        assert row.passed and row.tokens_per_s > 0 and row.peak_bytes > 12 * size.layers * size.hidden**2 * 8, row.reason
    assert ours.peak_bytes < math.peak_bytes and 0 < (ours.mfu or 0.5) < 1
