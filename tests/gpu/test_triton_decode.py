"""Triton's decode and append on a GPU: random calls (decode_fuzz.py), the bits that torch appends, and a CUDA graph of both.

How many random calls, and which: TILEWISE_FUZZ_CALLS (200), TILEWISE_FUZZ_SEED (0). A kind compiles its kernels once.
"""

import os
from dataclasses import replace
from functools import partial

import append_problems
import decode_problems
import pytest
import torch
from append_problems import CASES, AppendCase
from decode_fuzz import checked, kind, problem
from decode_problems import DecodeCase
from needs_triton import NEEDS_TRITON

import tilewise as tw
from tilewise.backends.triton import Triton

pytestmark = NEEDS_TRITON

CALLS, SEED = (int(os.environ.get(f"TILEWISE_FUZZ_{name}", number)) for name, number in (("CALLS", 200), ("SEED", 0)))
KINDS = 40


@pytest.mark.parametrize("number", range(KINDS))
def test_random_calls(number):
    one = kind(1000 * SEED + number, kernels=True)
    if number % 4 == 0 and not one.latent:
        one = replace(one, dtype=torch.float32)
    for seed in range(1000 * SEED + number, 1000 * SEED + CALLS, KINDS):
        made = problem(one, seed, "cuda", most=1000)
        try:
            checked(made, alone=one.split, run=partial(tw.decode, backend="triton"), backend="triton")
            torch.cuda.synchronize()
        except Exception as failure:
            failure.add_note(f"kind {number}, seed {seed}: {one}, {made}")
            raise


@pytest.mark.parametrize("case", [*CASES, AppendCase(lengths=(5, 70), new=2, dims=(576, 512), rotary=32, dtype=torch.float32)], ids=str)
def test_append(case, monkeypatch):
    call = append_problems.made(case, device="cuda")
    want = append_problems.by_torch(call, monkeypatch)
    ends = Triton().append(call)
    assert append_problems.same(call.k_cache, want[0]) and append_problems.same(call.v_cache, want[1])
    assert torch.equal(ends.cpu().long(), torch.tensor(case.lengths) + torch.tensor(case.new))


def test_a_graph_follows_lengths():
    """Captured once, replayed with other lengths: what the programs read is on the device."""
    call = decode_problems.made(DecodeCase(lengths=(700, 3000), queries=2, page=16, heads=(8, 2), dims=(128, 128)), device="cuda")
    bound = Triton().bind_decode(call)
    bound(call.tensors, call.seqlens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = bound(call.tensors, call.seqlens)
    for lengths in ((700, 3000), (1, 40), (0, 2999)):
        call.seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        want = bound(call.tensors, call.seqlens)
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
        decode_problems.held(call, o, lse)
