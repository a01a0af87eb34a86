"""Bound gradients on Hopper, carried out without a GPU: they lie in memory as their inputs do, in whatever order."""

import math
from dataclasses import replace

import pytest
import torch
from emulator.backend import NEEDED, Emulated

from tilewise.backends.hopper.backward import call as backward
from tilewise.backends.hopper.backward import plan
from tilewise.masks import Causal, Full, PrefixLM, SlidingWindow
from tilewise.problem import Gradients
from tilewise.testing import conformance
from tilewise.testing.cases import Case

pytestmark = NEEDED

# As in test_kernels.py, whose configurations the quick cases share.
SMALL = dict(batch=1, seqlen_q=150, seqlen_k=150, heads_q=2, heads_k=1, head_dim=64, dtype="bf16")
MORE = SMALL | dict(batch=2, heads_q=4, heads_k=2)
ORDERS = (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)  # of dimensions, from the outermost in memory


def lying(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    inverse = [order.index(dim) for dim in range(4)]
    return x.permute(order).contiguous().permute(inverse)


class Again(Emulated):
    """Gradients in memory that is full of NaN, of q, k and v that lie in other orders; the bits are those of contiguous ones."""

    def backward(self, call, o, lse, d_o, d_lse, bias_grad=False):
        right = super().backward(call, o, lse, d_o, d_lse, bias_grad)
        q, k, v = x = [lying(each, order) for each, order in zip((call.q, call.k, call.v), ORDERS, strict=True)]
        call = replace(call, q=q, k=k, v=v)
        extras = call.extras
        with self.on_gpu():
            again = backward.bind(call)
            empty = again.empty
            again.empty = lambda *layout: (made := empty(*layout)).fill_(math.nan if made.is_floating_point() else 77)
            grads = again(q, k, v, o, lse, d_o, d_lse, extras, bias_grad)
            lends = plan.Plan.of(call, plan.gpu_of(q.device)).lends
        for each, grad in zip(x[lends:], grads[lends:], strict=False):
            assert grad.stride() == each.stride()
        assert not lends or grads[0].is_contiguous()
        for mine, long in zip(grads, right, strict=True):
            torch.testing.assert_close(mine, long, atol=0, rtol=0, equal_nan=True)
        return Gradients(*grads)


QUICK = [
    Case(**SMALL | dict(head_dim=128, mask=Causal())),
    Case(**SMALL | dict(mask=Full(), seqlen_q=70, seqlen_k=40, bias="hq", bias_hides=True, dtype="fp16")),
]
SLOW = [
    Case(**MORE | dict(mask=Causal(), lse_grad=True)),
    Case(**MORE | dict(mask=Full(), seqlen_q=520, seqlen_k=400, heads_k=4)),  # blocks of keys are shared
    Case(**MORE | dict(mask=Full(), seqlen_q=460, seqlen_k=20)),
    Case(**MORE | dict(mask=SlidingWindow(40, 3), head_dim=72, head_dim_v=40, sink=True)),
    Case(**MORE | dict(mask=PrefixLM(30), softcap=5.0, alibi="h")),
    Case(**MORE | dict(mask=Causal(), head_dim=192, head_dim_v=128)),
    Case(**MORE | dict(mask=Causal(), head_dim=256)),
]


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=lambda case: case.id)
def test_gradients_lie_as_their_inputs(case):
    """And what is not finite is repaired there, and nothing else."""
    conformance.run_spoiled(Again(), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*QUICK, *SLOW], ids=lambda case: case.id)
def test_gradients_beside_what_is_hidden(case):
    conformance.run_hidden(Again(), case)
