"""Processes that compile ahead: started where they may be, of no harm where they fail, and gone with their parent."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends import hopper
from tilewise.backends.hopper import warmup
from tilewise.backends.hopper.backward import call as backward
from tilewise.backends.hopper.backward.repair import call as repairs
from tilewise.machine import helpers as programs
from tilewise.machine import lock
from tilewise.masks import Causal, Documents, Full, PrefixLM
from tilewise.problem import Call, Dropout
from tilewise.sm90 import cache, helpers, jit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="helpers are for Linux, as the kernels are")
WAIT_S = 300.0


@pytest.fixture
def on(kept, monkeypatch):
    """Helpers allowed, and an empty cache."""
    monkeypatch.setenv("TILEWISE_HELPERS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(helpers, "_seen", set())
    yield kept
    helpers.crew.end()


@pytest.fixture
def given(on, monkeypatch) -> list:
    """What helpers would be given, in place of processes."""
    jobs = []
    monkeypatch.setattr(helpers.crew, "give", jobs.append)
    return jobs


def small_kernel(small, dtype=torch.bfloat16) -> jit.Kernel:
    return small._replace(config=replace(small.config, dtype=dtype))


def test_each_kernel_is_asked_for_once(given, small):
    helpers.begin([small], [small_kernel(small, torch.float16)])
    helpers.begin([small])
    assert [[kernel for kernel, _ in job] for job in given] == [[small], [small_kernel(small, torch.float16)]]
    assert given[0][0][1] == cache.entry(small[0], small[2], jit.arch())


def test_what_is_on_disk_is_not_compiled(given, small, exported):
    assert cache.store(cache.entry(small[0], small[2], jit.arch()), exported)
    helpers.begin([small])
    assert not given


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda patch: patch.setenv("TILEWISE_HELPERS", "off"), "TILEWISE_HELPERS is 'off'"),
        (lambda patch: patch.setattr(os, "sched_getaffinity", lambda _: {0}), "a single core"),
        (lambda patch: patch.setattr(sys, "frozen", True, raising=False), "no Python can be started"),
        (lambda patch: patch.setattr(sys, "executable", "/usr/bin/blender"), "no Python can be started"),
        (lambda patch: patch.setattr(sys, "executable", None), "no Python can be started"),
        (lambda patch: patch.setenv("TILEWISE_CACHE", "0"), "the cache is off"),
        (lambda patch: patch.setattr(jit, "why_no_compiler", lambda: ["cutlass is not installed"]), "cutlass is not installed"),
    ],
)
def test_where_there_are_none(change, why, given, small, monkeypatch):
    assert not helpers.why_not()
    change(monkeypatch)
    helpers.begin([small])
    assert why in helpers.why_not() and not given


def test_a_folder_that_cannot_be_written_to(given, small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "file"))
    helpers.begin([small])
    assert "cannot be written to" in helpers.why_not() and not given


def test_a_kernel_that_cannot_be_sent_is_left_out(on, small):
    helpers.begin([small._replace(arguments=lambda config: [])])
    assert not helpers.crew.working


def test_no_process_can_be_started(on, small, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    helpers.begin([small])
    assert not helpers.crew.working


def test_no_more_than_there_are_cores_for(on, small, monkeypatch):
    monkeypatch.setattr(programs, "PROGRAM", "import sys; sys.stdin.read()")
    helpers.begin([small], [small_kernel(small, torch.float16)])
    (one,) = helpers.crew.working
    assert not one.idle()
    helpers.crew.end()
    assert one.process.returncode == -signal.SIGKILL and not helpers.crew.working


def test_one_that_has_ended_is_replaced(on, small, monkeypatch):
    monkeypatch.setattr(programs, "PROGRAM", "")
    helpers.begin([small])
    (first,) = helpers.crew.working
    first.process.wait()
    helpers.begin([small_kernel(small, torch.float16)])
    assert len(helpers.crew.working) == 1 and helpers.crew.working[0] is not first


SERVE = """
import json, os, sys
from pathlib import Path
from tilewise.machine import helpers as programs
from tilewise.sm90 import cache, helpers, jit
path = Path(sys.argv[1])

class Exported:
    def export_to_c(self, path_of, name):
        Path(path_of).write_bytes(path.read_bytes())

