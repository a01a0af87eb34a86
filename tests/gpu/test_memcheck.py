"""compute-sanitizer finds no access outside an allocation in the Hopper kernels: every allocation is its own, and every kind of kernel runs."""

import os
import shutil
import subprocess
import sys

import pytest

from tilewise.sm90.jit import why_not_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here())),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed"),
]

SMALL_SET = """
import torch
import tilewise as tw

def made(seqlen, heads, dim, grad=False):
    return torch.randn(2, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

causal, window = tw.Causal(), tw.SlidingWindow(50, 20)
ways = [tw.Full(), causal, window, tw.Documents([0, 3, 150, 333], inner=causal), window | tw.FirstKeys(4)]
for dim in (64, 128, 72, 256):
    for mask in ways if dim == 128 else ways[:3]:
        tw.attention(made(333, 4, dim), made(333, 2, dim), made(333, 2, dim), mask=mask, backend="hopper")
q, k, v = made(130, 4, 128), made(257, 2, 128), made(257, 2, 128)
slopes, sink = torch.rand(4, device="cuda"), torch.randn(4, device="cuda", dtype=torch.bfloat16)
bias = torch.randn(1, 4, 130, 257, device="cuda", dtype=torch.bfloat16)
tw.attention(q, k, v, causal=True, softcap=20.0, backend="hopper")
tw.attention(q, k, v, bias=bias, alibi_slopes=slopes, sink=sink, backend="hopper")
for dim in (64, 128, 256):
    for mask in ways if dim == 128 else ways[:3]:
        q, k, v = made(333, 4, dim, True), made(333, 2, dim, True), made(333, 2, dim, True)
        tw.attention(q, k, v, mask=mask, backend="hopper").backward(made(333, 4, dim))
q, k, v, bias = made(130, 4, 128, True), made(257, 2, 128, True), made(257, 2, 128, True), bias.requires_grad_()
tw.attention(q, k, v, causal=True, softcap=20.0, backend="hopper").backward(made(130, 4, 128))
tw.attention(q, k, v, bias=bias, alibi_slopes=slopes, sink=sink, backend="hopper").backward(made(130, 4, 128))
torch.cuda.synchronize()
print("all ran")
"""


def test_no_access_outside_an_allocation():
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-W", "ignore", "-c", SMALL_SET]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0 and "all ran" in done.stdout and "ERROR SUMMARY: 0 errors" in done.stdout, (done.stdout + done.stderr)[
        -4000:
    ]
