"""Which backend runs, what is said when none can, and that an explicit backend never falls back."""

from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise import problem
from tilewise.errors import UnsupportedError
from tilewise.masks import Full
from tilewise.runtime import dispatch, repeats


class Half:
    """Stands before the others and takes only fp16."""

    name = "half"

    def why_not(self, problem):
        return [] if problem.dtype == torch.float16 else [f"it computes fp16, not {problem.dtype}"]

    def tile(self, call):
        return None

    def forward(self, call):
        raise RuntimeError("ran on half")


@pytest.fixture
def backends(monkeypatch):
    """Sets the installed backends."""

    def install(*installed):
        for cached in (dispatch.reasons, dispatch.choose):
            cached.cache_clear()
        repeats.forget()
        monkeypatch.setattr(dispatch, "backends", lambda: installed)

    yield install
    dispatch.reasons.cache_clear()
    dispatch.choose.cache_clear()
    repeats.forget()


def qkv(dtype=torch.float32):
    return [torch.randn(1, 3, 1, 4).to(dtype) for _ in range(3)]


def test_first_able_backend_runs(backends):
    tiled, reference = dispatch.named("tiled"), dispatch.named("reference")
    backends(Half(), tiled, reference)
    assert tw.attention(*qkv()).isfinite().all()
    with pytest.raises(RuntimeError, match="ran on half"):
        tw.attention(*qkv(torch.float16))
    why = tw.explain(*qkv())
    assert why.backend == "tiled" and why.reasons["half"] == ["it computes fp16, not torch.float32"]
    assert "passed over: half (it computes fp16, not torch.float32)" in str(why)


def test_explicit_backend_never_falls_back(backends):
    tiled = dispatch.named("tiled")
    backends(Half(), tiled)
    with pytest.raises(
        UnsupportedError, match=r"backend 'half' cannot run this problem: it computes fp16, not torch.float32. backend='tiled' or"
    ):
        tw.attention(*qkv(), backend="half")


def test_no_backend_lists_every_reason(backends):
    reference = dispatch.named("reference")
    backends(Half(), reference)
    with pytest.raises(
        UnsupportedError, match=r"no backend can run this problem .*half: it computes fp16.*reference: runs only when asked for"
    ):
        tw.attention(*qkv())
    backends(Half())
    with pytest.raises(UnsupportedError, match=r"'half' cannot .* no other backend can run it either"):
        tw.attention(*qkv(), backend="half")


def test_problem_holds_nothing_that_changes_from_call_to_call():
    problems = {
        tw.explain(*(torch.randn(batch, seqlen, 2, 8) for _ in range(3)), mask=mask).problem
        for batch, seqlen in ((1, 5), (3, 64))
        for mask in (tw.SlidingWindow(3, 0), tw.Causal())
    }
    assert len(problems) == 1


def test_a_problem_is_of_its_tensors_gpu(monkeypatch):
    """Not of the current one, on a machine that has two kinds."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (9, 0), 1: (8, 0)}[device.index])
    problem._capability.cache_clear()
    found = []
    for index in range(2):
        q = SimpleNamespace(device=torch.device("cuda", index), is_cuda=True, dtype=torch.bfloat16, shape=(1, 9, 2, 64))
        found.append(problem.Call(q=q, k=q, v=q, mask=Full(), scale=1.0).problem)
    problem._capability.cache_clear()
    assert [each.capability for each in found] == [(9, 0), (8, 0)] and found[0] != found[1]
