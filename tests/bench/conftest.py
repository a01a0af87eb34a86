"""What the machine reaches is measured once for all dtypes: a product of one that is converted takes seconds, and rows need only some ceiling."""

import pytest
import torch

from tilewise.bench import timing


@pytest.fixture(autouse=True)
def one_ceiling(monkeypatch):
    measure = timing._measure
    monkeypatch.setattr(timing, "_measure", lambda device, dtype, threads: measure(device, torch.float32, threads))
