"""Triton's kernels as they are compiled for Ampere, and some for Ada: their PTX, in the emulator. The interpreter's tests say that the source is
right, these what became of it: products of fragments, asynchronous copies, what is shared.
"""

import itertools
from functools import partial

import decode_problems
import pytest
import torch
from decode_problems import DecodeCase
from eight_bits_problems import Quantised, held, made
from emulator import triton as emulated

from tests.shared.sampled import some
from tilewise.backends.triton import Triton, bound, decode, merging, prefix, targets
from tilewise.masks import Causal, ChunkedCausal, Documents, SlidingWindow
from tilewise.testing import cases, conformance
from tilewise.testing.cases import Case

AMPERE, ADA = targets.Target("sm_80"), targets.Target("sm_89")
SIZES = {"batch": 2, "seqlen_q": 45, "seqlen_k": 70, "heads_q": 4, "heads_k": 2}
EVERYTHING = {"softcap": 3.0, "dropout": 0.2, "bias": "hq", "alibi": "h", "sink": True, "lse_grad": True}
CASES = [
    Case(**SIZES, head_dim=64, mask=Causal(), dtype="bf16"),
    Case(**SIZES, head_dim=32, head_dim_v=24, mask=ChunkedCausal(11), dtype="fp16", layout="sliced"),
    Case(**SIZES, head_dim=72, head_dim_v=40, mask=SlidingWindow(20, 4), dtype="bf16", layout="bhsd"),
    Case(**SIZES, head_dim=32, mask=Documents([0, 3, 45], [0, 20, 70], inner=Causal()), dtype="fp16"),
    Case(**SIZES, head_dim=32, mask=Causal(), dtype="fp16", **EVERYTHING),
    Case(**SIZES, head_dim=32, mask=Causal(), dtype="fp32"),
    Case(**SIZES, head_dim=32, mask=ChunkedCausal(30), dtype="bf16", bias="bhq", alibi="bh", diagonal=True),
]
QUICK_OF_ADA = [case for case in cases.QUICK if case.id == "b1-q128k128-h2/1-d128-causal-bf16"]  # whose tiles are not those of Ampere
IN_EIGHT_BITS = [
    Quantised("int8", 45, 150, mask=Causal(), row_max=True),
    Quantised("int8_qk", 45, 150, mask=SlidingWindow(40, 3), dims=(96, 72), dtype=torch.float16),
    Quantised("int8", 20, 70, mask=Documents((0, 3, 20), (0, 40, 70)), dims=(17, 24)),
    Quantised("fp8", 20, 150, heads=(4, 2), dims=(64, 40), scale=-0.2),
    Quantised("int8", 10, 40, dims=(288, 64), heads=(1, 1)),
    Quantised("given int8", 20, 150, per=("token", "token", "token"), dims=(72, 40)),
]


@pytest.fixture
def compiled_for(monkeypatch):
    """Has kernels of a target run, at a pace of asynchronous copies."""

    def set_target(target: targets.Target, pace: str) -> None:
        monkeypatch.setattr(bound, "launcher", lambda kernel, _: emulated.launcher(kernel, target, pace))
        monkeypatch.setattr(bound, "of_device", lambda device: target)

    monkeypatch.setattr(bound, "interpreted", lambda: False)
    monkeypatch.setattr(targets, "interpreted", lambda: True)
    return set_target


@pytest.fixture
def ampere(compiled_for):
    """Sets the pace of asynchronous copies."""
    return partial(compiled_for, AMPERE)


@pytest.fixture
def decode_too(compiled_for, monkeypatch):
    """Decode runs as `compiled_for` says, which is to be called first."""

    def take() -> None:
        for module, name in itertools.product((decode, merging), ("launcher", "of_device", "interpreted")):
            monkeypatch.setattr(module, name, getattr(bound, name))

    return take


@pytest.mark.parametrize("case", some(CASES, 0.5, "Triton's kernels"), ids=lambda case: case.id)
def test_compiled_kernels(case, ampere):
    ampere("lazy")
    conformance.run_case(Triton(), case)


def test_no_queries_under_a_table(ampere):
    """Its tiles are listed for keys that nobody sees, too."""
    ampere("lazy")
    mask = Documents([0, 0], [0, 121], inner=ChunkedCausal(40))
    conformance.run_case(Triton(), Case(batch=1, seqlen_q=0, seqlen_k=200, heads_q=2, heads_k=2, head_dim=64, mask=mask, dtype="bf16"))


@pytest.mark.parametrize("case", some(IN_EIGHT_BITS, 0.4, "Triton's kernels in 8 bits"), ids=str)
def test_eight_bits(case, ampere):
    ampere("lazy")
    call = made(case)
    if not case.way.startswith("given"):
        call.k[0, -3, 0, 2] = torch.inf  # which some rows see
    held(call, *Triton().forward(call))


@pytest.mark.parametrize("case", QUICK_OF_ADA, ids=lambda case: case.id)
def test_ada(case, compiled_for):
    compiled_for(ADA, "lazy")
    conformance.run_case(Triton(), case)


def test_ada_converts_e4m3_of_caches_itself(compiled_for, decode_too):
    """By an instruction that Ampere has not."""
    compiled_for(ADA, "lazy")
    decode_too()
    call = decode_problems.made(DecodeCase(lengths=(100, 37), queries=1, page=16, dims=(64, 64)))
    eight, exact = decode_problems.with_eight_bits(call, (torch.float8_e4m3fn, torch.float8_e4m3fn), ("head", "token"))
    decode_problems.held(exact, *Triton().decode(eight))


def test_a_prefix_that_is_read_once(ampere, decode_too, monkeypatch):
    ampere("lazy")
    decode_too()
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = decode_problems.made(DecodeCase(lengths=(100, 90, 60), queries=(2, 0, 3), prefix=64, page=16))
    decode_problems.held(call, *Triton().decode(call))


@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: case.id)
def test_largest_scores(case, ampere):
    ampere("eager")
    conformance.run_row_max(Triton(), case)


@pytest.mark.parametrize("run", [conformance.run_hidden, conformance.run_spoiled], ids=lambda run: run.__name__)
def test_hidden_nan(run, ampere):
    ampere("eager")
    run(Triton(), Case(**SIZES, head_dim=32, mask=Causal(), dtype="bf16"))
