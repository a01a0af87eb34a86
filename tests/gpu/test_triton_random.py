"""Triton's forward and backward passes on random problems of attention, on a GPU: masks, lengths, layouts and what changes scores.

How many problems, and which: TILEWISE_FUZZ_CALLS (200), TILEWISE_FUZZ_SEED (0). A kind compiles its kernels once, for each form of mask.
"""

import os
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from needs_triton import NEEDS_TRITON

from tilewise.backends.triton import Triton
from tilewise.masks import Causal, ChunkedCausal, DeviceDocuments, Documents, Full, SlidingWindow
from tilewise.testing import conformance, poison, tolerance
from tilewise.testing.cases import Case, make, upstream
from tilewise.testing.strategies import cases, cumulative

pytestmark = NEEDS_TRITON

CALLS, SEED = (int(os.environ.get(f"TILEWISE_FUZZ_{name}", number)) for name, number in (("CALLS", 200), ("SEED", 0)))
KINDS = 25
DIMS = 64, 64, 128, 128, 96, 192, 256
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129]), st.integers(0, 200), st.integers(200, 700))
INNER = Full(), Causal(), SlidingWindow(50, 0), SlidingWindow(9, 5, "top_left"), ChunkedCausal(40)


def features(number: int) -> dict:
    """Of a kind: fields of a `Case` that kernels are compiled for."""
    r = Random(1000 * SEED + number)
    dim, dim_v = (r.choice((*DIMS, r.randint(1, 256))) for _ in range(2))
    return {
        "dtype": r.choice(("bf16", "bf16", "fp16", "fp32")), "head_dim": dim, "head_dim_v": r.choice((None, None, dim_v)),
        "softcap": r.choice((0.0, 0.0, 2.5)), "bias": r.choice((None, None, "", "q", "hq", "bhq")), "alibi": r.choice((None, None, "h", "bh")),
        "sink": r.random() < 0.3, "dropout": r.choice((0.0, 0.0, 0.0, 0.25)), "lse_grad": r.random() < 0.3, "diagonal": False,
    }  # fmt: skip


@pytest.mark.parametrize("number", range(KINDS))
def test_random_problems(number):
    """What is hidden is poisoned, so is memory around and before; no failure is shrunk, as each smaller problem may be one more kernel to compile."""
    fixed, tried = features(number), Counter()

    @seed(1000 * SEED + number)
    @settings(max_examples=CALLS // KINDS, derandomize=False, database=None, deadline=None, phases=[Phase.generate])
    @given(cases(LENGTHS, st.just(fixed["head_dim"]), (fixed["dtype"],), (0.0,)), st.integers(0, 1 << 20))
    def some(case, case_seed):
        case = replace(case, **fixed)
        run = (conformance.run_hidden, conformance.run_case, conformance.run_row_max)[case_seed % 5 % 3]
        try:
            run(Triton(), case, seed=case_seed, device="cuda")
            torch.cuda.synchronize()
        except Exception as failure:
            failure.add_note(f"TILEWISE_FUZZ_SEED {SEED}, kind {number}, {run.__name__}, seed {case_seed}: {case}")
            raise
        tried[run.__name__] += 1

    print(f"TILEWISE_FUZZ_SEED {SEED}, kind {number}: {fixed}")
    some()
    assert sum(tried.values()) > 0, tried


@pytest.mark.parametrize("number", range(KINDS))
def test_random_documents_whose_lengths_are_on_the_gpu(number):
    """As the mask that they are when they are read."""
    fixed = features(KINDS + number) | {"layout": "bshd", "alibi": None, "bias": None}
    print(f"TILEWISE_FUZZ_SEED {SEED}, kind {number}: {fixed}")

    @seed(1000 * SEED + number)
    @settings(max_examples=max(1, CALLS // KINDS // 2), derandomize=False, database=None, deadline=None, phases=[Phase.generate])
    @given(st.data(), st.integers(0, 1 << 20))
    def some(data, case_seed):
        lengths, documents = [data.draw(LENGTHS) for _ in range(2)], data.draw(st.integers(1, 5))
        ends = [cumulative(data.draw, length, documents) for length in lengths]
        inner, (heads_k, group) = data.draw(st.sampled_from(INNER)), (data.draw(st.integers(1, 3)) for _ in range(2))
        mask = Documents(*ends, inner=inner)
        sizes = dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True)) | {"batch": 1, "heads_q": heads_k * group, "heads_k": heads_k}
        try:
            held_by_lengths(Case(**sizes, **fixed, mask=mask), inner, ends, case_seed)
            torch.cuda.synchronize()
        except Exception as failure:
            failure.add_note(f"TILEWISE_FUZZ_SEED {SEED}, kind {number}, seed {case_seed}: {fixed}, {sizes}, {mask!r}")
            raise

    some()


def held_by_lengths(case: Case, inner, ends: list[list[int]], case_seed: int) -> None:
    call, (d_o, d_lse) = make(case, case_seed, "cuda", grad=True), upstream(case, case_seed, "cuda")
    unread = DeviceDocuments(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in ends), inner=inner)
    hidden, hidden_d_o, hidden_d_lse = poison.hide(call, d_o, d_lse)
    given = replace(hidden, mask=unread)
    with poison.memory():
        o, lse = Triton().forward(given)
        grads = Triton().backward(given, o, lse, hidden_d_o, hidden_d_lse)
    expect = tolerance.expected(call, d_o, d_lse)
    tolerance.check_outputs(call, o, lse, expect)
    tolerance.check_gradients(call, grads, d_o, d_lse, expect)
