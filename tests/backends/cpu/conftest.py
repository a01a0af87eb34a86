"""The kernel for the tests: the installed one, or one compiled here."""

import pytest
import torch

from tilewise.backends.cpu import native
from tilewise.backends.cpu.build import BuildError, build


@pytest.fixture(scope="session", autouse=True)
def kernel() -> None:
    """Compile the kernel where it is not installed; skip where that is impossible, and say why."""
    if native.problem() is None:
        return
    try:
        build()
    except BuildError as error:
        pytest.skip(f"no compiled kernel: {error}")
    native._load.cache_clear()
    assert native.problem() is None


@pytest.fixture(autouse=True)
def _oracle(expected_once) -> None:
    """Instruction sets get the same calls."""


@pytest.fixture
def threads():
    """Sets torch's number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
