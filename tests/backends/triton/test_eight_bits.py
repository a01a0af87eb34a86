"""Triton's forward pass in 8 bits, interpreted: the quantiser's bits are the contract's, the results the emulation's; what is refused says so."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
import triton_eight_bits as problems
from eight_bits_problems import Quantised
from interpreted import interpreted
from triton_eight_bits_cases import BITS, CASES, CHANGES, GIVEN, SPOILED

from tilewise.backends.triton import Triton
from tilewise.masks import Causal
from tilewise.problem import Problem


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case):
    interpreted(problems.holds, case)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("case", GIVEN, ids=str)
def test_tensors_in_eight_bits(case):
    interpreted(problems.holds, case)


def test_tensors_in_eight_bits_that_are_not_finite():
    interpreted(problems.holds_where_scales_are_not_finite)


@pytest.mark.parametrize("way", ["given", "given int8"])
def test_scales_of_tokens_of_any_size_and_sign(way):
    interpreted(problems.holds_for_scales_of_any_size_and_sign, way)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("case", SPOILED, ids=str)
def test_numbers_that_are_not_finite(case):
    """They reach the rows that see them, and no others."""
    interpreted(problems.holds, case, None, True)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("names", [["sink"], ["softcap"], ["alibi_slopes"], [*CHANGES]], ids="-".join)
@pytest.mark.parametrize("way", ["int8", "int8_qk"])
@pytest.mark.parametrize("spoiled", [False, True])
def test_changed_scores(way, names, spoiled):
    case = Quantised(way, 40, 100, mask=Causal(), row_max=True)
    interpreted(problems.holds, case, {name: CHANGES[name] for name in names}, spoiled)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("case", BITS, ids=str)
def test_the_quantiser_gives_the_contracts_bits(case, spoiled):
    interpreted(problems.quantises_to_the_bit, case, spoiled and case.seqlen_q > 5)


def test_e4m3_is_torchs():
    interpreted(problems.rounds_to_e4m3)


@pytest.mark.parametrize("way", ["int8", "int8_qk"])
def test_documents_whose_lengths_are_on_the_device(way):
    interpreted(problems.packed, way)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_gradients_are_those_of_16_bits(precision):
    interpreted(problems.keeps_gradients, precision)


@pytest.mark.parametrize("way", ["int8", "int8_qk"])
def test_hard_inputs(way):
    """V far from 0, channels of K with outliers, large scores: no worse than the emulation."""
    interpreted(problems.holds_on_hard_inputs, way)


def test_what_is_refused():
    given = Problem(device="cuda", dtype=torch.bfloat16, head_dim=64, head_dim_v=64, group=1, mask="full", capability=(8, 0))
    for fine in ({}, {"precision": "int8"}, {"precision": "int8_qk", "row_max": True}, {"precision": "fp8", "grad": True}):
        assert Triton().why_not(replace(given, **fine)) == []
    e4m3 = replace(given, dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, scales=("token", "token", "head"))
    assert Triton().why_not(e4m3) == []
    assert Triton().why_not(replace(e4m3, v_dtype=torch.float32)) == [
        "beside q in torch.float8_e4m3fn it takes v in float8_e4m3fn, bf16 or fp16, not torch.float32"
    ]
