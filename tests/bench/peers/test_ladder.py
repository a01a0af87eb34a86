"""The ladder as contenders, as far as a machine without a GPU can tell."""

import time
from dataclasses import dataclass, replace

import pytest
import torch

from tilewise.bench import Timing, find, ladder_from, ladder_sweep, run
from tilewise.bench.gate import Gate
from tilewise.bench.peers import Naive
from tilewise.bench.peers.ladder import OnLadder
from tilewise.bench.sets import Workload
from tilewise.bench.timing import interleave
from tilewise.ladder import RUNGS, VARIANTS
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.testing import tolerance
from tilewise.testing.eight_bits import by_one_scale

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Workload(name="small", batch=2, seqlen_q=40, heads_q=4, head_dim=16)


class Formula:
    """Stands for a rung: the formula on (heads, seqlen, head_dim)."""

    name, in_eight_bits = "k0", False

    def why_not(self, problem):
        return []

    def __call__(self, q, k, v, causal, operands=None):
        assert all(x.is_contiguous() for x in (q, k, v)), "a copy would be timed"
        one = replace(SMALL, batch=1, heads_q=q.shape[0], heads_k=0, mask=Causal() if causal else Full())
        return Naive().prepare(one, CPU)(*(x[None].transpose(1, 2) for x in (q, k, v)))[0].transpose(0, 1).contiguous()


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_a_rung_gets_heads_first_and_without_a_copy(mask):
    workload = replace(SMALL, mask=mask)
    assert Gate(workload, 0, CPU).verify(OnLadder(Formula()).prepare(workload, CPU), heads_first=True) < 1e-5
    (row,) = run([workload], [OnLadder(Formula())], memory=False, timing=Timing(budget_s=0.0))
    assert row.impl == "k0" and row.passed and row.median_s > 0


class Prepared(Formula):
    """Stands for a rung in 8 bits: half as exact as it is allowed to be. Counts how often it was asked for operands."""

    in_eight_bits, asked = True, 0

    def operands(self, q, k, v, scale):
        assert scale == SMALL.head_dim**-0.5
        self.asked += 1
        return tuple(by_one_scale(x).float() for x in (q, k, v))

    def __call__(self, q, k, v, causal, operands=None):
        return super().__call__(*operands, causal).to(q.dtype)


def test_a_rung_in_eight_bits_gets_them_ahead_and_is_held_to_what_they_can_reach():
    rung = Prepared()
    (row,) = run([SMALL], [OnLadder(rung)], memory=False, timing=Timing(budget_s=0.0))
    assert row.passed and row.error > 1e-3 and row.samples >= 3 and rung.asked == 2  # for the check, and for all that was timed
    with pytest.raises(AssertionError, match="^o"):
        Gate(SMALL, 0, CPU).verify(OnLadder(Prepared()).prepare(SMALL, CPU), heads_first=True)


def test_inputs_are_the_same_numbers_in_either_memory():
    for one, other in zip(SMALL.inputs(3), SMALL.inputs(3, heads_first=True), strict=True):
        assert torch.equal(one, other) and one.is_contiguous() and other.transpose(1, 2).is_contiguous()


def test_every_rung_is_a_contender_under_its_own_name():
    assert [each.name for each in find(",".join((*RUNGS, *VARIANTS)))] == [*RUNGS, *VARIANTS]
    assert [each.name for each in find("k3_2..k4_2, sdpa, k4_1")] == ["k3_2", "k3_3", "k4_1", "k4_2", "sdpa"]
    for wrong in ("k1..k9", "k6..k2", "..k2", "k6:turns..k6"):
        with pytest.raises(ValueError, match=r"a range goes up the ladder, from one of k1, k2, k3_1"):
            find(wrong)


def test_why_a_rung_cannot():
    cell = ladder_sweep()[0]
    (rung,) = find("k5")
    assert rung.why_not(cell, CPU) == ["it runs on a Hopper GPU, and the tensors are on cpu: move them to 'cuda'"]
    window = rung.why_not(replace(cell, mask=SlidingWindow(64, 0), direction="bwd"), CUDA)
    assert window[:2] == ["the ladder takes full and causal masks of equal lengths only", "it has no grad"]
    assert "it takes as many key heads as query heads" in rung.why_not(replace(cell, heads_k=1), CUDA)[0]


def test_cells_of_the_sweep():
    sweep = ladder_sweep()
    assert len(sweep) == 24 and {cell.name for cell in sweep} == {"ladder"}
    assert {(cell.batch * cell.seqlen_q, cell.heads_q * cell.head_dim) for cell in sweep} == {(16384, 2048)}
    (odd,) = ladder_from({"seqlen": "1000", "head_dim": "64", "causal": "1"})
    assert (odd.batch, odd.heads_q, odd.mask) == (16, 32, Causal())
    assert ladder_from({"seqlen": "65536", "head_dim": "128", "causal": "0"})[0].batch == 1
    assert ladder_from({}) == sweep
    with pytest.raises(ValueError, match="mask: not an option of the ladder's sweep"):
        ladder_from({"mask": "full"})


def test_what_is_right_is_computed_once_a_workload(monkeypatch):
    asked, held = [], tolerance.expected

    @dataclass(frozen=True)
    class Counting(Naive):
        name: str = "counting"

    def expected(*arguments):
        asked.append(arguments)
        return held(*arguments)

    monkeypatch.setattr(tolerance, "expected", expected)
    rows = run([SMALL], [Naive(), Counting()], memory=False, timing=Timing(clocks=()))
    assert [(row.passed, row.clock, row.median_s) for row in rows] == [(True, "none", None)] * 2
    assert len(asked) == 1


def test_slow_calls_are_timed_once_and_do_not_eat_the_others_time():
    calls = {"slow": lambda: time.sleep(0.03), "fast": lambda: time.sleep(0.001)}
    stats = interleave(calls, budget_s=0.02, once_above_s=0.02)
    assert stats["slow"].samples == 1 and stats["fast"].samples > 3
    assert interleave(calls, budget_s=0.0)["slow"].samples == 3


def test_no_workload_is_begun_after_the_limit():
    assert run([SMALL], [Naive()], memory=False, timing=Timing(clocks=()), limit_s=-1.0) == []
