"""Random calls of decode on a GPU (decode_fuzz.py), held as on the CPU: each kind compiles its kernels once, and has problems of any sizes.

How many, and which: TILEWISE_FUZZ_CALLS (400), TILEWISE_FUZZ_SEED (0).
"""

import os

import pytest
import torch
from decode_fuzz import checked, kind, problem
from hopper_problems import NEEDS_HOPPER

import tilewise as tw
from tilewise.backends.hopper.decode import prefix

pytestmark = NEEDS_HOPPER

CALLS, SEED = (int(os.environ.get(f"TILEWISE_FUZZ_{name}", number)) for name, number in (("CALLS", 400), ("SEED", 0)))
KINDS = 40


@pytest.mark.parametrize("number", range(KINDS))
def test_random_calls(number, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    one = kind(1000 * SEED + number, kernels=True)
    for seed in range(1000 * SEED + number, 1000 * SEED + CALLS, KINDS):
        made = problem(one, seed, "cuda", most=1000)
        try:
            checked(made, alone=one.split)
            torch.cuda.synchronize()
        except Exception as failure:
            failure.add_note(f"kind {number}, seed {seed}: {one}, {made}")
            raise


def test_what_does_not_exist_is_not_read():
    """Lengths and pages out of every range, in all kinds that have pages, without a fault, and without a word to sequences that are right."""
    for number in range(KINDS):
        one = kind(1000 * SEED + number, kernels=True)
        if not one.box or one.new or one.prefix or one.general:
            continue
        made = problem(one, number, "cuda", most=1000)
        given, batch = made.given, made.call.seqlens.shape[0]
        if batch == 1 or "cache_seqlens" not in given or not isinstance(given["cache_seqlens"], torch.Tensor):
            continue
        table, lengths = given["page_table"].clone(), given["cache_seqlens"].clone()
        table[0], lengths[0] = torch.iinfo(table.dtype).max, torch.iinfo(lengths.dtype).max
        expected, found = (tw.decode(**given | words) for words in ({}, {"page_table": table, "cache_seqlens": lengths}))
        torch.cuda.synchronize()
        first = 1 if made.call.cu_seqlens_q is None else int(made.call.cu_seqlens_q[1])
        torch.testing.assert_close(found[first:], expected[first:], rtol=2e-2, atol=2e-2, equal_nan=True)  # they are shared out otherwise
