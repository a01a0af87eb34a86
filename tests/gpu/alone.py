"""The mark of tests that compare times."""

import os

import pytest

ALONE = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="times say something of a GPU that nobody else uses: run this file without -n"
)