def build(launch, arguments, config, *, runs):
    print("what a compiler says")
    if "float16" in str(config.dtype) and "bfloat16" not in str(config.dtype):
        raise RuntimeError("out of registers")
    return Exported()

jit.build = build
programs.IDLE_S = float(sys.argv[2])
programs.serve(int(sys.argv[3]), helpers.compile_one)
"""


def served(exported, idle_s: float = WAIT_S, parent: int | None = None) -> subprocess.Popen:
    """A helper whose compiler takes no time."""
    command = [sys.executable, "-c", SERVE, str(exported.path), str(idle_s), str(os.getpid() if parent is None else parent)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_what_a_helper_does(on, small, exported):
    """One kernel fails, one is another process's, one is of other sources, one is compiled; then there is no more, and it ends."""
    kernels = [
        small_kernel(small, torch.float16),
        small,
        *(small._replace(config=replace(small.config, kv_stages=stages)) for stages in (9, 8)),
    ]
    entries = [cache.entry(*kernel.identity, jit.arch()) for kernel in kernels]
    entries[2] = entries[2].with_stem("other")
    with lock.held(entries[1], 0.0), served(exported) as helper:
        for job in (list(zip(kernels[:3], entries[:3], strict=True)), [(kernels[3], entries[3])]):
            helper.stdin.write(pickle.dumps(job))
            helper.stdin.flush()
            assert helper.stdout.read(1) == b"."
        helper.stdin.close()
        assert helper.wait(WAIT_S) == 0 and helper.stdout.read() == b""
    assert cache.entries() == [entries[3]] and cache.load(entries[3])


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("how", ["idle", "of another parent"])
def test_a_helper_ends_by_itself(how, on, exported):
    with served(exported, 0.0 if how == "idle" else WAIT_S, 1 if how == "of another parent" else None) as helper:
        assert helper.wait(WAIT_S) == 0


