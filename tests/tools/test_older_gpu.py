"""tools/gpu/older_gpu.py: what it assembles for, and which kernels the backend then has."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools/gpu")
    yield importlib.import_module("older_gpu")
    sys.modules.pop("older_gpu", None)


def test_the_assembler_is_asked_for_the_newer_gpu(tool, tmp_path):
    found = tmp_path / "real"
    found.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    found.chmod(0o755)
    made = tool.assembler(tmp_path, str(found), "sm_90")
    said = subprocess.run([made, "-v", "--gpu-name=sm_80", "a file.ptx", "-o", "x"], capture_output=True, text=True, check=True).stdout
    assert said == "-v|--gpu-name=sm_90|a file.ptx|-o|x|"


def test_kernels_are_those_of_the_older_gpu(tool, monkeypatch):
    from tilewise.backends.triton import append, bound, decode, merging, targets, tune
    from tilewise.masks import Causal
    from tilewise.problem import Call

    for module in (targets, append, bound, decode, merging, tune):
        monkeypatch.setattr(module, "of_device", module.of_device)
    tool.take_place("sm_89")
    q = torch.empty(1, 64, 2, 128, dtype=torch.bfloat16)
    forward = bound.Bound(Call(q=q, k=q, v=q, mask=Causal(), scale=1.0))
    assert forward.target == targets.Target("sm_89") == targets.of_device(torch.device("cpu")) == merging.of_device(torch.device("cpu"))
