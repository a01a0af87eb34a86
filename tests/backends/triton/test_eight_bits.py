"""Triton's forward pass in 8 bits, interpreted: the quantiser's bits are the contract's, the results the emulation's; what is refused says so."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
import triton_eight_bits as problems
from eight_bits_problems import Quantised
from interpreted import interpreted

from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.triton import Triton
from tilewise.masks import Causal, ChunkedCausal, Dense, Documents, PrefixLM, SlidingWindow
from tilewise.problem import Problem

FP16 = torch.float16
DENSE = Dense(torch.rand(70, 150, generator=torch.Generator().manual_seed(5)) > 0.4)
DENSE_ROWS = Dense(torch.rand(10, 150, generator=torch.Generator().manual_seed(5)) > 0.4)
CASES = [
    *(Quantised(way, 70, 150, mask=Causal(), row_max=True) for way in RECIPES),
    Quantised("int8", 130, 300, mask=SlidingWindow(40, 3), dims=(72, 40)),
    Quantised("int8", 40, 150, batch=2, heads=(4, 2), dtype=FP16, scale=-0.2),
    Quantised("int8_qk", 40, 150, batch=2, heads=(4, 2), dtype=FP16, dims=(96, 96)),
    Quantised("int8", 200, 30, mask=Causal(), row_max=True),  # rows that see nothing
    Quantised("int8_qk", 70, 150, mask=Documents((0, 20, 60), (0, 30, 130), inner=Causal())),
    Quantised("int8", 70, 150, mask=DENSE),
    Quantised("fp8", 70, 150, mask=ChunkedCausal(11)),
    Quantised("int8", 30, 140, dims=(192, 128)),
    Quantised("int8", 20, 140, dims=(300, 288), mask=PrefixLM(7)),
    Quantised("fp8", 10, 140, dims=(512, 512), heads=(1, 1)),
    *(Quantised("int8", 5, 20, dims=(d, d), row_max=True) for d in (1, 3, 8, 17)),
    *(Quantised("int8", n, k, heads=(1, 1)) for n, k in ((1, 1), (3, 15), (2, 16), (10, 127), (10, 128), (10, 129), (3, 0), (0, 3))),
]
GIVEN = [
    Quantised("given", 70, 40, per=("token", "tile", "head"), mask=Causal(), row_max=True),
    Quantised("given", 40, 300, batch=2, heads=(4, 2), per=("head", "head", "head"), scale=-0.2, dims=(72, 40)),
    Quantised("given int8", 40, 150, per=("token", "token", "tensor"), dims=(72, 40), mask=SlidingWindow(40, 3)),
    Quantised("given int8", 20, 300, batch=2, heads=(4, 2), per=("token", "tile", "head"), dtype=FP16, dims=(17, 96)),
    Quantised("given", 10, 150, per=("tensor", "token", "head"), dims=(288, 64), mask=DENSE_ROWS),
    Quantised("given", 40, 400, per=("tensor", "tile", "tile"), mask=Causal()),
    Quantised("given int8", 40, 300, per=("head", "token", "token"), dims=(96, 72), batch=2, heads=(4, 2), mask=Causal()),
    Quantised("given", 3, 1, per=("token", "token", "token")),
    Quantised("given", 3, 0, per=("token", "token", "token")),
    Quantised("given int8", 3, 1, per=("token", "token", "head")),
]
SPOILED = [
    *(Quantised(way, 40, 150, mask=mask) for way in RECIPES for mask in (Causal(), SlidingWindow(40, 3))),
    Quantised("int8", 30, 300),
    Quantised("int8", 40, 90, dtype=FP16, mask=PrefixLM(30)),
    Quantised("int8_qk", 30, 150),
]
CHANGES = {"sink": torch.tensor([0.5, 3.0]), "alibi_slopes": torch.tensor([[0.1, 0.5]]), "softcap": 2.0}
BITS = [
    Quantised(),
    Quantised(mask=Documents((0, 50, 130), (0, 20, 131))),
    Quantised("int8_qk", 5, 1500, dims=(72, 40)),
    Quantised("int8", dims=(256, 256), dtype=FP16),
    Quantised("int8", 130, 300, batch=2, heads=(4, 2), dims=(128, 128)),
    Quantised("int8", 5, 300, dims=(512, 512), heads=(1, 1)),
]


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
