"""Decode of a latent cache, carried out without a GPU; as test_decode.py."""

from dataclasses import replace

import pytest
import torch
from decode_problems import DecodeCase, held, made
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import prefix, repeat, workspace
from tilewise.masks import Causal, Full, SlidingWindow

pytestmark = NEEDED

LATENT = {"dims": (576, 512), "latent": True}


def run(call, pace: str = "random", seed: int = 0, slots: int = 4, **tuning):
    with Emulated(pace, seed, slots).on_gpu():
        found = decoding.decode(call, **tuning)
    assert found is not None, decoding.why_not(call)
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return found


def checked(case: DecodeCase, **tuning) -> None:
    call = made(case)
    results = [run(call, pace, seed, **tuning) for seed, pace in enumerate(PACES)]
    held(call, *results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


QUICK = [
    DecodeCase(lengths=(65, 0, 130), heads=(16, 1), page=64, **LATENT),
]
WIDE = [
    DecodeCase(lengths=(1, 64, 200), heads=(128, 1), **LATENT),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in WIDE)], ids=str)
def test_cases(case):
    checked(case)
