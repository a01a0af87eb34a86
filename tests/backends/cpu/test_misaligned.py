"""Tensors that begin at no multiple of their numbers' size, as torch.frombuffer gives them: the bits of those that do."""

import pytest
import torch

import tilewise as tw


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers one byte further on."""
    memory = bytearray(x.numel() * x.element_size() + 1)
    y = torch.frombuffer(memory, dtype=x.dtype, offset=1).view(x.shape)
    assert y.data_ptr() % x.element_size()
    return y.copy_(x)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("seqlen_q", (1, 37, 130))
def test_attention(dtype, seqlen_q):
    draw = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=draw).to(dtype)  # noqa: E731
    given = [new(1, seqlen_q, 4, 24), new(1, 150, 2, 24), new(1, 150, 2, 24), new(1, 4, seqlen_q, 150), new(4), new(4).float().abs()]
    d_o, d_lse = new(1, seqlen_q, 4, 24), new(1, 4, seqlen_q).float()
    found = []
    for place in (torch.clone, shifted, shifted):
        *leaves, slopes = (place(x).requires_grad_(n < 5) for n, x in enumerate(given))
        q, k, v, bias, sink = leaves
        results = tw.attention(q, k, v, bias=bias, sink=sink, alibi_slopes=slopes, causal=True, return_lse=True, backend="cpu")
        found.append((*results, *torch.autograd.grad(results, leaves, (place(d_o), place(d_lse)))))
        out = place(torch.zeros_like(results[0]))
        tw.attention(*(x.detach() for x in (q, k, v)), causal=True, out=out, backend="cpu")
        found[-1] += (out,)
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_decode(dtype):
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=draw).to(dtype) for shape in ((3, 1, 4, 24), (3, 90, 2, 24), (3, 90, 2, 24))]
    lengths = torch.tensor([90, 0, 33], dtype=torch.int32)
    q, k, v = map(shifted, given)
    right = tw.decode(given[0], k_cache=given[1], v_cache=given[2], cache_seqlens=lengths)
    assert torch.equal(tw.decode(q, k_cache=k, v_cache=v, cache_seqlens=shifted(lengths)), right)
