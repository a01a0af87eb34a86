"""In-kernel traces on a Hopper GPU: stamps change no bit of O, are in order, and tell a whole story for every warp that computes."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from tilewise.errors import UnsupportedError
from tilewise.ladder import RUNGS, VARIANTS
from tilewise.ladder.tracing import record
from tilewise.sm90.jit import why_not_here
from tilewise.sm90.phases import Phase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

TRACED = {name: rung for name, rung in {**RUNGS, **VARIANTS}.items() if name != "k1"}
SPECIALISED = {"k5_1", "k5", "k6_1", "k6", "k6:overlap", "k7", "k8"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", TRACED)
def test_trace(name, head_dim, causal):
    rung, seqlen = TRACED[name], 1000
    q, k, v = (torch.randn(96, seqlen, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    trace, o = record(rung, q, k, v, causal)
    assert torch.equal(o, rung(q, k, v, causal=causal))
    assert 1 <= len(trace.blocks) <= 8 and 0.2 < trace.ghz < 2.5
    assert trace.specialised == (name in SPECIALISED)
    config = rung.code.configure(head_dim, causal, **rung.choice)
    m_blocks = -(-seqlen // config.tile_m)
    for block, (place, _) in enumerate(trace.blocks):
        m_block = m_blocks - 1 - place if causal else place
        tiles = -(-min(seqlen, (m_block + 1) * config.tile_m if causal else seqlen) // config.tile_n)
        mine = [span for span in trace.spans if span.block == block]
        warps = {span.warp for span in mine if span.phase == Phase.SCORES}
        assert len(warps) == (4 * getattr(config, "consumers", 1) if name in SPECIALISED else 4 if name.startswith("k4") else 8)
        for warp in {span.warp for span in mine}:
            spans = [span for span in mine if span.warp == warp]
            assert all(0 <= span.start <= span.end for span in spans)
            assert all(before.end == after.start for before, after in pairwise(spans))
            count = Counter(span.phase for span in spans)
            if warp in warps:
                assert count[Phase.SCORES] == count[Phase.SOFTMAX] == tiles and count[Phase.STORE] == 1
                assert count[Phase.OUTPUT] + count[Phase.ISSUE] == tiles
            else:
                assert count[Phase.LOAD] == (tiles if name == "k5_1" else 2 * tiles) + 1  # K and V of each, at once in K5.1, and Q


def test_k1_has_no_phases():
    q = torch.randn(1, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="k1 has no phases to trace"):
        RUNGS["k1"].trace(q, q, q)
