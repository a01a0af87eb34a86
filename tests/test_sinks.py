"""Several sinks of a head are one (docs/algorithm.md, section 8): (tokens, heads_q) in every front end, with their gradients."""

import pytest
import torch

import tilewise as tw

HEADS = 4


def given(dtype: torch.dtype, tokens: int = 3) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, n, h, 16, generator=draw).to(dtype) for n, h in ((5, HEADS), (9, 2), (9, 2)))
    return q, k, v, torch.randn(tokens, HEADS, generator=draw).to(dtype)


def with_columns(q, k, v, sinks):
    """In fp64, the sinks as further columns of scores."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1), -torch.inf)
    columns = sinks.T[None, :, None].expand(*scores.shape[:-1], -1)
    p = torch.cat((scores, columns), -1).softmax(-1)[..., : scores.shape[-1]]
    return torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_as_further_columns_of_scores(tokens, dtype):
    within = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    leaves = [x.requires_grad_() for x in given(dtype, tokens)]
    *tensors, sinks = leaves
    o, want = tw.attention(*tensors, causal=True, sink=sinks), with_columns(*leaves)
    torch.testing.assert_close(o.double(), want, rtol=within, atol=within)
    d_o = torch.randn_like(o)
    found, expected = (torch.autograd.grad(x, leaves, d_o.to(x.dtype)) for x in (o, want))
    for name, x, y in zip("qkvs", found, expected, strict=True):
        assert x.dtype == dtype, name
        torch.testing.assert_close(x.double(), y.double(), rtol=4 * within, atol=4 * within, msg=name)


def test_every_front_end():
    q, k, v, sinks = given(torch.float32)
    want = tw.attention(q, k, v, causal=True, sink=sinks)
    assert torch.equal(want, tw.attention(q, k, v, causal=True, sink=sinks.logsumexp(0)))
    lengths = torch.full((2,), 9, dtype=torch.int32)
    torch.testing.assert_close(tw.decode(q, k, v, cache_seqlens=lengths, sink=sinks), want)
    parts = [
        tw.decode(q, x[0], x[1], cache_seqlens=lengths, sink=sinks, cp_rank=i, cp_world=2, cp_interleave=1, return_lse=True)
        for i, x in enumerate(((k[:, 0::2], v[:, 0::2]), (k[:, 1::2], v[:, 1::2])))
    ]
    torch.testing.assert_close(tw.merge(*zip(*parts, strict=True))[0], want)
    bounds_q, bounds_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 9))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    torch.testing.assert_close(tw.attention_varlen(*packed, bounds_q, bounds_k, causal=True, sink=sinks).view_as(want), want)
    plan = tw.distributed.plan(tw.Causal("bottom_right"), 9, (0, 1), heads=(HEADS, 2), head_dim=16)
    whole = torch.cat((torch.zeros(2, 4, HEADS, 16), q), 1)
    torch.testing.assert_close(tw.distributed.attention(whole, k, v, plan, sink=sinks)[:, 4:], want)


def test_none_and_those_that_count_for_nothing():
    q, k, v, sinks = given(torch.float32)
    plain = tw.attention(q, k, v)
    assert torch.equal(tw.attention(q, k, v, sink=sinks[:0]), plain)
    torch.testing.assert_close(tw.attention(q, k, v, sink=torch.full_like(sinks, -torch.inf)), plain)


def test_bad_ones_are_named():
    q, k, v, sinks = given(torch.float32)
    for sink, sentence in ((sinks[:, :2], "sink has heads_q 2"), (sinks.long(), "sink must"), (sinks[None], "sink must have 1 dimensions")):
        with pytest.raises(tw.ShapeError, match=sentence):
            tw.attention(q, k, v, sink=sink)
