"""The gate lets only right results be timed, and a run yields a complete row for every contender."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from tilewise import bench
from tilewise.bench import runner
from tilewise.bench.gate import LARGEST_SCORES, sample_of, verify
from tilewise.bench.peers import Naive, Sdpa, Tilewise
from tilewise.bench.runner import run
from tilewise.bench.sets import Workload
from tilewise.bench.timing import Stats
from tilewise.masks import Causal, Dense, PerHead, SlidingWindow

CPU = torch.device("cpu")
SMALL = Workload(name="small", batch=2, seqlen_q=40, heads_q=4, heads_k=2, head_dim=16, mask=Causal())


@dataclass(frozen=True)
class Spoiled:
    """The formula with a fault: what it does to q, k, v before and to o after."""

    name: str
    before: object = staticmethod(lambda q, k, v: (q, k, v))
    after: object = staticmethod(lambda o: o)

    def why_not(self, workload, device):
        return []

    def prepare(self, workload, device):
        right = Naive().prepare(workload, device)
        return lambda q, k, v: self.after(right(*self.before(q, k, v)))


class GradientOnly(torch.autograd.Function):
    """The identity, with a gradient 1 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


def one_bad_row(o):
    return torch.cat([o[:, :-1], o[:, -1:] * 1.001], 1)


