"""lab/instruments/turns.py by hand: a chain of blocks at one tile, and blocks that never meet."""

import importlib
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/instruments")
    return importlib.import_module("turns")


def test_blocks_wait_for_those_before_them(turns):
    alone = [np.array([n]) for n in range(4)]
    took, least = turns.milliseconds(alone, heads=2, group=1, apart=False, together=2)
    assert took == pytest.approx(turns.BLOCK + turns.VISIT) and least == pytest.approx(8 * turns.VISIT / turns.SLOTS)
    chain = [np.array([0])] * 4
    took, _ = turns.milliseconds(chain, heads=1, group=1, apart=False, together=1)
    assert took == pytest.approx(turns.BLOCK + turns.VISIT + 3 * turns.LATENCY)


def test_heads_of_a_group_one_after_another_wait_as_often(turns):
    walks = [np.arange(40), *(np.arange(30, 40) for _ in range(3))]  # the first keys are seen by all
    together, _ = turns.milliseconds(walks, heads=1, group=4, apart=False, together=1)
    apart, _ = turns.milliseconds(walks, heads=1, group=4, apart=True, together=1)
    assert together >= 160 * turns.VISIT and apart >= 160 * turns.VISIT


def test_numbers_are_those_of_the_kernel(turns):
    assert list(turns.numbers(2, 3, 2)) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
