"""The plugin that runs flash-attention's tests over the drop-ins, on a small file like theirs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn_interface import flash_attn_combine
from helper import VALUE

assert torch.cuda.get_device_capability("cuda") == (9, 0) and VALUE == 3


@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("seqlen_q", [5, 64, 4096])
@pytest.mark.parametrize("d", [8, 16, 24, 32])
def test_one(d, seqlen_q, dropout_p):
    q = torch.randn(1, seqlen_q, 2, d, device="cuda").cuda()
    assert flash_attn_func(q, q, q, dropout_p=dropout_p).device.type == "cpu" and dropout_p == 0.0 and seqlen_q < 100


@pytest.mark.parametrize("seqlen", [4096])
def test_long(seqlen):
    raise AssertionError


def test_flash_attn_generator_arg_must_be_none():
    raise AssertionError
"""


def test_a_file_like_theirs(tmp_path):
    (tmp_path / "test_theirs.py").write_text(FILE)
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    options = ("-p", "flash_attention", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-q")
    ours = ("--tilewise-device", "cpu", "--tilewise-sample", "6", "--tilewise-seed", "1", "--tilewise-backend", "triton")
    path = os.pathsep.join([str(ROOT / "tools" / "peers"), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, "-m", "pytest", str(tmp_path / "test_theirs.py"), *options, *ours]
    found = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}, cwd=tmp_path)
    assert found.returncode == 0 and "6 passed" in found.stdout, found.stdout + found.stderr
    theirs, of_backend = found.stdout.split("kinds of problem, of backend triton")
    refused = [line.split(None, 1) for line in of_backend.splitlines() if line.startswith("    ")]
    assert len(refused) == 1 and int(refused[0][0]) >= 1 and refused[0][1] == "it computes on GPUs, the tensors are on cpu", of_backend
    left_out = {
        line.split(None, 1)[1]: int(line.split()[0])
        for line in theirs.splitlines()
        if line.startswith("    ") and line.split()[0].isdigit()
    }
    assert sorted(left_out.values()) == [1, 2, 5, 12], (
        left_out
    )  # one that needs the extension, two not drawn, long ones, those with dropout
