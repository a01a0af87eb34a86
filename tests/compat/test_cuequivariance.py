"""cuEquivariance's triangle_attention: its formula in fp64 with gradients, masks and lengths, entries of a batch, what is refused."""

import pytest
import torch

from tilewise.compat.cuequivariance import triangle_attention
from tilewise.errors import ShapeError, UnsupportedError


def problem(batch, rows, heads, queries, keys, dim, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, rows, heads, n, dim) for n in (queries, keys, keys)] + [(batch, 1, heads, queries, keys)]
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def formula(q, k, v, bias, mask=None, scale=None):
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return p @ v


def same(got, want, inputs, tolerance=1e-12):
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    d_o = torch.randn(got.shape, generator=torch.Generator().manual_seed(9), dtype=got.dtype)
    for mine, theirs in zip(torch.autograd.grad(got, inputs, d_o), torch.autograd.grad(want, inputs, d_o), strict=True):
        torch.testing.assert_close(mine, theirs, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "mask", "lengths", "numbers"])
def test_values_and_gradients(kind, batch):
    inputs = problem(batch, 3, 2, 5, 7, 8)
    lengths = torch.tensor([7, 3, 1] * batch).view(batch, 3, 1, 1, 1)
    mask = torch.rand(batch, 3, 1, 1, 7, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 2] = True
    words = {
        "plain": {},
        "mask": {"mask": mask},
        "lengths": {"kv_lengths": lengths.int() + 90 * (lengths == 7)},
        "numbers": {"mask": mask.float()},
    }
    seen = {"plain": None, "lengths": torch.arange(7) < lengths}.get(kind, mask)
    same(triangle_attention(*inputs, scale=0.4, **words[kind]), formula(*inputs, seen, 0.4), inputs)


def test_without_a_batch():
    inputs = problem(1, 3, 2, 5, 7, 8)
    mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., 4:] = False
    got = triangle_attention(*(x[0] for x in inputs), mask)
    assert got.dim() == 4
    same(got, formula(*inputs, mask[None])[0], inputs)
    same(triangle_attention(*inputs[:3], inputs[3][0], mask), formula(*inputs, mask[None]), inputs)


def test_a_row_that_sees_nothing_is_zero():
    inputs = problem(1, 2, 2, 5, 7, 8)
    mask = torch.tensor([True, False]).view(1, 2, 1, 1, 1).expand(1, 2, 1, 1, 7)
    got = triangle_attention(*inputs, mask)
    assert got[:, 1].count_nonzero() == 0
    same(got, formula(*inputs, mask), inputs)


def test_a_bias_of_another_dtype():
    inputs = [x.detach().bfloat16() for x in problem(1, 3, 2, 5, 7, 8)]
    want = formula(*(x.double() for x in inputs))
    for bias in (inputs[3], inputs[3].float(), inputs[3].double()):
        torch.testing.assert_close(triangle_attention(*inputs[:3], bias).double(), want, atol=2e-2, rtol=2e-2)


def test_no_entries():
    inputs = problem(1, 2, 2, 5, 7, 8)
    got = triangle_attention(*(x[:0] for x in inputs))
    assert got.shape == (0, 2, 2, 5, 8) and torch.autograd.grad(got.sum(), inputs[0])[0].count_nonzero() == 0


def test_what_is_refused():
    inputs = problem(1, 3, 2, 5, 7, 8)
    mask = torch.ones(1, 3, 1, 1, 7, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="it returns no auxiliary tensors"):
        triangle_attention(*inputs, return_aux=True)
    with pytest.raises(ValueError, match="mask or kv_lengths, not both"):
        triangle_attention(*inputs, mask, kv_lengths=torch.ones(1, 3, 1, 1, 1))
    with pytest.raises(ShapeError, match=r"mask must be \(1, 3, 1, 1, 7\)"):
        triangle_attention(*inputs, mask[..., :6])
    with pytest.raises(ShapeError, match=r"bias must be \(1, 1, 2, 5, 7\)"):
        triangle_attention(*inputs[:3], inputs[3].expand(-1, 3, -1, -1, -1))
    with pytest.raises(ShapeError, match="or without B, got"):
        triangle_attention(*(x[0, 0] for x in inputs))