PARENT = """
import pickle, sys
from tilewise.machine import helpers as programs
from tilewise.sm90 import helpers
programs.PROGRAM = programs.PROGRAM.replace("module.compile_one", "lambda *_: __import__('time').sleep(999)")
helpers.crew.give([("kernel", "entry")])
(one,) = helpers.crew.working
print(one.process.pid, flush=True)
if sys.argv[1] == "killed":
    sys.stdin.readline()
"""


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("how", ["killed", "over"])
def test_helpers_end_with_their_parent(how, on):
    """At work, too."""
    with subprocess.Popen([sys.executable, "-c", PARENT, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        if how == "killed":
            time.sleep(0.5)  # so that the helper has begun; before that it sees who its parent is
            parent.kill()
        parent.wait(WAIT_S)
    end = time.monotonic() + WAIT_S
    while state_of(pid) != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


def state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_forked_child_has_no_helpers(on, small, monkeypatch):
    monkeypatch.setattr(programs, "PROGRAM", "import sys; sys.stdin.read()")
    helpers.begin([small])
    child = os.fork()
    if child == 0:
        os._exit(len(helpers.crew.working))
    assert os.waitpid(child, 0)[1] == 0 and helpers.crew.working[0].process.poll() is None


def call_of(mask, **extras) -> Call:
    return replace(warmup._call(warmup.Cell(64, 64, torch.bfloat16, mask, (), True), 512, 512), **extras)


def test_what_is_compiled_ahead():
    """Of what gradients may launch, what this call's will: a bias's only where it is wanted, and only one of its kernels."""
    for mask in (Causal(), Documents([0, 100, 512], inner=Causal())):
        call = call_of(mask)
        group, repair = backward.ahead(call)
        assert group[0][0] == backward.LAUNCH and repair[0][0] == repairs.LAUNCH
        assert sorted(map(str, (*group, *repair))) == sorted(map(str, backward.kernels(call)))
    assert len(backward.ahead(call_of(Full()))) == 1  # nothing is hidden
    assert backward.ahead(replace(call, k=call.k[:, :0], v=call.v[:, :0])) == []


def test_a_bias_is_compiled_ahead_where_its_gradient_is_wanted(monkeypatch):
    monkeypatch.setattr(backward.planning, "gpu_of", lambda device: backward.planning.Gpu(132, 0))
    bias = torch.zeros(1, 1, 512, 512, dtype=torch.bfloat16, device="meta")
    assert len(backward.ahead(call_of(Full(), bias=bias))) == 2
    call = call_of(Full(), bias=bias.requires_grad_())
    *_, (kernel,) = backward.ahead(call)
    assert kernel in backward.kernels(call)


def test_a_forward_with_gradients_begins_its_backward(monkeypatch):
    begun = []
    monkeypatch.setattr(hopper.helpers, "begin", lambda *groups: begun.extend(groups))
    monkeypatch.setattr(hopper.forward, "bind", lambda *_: SimpleNamespace(results=lambda call: (len(begun),)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    call = call_of(Causal())
    assert hopper.Hopper().forward(replace(call, grad=False)) == (0,)
    assert hopper.Hopper().forward(call) == (2,) and begun == backward.ahead(call)


ALIKE = """
import pickle, sys
from importlib import import_module
exec(open(sys.argv[1]).read())
install("cutlass.cute,tvm_ffi", "tilewise.sm90.helpers")
from tilewise.sm90 import cache, jit
for launch, arguments, config in pickle.load(sys.stdin.buffer):
    module, _, function = launch.partition(":")
    assert hasattr(import_module(module), function) and arguments(config)
    print(cache.entry(launch, config, jit.arch()))
import torch
assert torch.Tensor is Tensor
"""


def test_a_helper_does_without_torch(on, monkeypatch):
    """All kinds of kernels that are compiled ahead are the same kernels to it."""
    monkeypatch.setattr(backward.planning, "gpu_of", lambda device: backward.planning.Gpu(132, 0))
    bias = torch.zeros(1, 1, 512, 512, dtype=torch.bfloat16, device="meta").requires_grad_()
    sink = torch.zeros(call_of(Full()).heads_q, dtype=torch.bfloat16, device="meta")
    calls = (
        call_of(Documents([0, 100, 512], inner=Causal()), sink=sink),
        call_of(Full(), bias=bias),
        call_of(PrefixLM(3), dropout=Dropout(0.5, 0, 0)),
    )
    kernels = [kernel for call in calls for group in backward.ahead(call) for kernel in group]
    assert len({launch for launch, *_ in kernels}) == 5
    command = [sys.executable, "-c", ALIKE, str(programs.STANDIN)]
    found = subprocess.run(command, input=pickle.dumps(kernels), capture_output=True, check=True, timeout=WAIT_S)
    assert found.stdout.decode().split() == [str(cache.entry(launch, config, jit.arch())) for launch, _, config in kernels]


WITH_TORCH = """
import sys
exec(open(sys.argv[1]).read())
Module.__getattr__ = None  # a module of ours asks for more than there is
helpers = install("cutlass.cute,tvm_ffi", "tilewise.sm90.helpers")
import torch
print(torch.ones(2, dtype=torch.int32).sum().item(), helpers.compile_one.__name__)
"""


def test_where_there_must_be_torch_it_has_torch():
    found = subprocess.run(
        [sys.executable, "-c", WITH_TORCH, str(programs.STANDIN)], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert found.stdout == "2 compile_one\n"


TOGETHER = """
import json, os, sys
import torch
from tilewise.backends.hopper import warmup
from tilewise.backends.hopper.backward import call as backward
from tilewise.masks import Documents
from tilewise.sm90 import helpers, jit
os.sched_getaffinity = lambda _: {0, 1}
call = warmup._call(warmup.Cell(64, 64, torch.bfloat16, Documents([0, 100]), (), True), 100, 100)
kernel = backward.kernels(call)[0]  # the smallest
helpers.begin([kernel])
(helper,) = helpers.crew.working
entry = helpers.cache.entry(*kernel.identity, jit.arch())
while not entry.exists() and helper.process.poll() is None and not helper.idle():
    pass
jit.build = None
kind = type(jit.compiled(*kernel)).__module__
with open(f"/proc/{helper.process.pid}/maps") as maps:
    loads_torch = "libtorch" in maps.read()
print(json.dumps({"kind": kind, "dsl": "cutlass" in sys.modules, "cuda": torch.cuda.is_initialized(), "loads_torch": loads_torch}))
"""


def test_a_helper_compiles_what_this_process_then_loads(on):
    environment = os.environ | {"TILEWISE_HELPERS": "1"}
    found = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=True, env=environment, timeout=WAIT_S)
    said = json.loads(found.stdout)
    assert said["kind"].startswith("tvm_ffi") and not said["dsl"] and not said["cuda"] and not said["loads_torch"]
