"""Every way to fork, before and after its parent's first call: the child computes the bits of its parent, on threads of its own.

torch's own parallel operators hang in such a child, whose pool has no threads, so the tensors are drawn before the fork and gradients are given.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

BEGIN = """
import os, sys, torch, multiprocessing
if "torch alone" not in sys.argv: import tilewise as tw
torch.set_num_threads(2)
q, d_o = torch.randn(2, 512, 8, 64), torch.randn(2, 512, 8, 64)
leaf, one, lengths = q.clone().requires_grad_(), q[:, :1].contiguous(), torch.tensor([512, 300], dtype=torch.int32)
torch.randn(2048, 2048).exp().sum()  # torch's pool has a thread now

def results(*_):
    import tilewise as tw
    o = tw.attention(q, q, q, causal=True)
    of_one = tw.decode(one, q, q, cache_seqlens=lengths)
    packed = tw.attention(q[:1], q[:1], q[:1], mask=tw.Documents([0, 200, 512]))
    grad, = torch.autograd.grad(tw.attention(leaf, q, q), leaf, d_o)
    return [x.detach().numpy().tobytes() for x in (o, of_one, packed, grad)]

def ends_well(run):
    child = os.fork()
    if child == 0:
        os._exit(0 if run() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

before = results() if "called" in sys.argv else None
"""
FORMS = {
    "os.fork": """
def run():
    found = results()
    return len(found) == 4 and found == results() and (before or found) == found
assert ends_well(run)
""",
    "a fork in a fork": "assert ends_well(lambda: ends_well(lambda: (before or results()) == results()))",
    "a called fork in a fork": "assert ends_well(lambda: (found := results()) and ends_well(lambda: results() == found))",
    "a pool": """
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(results, range(4))
assert all(each == (before or found[0]) for each in found)
""",
    "a process": """
process = multiprocessing.get_context("fork").Process(target=results)
process.start(); process.join()
assert process.exitcode == 0
""",
    "a loader": """
from torch.utils.data import DataLoader, Dataset
class Attention(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        torch.set_num_threads(2)  # a worker has one
        return results()
found = list(DataLoader(Attention(), num_workers=2, batch_size=None, multiprocessing_context="fork"))
assert len(found) == 4 and all(each == (before or found[0]) for each in found)
""",
    "a thread's fork": """
import threading
held = []
thread = threading.Thread(target=lambda: held.append(ends_well(lambda: (before or results()) == results())))
thread.start(); thread.join()
assert held == [True]
""",
}
END = "\nif before is None and 'torch alone' not in sys.argv: results()  # and the parent computes on\n"


@pytest.mark.parametrize("form", [pytest.param(x, marks=[] if x == "os.fork" else pytest.mark.slow) for x in FORMS])
@pytest.mark.parametrize(
    "parent", ["", pytest.param("called", marks=pytest.mark.slow), pytest.param("torch alone", marks=pytest.mark.slow)]
)
def test_a_child_computes(form, parent):
    done = subprocess.run([sys.executable, "-c", BEGIN + FORMS[form] + END, parent], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_with_small_stacks():
    """OMP_STACKSIZE, and Python's own threads: what has no room for a job gives it to a thread that has."""
    script = """
import threading, torch, tilewise as tw
torch.set_num_threads(2)
q = torch.randn(1, 512, 4, 64)
mask = tw.Documents([*range(0, 513, 8)], inner=tw.Causal())
run = lambda: [tw.attention(q.to(dtype), q.to(dtype), q.to(dtype), mask=each, backend="cpu") for each in (mask, tw.Causal())
               for dtype in (torch.float32, torch.bfloat16, torch.float16)]
found = [run()]
threading.stack_size(64 << 10)
thread = threading.Thread(target=lambda: found.append(run()))
thread.start(); thread.join()
assert all(map(torch.equal, *found))
"""
    surroundings = os.environ | {"OMP_STACKSIZE": "16k"}
    done = subprocess.run([sys.executable, "-c", script], env=surroundings, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
