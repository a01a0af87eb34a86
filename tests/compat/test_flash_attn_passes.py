"""The two passes apart: the oracle's gradients, the same through a caller's own merge of parts (ring attention), and dropout's random numbers."""

import pytest
import torch
from peer_oracle import call_of, qkv, randn

import tilewise as tw
from tilewise.compat import _translate
from tilewise.compat import flash_attn_passes as passes
from tilewise.problem import Gradients
from tilewise.testing import poison, tolerance

WINDOW = (5, 0)
CU_Q, CU_K = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([0, 9, 24], dtype=torch.int32)


def tail(slopes=None, dropout_p=0.0, causal=True, window=(-1, -1)):
    """dropout_p to alibi_slopes, as all four have them in a row."""
    return dropout_p, 0.3, causal, *window, 0.0, slopes


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.25, 0.0, 0.1])], ids=["", "alibi"])
@pytest.mark.parametrize("window", [(-1, -1), WINDOW])
@pytest.mark.parametrize("dtype, dim", [(torch.float32, 16), (torch.bfloat16, 40)], ids=str)
def test_batches(dtype, dim, window, slopes):
    q, k, v = qkv(2, 9, 6, dims=(dim, dim), dtype=dtype, grad=False)  # the first rows see no key
    d_o = randn(*q.shape, seed=9, dtype=dtype)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    with poison.memory():
        o, lse, s_dmask, rng_state = passes._flash_attn_forward(q, k, v, *tail(slopes, window=window), False)
        delta = passes._flash_attn_backward(d_o, q, k, v, o, lse, *grads, *tail(slopes, window=window), False, rng_state)
    mask = tw.Causal() if window == (-1, -1) else tw.SlidingWindow(*WINDOW)
    call = call_of(q, k, v, mask, scale=0.3, **({} if slopes is None else {"alibi_slopes": slopes}))
    assert (lse[..., :3] == torch.inf).all() and s_dmask.numel() == 0
    tolerance.check_outputs(call, o, _translate.negative_infinity(lse))
    tolerance.check_gradients(call, Gradients(*grads, None, None), d_o)
    torch.testing.assert_close(delta, (d_o.float() * o.float()).sum(-1).transpose(1, 2))


def test_sequences():
    q, k, v = (x[0] for x in qkv(1, 20, 24, grad=False))
    slopes, d_o = torch.tensor([0.5, 0.25, 0.0, 0.1]), randn(20, 4, 16, seed=9)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    o, lse, _, _ = passes._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, 13, 15, *tail(slopes))
    passes._flash_attn_varlen_backward(d_o, q, k, v, o, lse, *grads, CU_Q, CU_K, 13, 15, *tail(slopes), False)
    fields = {"scale": 0.3, "alibi_slopes": slopes, "diagonal": torch.tensor([2] * 7 + [4] * 13)}
    call = call_of(q[None], k[None], v[None], tw.Documents(CU_Q, CU_K, inner=tw.Causal()), **fields)
    tolerance.check_outputs(call, o[None], lse[None])
    tolerance.check_gradients(call, Gradients(*(x[None] for x in grads), None, None), d_o[None])
    each = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    two = torch.stack((slopes, slopes.flip(0)))  # slopes of each sequence
    o, lse, _, _ = passes._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, 13, 15, *tail(two))
    passes._flash_attn_varlen_backward(d_o, q, k, v, o, lse, *each, CU_Q, CU_K, 13, 15, *tail(two), False)
    torch.testing.assert_close(
        [x[:7] for x in each[:1]] + [x[:9] for x in each[1:]], [x[:7] for x in grads[:1]] + [x[:9] for x in grads[1:]]
    )
    one = call_of(q[None, 7:], k[None, 9:], v[None, 9:], tw.Causal(), scale=0.3, alibi_slopes=two[1])
    tolerance.check_outputs(one, o[None, 7:], lse[None, :, 7:])
    tolerance.check_gradients(one, Gradients(each[0][None, 7:], each[1][None, 9:], each[2][None, 9:], None, None), d_o[None, 7:])


