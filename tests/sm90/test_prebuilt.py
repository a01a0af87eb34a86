"""Kernels from a wheel: made without a GPU, used by a process that has no DSL, and by none whose versions do not fit."""

import csv
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise import __version__
from tilewise.backends.hopper import Hopper, warmup
from tilewise.cli import doctor
from tilewise.errors import UnsupportedError
from tilewise.problem import Problem
from tilewise.sm90 import cache, identity, jit, prebuilt

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(device="cuda", dtype=torch.bfloat16, head_dim=64, head_dim_v=64, group=1, mask="full")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")


@pytest.fixture(scope="session")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        found = importlib.import_module("kernels_wheel")
    found.BUILD = ROOT / ".pytest_cache/prebuilt"
    return found


@pytest.fixture(scope="session")
def wheel(tool, exported, small, tmp_path_factory) -> Path:
    """Of the kernels that the problem may need, all with the code of `small`, the only one that runs."""
    kernels = warmup.of_problem(PROBLEM)
    assert small in kernels and set(kernels) <= set(tool.kernels([PROBLEM]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "build", lambda *_, **__: exported)
        return tool.write(tmp_path_factory.mktemp("dist"), {kernel: tool.entry(kernel) for kernel in kernels})


def test_what_the_wheel_holds(tool):
    """Each kernel once: of the passes, of decoding with its kinds, and of attention in 8 bits, where that is asked for at all."""
    wanted, latent = list(tool.problems("64,128", "bf16")), list(tool.problems(tool.LATENT, "bf16", "full", grad=False))
    found = tool.table(wanted, latent)
    names = [warmup.describe(kernel)[0] for kernel in found]
    assert len(found) == len(set(found)) and {"forward", "backward", "decode", "latent", "append", "quantiser", "eight_bits"} <= set(names)
    assert names.count("quantiser") == len(tool.PRECISIONS) * 2 and set(warmup.of_problem(PROBLEM)) <= set(found)
    assert {each.head_dim for each in (kernel.config for kernel in found) if hasattr(each, "head_dim")} == {64, 128, 576}
    assert "eight_bits" not in {warmup.describe(kernel)[0] for kernel in tool.table(list(tool.problems("96", "bf16", "band")))}


def forget() -> None:
    for each in (prebuilt.folder, prebuilt.why_not, jit._compiled):
        each.cache_clear()


@pytest.fixture
def site(wheel, kept, tmp_path, monkeypatch) -> Path:
    """Where the wheel is installed; the cache is empty, and this process believes that it has no GPU."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(identity, "driver", lambda: None)
    forget()
    yield tmp_path / "site"
    forget()


@pytest.fixture
def without_compiler(monkeypatch):
    def find_spec(name):
        return None if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl") else importlib.util.find_spec(name)

    for module in (jit, cache):
        monkeypatch.setattr(module, "find_spec", find_spec)
    monkeypatch.setattr(jit, "build", None)
    cache.library.cache_clear()
    yield
    cache.library.cache_clear()


def change(site, **facts) -> None:
    path = site / prebuilt.PACKAGE / prebuilt.FACTS
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    forget()


def said_by(function) -> str:
    with pytest.raises(TypeError) as error:
        function()
    return str(error.value)


def test_a_kernel_comes_from_the_package(site, small, without_compiler):
    path = cache.entry(small[0], small[2], jit.arch())
    assert path.parent == site / prebuilt.PACKAGE and prebuilt.describe().startswith(
        f"{path.parent}: {len(warmup.of_problem(PROBLEM))} kernels, "
    )
    before = {each: (each.stat().st_mtime_ns, each.read_bytes()) for each in path.parent.iterdir()}
    assert "launch(tensors" in said_by(jit.compiled(*small))
    assert before == {each: (each.stat().st_mtime_ns, each.read_bytes()) for each in path.parent.iterdir()} and not cache.entries()


WITHOUT_THE_DSL = """
import sys, tempfile
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl", "cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import importlib.util
whole = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("cutlass", "nvidia_cutlass_dsl") else whole(name, package)
sys.path[:0] = sys.argv[2:]

import torch
from emulator.prebuilt import EmulatedPrebuilt, driver
from tilewise.backends.hopper import Hopper
from tilewise.masks import Full
from tilewise.problem import Problem
from tilewise.sm90 import cache, jit, prebuilt
from tilewise.testing import conformance
from tilewise.testing.cases import Case

stand_in = driver(Path(tempfile.mkdtemp()))
assert cache.driver() == 13 and jit.why_no_compiler()
torch.cuda.is_available = lambda: True
problem = Problem(device="cuda", dtype=torch.bfloat16, head_dim=64, head_dim_v=64, group=1, mask="full", capability=(9, 0))
assert Hopper().why_not(problem) == [], Hopper().why_not(problem)
number = lambda name: __import__("ctypes").c_int.in_dll(stand_in, name)
backend = EmulatedPrebuilt(stand_in, Path(sys.argv[1]).read_text())
case = Case(batch=1, seqlen_q=330, seqlen_k=120, heads_q=2, heads_k=1, head_dim=64, dtype="bf16", mask=Full())

number("failure").value = 209
try:
    conformance.run_forward(backend, case)
except RuntimeError as error:
    assert str(error) == "a prebuilt kernel cannot be loaded: CUDA error 209 (CUDA_ERROR_NO_BINARY_FOR_GPU)", error
number("failure").value, before = 0, number("loads").value
for seed in range(2):
    print("error over tolerance", conformance.run_forward(backend, case, seed))
limits = (__import__("ctypes").c_int * 16).in_dll(stand_in, "limits")
assert number("loads").value == before + 1 and number("contexts").value == 1 and limits[8] == 227 << 10 and limits[14] == 1
assert {each.parent for each in backend.used} == {prebuilt.folder()} and "cutlass" not in sys.modules
print("done")
"""


@pytest.mark.skipif(shutil.which("cc") is None or torch.cuda.is_available(), reason="it needs a C compiler, and no driver beside its own")
def test_a_process_without_the_dsl_computes(site, exported, tmp_path):
    """By the entry's own launch function: with the tensors' strides and the driver's functions, and the kernel's PTX carried out."""
    (tmp_path / "kernel.ptx").write_text(exported.ptx)
    paths = [site, ROOT / "src", ROOT / "tests/emulated", ROOT / "tests/shared"]
    command = [sys.executable, "-c", WITHOUT_THE_DSL, tmp_path / "kernel.ptx", *paths]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and found.stdout.endswith("done\n"), found.stderr[-3000:]


DIFFERENCES = {
    "other code": ({"code": "0" * 64}, "it was made from other device code than this tilewise has: install the two of one version"),
    "newer tvm-ffi": ({"tvm_ffi": "0.1.99"}, r"it needs apache-tvm-ffi 0\.1 from 0\.1\.99 on, and this is 0\.1\."),
    "another series": ({"tvm_ffi": "0.0.9"}, r"it needs apache-tvm-ffi 0\.0 from 0\.0\.9 on"),
    "newer toolkit": ({"toolkit": 14}, "it needs a driver for CUDA 14, and this machine's is for CUDA 13"),
    "damaged": ({"code": None, "toolkit": None}, "facts.json is missing or damaged"),
}


@pytest.mark.parametrize(("facts", "sentence"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_does_not_fit_is_compiled_instead(facts, sentence, site, small, exported, monkeypatch):
    builds = []
    monkeypatch.setattr(jit, "build", lambda *given, **_: builds.append(given) or exported)
    monkeypatch.setattr(identity, "driver", lambda: 13)
    if None in facts.values():
        (site / prebuilt.PACKAGE / prebuilt.FACTS).write_text("{")
        forget()
    else:
        change(site, **facts)
    assert re.search(sentence, prebuilt.why_not()) and prebuilt.why_not().startswith("tilewise-kernels-sm90")
    assert doctor.machine()["prebuilt kernels"] == prebuilt.why_not()
    jit.compiled(*small)
    assert len(builds) == 1 and len(cache.entries()) == 1


def test_settings_of_the_dsl_and_a_cache_that_is_off_ask_for_a_compiler(site, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    forget()
    assert prebuilt.why_not().endswith("is not used: CUTE_DSL_LINEINFO=1 may change what is compiled")
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    monkeypatch.setenv("TILEWISE_CACHE", "off")
    forget()
    assert prebuilt.why_not().endswith("is not used, because TILEWISE_CACHE is 'off'")


def test_a_driver_before_cuda_12_is_too_old(site, monkeypatch):
    monkeypatch.setattr(identity, "driver", lambda: 11)
    change(site, toolkit=11)
    assert prebuilt.why_not().endswith("it needs a driver for CUDA 12, and this machine's is for CUDA 11")


def test_a_damaged_entry_is_compiled_and_the_package_left_alone(site, small, exported, monkeypatch):
    path = cache.entry(small[0], small[2], jit.arch())
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr(jit, "build", lambda *_, **__: exported)
    assert not cache.store(path, exported)
    jit.compiled(*small)
    assert path.read_bytes()[:-1] == content[:-1] and [each.parent != path.parent for each in cache.entries()] == [True]


def test_without_a_compiler_errors_say_what_lacks(site, small, without_compiler, monkeypatch):
    missing = "NVIDIA's CuTe DSL is not installed: pip install 'tilewise[hopper]'"
    wants = replace(PROBLEM, softcap=True, sink=True)
    (first, second) = Hopper().why_not(wants)
    assert first == missing and re.fullmatch(
        r"tilewise-kernels-sm90 lacks \d kernels? for full masks of head_dim 64/64 in torch.bfloat16 with softcap, sink", second
    )
    assert Hopper().why_not(PROBLEM) == ["torch sees no GPU here: run it on a machine with an H100 or H200"]
    with pytest.raises(
        UnsupportedError,
        match=r"no kernel at hand for hopper.forward.kernel with Config.*tilewise-kernels-sm90 has none, and NVIDIA's CuTe DSL",
    ):
        jit.compiled(small[0], small[1], replace(small[2], softcap=True))
    change(site, code="")
    assert Hopper().why_not(PROBLEM) == [missing, prebuilt.why_not()]
    with pytest.raises(UnsupportedError, match="other device code than this tilewise has.*pip install"):
        jit.compiled(*small)
    monkeypatch.setattr(prebuilt, "find_spec", lambda name: None)
    forget()
    assert Hopper().why_not(PROBLEM) == [missing, "tilewise-kernels-sm90 is not installed"] and prebuilt.describe() == ""


def test_why_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert (
        prebuilt.why_no_gpu() == ["it needs a Hopper GPU (compute capability 9.0), and this is 8.0"] and prebuilt.why_no_gpu((9, 0)) == []
    )
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert prebuilt.why_no_gpu() == ["it needs a Hopper GPU of NVIDIA's, and this torch is built for AMD's (ROCm)"]


def test_the_wheel_says_what_is_in_it_and_under_which_terms(tool, tmp_path):
    if not cache.library():
        pytest.skip("the DSL is not installed, or not for this processor")
    with zipfile.ZipFile(tool.write(tmp_path, {})) as archive:
        about = f"tilewise_kernels_sm90-{__version__}.dist-info"
        named = re.findall(r"^License-File: (.*)$", archive.read(f"{about}/METADATA").decode(), re.MULTILINE)
        held = {name: archive.read(f"{about}/licenses/{name}").decode() for name in named}
    assert set(held) == {"LICENSE", "NOTICE", "LICENSE.zig"}
    assert "Apache License" in held["LICENSE"] and "MIT" in held["LICENSE.zig"]
    assert all(name in held["NOTICE"] for name in ("CuTe DSL", "launch.c", "compiler_rt", "libtvm_ffi", "LICENSE.zig"))


def test_the_wheel(wheel, tool, small):
    assert wheel.name == f"tilewise_kernels_sm90-{__version__}-py3-none-manylinux2014_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names, read = archive.namelist(), archive.read
        about = f"tilewise_kernels_sm90-{__version__}.dist-info"
        record = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(read(f"{about}/RECORD").decode()))}
        assert record.keys() == set(names) and all(info.external_attr >> 16 == 0o644 for info in archive.infolist())
        for name in set(names) - {f"{about}/RECORD"}:
            assert record[name] == (f"sha256={tool._digest(read(name))}", str(len(read(name))))
        said = read(f"{about}/METADATA").decode()
        entry, *others = [read(name) for name in names if name.endswith(".so")]
    assert (
        f"Requires-Dist: tilewise=={__version__}" in said
        and "Requires-Dist: apache-tvm-ffi>=0.1.15" in said
        and f"\n{1 + len(others)} kernels, compiled" in said
    )
    versions = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", entry)}
    assert versions and max(versions) <= (2, 17)
    assert (
        b"libtvm_ffi.so" in entry and b"libcute_dsl_runtime" not in entry and b"_cudaLaunchKernelEx" not in entry
    )  # bound when it was linked


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no disassembler")
def test_code_for_the_host_runs_on_any_x86_64_v2(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".so"))
        archive.extract(name, tmp_path)
    code = subprocess.run(["objdump", "-d", tmp_path / name], capture_output=True, text=True, check=True).stdout
    assert len(code.splitlines()) > 1000 and not re.search(r"%[yz]mm|\tv\w+ +.*%xmm", code)


def test_kernels_of_all_lengths(tool):
    """Whatever the lengths and heads, a call of a problem that the wheel is for needs no other kernel."""
    from tilewise.masks import Causal, Documents, Full, PrefixLM, SlidingWindow
    from tilewise.problem import Call

    def tensors(seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v):
        shapes = (seqlen_q, heads_q, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v)
        return dict(zip("qkv", (torch.empty((1, *shape), dtype=torch.float16, device="meta") for shape in shapes), strict=True))

    lengths = [(1, 1), (1, 700), (40000, 1), (3000, 128), (129, 129), (512, 512), (2049, 300), (5000, 5000), (40000, 40000)]
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        has = {(each.launch, each.config) for each in tool.kernels(tool.problems("/".join(map(str, dims)), "fp16"))}
        for n, m in lengths:
            masks = [Full(), Causal(), SlidingWindow(9, 3), SlidingWindow(4000, 0), PrefixLM(5)]
            masks += [Documents([0, n // 2, n], inner=Causal()), Documents([0, n])] * (n == m)
            for mask in masks:
                for heads in ((1, 1), (16, 2), (256, 1)):
                    call = Call(**tensors(n, m, *heads, *dims), mask=mask, scale=1.0, grad=True)
                    wants = {(launch, config) for launch, _, config in Hopper().kernels(call)}
                    assert wants <= has, (dims, n, m, mask, heads)
    with pytest.raises(UnsupportedError, match="512"):
        warmup.of_problem(replace(PROBLEM, head_dim=512))
