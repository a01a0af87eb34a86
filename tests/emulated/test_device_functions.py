"""Functions of kernels on numbers that no test's tensors have."""

from types import SimpleNamespace

import pytest
import torch
from emulator.backend import NEEDED, Emulated

from tilewise.backends import philox
from tilewise.backends.hopper import changes
from tilewise.backends.hopper.operands import Draw
from tilewise.backends.hopper.stand_ins import StandIns
from tilewise.problem import Dropout
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


def arguments_of_draws(config):
    from tilewise.sm90.dsl import Int32

    return [jit.tensor(Int32, jit.size(), jit.size(), aligned=False), StandIns(config)(Draw), *(Int32(0) for _ in range(4))]


@pytest.mark.parametrize(
    ("p", "seed", "offset", "batch", "head", "query", "key"),
    [
        (0.5, 0, 0, 0, 0, 0, 0),
        (0.1, (1 << 63) - 5, (1 << 32) - 1, 7, 2, 1 << 20, (1 << 24) + 64),
        (1 - 2**-10, 3 << 31, 1 << 31, (1 << 30) + 1, 1, 80, 192),  # the number of a head has more than 32 bits
        (1 - 2**-40, 1, 2, 0, 0, 0, 0),
        (2**-40, 1, 2, 0, 0, 0, 0),
    ],
)
def test_draws_are_those_of_philox(p, seed, offset, batch, head, query, key):
    """In either order of a tile's numbers, and pair by pair."""
    dropout, heads, numbers = Dropout(p, seed, offset), 3, (32, 20)
    draw = changes.draw(SimpleNamespace(q=torch.zeros(1, dtype=torch.bfloat16), dropout=dropout, heads_q=heads))
    found = torch.zeros(32, 5, dtype=torch.int32)
    Emulated().compiled("device_functions:launch_draws", arguments_of_draws, numbers)(found, draw, batch, head, query, key)
    given = dropout, torch.tensor([batch]), torch.tensor([head]), query, query + 80, key, key + 128, heads
    want = philox.keep(*given)[0, 0]
    bit = lambda word, place: bool(word >> place & 1)  # noqa: E731
    columns = [c // 2 * 8 + c % 2 for c in range(max(numbers))]
    for lane, (*words, pair) in enumerate(found.tolist()):
        first, second = lane // 4, lane % 4 * 2
        for r in range(2):
            got = [bit(words[c // 16], 16 * r + c % 16) for c in range(32)]
            assert got == [bool(want[first + 8 * r, second + columns[c]]) for c in range(32)]
            got = [bit(words[2 + c // 16], 8 * (2 * r + c % 2) + c // 2 % 8) for c in range(20)]
            assert got == [bool(want[second + columns[c], first + 8 * r]) for c in range(20)]
        assert pair == int(want[lane, lane])
