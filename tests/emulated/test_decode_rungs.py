"""The ladder's rungs for decoding, carried out without a GPU: right by the one tolerance, with the same bits whoever comes first."""

import pytest
import torch
from decode_rung_problems import DIM, drawn, held
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.ladder import DECODE_RUNGS, decode_rung

pytestmark = NEEDED

FIRST = (200, 0, 65), (8, 2), 3
MORE = ((1, 64, 300), (4, 4), 4), ((130,), (64, 1), 1), ((1000, 63), (3, 1), 7)


@pytest.mark.parametrize("name", DECODE_RUNGS)
@pytest.mark.parametrize(("lengths", "heads", "splits"), [FIRST, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)], ids=str)
def test_cases(name, lengths, heads, splits):
    tensors, results = drawn(lengths, heads, max(*lengths, 1) + 20), []
    for seed, pace in enumerate(PACES):
        with Emulated(pace, seed).on_gpu():
            results.append(DECODE_RUNGS[name].run(*tensors, DIM**-0.5, splits))
        assert not any(kept.any() for kept in decode_rung._KEPT.values())
    held(*tensors, *results[0])
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


def test_both_rungs_have_the_same_bits():
    """The merge is the same, in another place."""
    tensors = drawn(*FIRST[:2], 220)
    with Emulated().on_gpu():
        first, second = (rung.run(*tensors, DIM**-0.5, 3) for rung in DECODE_RUNGS.values())
    assert all(map(torch.equal, first, second))


def test_lengths_out_of_range_are_clamped():
    q, k, v, _ = drawn((100, 100), (4, 2), 100)
    wild = torch.tensor([100_000, -5], dtype=torch.int32)
    with Emulated().on_gpu():
        o, lse = DECODE_RUNGS["d2"].run(q, k, v, wild, DIM**-0.5, 2)
    held(q, k, v, torch.tensor([100, 0], dtype=torch.int32), o, lse)
