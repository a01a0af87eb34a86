"""Threads: the same bits for any number of them, torch's own pool, and life after a fork."""

import os
import subprocess
import sys

import pytest
import torch

from tilewise.backends.cpu import Cpu
from tilewise.backends.cpu.native import library
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.testing.cases import Case, make, random_mask, upstream

CASES = [
    Case(batch=1, seqlen_q=700, seqlen_k=700, heads_q=2, heads_k=1, mask=Causal()),
    Case(batch=1, seqlen_q=500, seqlen_k=900, heads_q=2, heads_k=2, mask=SlidingWindow(100, 3), dtype="bf16"),
    Case(batch=1, seqlen_q=600, seqlen_k=600, heads_q=4, heads_k=2, mask=Documents((0, 200, 205, 600), inner=Causal()), dtype="fp16"),
    Case(batch=2, seqlen_q=300, seqlen_k=410, heads_q=4, heads_k=2, bias="q", sink=True, dropout=0.2, lse_grad=True),
    Case(batch=1, seqlen_q=400, seqlen_k=400, heads_q=2, heads_k=1, mask=random_mask(400, 400), head_dim=40),
    Case(batch=2, seqlen_q=1, seqlen_k=3000, heads_q=8, heads_k=4, mask=Full()),
]


def _everything(case: Case) -> list[torch.Tensor]:
    call, (d_o, d_lse) = make(case), upstream(case)
    o, lse = Cpu().forward(call)
    return [o, lse, *(x for x in Cpu().backward(call, o, lse, d_o, d_lse, bias_grad=True) if x is not None)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_bits_do_not_depend_on_the_number_of_threads(case, threads):
    threads(1)
    once = _everything(case)
    for n in (2, 3, 8):
        threads(n)
        assert all(torch.equal(x, y) for x, y in zip(once, _everything(case), strict=True)), f"{n} threads"


def test_the_pool_is_torchs():
    if sys.platform == "linux" and "USE_OPENMP=ON" in torch.__config__.show():
        assert library().shared_pool


def test_no_threads_beside_torchs(threads):
    """A call starts no thread that torch has not, and torch's number is obeyed."""
    threads(2)
    torch.mm(torch.ones(600, 600), torch.ones(600, 600))
    before = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else pytest.skip("needs /proc")
    _everything(CASES[0])
    assert len(os.listdir("/proc/self/task")) <= before + 1  # torch's own second thread, if it was not there yet


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes():
    script = """
import os, torch
from tilewise.backends.cpu import Cpu
from tilewise.testing.cases import Case, make
torch.set_num_threads(2)
call = make(Case(batch=1, seqlen_q=600, seqlen_k=600))
before = Cpu().forward(call)[0].numpy().tobytes()
child = os.fork()
if child == 0:  # torch's own operators, on its dead pool, would hang here
    os._exit(0 if Cpu().forward(call)[0].numpy().tobytes() == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
