"""Helpers compile what a call launches after its first kernel, into Triton's own cache."""

import os
import pickle
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from tests.backends.triton.test_warmup import CASES, launched  # noqa: F401
from tilewise.backends.triton import Triton, helpers, launch, merging, prefix, targets, warmup
from tilewise.backends.triton.bound import Bound
from tilewise.backends.triton.targets import Target
from tilewise.masks import Causal
from tilewise.problem import Call, DecodeCall
from tilewise.testing.cases import make, upstream

TARGET = Target("sm_80")
WAIT_S = 300.0


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Jobs, in place of processes, with an empty cache of Triton's."""
    if targets.interpreted():
        pytest.skip("in the interpreter nothing is compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEWISE_HELPERS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    monkeypatch.setattr(helpers, "_seen", set())
    found = []
    monkeypatch.setattr(helpers.crew, "give", found.append)
    yield found
    helpers.crew.end()


def call_of(**extras) -> Call:
    x = torch.zeros(1, 16, 2, 16, dtype=torch.bfloat16)
    return Call(q=x, k=x, v=x, mask=Causal(), scale=1.0, **{"grad": True} | extras)


@pytest.mark.parametrize("case", [case for case in CASES if case.head_dim % 8 == 0], ids=lambda case: case.id)
def test_what_a_call_launches_is_compiled_ahead(case, launched):  # noqa: F811
    """All of it but what a bias's gradient takes, in the order in which it is needed."""
    call, (d_o, d_lse) = make(replace(case, lse_grad=False), 0, "cpu", grad=True), upstream(replace(case, lse_grad=False), 0, "cpu")
    bound = Triton().bind(call)
    bound.backward(call.q, call.k, call.v, *bound.forward(call.q, call.k, call.v, call.extras, True), d_o, d_lse, call.extras, False)
    assert list(dict.fromkeys(launched)) == list(dict.fromkeys(helpers.ahead(bound, call)))


def test_each_kind_of_call_is_begun_once(begun):
    """The first kernel is this process's own, but for what launches it; two helpers share the others, in the order in which they are needed."""
    call = call_of()
    bound = Bound(call, target=TARGET, begin=lambda bound: helpers.begin_call(bound, call))
    helpers.begin_call(bound, call)
    first, *others = dict.fromkeys(helpers.ahead(bound, call))
    jobs = [[(kernel, TARGET, True) for kernel in others[turn::2]] for turn in (0, 1)]
    assert begun == [[(first, TARGET, False), *jobs[0]], jobs[1]]
    helpers.begin_call(bound, call_of(grad=False))
    assert len(begun) == 2
    assert [pickle.loads(pickle.dumps(each)) for job in begun for each in job] == [each for job in begun for each in job]


@pytest.mark.parametrize(("name", "value"), [("TILEWISE_HELPERS", "0"), ("TRITON_INTERPRET", "1")])
def test_where_there_are_none(name, value, begun, monkeypatch):
    assert not helpers.why_not()
    monkeypatch.setenv(name, value)
    call = call_of()
    helpers.begin_call(Bound(call, target=TARGET), call)
    assert helpers.why_not() and not begun


def test_a_single_core_has_none(begun, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    call = call_of()
    helpers.begin_call(Bound(call, target=TARGET), call)
    assert "single core" in helpers.why_not() and not begun


def test_a_helper_compiles_what_this_process_then_loads(begun, monkeypatch, tmp_path):
    """Without torch; a job that fails costs nothing."""
    kernel = Bound(call_of(), target=TARGET).preparing(False)
    broken = replace(kernel, constants=tuple((name, "no width" if name == "V_WIDTH" else value) for name, value in kernel.constants))
    other = Bound(call_of(), target=TARGET).preparing(True)
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not launch.on_disk(kernel, TARGET)
    helpers.crew.give([(broken, TARGET, True), (other, TARGET, False), (kernel, TARGET, True)])
    (helper,) = helpers.crew.working
    end = time.monotonic() + WAIT_S
    while not helper.idle():
        assert helper.process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    assert "libtorch" not in Path(f"/proc/{helper.process.pid}/maps").read_text()
    helpers.crew.end()
    assert launch.on_disk(kernel, TARGET) and not launch.on_disk(broken, TARGET) and not launch.on_disk(other, TARGET)
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda cache_hit, **_: hits.append(cache_hit))
    assert launch.compiled(kernel, TARGET).asm["ptx"] and hits == [True]
    assert not list(tmp_path.glob("*.lock")) and not list(tmp_path.glob(".*.lock"))


def test_one_process_compiles_and_the_others_wait(begun, monkeypatch):
    """The lock is for what is not on disk."""
    kernel, order = Bound(call_of(), target=TARGET).preparing(False), []

    @contextmanager
    def held(place, *_):
        order.append(place)
        yield True

    monkeypatch.setattr(launch.lock, "held", held)
    monkeypatch.setattr(launch, "build", lambda *_: order.append("built"))
    for there in (False, True):
        monkeypatch.setattr(launch, "on_disk", lambda *_, there=there: there)
        launch.compiled.__wrapped__(kernel, TARGET)
    assert order == [launch.lock_of(kernel, TARGET), "built", "built"]
    assert launch.lock_of(kernel, TARGET) != launch.lock_of(kernel, Target("sm_90"))


def test_without_a_folder_nobody_waits(monkeypatch, tmp_path):
    kernel = Bound(call_of(), target=TARGET).preparing(False)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(launch, "build", lambda *_: "built")
    assert not launch.on_disk(kernel, TARGET)
    assert launch.compiled.__wrapped__(kernel, TARGET) == "built"
    helpers.compile_one(kernel, TARGET, True)


def test_decode_has_the_kernel_that_merges_made(begun):
    x = torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16)
    cache = torch.zeros(1, 2048, 2, 16, dtype=torch.bfloat16)
    names = "page_table", "cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "split"
    found = {"q": x, "k_cache": cache, "v_cache": cache, "seqlens": torch.tensor([9], dtype=torch.int32), **dict.fromkeys(names)}
    call = DecodeCall(**found, shared_prefix=0, max_seqlen_q=1, mask=Causal(), scale=1.0)
    warmup.of_decode(warmup.Cell(16, 16, x.dtype, "band"), TARGET)  # which compiles in processes of its own
    assert not begun
    for _ in range(2):
        decoder = prefix.bind(call)
    of_decode, of_merge = decoder.kernel(True), merging.kernel(16, x.dtype, True)
    assert begun == [[(of_decode, decoder.target, False), (of_merge, decoder.target, True)]]
