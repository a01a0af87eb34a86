"""Triton by name in torch's surroundings: other default dtypes and devices, without autograd, in hooks, compiled."""

import pytest

pytest.importorskip("triton")

import torch
import triton_around as around
from interpreted import interpreted

CELLS = [
    (torch.bfloat16, "meta", "grad", "no"),
    (torch.float64, "cpu", "no_grad", "no"),
    (torch.float16, "meta", "inference_mode", "no"),
    (torch.float32, "cpu", "grad", "copying"),
]


NAMES = [pytest.param(name, marks=[pytest.mark.slow] if "every" in name else []) for name in around.BY_NAME]


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_defaults(name, cell):
    interpreted(around.default, name, *cell)


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name):
    interpreted(around.compiled, name)
