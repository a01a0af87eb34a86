"""Drop-ins in compiled programs of dynamic lengths, with a mask whose lengths are fixed: a parameter, a buffer. The lengths become the mask's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_operators import normal

import tilewise as tw
from tilewise.compat import diffusers, sdpa, xformers


def by_heads(function, q, k, v, mask):
    """A function of (batch, seqlen, heads, head_dim), called with (batch, heads, seqlen, head_dim)."""
    return function(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)


LAYERS = {
    "sdpa": lambda q, k, v, mask: sdpa.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    "diffusers": lambda q, k, v, mask: by_heads(diffusers.backend, q, k, v, mask),
    "xformers": lambda q, k, v, mask: by_heads(xformers.memory_efficient_attention, q, k, v, mask),
    "attention": lambda q, k, v, mask: by_heads(lambda *x: tw.attention(*x[:3], bias=x[3]), q, k, v, mask),
}
MASKS = {
    "float": (1, 4, 10, 10),
    "float, by key": (1, 1, 1, 10),
    "float, two dimensions": (10, 10),
    "bool": (2, 1, 10, 10),
    "bool, all": (10, 10),
}


class Model(nn.Module):
    def __init__(self, layer, mask):
        super().__init__()
        self.layer = layer
        if mask.dtype == torch.bool:
            self.register_buffer("mask", mask)
        else:
            self.mask = nn.Parameter(mask)

    def forward(self, q, k, v):
        return self.layer(q, k, v, self.mask)


def quick(layer, mask):
    return (layer, mask) in (("sdpa", "float"), ("diffusers", "bool"))


CASES = [
    pytest.param(layer, mask, marks=[] if quick(layer, mask) else [pytest.mark.slow])
    for layer in LAYERS
    for mask in MASKS
    if not (layer in ("xformers", "attention") and mask.startswith("bool"))
]


@pytest.mark.parametrize("layer, mask", CASES)
def test_lengths_become_those_of_the_mask(layer, mask):
    torch._dynamo.reset()
    numbers = normal(*MASKS[mask], dtype=torch.float32, seed=3)
    if mask.startswith("bool"):
        numbers = numbers > -1
        numbers[..., 0] = True
    qkv = [normal(2, 4, 10, 8, dtype=torch.float32, seed=seed) for seed in range(3)]
    compiled = torch.compile(Model(LAYERS[layer], numbers), dynamic=True, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), F.scaled_dot_product_attention(*qkv, attn_mask=numbers), atol=2e-6, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_what_the_mask_leaves_open_stays_dynamic(dim):
    """Batch and heads that are marked, beside a mask for all of them."""
    torch._dynamo.reset()
    mask = normal(10, 10, dtype=torch.float32, seed=3)
    model = Model(LAYERS["sdpa"], mask)
    compiled = torch.compile(model, fullgraph=True, backend=(counter := torch._dynamo.testing.CompileCounterWithBackend("aot_eager")))
    for size in (2, 3, 5):
        qkv = [normal(*((size, 4) if dim == 0 else (2, size)), 10, 8, dtype=torch.float32, seed=seed) for seed in range(3)]
        for x in qkv:
            torch._dynamo.mark_dynamic(x, dim)
        torch.testing.assert_close(compiled(*qkv), F.scaled_dot_product_attention(*qkv, attn_mask=mask), atol=2e-6, rtol=2e-6)
    assert counter.frame_count == 1


REFUSED = {
    "shape": (lambda x: sdpa.scaled_dot_product_attention(x, x, x, x[0, 0, :, :4]), r"attn_mask of shape \(.*\) does not broadcast"),
    "batch": (
        lambda x: sdpa.scaled_dot_product_attention(x, x[:, None].expand(2, 3, 4, 5, 8), x),
        "the batch dimensions .* do not broadcast",
    ),
    "dtype": (lambda x: sdpa.scaled_dot_product_attention(x, x.double(), x), r"convert it with k.to\(q.dtype\)"),
    "diffusers": (lambda x: diffusers.backend(x, x, x, x[:, :3, :, 0] > 0), r"attn_mask of shape \(.*\) does not broadcast"),
    "xformers": (lambda x: xformers.memory_efficient_attention(x, x, x, op=1), "op must be None"),
    "attention": (lambda x: tw.attention(x, x, x, bias=x[0, 0, :, :4]), "bias has seqlen_k"),
}


@pytest.mark.parametrize("call, words", REFUSED.values(), ids=REFUSED)
def test_refusals_are_sentences(call, words):
    """Also with lengths in them that are symbols."""
    x = normal(2, 4, 5, 8, dtype=torch.float32)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(call, dynamic=True, fullgraph=True, backend="eager")(x)
