"""The decode kernel, carried out without a GPU: right by the one tolerance, the same bits at any pace, counters back at 0, no NaN of unused tokens.

Compiling a configuration takes longer than carrying it out: a quick test has few, and the others are slow.
"""

import math
from dataclasses import replace

import pytest
import torch
from decode_problems import DecodeCase, by_kernel, held, made, with_eight_bits, with_int64, with_rotary
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

import tilewise
from tilewise.backends.hopper.decode import bound, prefix, workspace
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode.call import USUAL, Cut
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.runtime import append_operator, cache_values, decode_cache, decode_operator

pytestmark = NEEDED

WINDOW = SlidingWindow(100, 0)
CHANGES = {"softcap": 5.0, "alibi": True, "sink": True}
QUICK = [
    DecodeCase(lengths=(0, 1, 63, 64, 65, 300)),
    DecodeCase(lengths=(70, 1, 300, 9), queries=(3, 1, 0, 30), heads=(6, 2), page=16, mask=WINDOW, dtype=torch.float16, **CHANGES),
    DecodeCase(lengths=(70, 0, 140), queries=5, page=4),
    DecodeCase(lengths=(70, 0, 140), queries=(0, 0, 0), page=16),
]
CHUNKS = [  # several units a key head, of which later ones see later keys; two warpgroups, but for the last two
    DecodeCase(lengths=(170, 20, 100), queries=(100, 1, 40), heads=(4, 1), page=16),
]
CHUNKS_TOO = [
    DecodeCase(lengths=(300, 170, 20), queries=70, heads=(2, 1)),
    DecodeCase(lengths=(400, 100, 500, 9), queries=(130, 1, 90, 30), heads=(6, 2), page=16, mask=WINDOW, dtype=torch.float16, **CHANGES),
    DecodeCase(lengths=(350, 100), queries=200, heads=(3, 1), mask=Causal(offset=-2), page=5),
    DecodeCase(lengths=(350, 300), queries=(300, 1), heads=(2, 2), dims=(128, 128), page=64, mask=SlidingWindow(80, 30)),
    DecodeCase(lengths=(350, 300), queries=(200, 1), heads=(1, 1), mask=Full(), dims=(192, 128), page=64),
    DecodeCase(lengths=(70, 300), queries=90, tree=20, leftpad=(0, 100), dims=(96, 96)),
    DecodeCase(lengths=(350, 100), queries=70, heads=(3, 1), dims=(256, 256)),
    DecodeCase(lengths=(400, 130), queries=(150, 0), heads=(8, 2), dims=(256, 256), mask=SlidingWindow(100, 0), page=16),
]
WIDE = [
    DecodeCase(lengths=(300, 17, 0), page=16),
    DecodeCase(lengths=(2, 40, 300), queries=3, heads=(8, 2), mask=Full()),
    DecodeCase(lengths=(5, 150, 300), queries=20, heads=(8, 2), page=48),
    DecodeCase(lengths=(70, 1, 500), queries=4, mask=SlidingWindow(50, 3), page=256),
    DecodeCase(lengths=(70, 3, 500, 0), queries=2, leftpad=(5, 3, 200, 0), entries=True, mask=Causal(offset=-2)),
    DecodeCase(lengths=(70, 3, 0, 200, 130), queries=7, tree=7),
    DecodeCase(lengths=(70, 3, 0, 200, 130), queries=3, tree=9, page=16),
    *(DecodeCase(lengths=(70, 1, 130), dims=dims, page=page) for dims in ((128, 128), (72, 40), (256, 256)) for page in (0, 16, 5)),
    *(DecodeCase(lengths=(70, 1, 100), dims=dims, queries=2, **CHANGES) for dims in ((192, 128), (96, 96), (256, 256))),
    DecodeCase(lengths=tuple(i * 7 % 50 for i in range(70)), heads=(2, 1)),
]


