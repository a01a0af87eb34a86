"""lab/instruments/mma_forward.py, carried out without a GPU: right by the one tolerance, with the same bits however late its copies come."""

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

pytestmark = NEEDED


class Mma:
    """The experiment as a backend. Keeps what it computed last."""

    def __init__(self, pace: str = "lazy", seed: int = 0, change=str, **choice) -> None:
        self.emulated, self.choice = Emulated(pace, seed, change=change), choice

    def why_not(self, problem) -> list[str]:
        return []

    def forward(self, call):
        with self.emulated.on_gpu():
            self.found = mma_forward.attention(call.q, call.k, call.v, call.mask == Causal(), call.scale, **self.choice)
        return self.found


def case(seqlen_q, seqlen_k, mask, head_dim=64, dtype="bf16", heads=(1, 1), **others):
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads[0], "heads_k": heads[1], "head_dim": head_dim}
    return Case(**{**sizes, "mask": mask, "dtype": dtype, **others})


CASES = [
    case(130, 200, Causal(), dtype="fp16", heads=(2, 1)),
    case(63, 63, Full(), head_dim=128),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case):
    conformance.run_forward(Mma(), case)
