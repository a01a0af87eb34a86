"""What every warp of a traced rung must have done, and in which order."""

from collections import Counter
from itertools import pairwise

from tilewise.ladder.backward_rung import BackwardRung
from tilewise.ladder.rung import Rung
from tilewise.ladder.tracing import Trace
from tilewise.sm90.phases import Phase

SPECIALISED = {"b2", "b3", "k5_1", "k5", "k6_1", "k6", "k6:overlap", "k7", "k8"}


def check_story(trace: Trace, rung: Rung, seqlen: int, head_dim: int, causal: bool):
    """Of a forward pass."""
    name = rung.name
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
            count = phases_of(trace, block, warp)
            if warp in warps:
                assert count[Phase.SCORES] == count[Phase.SOFTMAX] == tiles and count[Phase.STORE] == 1
                assert count[Phase.OUTPUT] + count[Phase.ISSUE] == tiles
            else:
                assert count[Phase.LOAD] == (tiles if name == "k5_1" else 2 * tiles) + 1  # K and V of each, at once in K5.1, and Q


def check_backward_story(trace: Trace, rung: BackwardRung, seqlen: int, head_dim: int, causal: bool):
    """Of a backward pass: how many of a block's keys' tiles of queries each warp of it saw."""
    assert trace.specialised == (rung.name in SPECIALISED)
    config = rung.configure(head_dim, causal)
    n_blocks, m_blocks = -(-seqlen // config.tile_n), -(-seqlen // config.tile_m)
    for block, (place, _) in enumerate(trace.blocks):
        n_block = n_blocks - 1 - place if causal and rung.ordered else place
        tiles = m_blocks - (n_block * config.tile_n // config.tile_m if causal else 0)
        mine = [span for span in trace.spans if span.block == block]
        warps = {span.warp for span in mine if span.phase == Phase.SCORES}
        assert len(warps) == 4 * getattr(config, "consumers", 1)
        for warp in {span.warp for span in mine}:
            count = phases_of(trace, block, warp)
            if warp in warps:
                once = Phase.ISSUE, Phase.SCORES, Phase.SOFTMAX, Phase.OUTPUT, Phase.ADD
                assert {count[phase] for phase in once} == {tiles} and count[Phase.STORE] == 1
                assert count[Phase.TURN] == (tiles if rung.ordered else 0)
            else:
                assert count[Phase.LOAD] == 2 * tiles + 1  # Q and dO of each, K and V


def phases_of(trace: Trace, block: int, warp: int) -> Counter:
    """How often a warp was in each phase, one after another without a gap."""
    spans = [span for span in trace.spans if (span.block, span.warp) == (block, warp)]
    assert all(0 <= span.start <= span.end for span in spans)
    assert all(before.end == after.start for before, after in pairwise(spans))
    return Counter(span.phase for span in spans)
