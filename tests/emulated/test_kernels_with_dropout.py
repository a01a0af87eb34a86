"""Dropout in the Hopper kernels, carried out without a GPU: the pairs that the oracle keeps, in both passes and whoever computes them."""

import math
from dataclasses import replace

import pytest
import torch
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.backends.hopper.backward import plan
from tilewise.masks import Causal, Documents, Full, PrefixLM, SlidingWindow
from tilewise.testing import conformance, tolerance
from tilewise.testing.cases import Case, make

pytestmark = NEEDED

SMALL = dict(batch=1, seqlen_q=150, seqlen_k=150, heads_q=2, heads_k=1, head_dim=64, dtype="bf16", dropout=0.3)
DOCUMENTS = Documents((0, 20, 100), (0, 30, 130), inner=Causal())
EVERYTHING = {"softcap": 5.0, "bias": "hq", "alibi": "h", "diagonal": True, "sink": True, "lse_grad": True}
CASES = [Case(**SMALL | dict(mask=Causal(), seqlen_q=70, batch=2, lse_grad=True))]
MORE = [
    Case(**SMALL | dict(mask=Full(), head_dim=128, dropout=0.999)),
    Case(**SMALL | dict(mask=Causal(), head_dim=128, dtype="fp16", dropout=0.1)),
    Case(**SMALL | dict(mask=DOCUMENTS, seqlen_q=100, seqlen_k=130, sink=True)),
    Case(**SMALL | dict(mask=PrefixLM(30), head_dim=128)),
    Case(**SMALL | dict(mask=PrefixLM(30), seqlen_q=130, seqlen_k=60)),
    Case(**SMALL | dict(mask=Full(), seqlen_q=70, seqlen_k=40, bias="hq", bias_hides=True, dtype="fp16")),
    Case(**SMALL | dict(mask=Full(), seqlen_q=1, seqlen_k=300, heads_q=4)),
    Case(**SMALL | dict(mask=SlidingWindow(40, 3), head_dim=72, head_dim_v=40)),
    Case(**SMALL | dict(mask=Causal(), head_dim=192, head_dim_v=128)),
    Case(**SMALL | dict(mask=Causal(), head_dim=256)),
    Case(**SMALL | dict(mask=SlidingWindow(40, 3), head_dim=96, **EVERYTHING)),
    Case(**SMALL | dict(mask=Causal(), **EVERYTHING)),
    # What dropped pairs add to dS lies below fp16's normal numbers, unless dS is lifted
    Case(**SMALL | dict(mask=Causal(), seqlen_q=400, seqlen_k=400, heads_k=2, head_dim=8, dtype="fp16", dropout=0.999)),
    Case(**SMALL | dict(mask=Full(), batch=2, seqlen_q=640, seqlen_k=20, head_dim=96, dtype="fp16", dropout=0.99)),
    Case(**SMALL | dict(mask=Causal(), seqlen_q=400, seqlen_k=400, head_dim=256, dtype="fp16", dropout=0.999)),
    Case(**SMALL | dict(mask=Causal(), seqlen_q=200, seqlen_k=300, bias="hq", dtype="fp16", dropout=0.99)),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=lambda case: case.id)
def test_cases(case):
    conformance.run_hidden(Emulated(), case)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_same_bits_at_any_pace(head_dim):
    call = make(Case(**SMALL | dict(mask=Causal(), head_dim=head_dim)), 0, grad=True)
    found = []
    for seed, pace in enumerate(PACES):
        backend = Emulated(pace, seed)
        o, lse = backend.forward(call)
        found.append((o, lse, *backend.backward(call, o, lse, torch.ones_like(o), None)[:3]))
    assert all(torch.equal(x, y) for other in found for x, y in zip(found[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "head_dim"), [(Causal(), 64), (SlidingWindow(70, 3), 128), (Causal(), 256)], ids=repr)
def test_visible_and_hidden_nan(mask, head_dim):
    """A pair that is dropped is visible still: 0 times NaN is NaN."""
    conformance.run_spoiled(Emulated(), Case(**SMALL | dict(mask=mask, head_dim=head_dim)))
    conformance.run_overflown(Emulated(), Case(**SMALL | dict(mask=mask, head_dim=head_dim)))


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Causal(), PrefixLM(30)], ids=repr)
def test_numbers_of_v_that_are_not_finite(mask):
    """An infinity is NaN in a row that drops it, also in tiles from which it was taken before products."""
    call = make(Case(**SMALL | dict(mask=mask)), 0)
    v = call.v.clone()
    v[0, 3::37, 0, 1], v[0, 5::31, 0, 2:9], v[0, 9::23, 0, 4::3] = math.nan, math.inf, -math.inf
    call = replace(call, v=v)
    tolerance.check_outputs(call, *Emulated().forward(call))


@pytest.mark.slow
def test_a_batch_in_parts(monkeypatch):
    """Each launch of the backward pass draws for its own batch entries."""
    monkeypatch.setattr(plan, "MOST", 2)
    conformance.run_case(Emulated(), Case(**SMALL | dict(batch=3, mask=Full(), seqlen_q=40, seqlen_k=50, heads_q=1)))
