"""torch.jit.trace records an operator, so what it made is right on other inputs, and when it is saved and loaded."""

import io

import pytest
import torch

import tilewise as tw

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning", "ignore::torch.jit.TracerWarning")
LENGTHS = torch.tensor([3, 9])


def inputs(batch=2, seqlen_q=1, seqlen_k=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, seqlen_q, 4, 8), (batch, seqlen_k, 2, 8), (batch, seqlen_k, 2, 6)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def saved_and_loaded(module):
    torch.jit.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.jit.load(file)


def test_decode():
    tw.decode(*inputs())  # so that an eager call of these shapes was there before
    module = torch.jit.trace(lambda q, k, v, n: tw.decode(q, k, v, cache_seqlens=n), (*inputs(), LENGTHS))
    other = *inputs(seqlen_k=12, seed=5), torch.tensor([12, 5])
    for each in (module, saved_and_loaded(module)):
        assert torch.equal(each(*other), tw.decode(*other[:3], cache_seqlens=other[3]))


def test_attention():
    for _ in range(3):  # so that it is a call like one before
        tw.attention(*inputs(), causal=True)
    module = torch.jit.trace(lambda *x: tw.attention(*x, causal=True), inputs())
    other = inputs(3, 5, 12, seed=5)
    for each in (module, saved_and_loaded(module)):
        assert torch.equal(each(*other), tw.attention(*other, causal=True))


def test_attention_with_gradients():
    leaves, again = ([x.requires_grad_() for x in inputs()] for _ in range(2))
    torch.jit.trace(lambda *x: tw.attention(*x, causal=True), tuple(leaves))(*leaves).sum().backward()
    tw.attention(*again, causal=True).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, again, strict=True))


def test_packed_documents():
    q, k, v = (x[0] for x in inputs(seqlen_q=9))
    cu = torch.tensor([0, 4, 9])
    module = torch.jit.trace(lambda q, k, v, cu: tw.attention_varlen(q, k, v, cu, cu, causal=True), (q, k, v, cu))
    other, cu = (x[0] for x in inputs(seqlen_q=12, seqlen_k=12, seed=3)), torch.tensor([0, 1, 12])
    q, k, v = other
    assert torch.equal(module(q, k, v, cu), tw.attention_varlen(q, k, v, cu, cu, causal=True))


def test_bad_input_has_its_own_error():
    with pytest.raises(ValueError, match="heads_q must be a multiple"):
        torch.jit.trace(lambda *x: tw.attention(*x), (inputs()[0][:, :, :3], *inputs()[1:]))
