"""A few queries against many keys: their own forward and backward give what the oracle gives, on every instruction set, and read nothing hidden."""

import pytest
import torch

from tilewise.backends.cpu import Cpu, native
from tilewise.masks import Causal, FirstKeys, Full, SlidingWindow
from tilewise.problem import Call
from tilewise.testing.cases import Case, make, upstream
from tilewise.testing.conformance import run_case, run_hidden, run_spoiled

HEADS = {"heads_q": 6, "heads_k": 3}
CASES = [
    Case(batch=2, seqlen_q=1, seqlen_k=1030, **HEADS, head_dim=64, head_dim_v=40, mask=Causal()),
    Case(batch=1, seqlen_q=3, seqlen_k=700, **HEADS, head_dim=72, mask=SlidingWindow(600, None), lse_grad=True),
    Case(batch=1, seqlen_q=5, seqlen_k=260, **HEADS, head_dim=33, head_dim_v=130, mask=FirstKeys(4) | SlidingWindow(70, 0), dtype="bf16"),
    Case(batch=2, seqlen_q=8, seqlen_k=140, heads_q=7, heads_k=7, head_dim=16, mask=Causal(align="top_left"), dtype="fp16", layout="bhsd"),
    Case(batch=1, seqlen_q=7, seqlen_k=130, **HEADS, head_dim=128, mask=Full(), layout="sliced"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("isa", ("avx512", "avx2", "generic"))
def test_against_the_oracle(isa, case):
    if isa not in native.library().isas:
        pytest.skip(f"this processor has no {isa}")
    for run in (run_case, run_hidden, run_spoiled):
        run(Cpu(isa), case)


def _gradients(case: Case) -> tuple[torch.Tensor, ...]:
    call, (d_o, d_lse) = make(case), upstream(case)
    o, lse = Cpu().forward(call)
    return o, lse, *Cpu().backward(call, o, lse, d_o, d_lse)[:3]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_bits_do_not_depend_on_the_number_of_threads(case, threads):
    threads(1)
    once = _gradients(case)
    for n in (2, 3, 8, 70):  # 70: more than there are shares
        threads(n)
        assert all(torch.equal(x, y) for x, y in zip(once, _gradients(case), strict=True)), f"{n} threads"


def test_what_runs_is_explained():
    isas = native.library().isas
    if native.library().forced:
        pytest.skip("TILEWISE_CPU_ISA is set")

    def details(seqlen_q: int, seqlen_k: int) -> list[str]:
        q, k = torch.zeros(1, seqlen_q, 1, 64), torch.zeros(1, seqlen_k, 1, 64)
        return Cpu().details(Call(q=q, k=k, v=k, mask=Full(), scale=1.0))

    small = "avx512" if "avx512" in isas else isas[-1]
    assert details(30, 30) == [f"instruction set: {small} forward, {small} backward"]
    large = "amx" if "amx" in isas else small
    assert details(500, 500) == [f"instruction set: {large} forward, {large} backward"]
    few = details(2, 500)
    assert few[0] == f"instruction set: {small} forward, {small} backward" and few[1].startswith("few queries")
    assert Cpu("generic").details(
        Call(q=torch.zeros(1, 9, 1, 8), k=torch.zeros(1, 9, 1, 8), v=torch.zeros(1, 9, 1, 8), mask=Full(), scale=1.0)
    ) == ["instruction set: generic forward, generic backward"]
