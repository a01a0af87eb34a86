"""Which backend runs, what is said when none can, and that an explicit backend never falls back."""

from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise import problem
from tilewise.backends import Backend
from tilewise.backends.cpu import Cpu, native
from tilewise.backends.hopper import Hopper
from tilewise.errors import UnsupportedError
from tilewise.machine import once
from tilewise.masks import Full
from tilewise.runtime import call_cache, dispatch


class Half(Backend):
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
        call_cache.forget()
        monkeypatch.setattr(dispatch, "backends", lambda: installed)

    yield install
    dispatch.reasons.cache_clear()
    dispatch.choose.cache_clear()
    call_cache.forget()


def qkv(dtype=torch.float32):
    return [torch.randn(1, 3, 1, 4).to(dtype) for _ in range(3)]


@pytest.fixture
def no_kernel(monkeypatch, backends):
    """A machine without the CPU kernel, on which nothing was said yet."""
    monkeypatch.setattr(native, "_load", lambda: "its compiled kernel is on holiday: call it back")
    monkeypatch.setattr(once, "_said", set())
    backends(Hopper(), Cpu(), dispatch.named("tiled"), dispatch.named("reference"))


def test_what_is_missing_is_said_once(no_kernel):
    with pytest.warns(RuntimeWarning) as said:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            tw.attention(*qkv(dtype))
        tw.decode(torch.randn(1, 1, 1, 4), torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4))
    assert [str(each.message) for each in said] == [
        "'tiled' computes attention in place of 'cpu', several times slower: its compiled kernel is on holiday: call it back"
    ]


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_the_kernel_would_not_run_either(no_kernel):
    tw.attention(*qkv(torch.float64))
    tw.attention(*qkv(), backend="tiled")
    tw.attention(*qkv(), backend="reference")
    tw.attention(*qkv(torch.bfloat16), precision="int8")


def test_a_missing_compiler_is_said_where_there_is_a_hopper_gpu(monkeypatch):
    from tilewise.backends.hopper import jit, prebuilt

    shape = {"device": "cuda", "dtype": torch.float16, "head_dim": 64, "head_dim_v": 64, "group": 1, "mask": "full"}
    monkeypatch.setattr(jit, "why_no_compiler", lambda: ["NVIDIA's CuTe DSL is not installed: pip install 'tilewise[hopper]'"])
    assert Hopper().missing(problem.Problem(**shape)) == ""  # no GPU, so nothing that an installation would help
    monkeypatch.setattr(prebuilt, "why_no_gpu", lambda *_: [])
    assert "pip install 'tilewise[hopper]'" in Hopper().missing(problem.Problem(**shape))
    assert Hopper().missing(problem.Problem(**shape | {"dtype": torch.float64})) == ""


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
