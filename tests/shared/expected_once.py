"""The fp64 oracle computes what one call should give once, for the tests that put several kernels, or faults, through the same call.

It takes ten times as long as a compiled kernel. `pytestmark = pytest.mark.usefixtures("expected_once")`.
"""

import hashlib
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from tilewise.masks import Mask
from tilewise.testing import tolerance

MOST = 48  # calls that are remembered
_known: OrderedDict[tuple, tolerance.Expected] = OrderedDict()
_compute = tolerance.expected


def key(x):
    """Equal for equal arguments, bit by bit."""
    if isinstance(x, Tensor):
        content = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return str(x.dtype), tuple(x.shape), hashlib.sha256(content).digest()
    if is_dataclass(x) and not isinstance(x, Mask):  # masks are equal where they hide the same
        return type(x).__name__, *(key(getattr(x, field.name)) for field in fields(x))
    return tuple(map(key, x)) if isinstance(x, tuple) else x


def remembered(call, d_o=None, d_lse=None) -> tolerance.Expected:
    asked = key((call, d_o, d_lse))
    if asked not in _known:
        _known[asked] = _compute(call, d_o, d_lse)
    _known.move_to_end(asked)
    while len(_known) > MOST:
        _known.popitem(last=False)
    return _known[asked]


@pytest.fixture
def expected_once():
    with mock.patch.object(tolerance, "expected", remembered):
        yield
