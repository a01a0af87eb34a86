"""In-kernel traces on a Hopper GPU: stamps change no bit of O, are in order, and tell a whole story for every warp that computes."""

import pytest
import torch
from trace_stories import check_backward_story, check_story

from tilewise.errors import UnsupportedError
from tilewise.ladder import BACKWARD_RUNGS, RUNGS, VARIANTS
from tilewise.ladder.tracing import record, record_gradients
from tilewise.sm90.jit import why_not_here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

TRACED = {name: rung for name, rung in {**RUNGS, **VARIANTS}.items() if name != "k1"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", TRACED)
def test_trace(name, head_dim, causal):
    rung, seqlen = TRACED[name], 1000
    q, k, v = (torch.randn(96, seqlen, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    trace, o = record(rung, q, k, v, causal)
    assert torch.equal(o, rung(q, k, v, causal=causal))
    assert 1 <= len(trace.blocks) <= 8 and 0.2 < trace.ghz < 2.5
    check_story(trace, rung, seqlen, head_dim, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", BACKWARD_RUNGS)
def test_trace_of_gradients(name, head_dim, causal):
    rung, seqlen = BACKWARD_RUNGS[name], 1000
    q, k, v, d_o = (torch.randn(96, seqlen, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    given = q, k, v, *rung.attend(q, k, v, causal, head_dim**-0.5), d_o
    trace, found = record_gradients(rung, *given, causal)
    right = rung(*given, causal=causal)
    assert all(map(torch.equal, found[1:], right[1:])) and (not rung.ordered or torch.equal(found[0], right[0]))
    assert 1 <= len(trace.blocks) <= 8 and 0.2 < trace.ghz < 2.5
    check_backward_story(trace, rung, seqlen, head_dim, causal)


def test_k1_has_no_phases():
    q = torch.randn(1, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="k1 has no phases to trace"):
        RUNGS["k1"].trace(q, q, q)
