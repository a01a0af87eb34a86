"""Decode of a latent cache, carried out without a GPU; as test_decode.py."""

from dataclasses import replace

import pytest
import torch
from decode_problems import DecodeCase, by_kernel, held, made
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import extents, prefix, workspace
from tilewise.backends.hopper.decode.call import Cut
from tilewise.masks import Causal, Full, SlidingWindow

pytestmark = NEEDED

LATENT = {"dims": (576, 512), "latent": True}


EVERY_TILE = Cut(elements_per_extra_tile=1 << 30)  # so that few tiles lie in several blocks


def run(call, pace: str = "random", seed: int = 0, slots: int = 4, cut: Cut = EVERY_TILE, **tuning):
    with Emulated(pace, seed, slots).on_gpu():
        found = by_kernel(call, cut, **tuning)
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return found


def checked(case: DecodeCase, **how) -> None:
    call = made(case)
    results = [run(call, pace, seed, **how) for seed, pace in enumerate(PACES)]
    held(call, *results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


CHANGES = {"softcap": 5.0, "alibi": True, "sink": True}
QUICK = [
    DecodeCase(lengths=(65, 0, 130), heads=(128, 1), page=64, **LATENT),
]
WIDE = [
    DecodeCase(lengths=(1, 64, 200), heads=(128, 1), queries=2, **LATENT),
    DecodeCase(lengths=(1, 70, 300), heads=(128, 1), dims=(320, 256), latent=True),
    DecodeCase(lengths=(70, 1, 130, 0), heads=(32, 1), queries=(3, 1, 0, 5), page=16, dtype=torch.float16, **CHANGES, **LATENT),
    DecodeCase(lengths=(70, 130), heads=(48, 1), queries=4, page=8, mask=SlidingWindow(40, 1), **LATENT),
    DecodeCase(lengths=(70, 3, 140, 0), heads=(16, 1), queries=2, leftpad=(5, 3, 90, 0), entries=True, mask=Causal(offset=-2), **LATENT),
    DecodeCase(lengths=(70, 3, 140), heads=(16, 1), queries=3, tree=5, page=128, **LATENT),
    DecodeCase(lengths=(70, 3), heads=(4, 2), mask=Full(), dims=(576, 512), latent=True),
    DecodeCase(lengths=(70, 300), heads=(40, 1), queries=2, dims=(288, 256), latent=True, page=32),
    DecodeCase(lengths=(100, 65), heads=(16, 1), dims=(448, 384), latent=True),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in WIDE)], ids=str)
def test_cases(case):
    checked(case)


@pytest.mark.slow
def test_many_pieces():
    """They are added up by both warpgroups, of several blocks; those of a fixed size in groups first."""
    for polls in (0, 1 << 30):
        checked(DecodeCase(lengths=(1500, 3), heads=(20, 1), dims=(320, 256), latent=True), slots=9, cut=EVERY_TILE._replace(polls=polls))
    grouped = {"most_pieces": 2, "group": 3}
    checked(DecodeCase(lengths=(1500, 3), heads=(8, 1), dims=(320, 256), latent=True, split=64), slots=9, **grouped)


@pytest.mark.slow
def test_pieces_of_a_fixed_size():
    call = made(DecodeCase(lengths=(3, 300, 129), heads=(128, 1), split=100, **LATENT))
    o, lse = run(call)
    held(call, o, lse)
    entry = {name: getattr(call, name)[1:2] for name in ("q", "k_cache", "v_cache", "seqlens")}
    for slots in (1, 7):
        alone, of_alone = run(replace(call, **entry), slots=slots)
        assert torch.equal(alone, o[1:2]) and torch.equal(of_alone, lse[1:2])


@pytest.mark.slow
def test_columns_of_rows():
    """Thread blocks side by side have tiles of rows of the same tokens, also where sequences have other numbers of them."""
    call = made(DecodeCase(lengths=(200, 0, 65), heads=(80, 1), queries=(2, 5, 1), dims=(320, 256), latent=True))
    for slots, aligned in ((10, True), (8, False)):
        cut = EVERY_TILE._replace(aligned=aligned)
        found = run(call, slots=slots, cut=cut)
        held(call, *found)
        assert all(map(torch.equal, found, run(call, PACES[0], slots=slots, cut=cut)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(lengths=(270, 133, 128), heads=(16, 1), queries=2, prefix=130, sink=True, **LATENT),
        DecodeCase(lengths=(270, 133, 100), heads=(64, 1), queries=(2, 0, 5), prefix=128, page=16, **LATENT),
    ],
    ids=str,
)
def test_prefix_of_all(case, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(case)
    assert prefix.pays(call)
    held(call, *run(call))


def test_what_is_remembered_tells_one_memory_from_two():
    call = made(QUICK[0])
    apart = replace(call, v_cache=call.v_cache.clone())
    assert extents.latent(call) and not extents.latent(apart) and decoding._key(call) != decoding._key(apart)
    assert decoding.bind(apart) is None
