"""Random mask_mods of flex_attention, whose values change by every way that Python has between calls: O is that of torch's own formula."""

import random

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask
from torch_operators import normal

from tilewise.compat.flex import flex_attention

BATCH, HEADS = 2, 3
ATOMS = [
    lambda c, b, h, q, k: q >= k,
    lambda c, b, h, q, k: (q - k).abs() < c.left,
    lambda c, b, h, q, k: c.ids[q] == c.ids[k],
    lambda c, b, h, q, k: k < c.lengths[b],
    lambda c, b, h, q, k: (q - k) % (h + 2) == 0,
    lambda c, b, h, q, k: c.pairs[q, k],
    lambda c, b, h, q, k: q // c.left == k // c.left,
    lambda c, b, h, q, k: c.numbers[q] * c.numbers[k] > 0.1,
    lambda c, b, h, q, k: torch.where(q < c.left, k < c.left, q >= k),
]
OPERATIONS = [lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y]


class Values:
    """What the mods read: an integer, and tensors that share NumPy's memory."""

    def __init__(self, seqlen):
        self.left, self.numbers = seqlen // 2, torch.linspace(-1, 1, seqlen)
        self.memory = np.arange(seqlen) // 7, np.array([seqlen // 2, 3]), np.random.default_rng(seqlen).random((seqlen, seqlen)) > 0.3
        self.ids, self.lengths, self.pairs = map(torch.from_numpy, self.memory)


def change(draw, values, seqlen):
    ids, lengths, pairs = values.memory
    numbers = np.random.default_rng(draw.randrange(1000))
    draw.choice(
        [
            lambda: setattr(values, "left", draw.randrange(1, seqlen)),
            lambda: setattr(values, "left", draw.choice([1, True, 2])),
            lambda: setattr(values, "ids", torch.arange(seqlen) // draw.randrange(1, seqlen)),
            lambda: np.copyto(ids, numbers.integers(0, 3, seqlen)),
            lambda: np.copyto(lengths, numbers.integers(0, seqlen, 2)),
            lambda: np.copyto(pairs, numbers.random((seqlen, seqlen)) > 0.5),
            lambda: values.numbers.data.mul_(-1).add_(0.1),
        ]
    )()


def drawn_mod(draw, values):
    chosen = [(draw.choice(ATOMS), draw.choice(OPERATIONS), draw.random() < 0.2) for _ in range(draw.randrange(1, 4))]

    def mod(b, h, q, k):
        shown = None
        for atom, operation, turned in chosen:
            one = ~atom(values, b, h, q, k) if turned else atom(values, b, h, q, k)
            shown = one if shown is None else operation(shown, one)
        return shown

    return mod


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_mods_with_changing_values(seed, monkeypatch):
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    draw = random.Random(seed)
    seqlen = draw.choice([5, 16, 40, 64])
    values = Values(seqlen)
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    made = BlockMask.from_kv_blocks(one, one[..., None] - 1, mask_mod=drawn_mod(draw, values), seq_lengths=(seqlen, seqlen))
    q, k, v = (normal(BATCH, HEADS, seqlen, 8, seed=at) for at in range(3))
    for _ in range(4):
        expected = torchs.flex_attention(q, k, v, block_mask=made)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), expected, atol=1e-10, rtol=1e-10)
        change(draw, values, seqlen)
