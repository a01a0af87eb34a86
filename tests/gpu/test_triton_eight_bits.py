"""Triton's forward pass in 8 bits on a GPU: the quantiser's bits are the definition's (backends/eight_bits.py), the results the emulation's."""

import pytest
from needs_triton import NEEDS_TRITON

pytest.importorskip("triton")

import triton_eight_bits as problems
from eight_bits_problems import Quantised
from triton_eight_bits_cases import BITS, CASES, CHANGES, GIVEN, SPOILED

from tilewise.masks import Causal, SlidingWindow

pytestmark = NEEDS_TRITON

LONG = [
    Quantised(way, n, k, mask=mask, batch=2, heads=(4, 2), dims=(128, 128))
    for way in ("int8", "int8_qk")
    for mask in (Causal(), SlidingWindow(300, 0))
    for n, k in ((1000, 2100), (2049, 2049))
]


@pytest.mark.parametrize("case", [*CASES, *GIVEN, *LONG], ids=str)
def test_cases(case):
    problems.holds(case, device="cuda")


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("case", [*BITS, Quantised("int8", 700, 5000, batch=2, heads=(4, 2), dims=(128, 128))], ids=str)
def test_the_quantiser_gives_the_contracts_bits(case, spoiled):
    problems.quantises_to_the_bit(case, spoiled and case.seqlen_q > 5, device="cuda")


@pytest.mark.parametrize("case", SPOILED, ids=str)
def test_numbers_that_are_not_finite(case):
    problems.holds(case, None, True, device="cuda")


@pytest.mark.parametrize("names", [[], ["sink"], ["softcap"], ["alibi_slopes"], [*CHANGES]], ids="-".join)
@pytest.mark.parametrize("spoiled", [False, True])
def test_changed_scores(names, spoiled):
    for way in ("int8", "int8_qk"):
        case = Quantised(way, 40, 100, mask=Causal(), row_max=True)
        problems.holds(case, {name: CHANGES[name] for name in names}, spoiled, device="cuda")


def test_e4m3_is_torchs():
    problems.rounds_to_e4m3("cuda")


def test_scales():
    problems.holds_where_scales_are_not_finite("cuda")
    for way in ("given", "given int8"):
        problems.holds_for_scales_of_any_size_and_sign(way, "cuda")


@pytest.mark.parametrize("way", ["int8", "int8_qk"])
def test_documents_hard_inputs_and_gradients(way):
    problems.packed(way, "cuda")
    problems.holds_on_hard_inputs(way, "cuda")
    problems.keeps_gradients(way, "cuda")
