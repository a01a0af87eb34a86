"""A rung without a GPU: its name, and what it says to tensors and machines that it cannot serve."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise.cli import ladder as command
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.ladder import ALIASES, BACKWARD_RUNGS, RUNGS, VARIANTS
from tilewise.ladder.rung import Rung
from tilewise.sm90 import jit

EVERY = {**RUNGS, **VARIANTS}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def heads(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


def test_names():
    assert list(RUNGS) == ["k1", "k2", "k3_1", "k3_2", "k3_3", "k4_1", "k4_2", "k5_1", "k5", "k6_1", "k6", "k7", "k8"]
    assert all(name == rung.name and rung.title for name, rung in EVERY.items())
    assert all(name.partition(":")[0] in RUNGS for name in VARIANTS)
    assert set(ALIASES.values()) <= set(EVERY) and not ALIASES.keys() & EVERY.keys()
    assert [ALIASES[name] for name in ("k3", "k4_qk", "k4", "k6:turns")] == ["k3_3", "k4_1", "k4_2", "k6_1"]


def test_the_registry_needs_no_dsl():
    """Names and titles are there without NVIDIA's package; a rung's module is imported when it is used."""
    code = "import sys; import tilewise.ladder, tilewise.bench; tilewise.bench.known(); sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "given, error, message",
    [
        ((heads(64, 64),) * 3, ShapeError, "q must be (batch * heads, seqlen, head_dim), got (64, 64)"),
        ((heads(2, 64, 64), heads(2, 32, 64), heads(2, 64, 64)), ShapeError, "k must be as q, (2, 64, 64) torch.bfloat16 on cpu; got (2, 32, 64)"),
        ((heads(2, 64, 64), heads(2, 64, 64), heads(2, 64, 64).float()), ShapeError, "v must be as q"),
        ((heads(2, 64, 64).float(),) * 3, UnsupportedError, "it takes bfloat16 only, and the tensors are torch.float32"),
        ((heads(2, 64, 72),) * 3, UnsupportedError, "it takes head_dim 64 and 128, and this is 72"),
        ((heads(2, 64, 64),) * 3, UnsupportedError, "it runs on a Hopper GPU, and the tensors are on cpu: move them to 'cuda'"),
    ],
)  # fmt: skip
def test_bad_tensors(given, error, message):
    for rung in EVERY.values():
        with pytest.raises(error) as raised:
            rung(*given)
        assert message in str(raised.value)


@pytest.mark.parametrize("missing, name", [("cutlass", "NVIDIA's CuTe DSL"), ("tvm_ffi", "apache-tvm-ffi")])
def test_without_the_dsl(monkeypatch, missing, name):
    monkeypatch.setattr(jit, "find_spec", lambda module: None if module == missing else object())
    sentence = f"{name} is not installed: pip install 'tilewise[hopper]'"
    assert jit.why_not_here() == [sentence]
    assert RUNGS["k5"].reasons(torch.bfloat16, 64, "cuda") == [sentence]
    with pytest.raises(UnsupportedError, match=f"k5 cannot be compiled: {name} is not installed"):
        Rung("k5", "k5_warp_specialised", "").compiled(64, False)


def test_without_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(jit, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert jit.why_not_here() == ["torch sees no GPU here: run it on a machine with an H100 or H200"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert jit.why_not_here() == ["it needs a Hopper GPU (compute capability 9.0), and this is 8.0"]
    assert jit.why_not_here((9, 0)) == [] and "this is 12.0" in jit.why_not_here((12, 0))[0]  # another one than the current


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_an_amd_gpu_is_none_whatever_its_capability(capability, monkeypatch):
    monkeypatch.setattr(jit, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))  # as a gfx90a says
    assert jit.why_not_here(capability) == ["it needs a Hopper GPU of NVIDIA's, and this torch is built for AMD's (ROCm)"]


@NO_GPU
def test_the_command_lists_the_rungs_and_says_what_is_needed(capsys):
    assert command.main([], {}) == 2
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == [*EVERY, *BACKWARD_RUNGS]
    assert err.startswith("The ladder cannot run here: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        (["k9"], {}, "impl is 'k9'; it must be among"),
        (["k6..k1"], {}, "a range goes up the ladder"),
        ([], {"CAUSAL": "yes"}, "causal is 'yes'; each item of its comma-separated list must be 0 or 1"),
        ([], {"SEQLEN": "0"}, "seqlen is '0'"),
        ([], {"DEVICE": "h100"}, "DEVICE is 'h100'; it must be a device as torch names it, such as cuda or cuda:1"),
        ([], {"DEVICE": "cpu"}, "DEVICE is 'cpu'; the rungs run on a Hopper GPU: cuda, or cuda:N for the N-th"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(arguments, environment, message, capsys):
    assert command.main(arguments, environment) == 2
    assert message in capsys.readouterr().err


def test_the_command_runs_the_cells_of_the_environment(monkeypatch, capsys):
    asked = {}

    def run(cells, contenders, **options):
        asked.update(cells=cells, names=[each.name for each in contenders], **options)
        return []

    monkeypatch.setattr(command, "why_not_here", lambda: [])
    monkeypatch.setattr(command.bench, "run", run)
    environment = {"CHECK": "1", "SEQLEN": "512", "HEADDIM": "64", "CAUSAL": "0"}
    assert command.main(["k4_qk", "k4", "k6:turns"], environment) == 0
    assert asked["names"] == ["k4_1", "k4_2", "k6_1"]
    assert command.main(["k1..k8"], environment) == 0 and asked["names"] == list(RUNGS)
    assert command.main(["k1..k3_1", "sdpa:cudnn"], environment) == 0
    (cell,) = asked["cells"]
    assert asked["names"] == ["k1", "k2", "k3_1", "sdpa:cudnn"] and asked["device"] == "cuda" and cell.direction == "fwd"
    assert (cell.batch, cell.seqlen_q, cell.heads_q, cell.head_dim, cell.dtype) == (32, 512, 32, 64, torch.bfloat16)
    assert command.main([], {}) == 0
    assert len(asked["cells"]) == 24 and asked["names"] == list(RUNGS)
    assert command.main(["k5"], {"DEVICE": "cuda:1"}) == 0 and asked["device"] == "cuda:1"
    last = list(BACKWARD_RUNGS)[-1]
    assert command.main([f"b1..{last}", "fa4"], {}) == 0 and asked["names"] == [*BACKWARD_RUNGS, "fa4"]
    assert {cell.direction for cell in asked["cells"]} == {"bwd"}
    assert "Against the fp64 oracle" in capsys.readouterr().out


def test_the_command_prints_what_was_measured_without_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "RESULTS", Path(__file__).parents[2] / "benchmarks/results")
    assert command.main(["--measured", "k4", "k6:turns"], {"SEQLEN": "512,8192", "HEADDIM": "64", "CAUSAL": "0"}) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "k4_2" in line or "k6_1" in line]
    assert (
        [len(line[-2:]) for line in lines] == [2, 2]
        and lines[0][:3] == ["64", "full", "k4_2"]
        and float(lines[1][-1]) > float(lines[0][-1]) > 1
    )
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert command.main(["--measured", "k5"], {}) == 2 and "run this in a checkout" in capsys.readouterr().err


def test_a_score_matrix_that_does_not_fit(monkeypatch):
    """K1 says so before it asks for the memory."""
    for name, number in (("memory_reserved", 3 << 30), ("memory_allocated", 1 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    q = SimpleNamespace(shape=(16, 16384, 64), device="cuda")
    with pytest.raises(UnsupportedError, match=r"\(16, 16384, 16384\) in fp32: 17\.2 GB, and 3\.2 GB are free"):
        RUNGS["k1"]._scores(q)


def test_rows_are_laid_out_as_the_kernels_need_them():
    whole = torch.randn(4, 10, 72).bfloat16()
    assert jit.aligned(whole) is whole and jit.aligned(whole[:, 2:, :64]).data_ptr() == whole[:, 2:].data_ptr()
    for x in (
        whole[..., 1:65],
        torch.randn(4, 10, 128).bfloat16()[..., ::2],
        whole.flatten()[1 : 1 + 4 * 8 * 64].view(4, 8, 64),
        torch.randn(4, 10, 68).bfloat16()[..., :64],
    ):
        copy = jit.aligned(x)
        assert torch.equal(copy, x) and copy.data_ptr() % 16 == 0 and not any(step % 8 for step in copy.stride()[:-1])


@pytest.mark.skipif(bool(jit.why_no_compiler()), reason="; ".join(jit.why_no_compiler()))
@pytest.mark.parametrize("cached", ["0", "1"], ids=["compiled", "from disk"])
@pytest.mark.parametrize("name", ["k2", "k5", "k7"])
def test_what_a_kernel_is_given(name, cached, monkeypatch, tmp_path):
    """The function takes everything but tensors on a CPU, be it the DSL's or one from disk, which fills in no argument."""
    monkeypatch.setenv("TILEWISE_CACHE", cached)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    q = heads(2, 100, 64)
    jit._compiled.cache_clear()
    try:
        with pytest.raises(ValueError, match="Mismatched Tensor on argument #0.*device_type=cuda"):
            RUNGS[name].run(q, q, q, causal=False, scale=1.0)
    finally:
        jit._compiled.cache_clear()
