"""The decode kernel over a rank's share of every sequence, without a GPU: what all ranks find, merged, is the whole's by the one tolerance.

Compiling a configuration takes longer than carrying it out: a quick test has few, and the others are slow.
"""

from dataclasses import replace

import decode_shares
import pytest
import torch
from decode_problems import DecodeCase, by_kernel, made, with_eight_bits, with_int64, with_rotary
from emulator.backend import NEEDED, Emulated

from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import workspace
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import Share

pytestmark = NEEDED

WINDOW, CHANGES = SlidingWindow(100, 0), {"softcap": 5.0, "alibi": True, "sink": True}
QUICK = [  # case, world, interleave, tokens of a page
    (DecodeCase(lengths=(0, 1, 63, 300), queries=2), 2, 16, 16),
    (DecodeCase(lengths=(70, 1, 300, 9), queries=(3, 1, 0, 30), heads=(6, 2), mask=WINDOW, dtype=torch.float16, **CHANGES), 3, 1, 0),
]
SLOW = [
    (DecodeCase(lengths=(70, 3, 0, 200, 130), queries=7, tree=7, alibi=True), 2, 3, 16),
    (DecodeCase(lengths=(70, 3, 500, 0), queries=2, leftpad=(5, 3, 200, 0), entries=True, mask=Causal(offset=-2)), 3, 4, 0),
    (DecodeCase(lengths=(300, 17, 0), split=64, sink=True, softcap=5.0), 2, 1, 4),
    (DecodeCase(lengths=(400, 350), queries=200, heads=(3, 1), mask=SlidingWindow(80, 30)), 2, 64, 16),  # many rows, two warpgroups
    (DecodeCase(lengths=(350, 100), queries=(300, 1), heads=(2, 2), dims=(128, 128)), 2, 1, 64),
    (DecodeCase(lengths=(70, 300), queries=90, tree=20, leftpad=(0, 100), dims=(96, 96)), 2, 5, 0),
    (DecodeCase(lengths=(70, 1, 130), queries=3, dims=(256, 256), mask=Full()), 4, 2, 0),
    (DecodeCase(lengths=(70, 1, 300), queries=2, heads=(8, 1), dims=(576, 512), latent=True, alibi=True), 2, 16, 16),
    (DecodeCase(lengths=(5, 9), queries=2), 8, 16, 0),  # most ranks hold nothing
]


def compute(call):
    with Emulated().on_gpu():
        found = by_kernel(call)
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return found


@pytest.mark.parametrize("given", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str)
def test_cases(given):
    case, *of_ranks = given
    decode_shares.check(made(case), compute, *of_ranks)


@pytest.mark.slow
def test_eight_bits_rotary_and_wide_indices():
    call = made(DecodeCase(lengths=(70, 1, 200, 0), queries=3))
    eight, exact = with_eight_bits(call, (torch.float8_e4m3fn, torch.int8), ("token", "head"))
    decode_shares.check(eight, compute, 3, 4, 16, exact)
    turned, exact = with_rotary(call, 16, True)
    decode_shares.check(turned, compute, 2, 1, 0, exact)
    decode_shares.check(with_int64(call), compute, 2, 1, 0)


def test_wild_lengths_are_clamped():
    """Nothing is read beyond what the caches hold, whatever lengths say."""
    call = decode_shares.of_rank(made(DecodeCase(lengths=(64, 300), queries=2)), Share(1, 2, 16), 16)
    full = replace(call, k_cache=call.k_cache.nan_to_num(1.0), v_cache=call.v_cache.nan_to_num(1.0))
    full = replace(full, page_table=full.page_table.clamp(0, full.k_cache.shape[0] - 1))
    for lengths in ([2**31 - 1, 5000], [-(2**31), 320]):
        o, lse = compute(replace(full, seqlens=torch.tensor(lengths, dtype=torch.int32)))
        assert o.isfinite().all() and not lse.isnan().any()


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(lengths=(70, 1, 300), queries=2, sink=True),
        pytest.param(DecodeCase(lengths=(70, 1, 300), queries=(3, 1, 0), page=16, split=64, sink=True), marks=pytest.mark.slow),
        pytest.param(DecodeCase(lengths=(70, 1, 300), queries=2, heads=(8, 1), dims=(576, 512), latent=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_to_be_merged_need_not_be_rounded(case):
    """O in fp32 rounds to what is given without."""
    call = made(case)
    (plain, lse), (wide, other) = compute(call), compute(replace(call, out_dtype=torch.float32))
    assert wide.dtype == torch.float32 and torch.equal(wide.to(case.dtype), plain) and torch.equal(lse, other)
    assert not torch.equal(wide, plain.float())


def test_what_a_kernel_depends_on():
    """One kernel serves all ranks, worlds and interleaves; a call that has all tokens is not theirs."""
    call = made(DecodeCase(lengths=(64, 300)))
    shares = [replace(call, share=Share(*each)) for each in ((0, 2, 1), (1, 2, 1), (3, 4, 16))]
    assert len({decoding.config_of(each) for each in shares}) == 1
    assert decoding.config_of(call) not in map(decoding.config_of, shares)
    assert len({decoding._key(each) for each in (call, *shares)}) == 4
