"""Random calls three times by the Triton backend, in Triton's interpreter: later calls play what the first launched, with its bits."""

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from sampled import SEED

from tests.shared.interpreted import interpreted
from tilewise.errors import UnsupportedError
from tilewise.masks import Documents
from tilewise.testing.strategies import cases

pytest.importorskip("triton")

DTYPES = "fp32", "bf16", "fp16"
SHORT = st.sampled_from([1, 2, 17])
EXAMPLES = {"attention": 2, "varlen": 3, "decode": 2}  # as many as take two or three seconds
HOW = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def drawn(name: str, examples: int) -> int:
    """So many random problems, in the process of the interpreter; how many of them the backend takes."""
    import three_calls

    taken = 0

    def attempt(call) -> None:
        nonlocal taken
        try:
            call()
            taken += 1
        except UnsupportedError:
            pass

    def attentions(case, return_lse):
        if not isinstance(case.mask, Documents):  # a call of its own, of all heads: packed ones are below
            attempt(lambda: three_calls.hold_attention(case, return_lse, "triton"))

    def varlens(problem, grad, return_lse):
        expected = three_calls.varlen(problem, "reference", grad, return_lse, torch.float64)
        attempt(lambda: three_calls.hold_varlen(problem, expected, "triton", grad, return_lse))

    def decodes(number, return_lse):
        attempt(lambda: three_calls.hold_decode(number, return_lse, most=40, backend="triton"))

    problems = {
        "attention": (attentions, (cases(lengths=SHORT, head_dims=st.sampled_from([16, 24, 32]), dtypes=DTYPES), st.booleans())),
        "varlen": (varlens, (three_calls.packed().filter(lambda problem: problem["dtype"] in DTYPES), st.booleans(), st.booleans())),
        "decode": (decodes, (st.integers(0, 1 << 30), st.booleans())),
    }
    test, strategies = problems[name]
    with three_calls.fresh_is_nan():
        seed(int(SEED))(settings(**HOW, max_examples=examples)(given(*strategies)(test)))()
    return taken


@pytest.mark.parametrize("name", ["attention", "varlen", "decode"])
def test_few(name):
    assert interpreted(drawn, name, EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "varlen", "decode"])
def test_many(name):
    assert interpreted(drawn, name, 30) > 5
