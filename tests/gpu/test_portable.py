"""The portable backend on a CUDA device: the same gate as on the CPU."""

import pytest
import torch

import tilewise as tw
from tilewise.backends.tiled import Tiled
from tilewise.testing import conformance
from tilewise.testing.cases import QUICK

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_quick_case(case):
    conformance.run_case(Tiled(), case, device="cuda")


@pytest.mark.parametrize("form", conformance.CLOSED_FORMS.values(), ids=conformance.CLOSED_FORMS)
def test_closed_form(form):
    form(Tiled(), device="cuda")


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cuda", "cpu"), ("cuda", "cuda")], ids=str)
def test_packed_lengths_may_live_anywhere(devices):
    q, k, v = (torch.randn(12, 4, 16, device="cuda") for _ in range(3))
    cu_q, cu_k = (torch.tensor([0, 5, 12], device=device) for device in devices)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], device="cuda")
    o = tw.attention_varlen(q, k, v, cu_q, cu_k, causal=True, alibi_slopes=slopes)
    alone = tw.attention(q[None, 5:], k[None, 5:], v[None, 5:], causal=True, alibi_slopes=slopes)[0]
    torch.testing.assert_close(o[5:], alone)
