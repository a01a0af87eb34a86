"""Random calls three times on a GPU, by Hopper's kernels and by Triton's: fresh memory is NaN, later calls have the first one's bits.

Attention's cases are drawn out of the quick conformance suite, so that their kernels are those of other tests here. TILEWISE_TEST_SEED says which.
"""

import random
import zlib

import pytest
import three_calls
import torch
from hypothesis import given, seed, settings
from sampled import SEED

from tilewise.errors import UnsupportedError
from tilewise.testing.cases import QUICK

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = "hopper", "triton"
EACH = 12  # random cases of attention, and calls of decode, by each backend
TAKEN = [case for case in QUICK if case.dtype in ("bf16", "fp16") and not case.diagonal]  # a diagonal is no argument of `attention`


@pytest.fixture(autouse=True)
def poisoned():
    with three_calls.fresh_is_nan():
        yield


def draw(words: str) -> random.Random:
    return random.Random(zlib.crc32(f"{SEED} {words}".encode()))


def taken(run) -> None:
    """`run`; skipped where the backend refuses the call, or is not of this GPU."""
    try:
        run()
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("turn", range(EACH))
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(backend, turn):
    case = draw(f"attention {backend}").sample(TAKEN, EACH)[turn]
    taken(lambda: three_calls.hold_attention(case, bool(turn % 2), backend, "cuda"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed(backend):
    refused = []

    @seed(int(SEED))
    @settings(max_examples=6, deadline=None)
    @given(three_calls.packed().filter(lambda problem: problem["dtype"] in ("bf16", "fp16")))
    def drawn(problem):
        expected = three_calls.varlen(problem, "reference", True, True, torch.float64)
        try:
            three_calls.hold_varlen(problem, expected, backend, True, True, "cuda")
        except UnsupportedError as refusal:
            refused.append(str(refusal))

    drawn()
    if len(refused) >= 6:
        pytest.skip(refused[0])


@pytest.mark.parametrize("turn", range(EACH))
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode(backend, turn):
    number = draw(f"decode {backend} {turn}").randrange(40)  # of the kinds that test_hopper_decode_fuzz.py compiles
    taken(lambda: three_calls.hold_decode(number, bool(turn % 2), True, "cuda", 1000, backend))
