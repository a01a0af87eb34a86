"""lab/instruments/mma_kernel.py, carried out without a GPU: right by the one tolerance, with the same bits however late its copies come."""

import sys
from pathlib import Path

import pytest
import torch
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.masks import Causal, Full
from tilewise.testing import conformance
from tilewise.testing.cases import Case

if not NEEDED[0].args[0]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "lab/instruments"), *sys.path])
        import mma_forward
        import mma_kernel

pytestmark = NEEDED


class Mma:
    """The experiment as a backend. Keeps what it computed last."""

    def __init__(self, pace: str = "lazy", seed: int = 0, change=str, **choice) -> None:
        self.emulated, self.choice = Emulated(pace, seed, change=change), choice

    def why_not(self, problem) -> list[str]:
        return []

    def forward(self, call):
        with self.emulated.on_gpu():
            self.found = mma_kernel.attention(call.q, call.k, call.v, call.mask == Causal(), call.scale, **self.choice)
        return self.found


def case(seqlen_q, seqlen_k, mask, head_dim=64, dtype="bf16", heads=(1, 1), **others):
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads[0], "heads_k": heads[1], "head_dim": head_dim}
    return Case(**{**sizes, "mask": mask, "dtype": dtype, **others})


SMALL = {"tile_m": 64, "warps": 4, "ring": 3, "q_in_registers": True}
CASES = [
    (case(130, 200, Causal(), dtype="fp16", heads=(2, 1)), {}),
    (case(63, 63, Full(), 128), {}),
    (case(140, 9, Causal(), 128, layout="sliced"), {}),  # a whole tile of queries sees nothing
    (case(1, 1, Full()), {}),
]
LENGTHS = (1, 1), (1, 200), (63, 63), (64, 64), (130, 200), (200, 130), (150, 0), (257, 260)
MORE = [
    (case(*lengths, mask, head_dim, dtype, (4, 2), batch=1 + (dtype == "fp16"), layout=layout), choice)
    for mask, layout in ((Full(), "bshd"), (Causal(), "bhsd"))
    for lengths in LENGTHS
    for head_dim, dtype, choice in ((64, "bf16", {}), (128, "fp16", {}), (64, "fp16", SMALL), (128, "bf16", {"tile_n": 64, "ring": 2}))
]


def named(x) -> str:
    return x.id if isinstance(x, Case) else "-".join(f"{name}{value}" for name, value in x.items())


@pytest.mark.parametrize(("case", "choice"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)], ids=named)
def test_cases(case, choice):
    conformance.run_forward(Mma(**choice), case)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{}, SMALL, {"warps": 8, "ring": 2, "tile_n": 64, "ahead": 1}], ids=named)
@pytest.mark.parametrize("lengths", [(130, 200), (200, 60)], ids=str)
def test_bits_do_not_depend_on_who_comes_first(lengths, choice):
    found = [Mma(pace, seed, **choice) for seed, pace in enumerate(PACES)]
    for each in found:
        conformance.run_forward(each, case(*lengths, Causal(), 128))
        assert all(torch.equal(x, y) for x, y in zip(found[0].found, each.found, strict=True))


def spoiled(was: str, now: str):
    def change(ptx: str) -> str:
        assert was in ptx
        return ptx.replace(was, now)

    return change


@pytest.mark.parametrize(
    "change",
    [
        spoiled("cp.async.wait_group 2", "cp.async.wait_group 3"),  # a tile is read before it is there
        pytest.param(spoiled("bar.sync", "// "), marks=pytest.mark.slow),  # ... or before the others have copied theirs
        pytest.param(spoiled("ldmatrix.sync.aligned.m8n8.x4.trans", "ldmatrix.sync.aligned.m8n8.x4"), marks=pytest.mark.slow),
    ],
    ids=["early", "alone", "V as it lies"],
)
def test_spoiled_kernels_fail(change):
    with pytest.raises(AssertionError):
        conformance.run_forward(Mma(change=change), case(130, 200, Full()))


def test_what_is_refused():
    q, k = torch.zeros(1, 3, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 5, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        mma_kernel.attention(q, k, k)
    with pytest.raises(ValueError, match="positive"):
        mma_kernel.attention(q, q, q, scale=-1.0)
    with pytest.raises(ValueError, match="head_dim 64 and 128"):
        mma_kernel.attention(*[q[..., :32]] * 3)
    with pytest.raises(ValueError, match="ring"):
        mma_kernel.configure(q.dtype, 64, False, ring=1)
    with pytest.raises(SystemExit, match="no GPU") if not torch.cuda.is_available() else pytest.raises(SystemExit):
        mma_forward.main([] if not torch.cuda.is_available() else ["--dtype", "fp32"])
