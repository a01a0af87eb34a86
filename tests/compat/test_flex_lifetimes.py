"""flex_attention by tilewise keeps no module, mod or tensor alive."""

import gc
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch_operators import normal

from tilewise.compat import flex
from tilewise.compat.flex import flex_attention, mask_of

N = 64


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.ids, self.weight = 50, torch.zeros(N, dtype=torch.int64), torch.nn.Parameter(torch.zeros(9))

    def mod(self, b, h, q, k):
        return (q - k < self.left) & (q >= k) & (self.ids[q] == self.ids[k])


def of_the_mask(layer):
    made = create_block_mask(lambda b, h, q, k: layer.mod(b, h, q, k), None, None, N, N, device="cpu")
    return lambda x: flex_attention(x, x, x, block_mask=made)


def frozen(layer):
    made = create_block_mask(lambda b, h, q, k: layer.mod(b, h, q, k), None, None, N, N, device="cpu")
    mask_of(made, 1, 2, frozen=True)
    return lambda x: flex_attention(x, x, x, block_mask=made)


def in_bits(layer):
    made = create_block_mask(lambda b, h, q, k: layer.mod(b, h, q, k) & ((q * k) % 3 == 0), None, None, N, N, device="cpu")
    return lambda x: flex_attention(x, x, x, block_mask=made)


def of_the_score(layer):
    return lambda x: flex_attention(x, x, x, lambda s, b, h, q, k: torch.where(q - k < layer.left, s + layer.ids[q - k], -float("inf")))


def trained(layer):
    table = torch.nn.Parameter(torch.zeros(N, dtype=torch.float64))
    layer.table = table
    return lambda x: flex_attention(x, x, x, lambda s, b, h, q, k: s + layer.table[(q - k).abs()])


def converted(layer):
    mask = mask_of(create_block_mask(lambda b, h, q, k: layer.mod(b, h, q, k), None, None, N, N, device="cpu"))
    return lambda x: flex.attention(x, x, x, mask=mask)


def compiled(layer):
    return torch.compile(of_the_mask(layer), backend="eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", [of_the_mask, frozen, in_bits, of_the_score, trained, converted, compiled], ids=lambda each: each.__name__)
def test_modules_are_freed(use):
    seen = []
    for _ in range(3):
        layer = Layer()
        layer.forward = use(layer)
        for _ in range(2):
            o = layer.forward(normal(1, 2, N, 8).requires_grad_())
            o.sum().backward()
        seen += [weakref.ref(layer), weakref.ref(layer.ids), weakref.ref(layer.weight)]
        del layer, o
    gc.collect()
    assert sum(each() is not None for each in seen) == 0
