"""Speed does not depend on the data: a finite input takes at most 1.25 times as long as a normal one, NaN and infinities at most 3 times.

Forward passes; `tilewise bench --set hard-inputs` has the whole table. To be run with nothing else on the GPU.
"""

import pytest
import torch
from hopper_problems import NEEDS_HOPPER

from tilewise.backends.hopper import Hopper
from tilewise.bench.distributions import DISTRIBUTIONS, FINITE_LIMIT, HIDDEN, NON_FINITE_LIMIT
from tilewise.bench.timing import interleave
from tilewise.bench.workloads import Workload
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import Call

pytestmark = NEEDS_HOPPER

NAMES = [name for name in DISTRIBUTIONS if name not in HIDDEN]


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(1023, 0)], ids=repr)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward(head_dim, mask):
    shape = {"batch": 1, "seqlen_q": 8192, "heads_q": 2048 // head_dim, "head_dim": head_dim, "mask": mask, "dtype": torch.bfloat16}
    device, calls = torch.device("cuda"), {}
    for name in NAMES:
        x = Workload(name="hard-inputs", data=name, **shape).inputs(0, device)
        call = Call(q=x.q, k=x.k, v=x.v, mask=mask, scale=head_dim**-0.5)
        calls[name] = lambda call=call: Hopper().forward(call)
    times = {name: each.median for name, each in interleave(calls, budget_s=0.05, device=device, clock="events").items()}
    ratios = {name: time / times["normal"] for name, time in times.items()}
    slow = {name: x for name, x in ratios.items() if x > (FINITE_LIMIT if DISTRIBUTIONS[name].finite else NON_FINITE_LIMIT)}
    assert not slow, slow
