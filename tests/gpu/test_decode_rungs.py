"""The ladder's rungs for decoding on a Hopper GPU: right by the one tolerance, the same bits in every run and in a replayed graph."""

import pytest
import torch
from decode_rung_problems import DIM, drawn, held
from hopper_problems import NEEDS_HOPPER

from tilewise.ladder import DECODE_RUNGS, decode_rung

pytestmark = NEEDS_HOPPER

CASES = [
    ((8192,), (32, 8)),
    ((1, 63, 64, 65, 0, 1000, 3), (8, 2)),
    ((500,) * 40, (32, 8)),
    ((3000, 20), (64, 1)),
    ((700, 700, 699), (4, 4)),
]


@pytest.mark.parametrize("rung", DECODE_RUNGS.values(), ids=DECODE_RUNGS)
@pytest.mark.parametrize(("lengths", "heads"), CASES, ids=lambda x: str(x)[:24])
def test_cases(rung, lengths, heads):
    q, k, v, n = drawn(lengths, heads, max(lengths) + 5, "cuda")
    splits = rung.splits(q, k, 132)
    for pieces in {1, 2, splits}:
        o, lse = rung.run(q, k, v, n, DIM**-0.5, pieces)
        held(q, k, v, n, o, lse)
        for _ in range(20):
            again, lse_again = rung.run(q, k, v, n, DIM**-0.5, pieces)
            assert torch.equal(o, again) and torch.equal(lse, lse_again)
    assert torch.equal(rung(q, k, v, n), rung.run(q, k, v, n, DIM**-0.5, splits)[0])
    assert not any(kept.any() for kept in decode_rung._KEPT.values())


@pytest.mark.parametrize("rung", DECODE_RUNGS.values(), ids=DECODE_RUNGS)
def test_a_graph_follows_the_lengths(rung):
    q, k, v, n = drawn((100, 4000), (32, 8), 4000, "cuda")
    rung(q, k, v, n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rung(q, k, v, n)
    for lengths in ((4000, 1), (0, 64), (2049, 2048)):
        n.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(o, rung(q, k, v, n))


def test_both_rungs_have_the_same_bits():
    tensors = drawn((3000, 17), (32, 8), 3000, "cuda")
    first, second = (rung(*tensors) for rung in DECODE_RUNGS.values())
    assert torch.equal(first, second)
