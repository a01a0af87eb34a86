"""Triton's append, interpreted: the bits that torch writes, where it writes them, and nowhere else."""

import pytest
import torch
import triton_problems as problems
from append_problems import CASES, AppendCase
from interpreted import interpreted

from tilewise.backends.triton import targets

pytestmark = pytest.mark.skipif(not targets.installed(), reason="Triton is not installed")

MORE = [
    AppendCase(lengths=tuple(i % 90 - 4 for i in range(70)), new=tuple(i % 2 for i in range(70)), heads=1, dims=(8, 8)),
    AppendCase(lengths=(5, 0, 79), new=4, rotary=64, interleaved=True, table=torch.float16, first=True),
    AppendCase(lengths=(2**40, -(2**40), 3, 2**31 + 3), new=2, index=torch.int64, page=16),
    AppendCase(lengths=(5, 70), new=2, dims=(576, 512), heads=3, rotary=32, dtype=torch.float32),
]


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_cases(case):
    interpreted(problems.appended, case)


@pytest.mark.parametrize("bounds", [(0, 5, 2, 6), (-4, 100, 101, 102), (0, 2, 2**31 - 1, -5)])
def test_wild_offsets_write_nothing_that_is_not_there(bounds):
    interpreted(problems.appends_by, bounds)


def test_tensors_that_do_not_lie_in_rows():
    """Copies are read in their place; caches that no copy can stand for are torch's."""
    interpreted(problems.appends_what_is_strided)
