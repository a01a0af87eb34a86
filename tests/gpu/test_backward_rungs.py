"""The ladder's rungs for gradients on a Hopper GPU: right by the one tolerance, in many runs, and the same bits from those that promise them."""

import pytest
import torch
from hopper_problems import NEEDS_HOPPER, of_the_ladder

from tilewise.errors import UnsupportedError
from tilewise.ladder import BACKWARD_RUNGS
from tilewise.masks import Causal, Full
from tilewise.testing import conformance
from tilewise.testing.cases import Case

pytestmark = NEEDS_HOPPER

SEQLENS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 256, 300, 577, 1000)
CASES = of_the_ladder(SEQLENS)


def rungs(test):
    return pytest.mark.parametrize("rung", BACKWARD_RUNGS.values(), ids=BACKWARD_RUNGS)(test)


@rungs
def test_cases(rung):
    for seed, case in enumerate(CASES):
        try:
            conformance.run_hidden(rung, case, seed, device="cuda")
        except AssertionError as failure:
            raise AssertionError(f"{case.id}: {failure}") from None


@rungs
@pytest.mark.parametrize("seed", range(4))
def test_random_problems(rung, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    for _ in range(12):
        seqlen, heads, scale = draw(1, 900), draw(1, 5), (None, 0.5, 2.0)[draw(0, 3)]
        mask, head_dim = (Full(), Causal())[draw(0, 2)], (64, 128)[draw(0, 2)]
        sizes = {"batch": draw(1, 3), "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": heads, "heads_k": heads, "head_dim": head_dim}
        conformance.run_case(rung, Case(**sizes, mask=mask, scale=scale, dtype="bf16"), seed=draw(0, 1 << 20), device="cuda")


@rungs
@pytest.mark.parametrize("causal", [False, True])
def test_many_runs(rung, causal):
    """More blocks than run at a time. dK and dV have one owner; dQ has the same bits where additions have an order."""
    q, k, v, d_o = (torch.randn(48, 1100, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, lse = rung.attend(q, k, v, causal, 128**-0.5)
    first = rung(q, k, v, o, lse, d_o, causal)
    for _ in range(50):
        again = rung(q, k, v, o, lse, d_o, causal)
        assert all(map(torch.equal, first[1:], again[1:]))
        assert torch.equal(first[0], again[0]) or not rung.ordered
    torch.testing.assert_close(first[0], again[0])


@rungs
def test_too_many_heads(rung):
    q = torch.empty(70000, 1, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="at most 65535 heads"):
        rung(q, q, q, q, q.new_empty((70000, 1), dtype=torch.float32), q)
