"""Functions of kernels on numbers that no test's tensors have."""

import pytest
import torch
from emulator.backend import NEEDED, Emulated

from tilewise.sm90 import jit

pytestmark = NEEDED


def arguments(config):
    from tilewise.sm90.dsl import Int32

    return [jit.tensor(Int32, jit.size(), aligned=False), Int32(0), Int32(0)]


@pytest.mark.parametrize(("m_blocks", "n_blocks"), [(5, 3), (1, 1), (65536, 32768), (90000, 45000), (92000, 46000), (46000, 46001)])
def test_shares_of_the_finisher(m_blocks, n_blocks):
    """Up to 5.9 million tokens, of which a block of keys has 128 and a tile of queries 64: n m_blocks is then nearly 2^32."""
    found = torch.zeros(32, dtype=torch.int32)
    Emulated().compiled("device_functions:launch", arguments, None)(found, m_blocks, n_blocks)
    want = [(n_blocks - i) * m_blocks // n_blocks for i in range(min(32, n_blocks + 1))]
    assert found.tolist()[: len(want)] == want
