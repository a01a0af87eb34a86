"""Biases and dense masks of every broadcast: the oracle's values, and gradients of a bias in its own shape."""

import pytest
import torch

import tilewise as tw
from tilewise.problem import Call, Gradients
from tilewise.testing import poison, tolerance

BATCH, ROWS, KEYS, HEADS = 2, 5, 13, 4
SHAPES = (
    *((ROWS, KEYS), (1, KEYS), (ROWS, 1), (1, 1), (HEADS, ROWS, KEYS), (1, ROWS, KEYS), (HEADS, 1, KEYS), (HEADS, ROWS, 1), (HEADS, 1, 1)),
    *((BATCH, HEADS, 1, KEYS), (BATCH, 1, ROWS, 1), (1, HEADS, ROWS, 1), (BATCH, HEADS, ROWS, 1), (BATCH, 1, 1, 1), (BATCH, 1, 1, KEYS)),
)
WHOLE = (BATCH, HEADS, ROWS, KEYS)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((BATCH, ROWS, HEADS, 8), (BATCH, KEYS, 2, 8), (BATCH, KEYS, 2, 6))
    return [randn(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes)]


def call_of(q, k, v, mask=None, bias=None) -> Call:
    return Call(q=q.detach(), k=k.detach(), v=v.detach(), mask=mask or tw.Causal(), scale=8**-0.5, bias=bias, grad=True)


@pytest.mark.parametrize("backend, dtype", [("cpu", torch.float32), ("cpu", torch.bfloat16), ("tiled", torch.float32)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_biases(shape, backend, dtype):
    leaves, bias = qkv(dtype), randn(*shape, seed=5, dtype=dtype).requires_grad_()
    with poison.memory():
        o, lse = tw.attention(*leaves, causal=True, bias=bias, backend=backend, return_lse=True)
    call = call_of(*leaves, bias=bias.detach().expand(WHOLE))
    d_o, d_lse = randn(*o.shape, seed=8, dtype=dtype), randn(*lse.shape, seed=9)
    *found, d_bias = torch.autograd.grad((o, lse), (*leaves, bias), (d_o, d_lse))
    tolerance.check_outputs(call, o.detach(), lse.detach())
    tolerance.check_gradients(call, Gradients(*found, None, None), d_o, d_lse)
    assert d_bias.shape == bias.shape and d_bias.dtype == bias.dtype


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_biases(shape):
    """In fp64: what a bias written out has, summed up."""
    leaves, bias = qkv(torch.float64), randn(*shape, seed=5, dtype=torch.float64)
    found, whole = bias.clone().requires_grad_(), bias.expand(WHOLE).clone().requires_grad_()
    d_o, d_lse = randn(BATCH, ROWS, HEADS, 6, seed=8, dtype=torch.float64), randn(BATCH, HEADS, ROWS, seed=9, dtype=torch.float64)
    grads = []
    for x in (found, whole):
        outputs = tw.attention(*leaves, bias=x, return_lse=True)
        grads += torch.autograd.grad(outputs, x, (d_o, d_lse))
    torch.testing.assert_close(grads[0], grads[1].sum_to_size(shape))


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_masks(shape, backend):
    leaves, shown = qkv(), randn(*shape, seed=5) > -0.5
    mask = tw.Dense(shown)
    o, lse = tw.attention(*leaves, mask=mask, backend=backend, return_lse=True)
    call = call_of(*leaves, mask=tw.Dense(shown.expand(WHOLE).clone()))
    d_o = randn(*o.shape, seed=8)
    tolerance.check_outputs(call, o.detach(), lse.detach())
    tolerance.check_gradients(call, Gradients(*torch.autograd.grad(o, leaves, d_o), None, None), d_o)
    assert mask.pairs(ROWS, KEYS, BATCH, HEADS) == shown.expand(WHOLE).sum()


@pytest.mark.parametrize("shape", [(ROWS, 1), (HEADS, 1, KEYS), (BATCH, 1, ROWS, 1)], ids=str)
def test_it_compiles_whole(shape):
    leaves, bias = qkv(), randn(*shape, seed=5).requires_grad_()
    shown = randn(*shape, seed=6) > -0.5

    def function(q, k, v, bias, shown):
        return tw.attention(q, k, v, bias=bias, mask=tw.Dense(shown))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    want, got = (torch.autograd.grad(each(*leaves, bias, shown).sum(), (*leaves, bias)) for each in (function, compiled))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_biases_are_read_as_they_lie():
    """Strides of whoever made it, among them 0."""
    q, k, v = (x.detach() for x in qkv())
    bias = randn(KEYS, HEADS, ROWS, seed=5).permute(1, 2, 0)
    torch.testing.assert_close(tw.attention(q, k, v, bias=bias), tw.attention(q, k, v, bias=bias.contiguous()))
