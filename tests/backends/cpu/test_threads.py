"""Threads: the same bits for any number of them, torch's own pool, and life after a fork."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tilewise.backends.cpu import Cpu
from tilewise.backends.cpu.native import library
from tilewise.masks import Causal, Documents, Full, PerHead, SlidingWindow
from tilewise.testing.cases import Case, make, random_mask, upstream

CASES = [
    Case(batch=1, seqlen_q=700, seqlen_k=700, heads_q=2, heads_k=1, mask=Causal()),
    Case(batch=1, seqlen_q=500, seqlen_k=900, heads_q=2, heads_k=2, mask=SlidingWindow(100, 3), dtype="bf16"),
    Case(batch=1, seqlen_q=600, seqlen_k=600, heads_q=4, heads_k=2, mask=Documents((0, 200, 205, 600), inner=Causal()), dtype="fp16"),
    Case(batch=2, seqlen_q=300, seqlen_k=410, heads_q=4, heads_k=2, bias="q", sink=True, dropout=0.2, lse_grad=True),
    Case(batch=1, seqlen_q=400, seqlen_k=400, heads_q=2, heads_k=1, mask=random_mask(400, 400), head_dim=40),
    Case(batch=2, seqlen_q=1, seqlen_k=3000, heads_q=8, heads_k=4, mask=Full()),
    Case(batch=1, seqlen_q=1, seqlen_k=224, heads_q=64, heads_k=8, mask=PerHead({(0, 1): Causal(), (1, 64): SlidingWindow(38, 0)})),
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


def test_workers_of_a_loader_compute_after_their_parent_did():
    """torch's DataLoader forks its workers from a process whose pool has run, and gives them one thread each."""
    script = """
import torch, tilewise
from torch.utils.data import DataLoader, Dataset
x = torch.randn(1, 400, 2, 64)
class Attention(Dataset):
    __len__ = lambda self: 4
    __getitem__ = lambda self, i: tilewise.attention(x, x, x, causal=True, backend="cpu")
torch.set_num_threads(2)
wanted = Attention()[0]
results = list(DataLoader(Attention(), num_workers=2, batch_size=None))
assert len(results) == 4 and all(torch.equal(wanted, result) for result in results)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_several_python_threads_at_once(threads):
    threads(2)
    case = CASES[0]
    once = _everything(case)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(_everything, [case] * 12):
            assert all(torch.equal(x, y) for x, y in zip(once, results, strict=True))