def test_parts_of_the_keys_as_in_a_ring():
    """Each part's backward pass takes O and LSE of the whole; what it wants is written, what it does not is left."""
    q, k, v = qkv(2, 9, 12, grad=False)
    d_o = randn(*q.shape, seed=9)
    parts = [passes._flash_attn_forward(q, k[:, a:b], v[:, a:b], *tail(causal=False), False)[:2] for a, b in ((0, 5), (5, 12))]
    o, lse = tw.merge(*zip(*parts, strict=True))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a, b in ((0, 5), (5, 12)):
        part = torch.empty_like(q)
        args = d_o, q, k[:, a:b], v[:, a:b], o, lse
        passes._flash_attn_backward(*args, part, dk[:, a:b], dv[:, a:b], *tail(causal=False), False)
        passes._flash_attn_backward(*args, None, None, None, *tail(causal=False), False)
        dq += part
    call = call_of(q, k, v, tw.Full(), scale=0.3)
    tolerance.check_gradients(call, Gradients(dq, dk, dv, None, None), d_o)


def test_dropout_drops_the_same_in_both_passes():
    leaves = q, k, v = qkv(1, 17, 19)
    d_o = randn(1, 17, 4, 16, seed=9)
    words = tail(dropout_p=0.4)
    o, lse, _, rng_state = passes._flash_attn_forward(q, k, v, *words, False)
    other = passes._flash_attn_forward(q, k, v, *words, False)
    seed, offset = rng_state.tolist()
    expected = tw.attention(q, k, v, causal=True, scale=0.3, dropout_p=0.4, dropout_seed=seed, dropout_offset=offset)
    assert torch.equal(o, expected) and not torch.equal(o, other[0]) and not o.requires_grad
    grads = [torch.empty_like(x) for x in leaves]
    passes._flash_attn_backward(d_o, q, k, v, o, lse, *grads, *words, False, rng_state)
    for got, wanted in zip(grads, torch.autograd.grad(expected, leaves, d_o), strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(RuntimeError, match="rng_state must be given with dropout_p > 0"):
        passes._flash_attn_backward(d_o, q, k, v, o, lse, *grads, *words, False)


def test_refusals():
    q, k, v = (x[0] for x in qkv(1, 20, 24, grad=False))
    table = torch.zeros(2, 1, dtype=torch.int32)
    common = (CU_Q, CU_K, 13, 15, *tail())
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported together with block_table"):
        passes._flash_attn_varlen_forward(q, k[None], v[None], *common, block_table=table, num_splits=2)
    with pytest.raises(RuntimeError, match="num_splits must be an integer, 0 for any number, got None"):
        passes._flash_attn_varlen_forward(q, k[None], v[None], *common, block_table=table, num_splits=None)
    with pytest.raises(RuntimeError, match="leftpad_k is not supported; give cu_seqlens_k that begin behind the padding"):
        passes._flash_attn_varlen_forward(q, k, v, *common, leftpad_k=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="return_softmax=True is not supported"):
        passes._flash_attn_forward(q[None], k[None], v[None], *tail(dropout_p=0.2), True)


def test_pages_and_lengths_in_use():
    q, k, v = (x[0] for x in qkv(1, 20, 24, grad=False))
    used = torch.tensor([5, 11], dtype=torch.int32)
    o, lse, _, _ = passes._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, 13, 15, *tail(), seqused_k=used)
    table = torch.tensor([[1, 0, 0], [3, 2, 0]], dtype=torch.int32)
    pages = [torch.full((4, 8, 2, 16), torch.nan) for _ in range(2)]
    for cache, x in zip(pages, (k, v), strict=True):
        cache[1, :5], cache[3], cache[2, :3] = x[:5], x[9:17], x[17:20]
    paged = passes._flash_attn_varlen_forward(q, *pages, CU_Q, CU_K, 13, 15, *tail(), block_table=table, seqused_k=used)
    torch.testing.assert_close(paged[0], o)
    for n, (q0, q1, k0) in enumerate(((0, 7, 0), (7, 20, 9))):
        call = call_of(q[None, q0:q1], k[None, k0 : k0 + used[n]], v[None, k0 : k0 + used[n]], tw.Causal(), scale=0.3)
        tolerance.check_outputs(call, o[None, q0:q1], _translate.negative_infinity(lse)[None, :, q0:q1])
