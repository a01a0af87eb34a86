"""What every warp of a traced rung must have done, and in which order."""

from collections import Counter
from itertools import pairwise

from tilewise.ladder.rung import Rung
from tilewise.ladder.tracing import Trace
from tilewise.sm90.phases import Phase

SPECIALISED = {"k5_1", "k5", "k6_1", "k6", "k6:overlap", "k7", "k8"}


def check_story(trace: Trace, rung: Rung, seqlen: int, head_dim: int, causal: bool):
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
            spans = [span for span in mine if span.warp == warp]
            assert all(0 <= span.start <= span.end for span in spans)
            assert all(before.end == after.start for before, after in pairwise(spans))
            count = Counter(span.phase for span in spans)
            if warp in warps:
                assert count[Phase.SCORES] == count[Phase.SOFTMAX] == tiles and count[Phase.STORE] == 1
                assert count[Phase.OUTPUT] + count[Phase.ISSUE] == tiles
            else:
                assert count[Phase.LOAD] == (tiles if name == "k5_1" else 2 * tiles) + 1  # K and V of each, at once in K5.1, and Q
