"""The set hard-inputs: its cells, that rows of it say all they should, and that peers may be wrong but tilewise may not."""

from dataclasses import dataclass, replace

import pytest
import torch

from tilewise import bench
from tilewise.bench.gate import Gate, sample_of
from tilewise.bench.peers import Naive, Sdpa, Tilewise
from tilewise.bench.runner import Timing, run
from tilewise.bench.sets import workloads_from
from tilewise.bench.sets.distributions import DISTRIBUTIONS, HIDDEN
from tilewise.bench.store import append, load
from tilewise.cli import grammar
from tilewise.masks import Causal, Documents, Full, SlidingWindow

CPU = torch.device("cpu")
QUICK = Timing(budget_s=0.0)


def cells(**options):
    return workloads_from({"set": "hard-inputs", "seqlen": "96", "heads": "2", "head_dim": "16", "dtype": "fp32", **options})


def test_the_whole_set():
    sweep = workloads_from({"set": "hard-inputs"})
    assert len(sweep) == 2 * 3 * (3 * (len(DISTRIBUTIONS) - 2) + 3) and len({each.id for each in sweep}) == len(sweep)
    assert {(each.seqlen_q, each.heads_q * each.head_dim, each.dtype) for each in sweep} == {(8192, 2048, torch.bfloat16)}
    assert {each.direction for each in sweep} == {"fwd", "bwd"} and all(each.rms for each in sweep)
    masks = {each.mask for each in sweep}
    assert {Full(), Causal(), SlidingWindow(1023, 0)} < masks and len(masks) == 4
    assert all((each.data in HIDDEN) <= isinstance(each.mask, Documents) for each in sweep)


def test_parts_of_the_set():
    some = cells(mask="causal,window:7", data="q x64, nan in v", direction="bwd")
    assert [(each.mask, each.data) for each in some] == [(m, d) for m in (Causal(), SlidingWindow(7, 0)) for d in ("q x64", "nan in v")]
    assert {(each.seqlen_q, each.heads_q, each.head_dim, each.direction) for each in some} == {(96, 2, 16, "bwd")}
    assert cells(causal="1", data="normal", direction="fwd")[0].mask == Causal()
    (custom,) = workloads_from({"seqlen": "64", "mask": "full", "data": "cauchy"})
    assert custom.data == "cauchy" and custom.rms and not workloads_from({})[0].rms
    for options, message in (
        ({"batch": "2"}, "batch: not an option of the set hard-inputs"),
        ({"data": "odd"}, "data is 'odd'; each item"),
    ):
        with pytest.raises(ValueError, match=message):
            cells(**options)
    with pytest.raises(ValueError, match="set fixes the sizes, so data cannot be given with it"):
        workloads_from({"set": "cpu", "data": "cauchy"})


def test_rows_say_how_wrong_and_how_much_slower(tmp_path):
    rows = run(cells(mask="causal", data="normal,q x16", direction="bwd"), [Tilewise(), Sdpa()], timing=QUICK, memory=False)
    assert [(row.impl, row.case.get("data")) for row in rows] == [(i, d) for d in (None, "q x16") for i in ("tilewise", "sdpa")]
    for row in rows:
        assert row.passed and row.places_agree and set(row.rms_error) == {"o", "dq", "dk", "dv"} and max(row.rms_error.values()) < 1e-4
    assert rows[2].over_normal > 0 and rows[0].over_normal is rows[1].over_normal is rows[3].over_normal is None
    append(tmp_path / "rows.jsonl", rows)
    assert load(tmp_path / "rows.jsonl") == rows


@dataclass(frozen=True)
class Leaky:
    """The formula, which lets NaN through where the mask hides it, under any name."""

    name: str = "leaky"

    def why_not(self, workload, device):
        return []

    def prepare(self, workload, device):
        return Naive().prepare(workload, device)


@pytest.mark.parametrize("name", ["leaky", "tilewise:leaky"])
def test_a_peer_may_be_wrong_on_hard_inputs_and_tilewise_may_not(name):
    (row,) = run(cells(mask="causal", data="nan in last keys", direction="fwd"), [Leaky(name)], timing=QUICK, memory=False)
    assert row.passed is False and row.places_agree is False and row.reason.startswith("missed the tolerance: o[")
    assert (row.median_s is not None) == (name == "leaky")


def test_every_finite_result_of_tilewise_passes_the_gate():
    """And what is not finite is where fp64 has it, hidden NaN included."""
    rows = run(cells(), [Tilewise("tiled"), Tilewise()], timing=Timing(clocks=()), memory=False)
    assert {row.impl for row in rows} == {"tilewise", "tilewise:tiled"}
    assert [(row.case, row.reason) for row in rows if not row.passed] == []


@pytest.mark.parametrize("data", ["nan in v", "q x64"])
def test_samples_of_rows_with_inputs_that_are_not_finite(data, monkeypatch):
    """Rows outside the sample reach dK and dV there, so those are not checked; O and dQ are."""
    monkeypatch.setattr("tilewise.bench.gate.sample_of", lambda workload: sample_of(workload, 2 * 96 * 9))
    (cell,) = cells(mask="window:20", data=data, direction="bwd")
    gate = Gate(cell, 1, CPU)
    assert not gate.whole and gate.verify(Tilewise("tiled").prepare(cell, CPU)) < 1e-4
    with pytest.raises(AssertionError, match=r"^o"):
        gate.verify(lambda q, k, v: Tilewise("tiled").prepare(cell, CPU)(q, k, v) * 1.01)


def test_the_command(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--head-dim", "16", "--dtype", "fp32", "--data", "normal,late jump,nan in v", "--mask", "causal", "--direction", "fwd"]
    command = ["bench", "--set", "hard-inputs", *options, "--impl", "tilewise,sdpa", "--budget", "0.01", "--no-memory", "--out", str(out)]
    assert grammar.main(command) == 0
    said = capsys.readouterr().out
    assert (
        "d16 fwd Causal() fp32, 512 tokens: finite inputs at most" in said
        and "not finite at most" in said
        and "times the best peer's" in said
    )
    assert {row.case["seqlen_q"] for row in load(out)} == {512}


def test_a_cell_can_be_run_by_a_whole_family_of_sets():
    both = workloads_from({"set": "cpu,hard-inputs", "dtype": "fp16"})
    assert {each.name for each in both} == {"cpu", "hard-inputs"} and {each.direction for each in both} == {"fwd"}
    assert replace(both[-1], data="normal").finite and bench.ours("k5") and bench.ours("tilewise:cpu") and not bench.ours("sdpa")
