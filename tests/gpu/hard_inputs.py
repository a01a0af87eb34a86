"""What a backend's time on hard inputs is held to, relative to that on normal ones."""

from collections.abc import Callable

import torch

from tilewise.backends import Backend
from tilewise.bench.sets import Workload, padded
from tilewise.bench.sets.distributions import DISTRIBUTIONS, HIDDEN, NORMAL
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, Documents, Full, Mask, SlidingWindow
from tilewise.problem import Call

SEQLEN = 8192
MASKS = [Full(), Causal(), SlidingWindow(1023, 0), padded(SEQLEN)]


def ratios(backend: Backend, backward: Callable, head_dim: int, mask: Mask, grad: bool) -> dict[str, float]:
    """By distribution: how many times as long as on normal inputs; of those that suit the mask. `backward(call, o, lse, d_o, None)`: gradients."""
    shape = {"batch": 1, "seqlen_q": SEQLEN, "heads_q": 2048 // head_dim, "head_dim": head_dim, "mask": mask, "dtype": torch.bfloat16}
    device, calls = torch.device("cuda"), {}
    for name in DISTRIBUTIONS:
        if name == NORMAL or (name in HIDDEN) == isinstance(mask, Documents):
            x = Workload(name="hard-inputs", data=name, direction="bwd" if grad else "fwd", **shape).inputs(0, device)
            q, k, v = (each.detach() for each in x[:3])
            call = Call(q=q, k=k, v=v, mask=mask, scale=head_dim**-0.5, grad=grad)
            calls[name] = _gradients(backend, backward, call, x.d_o) if grad else lambda call=call: backend.forward(call)
    times = {name: each.median for name, each in interleave(calls, budget_s=0.05, device=device, clock="events").items()}
    return {name: time / times[NORMAL] for name, time in times.items()}


def _gradients(backend: Backend, backward: Callable, call: Call, d_o: torch.Tensor) -> Callable:
    o, lse = backend.forward(call)
    return lambda: backward(call, o, lse, d_o, None)
