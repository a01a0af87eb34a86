"""Traces of rungs without a GPU: stamps change no bit of O, and tell a whole story for every warp. The clock counts how often it is read."""

from unittest import mock

import pytest
import torch
from emulator.backend import NEEDED, Emulated
from trace_stories import check_backward_story, check_story

from tilewise.ladder import BACKWARD_RUNGS, RUNGS
from tilewise.ladder.rung import Rung
from tilewise.ladder.tracing import Case, Trace, keep
from tilewise.sm90.phases import SLOTS, WARPS

pytestmark = NEEDED


CASES = [("k8", 64, True, 140)]
WIDE = [(name, head_dim, causal, 300) for name, head_dim in (("k6", 64), ("k7", 128), ("k7", 64), ("k8", 128)) for causal in (False, True)]


@pytest.mark.parametrize(
    ("name", "head_dim", "causal", "seqlen"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in WIDE)]
)
def test_trace(name, head_dim, causal, seqlen):
    rung, heads = RUNGS[name], 1
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, seqlen, head_dim, dtype=torch.float32, generator=generator).bfloat16() for _ in range(3))
    m_blocks = -(-seqlen // rung.code.configure(head_dim, causal).tile_m)
    events = torch.zeros((m_blocks * heads * WARPS * SLOTS, 2), dtype=torch.int32, device="cpu")
    with Emulated(slots=2).on_gpu(), mock.patch.multiple(Rung, reasons=lambda *_: []):
        plain, stamped = (rung.run(q, k, v, causal, 0.1, events=each) for each in (None, events))
    assert all(map(torch.equal, plain, stamped))
    case = Case(rung=name, seqlen=seqlen, head_dim=head_dim, causal=causal, heads=heads, device="emulator")
    check_story(Trace(case, *keep(events.view(-1, WARPS, SLOTS, 2), m_blocks, 8)), rung, seqlen, head_dim, causal)


@pytest.mark.parametrize(
    ("name", "head_dim", "causal"),
    [("b3", 64, True), *(pytest.param(name, 64, causal, marks=pytest.mark.slow) for name in ("b1", "b2") for causal in (False, True))],
)
def test_trace_of_gradients(name, head_dim, causal):
    """dQ has the same bits where the blocks' order is fixed."""
    rung, heads, seqlen = BACKWARD_RUNGS[name], 1, 140
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(heads, seqlen, head_dim, dtype=torch.float32, generator=generator).bfloat16() for _ in range(4))
    n_blocks = -(-seqlen // rung.configure(head_dim, causal).tile_n)
    events = torch.zeros((n_blocks * heads * WARPS * SLOTS, 2), dtype=torch.int32, device="cpu")
    with Emulated(slots=2).on_gpu(), mock.patch.multiple(Rung, reasons=lambda *_: []):
        o, lse = rung.attend(q, k, v, causal, 0.1)
        plain, stamped = (rung.run(q, k, v, o, lse, d_o, causal=causal, scale=0.1, events=each) for each in (None, events))
    assert all(map(torch.equal, plain[1:], stamped[1:])) and (not rung.ordered or torch.equal(plain[0], stamped[0]))
    case = Case(rung=name, seqlen=seqlen, head_dim=head_dim, causal=causal, heads=heads, device="emulator")
    check_backward_story(Trace(case, *keep(events.view(-1, WARPS, SLOTS, 2), n_blocks, 8)), rung, seqlen, head_dim, causal)
