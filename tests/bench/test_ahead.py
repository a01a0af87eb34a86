"""What is compiled ahead: one workload of each kind for each contender that compiles; failures stop nothing."""

import os
import pickle
from dataclasses import dataclass, replace

import pytest
import torch

from tilewise.bench import ahead
from tilewise.bench.ahead import compile_ahead, jobs
from tilewise.bench.peers import Naive, Sdpa, Tilewise, known
from tilewise.bench.sets import Workload, model_shapes
from tilewise.masks import Causal, SlidingWindow

CPU = torch.device("cpu")
SMALL = Workload(name="small", batch=3, seqlen_q=33, heads_q=4, heads_k=2, head_dim=16, mask=Causal())


@dataclass(frozen=True)
class Failing(Naive):
    name: str = "flex:broken"

    def prepare(self, workload, device):
        raise RuntimeError("no compiler\nand more")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ahead.CACHES:
        monkeypatch.delenv(name, raising=False)
    yield
    for name in ahead.CACHES:
        os.environ.pop(name, None)


def test_one_of_each_kind_with_one_sequence():
    workloads = [SMALL, replace(SMALL, batch=5), replace(SMALL, name="again"), replace(SMALL, direction="bwd"), replace(SMALL, softcap=1.0)]
    todo = [job.args for job in jobs(workloads, [Tilewise(), Sdpa(), Naive()], CPU)]
    assert [(impl.name, each.batch, each.direction, each.softcap) for impl, each, _ in todo] == [
        ("tilewise", 1, "fwd", 0.0),
        ("tilewise", 1, "bwd", 0.0),
        ("tilewise", 1, "fwd", 1.0),
    ]
    assert jobs([SMALL], [known()["fa4"]], CPU) == []  # which cannot run here


def test_ours_on_a_gpu_are_kernels_each_once(monkeypatch):
    monkeypatch.setattr(Tilewise, "why_not", lambda *arguments: [])
    workloads = [each for direction in ("fwd", "bwd") for each in model_shapes(direction=direction)]
    todo = jobs(workloads, [Tilewise()], torch.device("cuda"))
    assert all(job.func is ahead._kernel for job in todo) and len(todo) < len(workloads)
    kernels = [job.args[1] for job in todo]
    assert len(set(kernels)) == len(kernels) and {"forward", "backward", "bias"} <= {ahead.warmup.describe(each)[0] for each in kernels}
    outcome = ahead.warmup.Outcome(kernels[0], "failed", 0.5, reason="no compiler")
    monkeypatch.setattr(ahead.warmup, "one", lambda kernel: outcome)
    (compiled,) = compile_ahead(todo[:1], processes=0)
    assert (compiled.impl, compiled.reason, compiled.seconds) == ("tilewise", "no compiler", 0.5)
    pickle.loads(pickle.dumps(todo))


def test_those_that_share_kernels_are_one_kind():
    fa4, longer = known()["fa4"], replace(SMALL, seqlen_q=64, seqlen_k=64)
    assert ahead._kind(fa4, SMALL) == ahead._kind(fa4, longer) and ahead._kind(Tilewise(), SMALL) != ahead._kind(Tilewise(), longer)
    for other in ({"heads_k": 4}, {"mask": SlidingWindow(3, 0)}, {"sink": True}, {"direction": "bwd"}, {"dtype": torch.bfloat16}):
        assert ahead._kind(fa4, SMALL) != ahead._kind(fa4, replace(SMALL, **other))


def test_each_runs_once_and_what_fails_is_an_outcome():
    workloads = [replace(SMALL, direction="bwd", bias="hqk", bias_grad=True, sink=True)]
    worked, failed = compile_ahead(jobs(workloads, [Tilewise(), Failing()], CPU), processes=0)
    assert (worked.impl, worked.reason, worked.seconds > 0) == ("tilewise", "", True) and worked.what.startswith("small b1 s33")
    assert (failed.impl, failed.reason) == ("flex:broken", "RuntimeError: no compiler")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_a_cache_that_the_user_switched_off_stays_off(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert list(compile_ahead(jobs([SMALL], [Naive()], CPU), processes=0)) == []
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"


@pytest.mark.slow
def test_in_processes_of_their_own():
    outcomes = list(compile_ahead(jobs([SMALL, replace(SMALL, direction="bwd")], [Tilewise()], CPU), processes=2))
    assert [(each.impl, each.reason) for each in outcomes] == [("tilewise", "")] * 2


def test_what_is_carried_to_other_processes_can_be():
    for workload in model_shapes(direction="bwd"):
        copy = pickle.loads(pickle.dumps(workload))
        assert copy.id == workload.id and copy.case == workload.case
    assert pickle.loads(pickle.dumps(known()["fa4"])) == known()["fa4"]
