"""The decode kernel, carried out without a GPU: right by the one tolerance, the same bits at any pace, counters back at 0, no NaN of unused tokens."""

import pytest
import torch
from decode_problems import DecodeCase, held, made
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import workspace

pytestmark = NEEDED

LENGTHS = (0, 1, 63, 64, 65, 200)
CASES = [
    DecodeCase(lengths=(0, 1, 127, 128, 129, 300)),
    DecodeCase(lengths=(300, 17, 0), page=16),
]


def run(call, pace: str = "random", seed: int = 0, slots: int = 4, **tuning):
    with Emulated(pace, seed, slots).on_gpu():
        found = decoding.decode(call, **tuning)
    assert found is not None, decoding.why_not(call)
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case):
    call = made(case)
    results = [run(call, pace, seed) for seed, pace in enumerate(PACES)]
    held(call, *results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
