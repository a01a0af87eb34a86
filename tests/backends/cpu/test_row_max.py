"""Each row's largest score from the kernel: for every instruction set, for few queries, and where the maximum moves with every block of keys."""

import math
from dataclasses import replace

import pytest
import torch

from tilewise.backends.cpu import Cpu
from tilewise.backends.cpu.native import library
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.testing import conformance, tolerance
from tilewise.testing.cases import QUICK, Case, make

ISAS = library().isas


def test_quick():
    ran = 0
    for case in QUICK[::2]:
        try:
            conformance.run_row_max(Cpu(), case)
            ran += 1
        except UnsupportedError:
            assert "fp64" in case.id
    assert ran > len(QUICK) // 3


@pytest.mark.parametrize("isa", ISAS)
def test_by_instruction_set(isa):
    for case in QUICK[:: 8 if isa == "generic" else 5]:
        if "fp64" not in case.id:
            conformance.run_row_max(Cpu(isa), case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_maxima_that_move_with_every_block(isa, scale):
    """Keys ascend, or descend, in the scores of every row; beside a row of NaN and one that reads an infinity."""
    for mask, dtype in ((Full(), "bf16"), (Causal(), "fp32"), (SlidingWindow(200, 3), "fp16")):
        call = make(Case(batch=1, seqlen_q=130, seqlen_k=420, head_dim=40, dtype=dtype, mask=mask, scale=scale))
        slope = torch.linspace(0.1, 3.0, 420)[None, :, None, None]
        for k in (call.k.abs() * slope, call.k.abs() * slope.flip(1)):
            moving = replace(call, q=call.q.abs(), k=k.to(call.k.dtype), row_max=True)
            moving.q[0, 7, 1, 3], moving.k[0, 300, 0, 2] = math.nan, math.inf
            tolerance.check_row_max(moving, Cpu(isa).forward(moving)[2])


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("sink", [False, True])
def test_few_queries_whose_keys_are_split(seqlen_q, sink):
    """The largest score is in the first split, in the last, and NaN is in one between."""
    case = Case(batch=2, seqlen_q=seqlen_q, seqlen_k=3500, heads_q=4, heads_k=2, head_dim=32, dtype="bf16", mask=Causal(), sink=sink)
    for key, value in ((5, 30.0), (3400, 30.0), (2000, math.nan), (2000, math.inf)):
        call = replace(make(case), row_max=True)
        assert any(line.startswith("few queries") for line in Cpu().details(call))
        call.k[:, key, 1] = call.q[:, -1, 2] * value
        o, lse, row_max = Cpu().forward(call)
        tolerance.check_outputs(call, o, lse)
        tolerance.check_row_max(call, row_max)