FAULTS = [
    Spoiled("scaled twice", before=lambda q, k, v: (q * 0.25, k, v)),
    Spoiled("keys shifted", before=lambda q, k, v: (q, k.roll(1, 1), v)),
    Spoiled("heads exchanged", before=lambda q, k, v: (q, k.flip(2), v)),
    Spoiled("one bad row", after=one_bad_row),
    Spoiled("not a number", after=lambda o: o.index_fill(1, torch.tensor([3]), torch.nan)),
    Spoiled("another dtype", after=lambda o: o.double()),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_result_is_never_timed(fault):
    (row,) = run([SMALL], [fault], budget_s=0.0, memory=False)
    assert row.passed is False and row.median_s is None and row.flops_per_s is None
    assert row.reason.startswith("missed the tolerance: o")


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_a_wrong_gradient_is_never_timed(tensor):
    def spoil(*inputs):
        return tuple(GradientOnly.apply(x) if place == tensor else x for place, x in enumerate(inputs))

    (row,) = run([replace(SMALL, direction="bwd")], [Spoiled("gradient", before=spoil)], budget_s=0.0, memory=False)
    assert row.passed is False and row.reason.startswith(f"missed the tolerance: d{'qkv'[tensor]}")


LARGE = Workload(name="large", batch=2, seqlen_q=1100, heads_q=4, heads_k=2, head_dim=8, mask=SlidingWindow(200, 0))


def test_samples():
    everything = sample_of(SMALL)
    assert everything.rows == [range(40)] and (everything.batch, everything.heads_k) == (slice(0, 2), slice(0, 2))
    head = sample_of(LARGE)
    assert head.rows == [range(1100)] and (head.batch, head.heads_k) == (slice(1, 2), slice(1, 2))
    rows = sample_of(LARGE, largest=2 * 1100 * 300).rows
    assert rows == [range(100), range(500, 600), range(1000, 1100)]
    long = sample_of(replace(LARGE, seqlen_q=1 << 17, seqlen_k=1 << 17)).rows
    assert 0 < sum(map(len, long)) * 2 * (1 << 17) <= LARGEST_SCORES
    assert [len(piece) for piece in sample_of(replace(LARGE, seqlen_q=1 << 24, seqlen_k=1 << 24)).rows] == [1, 1, 1]


@pytest.mark.parametrize("largest", [1 << 22, 2 * 1100 * 300], ids=["a head", "some rows"])
@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_a_sample_of_a_large_workload_is_enough_to_pass_and_to_fail(monkeypatch, largest, direction):
    monkeypatch.setattr("tilewise.bench.gate.sample_of", lambda workload: sample_of(workload, largest))
    large = replace(LARGE, direction=direction)
    right = Sdpa().prepare(large, CPU)
    assert verify(right, large, 0, CPU) < 1e-5
    with pytest.raises(AssertionError, match=r"^o"):
        verify(lambda q, k, v: one_bad_row(right(q, k, v)), large, 0, CPU)
    if direction != "fwd":
        with pytest.raises(AssertionError, match=r"^dk"):
            verify(lambda q, k, v: right(q, GradientOnly.apply(k), v), large, 0, CPU)


@pytest.mark.parametrize(
    "mask",
    [
        PerHead({(0, 1): Causal(), (1, 4): SlidingWindow(9, 9)}),
        Dense(torch.rand(2, 1, 1100, 1100, generator=torch.Generator().manual_seed(0)) < 0.9),
    ],
    ids=["by head", "by batch entry"],
)
def test_samples_of_masks_that_differ_by_head_or_batch_entry(monkeypatch, mask):
    monkeypatch.setattr("tilewise.bench.gate.sample_of", lambda workload: sample_of(workload, 2 * 1100 * 300))
    workload = replace(LARGE, mask=mask)
    assert verify(Sdpa().prepare(workload, CPU), workload, 0, CPU) < 1e-5


def test_rows_are_complete():
    seen = []
    directions = ("fwd", "bwd", "fwd+bwd")
    workloads = [replace(SMALL, direction=direction) for direction in directions]
    rows = run(workloads, [Tilewise(), Sdpa(), Sdpa("cudnn")], budget_s=0.01, progress=lambda *step: seen.append(step))
    assert [(row.impl, row.case["direction"]) for row in rows] == [
        (impl, direction) for direction in directions for impl in ("tilewise", "sdpa", "sdpa:cudnn")
    ]
    for row in rows:
        if row.impl == "sdpa:cudnn":
            assert row.passed is None and row.median_s is None and row.reason == "torch has no cudnn kernel on a CPU"
            continue
        assert row.passed and row.reason is None and row.clock == "wall" and row.samples >= 3
        assert 0 < row.p10_s <= row.median_s <= row.p90_s
        assert row.flops_per_s == row.flops / row.median_s and row.paper_flops_per_s < row.flops_per_s
        assert 0 < row.ceiling_share < 10 and 0 <= row.error < 1e-5
        assert row.environment["torch"] == torch.__version__ and row.environment["threads"] == torch.get_num_threads()
    assert [step[:2] for step in seen] == [(0, 3), (1, 3), (2, 3), (3, 3)] and seen[0][2] == SMALL.id


def test_rows_are_kept_as_they_come():
    kept = []

    def stop_after_the_first(rows):
        kept.extend(rows)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([SMALL, SMALL], [Naive(), Sdpa()], budget_s=0.0, memory=False, keep=stop_after_the_first)
    assert [row.impl for row in kept] == ["naive", "sdpa"] and kept[0].environment["torch"] == torch.__version__


def test_one_contender_that_breaks_does_not_take_the_others_along():
    def breaks(*inputs):
        raise OSError("no such kernel\nand a long story")

    broken, fine = run([SMALL], [Spoiled("broken", before=breaks), Naive()], budget_s=0.0, memory=False)
    assert broken.passed is None and broken.reason == "cannot run this: OSError: no such kernel"
    assert fine.passed and fine.median_s > 0 and fine.peak_extra_bytes is None


@pytest.mark.parametrize(("fastest", "clocks"), [(40e-6, {"graph", "wall"}), (60e-6, {"events", "wall"})])
def test_all_are_timed_by_graphs_if_one_is_shorter_than_its_launch(monkeypatch, fastest, clocks):
    """So that rows of one workload can be compared."""
    seconds = {"fast": fastest, "slow": 70e-6}

    def interleaved(calls, clock, **how):
        return {name: Stats.of([seconds[name]]) for name in calls}

    monkeypatch.setattr(runner, "interleave", interleaved)
    calls = dict.fromkeys(seconds)
    timed = runner._timed(calls, runner.Timing(), torch.device("cuda"), graphs=True)
    assert {name: set(each) for name, each in timed.items()} == dict.fromkeys(seconds, clocks)
    timed = runner._timed(calls, runner.Timing(), torch.device("cuda"), graphs=False)
    assert {name: set(each) for name, each in timed.items()} == {name: {"events", "wall"} for name in seconds}


def test_the_package_offers_what_the_command_line_needs():
    rows = bench.run(bench.workloads_from({"seqlen": "32", "heads": "2", "mask": "causal"}), bench.find("tilewise"), budget_s=0.0)
    assert bench.table(rows).row_count == 1


@dataclass(frozen=True)
class Timid(Naive):
    """Right when it is checked, and out of memory from then on."""

    name: str = "timid"
    calls: list = field(default_factory=list)

    def prepare(self, workload, device):
        right = Naive().prepare(workload, device)

        def attend(q, k, v):
            self.calls.append(0)
            if len(self.calls) > 1:
                raise torch.OutOfMemoryError("tried to allocate much")
            return right(q, k, v)

        return attend


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_what_fails_when_it_is_timed_takes_nobody_along(direction):
    timid, fine = run([replace(SMALL, direction=direction)], [Timid(), Naive()], budget_s=0.0, memory=False)
    assert timid.reason == "cannot be timed beside the others: OutOfMemoryError: tried to allocate much"
    assert timid.median_s is None and timid.passed and fine.median_s > 0


def test_a_workload_that_fails_as_a_whole_stops_nothing(monkeypatch):
    def breaks(*args):
        if args[0].name == "bad":
            raise torch.OutOfMemoryError("no room for the reference")
        return held(*args)

    held = runner._calls
    monkeypatch.setattr(runner, "_calls", breaks)
    rows = run([replace(SMALL, name="bad"), SMALL], [Naive(), Sdpa()], budget_s=0.0, memory=False)
    assert [row.reason for row in rows[:2]] == ["this workload cannot be measured: OutOfMemoryError: no room for the reference"] * 2
    assert all(row.name == "bad" and row.environment["torch"] for row in rows[:2]) and all(row.median_s > 0 for row in rows[2:])
