"""Speed does not depend on the data: a finite input takes at most 1.25 times as long as a normal one, NaN and infinities at most 3 times, or `ABOVE`.

`tilewise bench --set hard-inputs` has the whole table. To be run with nothing else on the GPU.
"""

import pytest
import torch
from alone import ALONE
from hopper_problems import NEEDS_HOPPER

from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import call as gradients
from tilewise.bench.sets import Workload, padded
from tilewise.bench.sets.distributions import DISTRIBUTIONS, FINITE_LIMIT, HIDDEN, NON_FINITE_LIMIT, NORMAL
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.problem import Call

pytestmark = NEEDS_HOPPER

SEQLEN = 8192
MASKS = [Full(), Causal(), SlidingWindow(1023, 0), padded(SEQLEN)]

# What a backward pass under a causal or window mask takes beyond those limits (docs/numerics.md, Repairs' time): may fall, not rise.
ABOVE = {"cauchy": 1.85, "largest scores": 3.5, "nan in v": 3.3, "inf in v": 3.3, "overflown": 4.5}


@ALONE
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_input_is_slow(head_dim, mask, grad):
    shape = {"batch": 1, "seqlen_q": SEQLEN, "heads_q": 2048 // head_dim, "head_dim": head_dim, "mask": mask, "dtype": torch.bfloat16}
    device, calls = torch.device("cuda"), {}
    for name in DISTRIBUTIONS:
        if name == NORMAL or (name in HIDDEN) == isinstance(mask, Documents):
            x = Workload(name="hard-inputs", data=name, direction="bwd" if grad else "fwd", **shape).inputs(0, device)
            q, k, v = (each.detach() for each in x[:3])
            call = Call(q=q, k=k, v=v, mask=mask, scale=head_dim**-0.5, grad=grad)
            calls[name] = backward(call, x.d_o) if grad else lambda call=call: Hopper().forward(call)
    times = {name: each.median for name, each in interleave(calls, budget_s=0.05, device=device, clock="events").items()}
    ratios = {name: time / times[NORMAL] for name, time in times.items()}
    limits = {name: FINITE_LIMIT if DISTRIBUTIONS[name].finite else NON_FINITE_LIMIT for name in ratios}
    if grad and isinstance(mask, (Causal, SlidingWindow)):
        limits |= ABOVE
    slow = {name: x for name, x in ratios.items() if x > limits[name]}
    assert not slow, slow


def backward(call, d_o):
    o, lse = Hopper().forward(call)
    return lambda: gradients.backward(call, o, lse, d_o, None)
