"""Every rung of the ladder, carried out without a GPU: right by the one tolerance, with the same bits whoever comes first."""

from unittest import mock

import pytest
import torch
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.ladder import RUNGS, VARIANTS
from tilewise.ladder.rung import Rung
from tilewise.masks import Causal, Full
from tilewise.testing import conformance
from tilewise.testing.cases import Case

pytestmark = NEEDED


class Climbed:
    """A rung as a backend. Keeps what it computed last."""

    def __init__(self, rung: Rung, pace: str, seed: int) -> None:
        self.rung, self.emulated, self.in_eight_bits = rung, Emulated(pace, seed), rung.in_eight_bits

    def why_not(self, problem) -> list[str]:
        return []

    def forward(self, call):
        def scores(rung, q):
            return q.new_empty((*q.shape[:2], q.shape[1]), dtype=torch.float32)

        with self.emulated.on_gpu(), mock.patch.multiple(Rung, reasons=lambda *_: [], _scores=scores):
            self.found = self.rung.forward(call)
        return self.found


def case(seqlen, heads, head_dim, mask):
    return Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads, heads_k=heads, head_dim=head_dim, mask=mask, dtype="bf16")


FIRST = case(130, 1, 64, Causal())
MORE = case(200, 1, 128, Full()), case(1, 1, 64, Full()), case(300, 1, 128, Causal())
OF_NAIVE = case(40, 1, 64, Causal())
"""K1 has a thread a score."""
SAME_BUT_FOR_STAGES = "k3_1", "k3_2"
CASES = [("k1", OF_NAIVE), *((name, FIRST) for name in RUNGS if name not in ("k1", *SAME_BUT_FOR_STAGES))]
SLOW = [("k1", FIRST), *((name, FIRST) for name in (*SAME_BUT_FOR_STAGES, *VARIANTS))]
SLOW += [(name, each) for name in (*RUNGS, *VARIANTS) if name != "k1" for each in MORE]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda x: x if isinstance(x, str) else x.id)
def test_cases(name, case):
    climbed = [Climbed({**RUNGS, **VARIANTS}[name], pace, seed) for seed, pace in enumerate(PACES)]
    for each in climbed:
        conformance.run_forward(each, case)
        assert all(torch.equal(x, y) for x, y in zip(climbed[0].found, each.found, strict=True))
