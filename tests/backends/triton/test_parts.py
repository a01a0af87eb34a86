"""Triton's dropout of a part of a call, interpreted: it drops what the whole call would."""

import pytest
import triton_problems as problems
from interpreted import interpreted

from tilewise.backends.triton import targets

pytestmark = pytest.mark.skipif(not targets.installed(), reason="Triton is not installed")


@pytest.mark.parametrize("hidden", [False, True])
def test_dropout_drops_what_the_whole_call_would(hidden):
    interpreted(problems.drops_what_the_whole_call_would, hidden)
