"""Random calls (decode_fuzz.py) of the decode kernel, carried out without a GPU: small ones, of kinds that a kernel takes."""

import math
from dataclasses import replace

import pytest
from decode_fuzz import exact, kind, problem, slots
from decode_problems import DecodeCase, by_kernel, held, made
from emulator.backend import NEEDED, Emulated

from tilewise.backends.hopper.decode import prefix, workspace
from tilewise.masks import Full, SlidingWindow

pytestmark = NEEDED

KINDS, LONGEST, WORK = 60, 60, 200_000  # WORK: rows times keys, beyond which the emulator takes minutes


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KINDS))
def test_random_calls(number, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    one = replace(kind(number, kernels=True), new="")
    calls = (problem(one, seed, most=LONGEST).call for seed in range(number, 10_000, KINDS))
    call = next(call for call in calls if call.q.numel() // call.q.shape[-1] * int(call.seqlens.max()) <= WORK)
    with Emulated("random", number, slots=4).on_gpu():
        found = by_kernel(call)
    held(exact(call), *found)
    assert not any(counters.any() for _, counters in workspace._KEPT.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(lengths=(300, 20, 130, 128), prefix=128, page=16, mask=Full(), queries=3),
        DecodeCase(lengths=(300, 125, 130), prefix=128, mask=SlidingWindow(None, 9)),
        DecodeCase(lengths=(300, 128, 130), prefix=128, page=16, tree=7),
        DecodeCase(lengths=(20, 300, 130), prefix=128),
        # As where a request has ended, and its row of the page table names nothing.
        DecodeCase(lengths=(20, 300, 130), prefix=128, page=16),
    ],
    ids=str,
)
def test_prefixes_that_sequences_have_in_part(case, monkeypatch):
    """Who has not all of it, or sees not all of it, computes alone."""
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(case)
    with Emulated().on_gpu():
        held(call, *by_kernel(call))


@pytest.mark.parametrize("wide", [("seqlens", "cu_seqlens_q"), pytest.param((), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("page", "entries"), [(0, False), (0, True), (16, False), (5, False)])
def test_prefix_of_the_longest_sequence_that_asks(page, entries, wide, monkeypatch):
    """Who has no queries need not have any keys either, whatever its length says."""
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(DecodeCase(lengths=(300, 20, 130, 131, 131), queries=(0, 1, 2, 1, 0), prefix=64, page=page, entries=entries))
    for b in (0, 4):
        where = slots(call, b, 0, int(call.seqlens[b]))
        call.k_cache[where] = call.v_cache[where] = math.nan
    with Emulated().on_gpu():
        held(call, *by_kernel(replace(call, **{name: getattr(call, name).long() for name in wide})))