def run(call, pace: str = "random", seed: int = 0, slots: int = 4, cut: Cut = USUAL, **tuning):
    with Emulated(pace, seed, slots).on_gpu():
        found = by_kernel(call, cut, **tuning)
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return found


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("case", [*QUICK, *CHUNKS, *(pytest.param(case, marks=pytest.mark.slow) for case in (*CHUNKS_TOO, *WIDE))], ids=str)
def test_cases(case):
    call = made(case)
    results = [run(call, pace, seed) for seed, pace in enumerate(PACES)]
    held(call, *results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(lengths=(70, 1, 90, 9), queries=(3, 1, 0, 5), page=16),
        pytest.param(DecodeCase(lengths=(70, 3, 500, 0), queries=2, leftpad=(5, 3, 200, 0), entries=True), marks=pytest.mark.slow),
        pytest.param(DecodeCase(lengths=(70, 3, 500, 0), page=5), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_indices_in_int64(case):
    """As in int32; what does not fit there is clamped."""
    call = made(case)
    found, wide = run(call), with_int64(call)
    assert all(map(torch.equal, found, run(wide)))
    shorter = replace(wide, seqlens=torch.where(wide.seqlens < 10, -(1 << 40), wide.seqlens))
    held(shorter.in_int32(), *run(shorter))


E4M3, INT8 = torch.float8_e4m3fn, torch.int8
SCALED = [
    (DecodeCase(lengths=(70, 1, 130, 0), queries=3, page=16), (E4M3, E4M3), ("token", "head")),
]
SCALED_TOO = [
    (DecodeCase(lengths=(70, 1, 200, 0)), (E4M3, E4M3), ("sequence", None)),
    (DecodeCase(lengths=(70, 1, 200, 0), dtype=torch.float16), (E4M3, E4M3), ("head", "sequence")),
    (DecodeCase(lengths=(70, 1, 200, 0), queries=(3, 0, 5, 1), page=5, dims=(64, 48)), (INT8, E4M3), ("token", "all")),
    (
        DecodeCase(lengths=(70, 3, 300, 0), queries=2, leftpad=(5, 3, 200, 0), entries=True, dtype=torch.float16),
        (E4M3, INT8),
        (None, "token"),
    ),
    *(
        (DecodeCase(lengths=(70, 1, 100), dims=dims, page=page), (E4M3, E4M3), ("all", "token"))
        for dims in ((128, 128), (96, 96), (192, 128), (256, 256))
        for page in (0, 4)
    ),
    (DecodeCase(lengths=(300, 17, 0), page=16, split=64, sink=True, softcap=5.0, alibi=True), (E4M3, E4M3), ("head", "head")),
]


@pytest.mark.parametrize(
    ("case", "kinds", "scales"), [*SCALED, *(pytest.param(*each, marks=pytest.mark.slow) for each in SCALED_TOO)], ids=str
)
def test_caches_of_eight_bits(case, kinds, scales):
    """The bits of a cache in q's dtype that holds what they stand for."""
    given, exact = with_eight_bits(made(case), kinds, scales)
    results = [run(given, pace, seed) for seed, pace in enumerate(PACES)]
    held(exact, *results[0])
    tile = decoding.config_of(given).tile_n
    assert all(map(torch.equal, results[0], run(exact, tile_n=tile)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize(
    ("half", "interleaved", "dtype"),
    [
        (16, False, torch.float32),
        pytest.param(12, True, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(32, False, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_queries_that_are_rotated_on_their_way(half, interleaved, dtype):
    """As if they had been before, bit for bit."""
    call, rotated = with_rotary(
        made(DecodeCase(lengths=(70, 1, 300, 9), queries=(3, 1, 0, 30), heads=(6, 2), page=16)), half, interleaved, dtype
    )
    found = run(call)
    held(rotated, *found)
    assert all(map(torch.equal, found, run(rotated)))


def test_pieces_of_a_fixed_size():
    """A sequence has the same bits alone, in a batch, and however many multiprocessors there are; with groups of pieces, too."""
    call = made(DecodeCase(lengths=(3, 600, 129), heads=(4, 2), split=100))
    grouped = {"most_pieces": 3, "group": 2}
    o, lse = run(call, **grouped)
    held(call, o, lse)
    entry = {name: getattr(call, name)[1:2] for name in ("q", "k_cache", "v_cache", "seqlens")}
    for slots in (1, 7):
        alone, of_alone = run(replace(call, **entry), slots=slots, **grouped)
        assert torch.equal(alone, o[1:2]) and torch.equal(of_alone, lse[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(60, 0)], ids=str)
def test_pieces_of_a_fixed_size_of_chunks(mask):
    """Bits depend neither on how rows are cut nor on the batch; one unit may have one piece, and another so many that groups come first."""
    call = made(DecodeCase(lengths=(420, 130), queries=(80, 2), heads=(2, 1), split=64, mask=mask, page=16))
    grouped = {"most_pieces": 3, "group": 2}
    found = run(call, **grouped)
    held(call, *found)
    narrow = {"consumers": 1, "overlap": False} | grouped
    for others in (narrow, narrow | {"causal_tiles": False}):
        assert all(map(torch.equal, found, run(call, slots=7, **others)))
    alone = replace(
        call,
        q=call.q[80:82],
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen_q=2,
        **{name: getattr(call, name)[1:] for name in ("seqlens", "page_table")},
    )
    o, lse = run(alone, **grouped)
    assert torch.equal(o, found[0][80:82]) and torch.equal(lse, found[1][:, 80:82])


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [{"q_in_smem": False, "kv_stages": 3}, {"overlap": False, "tile_n": 128}], ids=str)
def test_the_softmax_under_the_tile_before(tuning):
    """The same bits with Q in registers, and one tile after the other. One warpgroup has no rows of the last unit."""
    call = made(DecodeCase(lengths=(300, 5), queries=(70, 1), heads=(3, 1), mask=SlidingWindow(100, 0), page=16))
    chunk = {"consumers": 2, "overlap": True}
    found = run(call, slots=3, **chunk)
    held(call, *found)
    for seed, pace in enumerate(PACES):
        assert all(map(torch.equal, found, run(call, pace, seed, slots=3, **chunk | tuning)))


def test_keys_that_only_later_units_see():
    """May hold anything: they do not reach the rows of earlier ones."""
    call = made(DecodeCase(lengths=(300,), queries=200, heads=(2, 1)))
    spoiled = replace(call, v_cache=call.v_cache.index_fill(1, torch.tensor([299]), torch.nan))
    (o, lse), (o_spoiled, lse_spoiled) = run(call), run(spoiled)
    assert torch.equal(lse, lse_spoiled)
    assert torch.equal(o[:, :192], o_spoiled[:, :192]) and o_spoiled[:, 199].isnan().all()


def test_columns_of_key_heads():
    """Thread blocks side by side have the key heads of the same tokens, one each or several; queries and pieces are as in one row."""
    call = made(DecodeCase(lengths=(400, 0, 65), queries=(2, 40, 3), heads=(8, 4)))
    for slots, aligned in ((8, True), (6, True), (8, False)):
        found = run(call, slots=slots, cut=Cut(aligned))
        held(call, *found)
    assert all(map(torch.equal, found, run(call, PACES[0], slots=slots, cut=Cut(aligned))))


@pytest.mark.parametrize(
    ("case", "slots"),
    [
        (DecodeCase(lengths=(200, 0, 130, 190), queries=(2, 1, 0, 40), heads=(4, 2)), 7),  # whole units, two a block
        pytest.param(DecodeCase(lengths=(300, 290), heads=(8, 2), page=16, sink=True), 16, marks=pytest.mark.slow),  # in two
        pytest.param(DecodeCase(lengths=(600, 20, 600), queries=2, mask=WINDOW, page=5), 6, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shares_fitted_to_units(case, slots):
    """As equal ones, right, and the same bits again."""
    call = made(case)
    for alone in (0, 4, None):
        found = run(call, slots=slots, cut=Cut(solo_speedup_x4=alone))
        held(call, *found)
        assert all(map(torch.equal, found, run(call, PACES[0], slots=slots, cut=Cut(solo_speedup_x4=alone))))


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 16, 5])
def test_large_tiles(page):
    """Of 128 keys, as calls have whose caches are larger."""
    call = made(DecodeCase(lengths=(300, 1, 129, 0), queries=2, heads=(4, 2), dims=(128, 128), page=page))
    found = run(call, tile_n=128, kv_stages=2)
    held(call, *found)
    assert all(map(torch.equal, found, run(call, "lazy", tile_n=128, kv_stages=2)))


@pytest.mark.parametrize("length", [900, pytest.param(1900, marks=pytest.mark.slow)])
def test_many_pieces_of_few_rows(length):
    """Fewer than a warp adds up at a time, and a row or half of one a warp."""
    call = made(DecodeCase(lengths=(length, 3, 0), heads=(3, 1), dims=(64, 40), queries=(1, 1, 0), sink=True))
    results = [run(call, pace, seed, slots, Cut(elements_per_extra_tile=1 << 20)) for seed, pace in enumerate(PACES) for slots in (32, 5)]
    for found in results[:2]:
        held(call, *found)
    for i, found in enumerate(results[2:]):
        assert all(map(torch.equal, results[i % 2], found))


@pytest.mark.parametrize("rows", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_units_of_few_rows(rows):
    """Several of a key head, where a tile would hold all rows."""
    call = made(DecodeCase(lengths=(200, 3, 70), queries=(3, 1, 0), heads=(8, 2), page=16))
    found = run(call, slots=12, cut=Cut(rows=rows))
    held(call, *found)
    assert all(map(torch.equal, found, run(call, "lazy", slots=12, cut=Cut(rows=rows))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(
            lengths=(270, 133, 128, 200, 131), queries=2, prefix=130, sink=True
        ),  # two queries, so the third sequence is too short to join
        DecodeCase(lengths=(270, 133, 100, 200), queries=(2, 0, 5, 1), prefix=128, page=16),
        DecodeCase(lengths=(270, 133, 0), prefix=128, page=16, split=64),
        DecodeCase(lengths=(270, 150), queries=40, heads=(8, 2), prefix=70),  # softmax and products overlap
        DecodeCase(lengths=(700, 130, 133), prefix=128, heads=(4, 1), dtype=torch.float16, softcap=20.0),  # units in several pieces
    ],
    ids=str,
)
def test_prefix_of_all(case, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(case)
    assert prefix.pays(call)
    held(call, *run(call))


@pytest.mark.slow
@pytest.mark.parametrize("scales", [("head", "all"), (None, "head")], ids=str)
def test_a_prefix_in_eight_bits(scales, monkeypatch):
    """Scales of V multiply the prefix's part of O once."""
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(DecodeCase(lengths=(200, 130, 100), prefix=128, page=16))
    given, exact = with_eight_bits(call, (torch.float8_e4m3fn, torch.int8), scales)
    assert prefix.pays(given)
    held(exact, *run(given))


def test_light_keys_behind_a_prefix_in_fp16(monkeypatch):
    """Each has 2^-21 of the prefix's weight, for which fp16 has three bits."""
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(DecodeCase(lengths=(200, 180), prefix=16, heads=(2, 2), dtype=torch.float16))
    call.q.fill_(1.0)
    call.k_cache.fill_(-0.0625)[:, :16] = 0.125  # scores of -4, and 8 in the prefix
    call.v_cache.fill_(100.0)[:, :16] = 0.0
    o, _ = run(replace(call, scale=1.0))
    for each, length in zip(o, (200, 180), strict=True):
        light = (length - 16) * math.exp(-12)
        torch.testing.assert_close(
            each.double(), torch.full_like(each, 100 * light / (16 + light), dtype=torch.float64), rtol=1e-3, atol=0.0
        )


@pytest.mark.slow
@pytest.mark.parametrize("wild", [-1, 10**6, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("page", [4, 16])
def test_pages_that_do_not_exist(page, wild):
    """They are read as zeros, and nobody else's result changes."""
    call = made(DecodeCase(lengths=(100, 100), page=page))
    o, lse = run(call)
    table = call.page_table.clone()
    table[0, 3] = wild
    spoiled, of_spoiled = run(replace(call, page_table=table))
    assert torch.equal(spoiled[1], o[1]) and torch.equal(of_spoiled[1], lse[1])
    assert spoiled.isfinite().all() and not torch.equal(spoiled[0], o[0])


def test_lengths_beyond_the_cache_and_below_nothing():
    call = made(DecodeCase(lengths=(100, 100, 100)))
    held(replace(call, seqlens=(wild := torch.tensor([100_000, -5, 100], dtype=torch.int32))), *run(replace(call, seqlens=wild)))


@pytest.mark.slow
def test_wild_offsets_of_ragged_queries():
    """They read and write nothing that is not there; the emulator would tell."""
    call = made(DecodeCase(lengths=(70, 90, 100), queries=(2, 3, 1)))
    for cu in ([0, 5, 2, 6], [-4, 100, 101, 102], [0, 2, 2**31 - 1, -5]):
        run(replace(call, cu_seqlens_q=torch.tensor(cu, dtype=torch.int32)))


@pytest.fixture
def backend(monkeypatch):
    """What public calls get, as on a GPU, where values are read only if the caller asks."""
    found = Emulated()
    monkeypatch.setattr(decode_operator, "choose", lambda problem, name, **_: found)
    monkeypatch.setattr(append_operator, "_backend", lambda _: found)
    monkeypatch.setattr(cache_values, "wanted", lambda device, check: check)
    monkeypatch.setattr(bound, "_KEPT", {})
    decode_cache.forget()
    with found.on_gpu():
        yield found
    assert len(decode_cache._KNOWN) == 1
    decode_cache.forget()


@pytest.fixture
def bound_once(backend, monkeypatch):
    """To be called behind the first call: others may not be bound again."""

    def once():
        monkeypatch.setattr(type(backend), "bind_decode", None)
        monkeypatch.setattr(type(backend), "bind_append", None)

    return once


def test_public_calls(bound_once):
    call = made(QUICK[0])
    given = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, "causal": True, "return_lse": True}
    for lengths in (call.seqlens, call.seqlens, torch.tensor([0, 1, 20, 30, 65, 100], dtype=torch.int32)):
        held(replace(call, seqlens=lengths), *tilewise.decode(**given, cache_seqlens=lengths))
        bound_once()


def test_public_calls_into_a_tensor_of_the_callers(bound_once, monkeypatch):
    """The kernel writes there, whatever the strides between rows, and nothing beside."""
    call = made(QUICK[0])
    shape = *call.q.shape[:-1], call.v_cache.shape[3]
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    for _ in range(2):
        whole = torch.full((*shape[:-1], shape[-1] + 8), torch.nan, dtype=call.q.dtype)
        out = whole[..., : shape[-1]]
        given = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, "cache_seqlens": call.seqlens, "out": out}
        o, lse = tilewise.decode(**given, return_lse=True)
        assert o is out and whole[..., shape[-1] :].isnan().all()
        held(call, o, lse)
        bound_once()


def test_public_calls_with_new_tokens(bound_once):
    """They are written by the appending kernel, where each sequence ends now."""
    call = made(DecodeCase(lengths=(1, 63, 64, 65, 300)))
    for first in (1, 2):
        lengths = torch.where(call.seqlens > first, call.seqlens - first, 0)
        k, v = (torch.stack([x[b, n : n + 1] for b, n in enumerate(lengths.tolist())]) for x in (call.k_cache, call.v_cache))
        grown = replace(call, seqlens=lengths + 1)
        spoiled = [x.clone() for x in (call.k_cache, call.v_cache)]
        for x in spoiled:
            for b, n in enumerate(lengths.tolist()):
                x[b, n:] = torch.nan
        given = {"q": call.q, "k_cache": spoiled[0], "v_cache": spoiled[1], "k": k, "v": v, "return_lse": True}
        held(grown, *tilewise.decode(**given, cache_seqlens=lengths))
        bound_once()


def test_public_calls_over_caches_of_eight_bits(bound_once):
    """The kernel reads the scales of each call."""
    call = made(DecodeCase(lengths=(70, 1, 130, 0), heads=(4, 2), dims=(64, 64)))
    for seed in range(3):
        eight, exact = with_eight_bits(call, (torch.float8_e4m3fn, torch.float8_e4m3fn), ("head", "sequence"), seed)
        fields = "q", "k_cache", "v_cache", "k_scale", "v_scale"
        given = {name: getattr(eight, name) for name in fields} | {"cache_seqlens": eight.seqlens, "causal": True}
        held(exact, *tilewise.decode(**given, return_lse=True))
        bound_once()


@pytest.mark.slow
def test_public_calls_with_a_prefix_and_tensors_of_their_own(bound_once, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(DecodeCase(lengths=(270, 133, 100, 200), queries=2, prefix=128, page=16, sink=True))
    fields = "q", "k_cache", "v_cache", "page_table", "sink", "shared_prefix"
    for each in (call, replace(call, sink=call.sink + 1.0)):
        given = {name: getattr(each, name) for name in fields} | {"cache_seqlens": each.seqlens}
        held(each, *tilewise.decode(**given, return_lse=True))
        bound_once()


def test_calls_are_bound_once(monkeypatch):
    """Whatever their lengths, strides and pages; also those that no kernel covers."""
    monkeypatch.setattr(bound, "_KEPT", {})
    call = made(DecodeCase(lengths=(0, 1, 63, 64, 65, 300)))
    shorter = replace(call, seqlens=torch.tensor([0, 1, 20, 30, 65, 100], dtype=torch.int32))
    apart = torch.empty(*call.q.shape[:3], 2 * call.q.shape[3], dtype=call.q.dtype)[..., : call.q.shape[3]].copy_(call.q)
    with Emulated().on_gpu():
        found = decoding.bound(call)
        for each in (call, shorter, replace(call, q=apart)):
            assert decoding.bound(each) is found
            assert all(map(torch.equal, found(each.tensors, each.seqlens), by_kernel(each)))
        fewer = replace(call, q=call.q[:3], k_cache=call.k_cache[:3], v_cache=call.v_cache[:3], seqlens=call.seqlens[:3])
        assert decoding.bound(fewer) is not found and len(bound._KEPT) == 2
        refused = replace(call, scale=-1.0)
        assert decoding.bound(refused) is None
        monkeypatch.setattr(decoding, "bind", None)
        assert decoding.bound(refused) is None
