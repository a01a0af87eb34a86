"""The long gate of the Hopper backend on a GPU (`-m slow`): FULL, and random problems for ten minutes in all.

What has a backward pass there is held to it, in poisoned memory; what has only a forward pass to that. TILEWISE_FUZZ_SECONDS changes the time
of each of the parts, which may run side by side.
"""

import os
from collections import Counter
from time import monotonic

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tilewise.backends.hopper import Hopper
from tilewise.sm90.jit import why_not_here
from tilewise.testing import conformance
from tilewise.testing.cases import FULL, make
from tilewise.testing.strategies import cases

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

PARTS = 10
SECONDS = float(os.environ.get("TILEWISE_FUZZ_SECONDS", 60))
LENGTHS = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128, 129]), st.integers(0, 200), st.integers(200, 700))
HEAD_DIMS = st.one_of(st.sampled_from([64, 96, 128, 192, 256]), st.integers(1, 32).map(lambda n: 8 * n))


def held(case, case_seed: int = 0) -> str:
    """What the backend was held to: "both" passes, the "forward" one, or "nothing", where it has none for the case."""
    backend = Hopper()
    why_not = [backend.why_not(make(case, case_seed, "cuda", grad).problem) for grad in (False, True)]
    try:
        if not why_not[1]:
            conformance.run_hidden(backend, case, seed=case_seed, device="cuda")
            return "both"
        if not why_not[0]:
            conformance.run_forward(backend, case, seed=case_seed, device="cuda")
            return "forward"
    except AssertionError as failure:
        raise AssertionError(f"{case.id}: {failure}") from None
    return "nothing"


@pytest.mark.parametrize("part", range(16))
def test_full(part):
    tried = Counter(held(case) for case in FULL[part::16])
    assert tried["both"] + tried["forward"] > 10, tried


@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems_for_a_while(part):
    """No failure is shrunk: each smaller problem may be one more kernel to compile."""
    until, tried, batch = monotonic() + SECONDS, Counter(), 0
    while monotonic() < until:

        @seed(1_000_000 * part + batch)
        @settings(max_examples=50, derandomize=False, database=None, phases=[Phase.generate])
        @given(cases(LENGTHS, HEAD_DIMS, ("bf16", "fp16"), (0.0,)), st.integers(0, 1 << 20))
        def some(case, case_seed):
            if monotonic() < until:
                tried[held(case, case_seed)] += 1

        some()
        batch += 1
    print(f"part {part}: {dict(tried)}")
    assert tried["both"] + tried["forward"] > 0
