"""The portable backend on a CUDA device: the same gate as on the CPU."""

import pytest
import torch

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
