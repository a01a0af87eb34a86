"""Several GPUs have the bits of one: on one GPU by parts of a call, on two or more by NCCL (tools/gpu/context_parallel.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_cases import families
from hopper_problems import NEEDS_HOPPER

import tilewise as tw
from tilewise.masks import Part

pytestmark = NEEDS_HOPPER

ROOT = Path(__file__).parents[2]
N, ROWS = 2000, ((0, 256), (640, 1152), (1920, 2000))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", list(families(N)))
def test_rows_have_the_bits_of_the_whole_call(name, dim):
    mask, places = families(N)[name], torch.cat([torch.arange(*rows) for rows in ROWS]).cuda()
    generator = torch.Generator("cuda").manual_seed(dim)
    q, k, v, d_o = (torch.randn(1, N, heads, dim, generator=generator, device="cuda").bfloat16() for heads in (4, 2, 2, 4))

    def results(q, d_o, rows):
        q = q.clone().requires_grad_()
        o, lse = tw.attention(q, k, v, mask=Part(mask, N, rows), return_lse=True, backend="hopper")
        return o.detach(), lse.detach().transpose(1, 2), torch.autograd.grad(o, q, d_o)[0]

    whole, ours = results(q, d_o, ((0, N),)), results(q[:, places], d_o[:, places], ROWS)
    for what, x, y in zip(("o", "lse", "dq"), ours, whole, strict=True):
        assert torch.equal(x, y[:, places]), what


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
def test_two_gpus():
    environment = os.environ | {"PYTHON": sys.executable, "OUT": os.devnull}
    done = subprocess.run(
        [ROOT / "tools/gpu/context_parallel.sh", "--gpus", "2", "--check-only"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
