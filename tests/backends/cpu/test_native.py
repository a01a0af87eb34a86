"""Finding the kernel, saying why it is missing, and choosing its instruction set."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from tilewise.backends.cpu import Cpu, abi, native
from tilewise.masks import Full
from tilewise.problem import Call, Problem

PROBLEM = Problem(device="cpu", dtype=torch.float32, head_dim=64, head_dim_v=64, group=1, mask="full")


def _why_not(**environment: str) -> str:
    script = """
import torch
from tilewise.backends.cpu import Cpu
from tilewise.problem import Problem
problem = Problem(device="cpu", dtype=torch.float32, head_dim=64, head_dim_v=64, group=1, mask="full")
print(Cpu().why_not(problem) or Cpu().describe())
"""
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_here():
    assert Cpu().why_not(PROBLEM) == []
    assert Cpu().describe().split()[0] in abi.ISAS[1:]


def test_what_it_cannot_run():
    others = {"device": "cuda"}, {"dtype": torch.float64}
    sentences = [Cpu().why_not(Problem(**{**PROBLEM.__dict__, **other})) for other in others]
    assert sentences[0] == ["it computes on the CPU, the tensors are on cuda"]
    assert sentences[1] == ["it computes fp32, bf16 and fp16, not torch.float64"]


def test_a_missing_library_is_a_reason(tmp_path):
    assert "none.so cannot be read (No such file or directory)" in _why_not(TILEWISE_CPU_LIBRARY=str(tmp_path / "none.so"))


def test_a_library_of_other_sources_is_a_reason(tmp_path):
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("void tw_info(int *info) { for (int i = 0; i < 8; i++) info[i] = 99; }")
    if subprocess.run(["cc", "-shared", "-fPIC", "-o", other, source]).returncode:
        pytest.skip("no C compiler")
    assert "was built from other sources" in _why_not(TILEWISE_CPU_LIBRARY=str(other))


def test_an_editable_installs_library_is_not_older_than_a_source(tmp_path, monkeypatch):
    library, package = tmp_path / abi.NAME, sys.modules["tilewise.backends.cpu"]
    library.touch()
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    assert native._installed() == library
    os.utime(library, (0, 0))
    assert native._installed().startswith(f"{library} is older than ")


def test_the_environment_chooses_the_instruction_set():
    assert _why_not(TILEWISE_CPU_ISA="generic").startswith("generic")
    assert "TILEWISE_CPU_ISA=mmx is not available here" in _why_not(TILEWISE_CPU_ISA="mmx")


def test_the_argument_chooses_the_instruction_set():
    assert all(Cpu(isa).describe().startswith(isa) for isa in native.library().isas)
    with pytest.raises(ValueError, match="isa must be one of"):
        Cpu("mmx")


def test_the_kernel_refuses_another_version_and_an_instruction_set_it_lacks():
    functions = native.library().functions
    assert functions.tw_forward(ctypes.byref(abi.Args(abi.ABI_VERSION + 1))) == abi.BAD_ABI
    assert functions.tw_forward(ctypes.byref(abi.Args(abi.ABI_VERSION, 17))) == abi.BAD_ISA
    with pytest.raises(RuntimeError, match="no such instruction set"):
        native.run(functions.tw_forward, abi.Args(abi.ABI_VERSION, 17))


def test_instruction_sets_agree():
    q, k, v = (torch.randn(1, 130, 2, 48) for _ in range(3))
    call = Call(q=q, k=k, v=v, mask=Full(), scale=0.1)
    results = [Cpu(isa).forward(call)[0] for isa in native.library().isas]
    assert all(torch.allclose(results[0], result, atol=2e-6) for result in results)
