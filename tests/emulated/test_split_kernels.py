"""Split-K and split-Q as compiled kernels: both are right, and their loads and stores are the bytes that ladder/warp_splits.py counts."""

from collections import Counter

import numpy as np
import pytest
import split_kernels
import torch
from emulator.backend import NEEDED, Emulated
from emulator.warp import Warp
from split_kernels import DIM, KEYS, OPERAND_BYTES, ROWS, TILE_N

from tilewise.ladder.warp_splits import split_k, split_q
from tilewise.sm90 import jit

pytestmark = NEEDED


def arguments(by_keys: bool):
    from tilewise.sm90.dsl import BFloat16, Float32

    return [jit.tensor(dtype, jit.size(), jit.size(), aligned=False) for dtype in (BFloat16, BFloat16, BFloat16, Float32)]


@pytest.fixture
def moved(monkeypatch) -> Counter:
    """Bytes between warps and shared memory, by direction and whether they are of operands; what several lanes read at once counts once."""
    counted: Counter = Counter()

    def counting(original, direction):
        def access(self, addresses, m, kind, n):
            size = np.dtype(kind).itemsize * (n if isinstance(n, int) else len(n))
            places = np.unique(np.asarray(addresses if m is None else addresses[m]).astype(np.int64) - int(self.block.shared_base[0]))
            for place in places:
                counted[direction, "operands" if place < OPERAND_BYTES else "fp32"] += size
            return original(self, addresses, m, kind, n)

        return access

    for direction, name in (("read", "load_shared"), ("written", "store_shared")):
        monkeypatch.setattr(Warp, name, counting(getattr(Warp, name), direction))
    return counted


@pytest.mark.parametrize("by_keys", [True, False], ids=["split-K", "split-Q"])
def test_a_kernel_moves_what_is_counted(by_keys, moved):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, DIM, generator=draw).bfloat16() for n in (ROWS, KEYS, KEYS))
    o = torch.full((ROWS, DIM), torch.nan)
    Emulated().compiled("split_kernels:launch", arguments, by_keys)(q, k, v, o)
    q, k, v = (x.double() for x in (q, k, v))
    want, shared = (split_k if by_keys else split_q)(q * DIM**0.5 * np.log(2), k, v, tile_n=TILE_N)  # exp2, and no scale
    torch.testing.assert_close(o.double(), want, rtol=1e-4, atol=1e-5)
    assert moved["written", "operands"] == OPERAND_BYTES  # at the start, each once
    assert moved["read", "operands"] == shared.bytes["Q"] + shared.bytes["K and V"]
    assert moved["read", "fp32"] + moved["written", "fp32"] == shared.bytes["statistics"] + shared.bytes["partial O"]
    assert (moved["read", "fp32"] > 0) == by_keys and split_kernels.EACH * 4 == TILE_N
