"""Triton's decode, interpreted: right by the one tolerance, no NaN of unused tokens, nothing read that does not exist."""

import math

import pytest
import torch
import triton_problems as problems
from decode_problems import DecodeCase
from interpreted import interpreted

from tilewise.backends.triton import decode, targets
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import DecodeCall

pytestmark = pytest.mark.skipif(not targets.installed(), reason="Triton is not installed")

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
FEW = 12  # random calls, of which half run every time
CHANGES = {"softcap": 5.0, "alibi": True, "sink": True}
CASES = [
    DecodeCase(lengths=(0, 1, 63, 64, 65, 300)),
    DecodeCase(
        lengths=(70, 1, 300, 9), queries=(3, 1, 0, 30), heads=(6, 2), page=16, mask=SlidingWindow(100, 0), dtype=torch.float16, **CHANGES
    ),
    DecodeCase(lengths=(70, 0, 140), queries=5, page=4, heads=(2, 2), dtype=torch.float32),
    DecodeCase(lengths=(70, 0, 140), queries=(0, 0, 0), page=16, sink=True),
    DecodeCase(lengths=(70, 3, 500, 0), queries=2, leftpad=(5, 3, 200, 0), entries=True, mask=Causal(offset=-2)),
    DecodeCase(lengths=(70, 1, 600), queries=4, mask=SlidingWindow(50, 3), page=256),
    DecodeCase(lengths=(2, 40, 300), queries=3, heads=(8, 2), mask=Full(), page=64),
    DecodeCase(lengths=(70, 3, 0, 130), queries=7, tree=7, heads=(2, 1)),
    DecodeCase(lengths=(70, 3, 0, 130), queries=3, tree=9, page=16, heads=(2, 1)),
    DecodeCase(lengths=(1500,), heads=(16, 1), **CHANGES),
    DecodeCase(lengths=(1500, 20), split=100, page=5),
    DecodeCase(lengths=(2000, 0, 3, 700, 1025), page=64),  # parts by length: one of all, and, with few sequences, several on average
    DecodeCase(lengths=(300, *([3] * 130)), heads=(1, 1), page=16),
    DecodeCase(lengths=(1300, 20, 600), queries=3, heads=(2, 1), dtype=torch.float16, **CHANGES),
    DecodeCase(lengths=(1500, 20, 900), queries=2, heads=(2, 1), leftpad=(900, 0, 7), entries=True, sink=True),
    DecodeCase(lengths=(1500, 900, 5), queries=5, heads=(8, 1), page=5, tree=7),
    DecodeCase(lengths=(1500, 30, 700), queries=4, heads=(2, 1), mask=SlidingWindow(600, 0), dims=(96, 40)),
    DecodeCase(lengths=(70,), dims=(72, 40), **CHANGES),
    DecodeCase(lengths=(70,), dims=(192, 128), queries=9, dtype=torch.float16),
    DecodeCase(lengths=(70,), dims=(256, 256), heads=(2, 1)),
    DecodeCase(lengths=(40,), dims=(576, 512), latent=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case):
    interpreted(problems.holds, case)


@pytest.mark.parametrize(
    ("batch", "shape", "sequences", "splits"),
    [
        (16, {}, 128, 2),  # 8 key heads
        (64, {}, 128, 3),  # more than two a multiprocessor without any parts: twelve
        (300, {}, 1024, 1),
        (1, {}, 0, 33),
        (2000, {}, 0, 1),
        (64, {"capacity": 256}, 0, 1),  # of which there is one part
        (64, {"queries": 17}, 0, 1),
        (4, {"packed": True}, 0, 5),
        (1024, {"heads": 512}, 0, 1),  # parts would take 1 GB
    ],
    ids=str,
)
def test_how_many_parts_there_are(batch, shape, sequences, splits, monkeypatch):
    """Of a GPU with 132 multiprocessors."""
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    shape = {"capacity": 1 << 14, "queries": 1, "packed": False, "heads": 32} | shape
    numbers = torch.empty(1, dtype=torch.bfloat16, device="cpu")
    lead = (batch * shape["queries"],) if shape["packed"] else (batch, shape["queries"])
    cache, lengths = numbers.expand(batch, shape["capacity"], 8, 128), torch.empty(1, dtype=torch.int32, device="cpu")
    absent = dict.fromkeys(("page_table", "cache_batch_idx", "leftpad", "tree", "split"))
    call = DecodeCall(
        q=numbers.expand(*lead, shape["heads"], 128), k_cache=cache, v_cache=cache, seqlens=lengths.expand(batch),
        cu_seqlens_q=lengths.expand(batch + 1) if shape["packed"] else None, max_seqlen_q=shape["queries"], shared_prefix=0,
        mask=Causal(), scale=1.0, **absent,
    )  # fmt: skip
    found = decode.Shares(call, target=targets.Target("sm_90"))
    assert (found.sequences, found.splits) == (sequences, splits)


@pytest.mark.parametrize(
    "given",
    [
        (DecodeCase(lengths=(0, 1, 63, 300, 7), queries=2), 2, 16, 16),
        (DecodeCase(lengths=(70, 1, 300, 9), queries=(3, 1, 0, 20), heads=(6, 2), mask=SlidingWindow(40, 0), **CHANGES), 3, 1, 0),
        (DecodeCase(lengths=(70, 3, 0, 130), queries=7, tree=7, leftpad=(5, 0, 0, 20), heads=(2, 1), dtype=torch.float32), 3, 4, 5),
        (DecodeCase(lengths=(1500, 20), split=100, entries=True, alibi=True), 2, 1, 0),
        (DecodeCase(lengths=(70, 130), queries=3, dims=(96, 64)), 2, 2, 0, 16),
        (DecodeCase(lengths=(70, 130, 2), queries=3), 4, 8, 16, 0, (E4M3, E4M3)),
    ],
    ids=str,
)
def test_shares_of_ranks(given):
    interpreted(problems.holds_shares, *given)


@pytest.mark.parametrize("lengths", [(70, 1), (1500,)])
def test_what_is_to_be_merged_need_not_be_rounded(lengths):
    interpreted(problems.rounds_wide_outputs, DecodeCase(lengths=lengths, queries=2, sink=True))


@pytest.mark.parametrize(
    "given", [((2, 3, 5, 4, 128), 16, torch.bfloat16), ((5, 70, 3, 40), 3, torch.float16), ((1, 1, 9, 2, 512), 0, torch.float32)], ids=str
)
def test_parts_are_put_together(given):
    interpreted(problems.merges, *given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_keys_that_are_to_be_added_to_others(dtype):
    interpreted(problems.rounds_wide_keys, dtype)


def test_indices_in_int64():
    interpreted(problems.holds_with_int64, DecodeCase(lengths=(70, 1, 90, 9), queries=(3, 1, 0, 5), page=16))
    interpreted(problems.holds_with_int64, DecodeCase(lengths=(70, 3, 100, 0), leftpad=(5, 3, 20, 0), entries=True))


@pytest.mark.parametrize(
    ("case", "kinds", "scales", "arch"),
    [
        (DecodeCase(lengths=(70, 1, 130, 0), queries=3, page=16), (E4M3, E4M3), ("token", "head"), "sm_80"),
        (DecodeCase(lengths=(70, 1, 130, 0), queries=3, page=16), (E4M3, E4M3), ("token", "head"), "sm_89"),
        (DecodeCase(lengths=(70, 1, 100, 0), dtype=torch.float16), (E4M3, INT8), ("all", "sequence"), "sm_80"),
        (DecodeCase(lengths=(70, 300), dims=(72, 40), entries=True, dtype=torch.float32), (INT8, E4M3), (None, "token"), "sm_80"),
    ],
    ids=str,
)
def test_caches_of_eight_bits(case, kinds, scales, arch):
    interpreted(problems.holds_in_eight_bits, case, kinds, scales, arch)


PREFIXED = [
    DecodeCase(lengths=(270, 133, 128, 200, 131), queries=2, prefix=130, sink=True),  # the third sequence is too short to join
    DecodeCase(lengths=(270, 133, 100, 200), queries=(2, 0, 5, 1), prefix=128, page=16),
    DecodeCase(lengths=(90, 80), queries=20, heads=(8, 2), prefix=40),
    DecodeCase(lengths=(600, 130, 133), prefix=128, heads=(4, 1), dtype=torch.float16, softcap=20.0),
    DecodeCase(lengths=(80, 90, 75), queries=4, tree=7, prefix=70, page=16),  # of the last, the tree hides some of the prefix
    DecodeCase(lengths=(70, 80, 0), entries=True, prefix=70, dtype=torch.float32),
]


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("case", PREFIXED, ids=str)
def test_a_prefix_of_all_is_read_once(case):
    interpreted(problems.reads_a_prefix_once, case)


@pytest.mark.parametrize("scales", [("head", "all"), ("token", "head")], ids=str)
def test_a_prefix_in_eight_bits(scales):
    interpreted(problems.reads_a_prefix_once, DecodeCase(lengths=(100, 90, 70), prefix=64, page=16), scales)


@pytest.mark.parametrize(
    ("half", "interleaved", "table"), [(16, False, torch.float32), (32, True, torch.bfloat16), (3, False, torch.float16)]
)
def test_queries_that_are_yet_to_be_rotated(half, interleaved, table):
    case = DecodeCase(lengths=(70, 1, 130), queries=2 if interleaved else (3, 1, 0), dims=(96, 64) if half == 3 else (64, 64))
    interpreted(problems.holds_with_rotary, case, half, interleaved, table)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96)])
def test_what_some_queries_see_stays_theirs(number, dims):
    interpreted(problems.keeps_what_some_see_from_others, DecodeCase(lengths=(100,), queries=5, dims=dims), number)


def test_a_weight_of_0_meets_an_infinity():
    interpreted(problems.a_weight_of_0_meets_an_infinity, DecodeCase(lengths=(100,), queries=5, dims=(64, 64)))


@pytest.mark.parametrize(
    "case", [DecodeCase(lengths=(70, 130), page=16), DecodeCase(lengths=(70, 130, 9), queries=2, entries=True)], ids=str
)
def test_what_does_not_exist_is_not_read(case):
    interpreted(problems.does_not_read_what_does_not_exist, case)


def test_bound_calls():
    interpreted(problems.writes_where_it_is_told, DecodeCase(lengths=(70, 300), queries=2, page=16))


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("seed", range(FEW))
def test_random_calls(seed):
    interpreted(problems.random_call, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, FEW + 400, 50))
def test_many_random_calls(first):
    assert sum(interpreted(problems.random_call, seed) for seed in range(first, first + 50)) > 30
