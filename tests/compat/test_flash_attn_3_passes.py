"""FlashAttention-3's passes apart: the public functions' values whichever way, and their gradients; earlier releases' words and results."""

import inspect

import pytest
import torch
from peer_oracle import qkv, randn

from tilewise.compat import flash_attn_3
from tilewise.compat import flash_attn_3_passes as passes

CU_Q, CU_K = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([0, 9, 24], dtype=torch.int32)
WORDS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (5, 1)}, "softcap": {"softcap": 2.0, "causal": True}}


def apart(words):
    """The passes' words, forward and backward, for the public function's."""
    left, right = words.get("window_size", (-1, -1))
    rest = {"window_size_left": left, "window_size_right": right, "softcap": words.get("softcap", 0.0)}
    return rest | {"causal": words.get("causal", False)}, rest | {"is_causal": words.get("causal", False)}


def compare(leaves, call, lengths, words):
    """`call`, a public function of q, k, v, and the passes with `lengths`, (forward's, backward's)."""
    forward, backward = apart(words)
    o, lse = call(*leaves)
    d_o = randn(*o.shape, seed=9).to(o.dtype)
    expected = torch.autograd.grad(o, leaves, d_o)
    plain = [x.detach() for x in leaves]
    out = torch.full_like(o.detach(), torch.nan)
    got, got_lse, *nothing = passes._flash_attn_forward(*plain, out_=out, **lengths[0], **forward)
    assert got is out and torch.equal(out, o) and torch.equal(got_lse, lse) and [x.numel() for x in nothing] == [0, 0]
    grads = [torch.full_like(x, torch.nan) for x in plain]
    into = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    delta = passes._flash_attn_backward(d_o, *plain, out, lse.detach(), **lengths[1], **into, **backward, deterministic=True)
    torch.testing.assert_close(delta, (d_o.float() * out.float()).sum(-1).transpose(-1, -2))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches(words, dtype):
    leaves = qkv(2, 9, 13, dims=(16, 16), dtype=dtype)
    compare(leaves, lambda *x: flash_attn_3.flash_attn_func(*x, return_attn_probs=True, **WORDS[words]), ({}, {}), WORDS[words])


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("used", ["", "k", "q", "qk"])
def test_sequences(words, used):
    leaves = [x.detach()[0].requires_grad_() for x in qkv(1, 20, 24)]
    counts = {f"seqused_{x}": torch.tensor([5, 11], dtype=torch.int32) for x in used}
    lengths = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 13, "max_seqlen_k": 15}
    back = lengths | {f"sequed_{x}": counts[f"seqused_{x}"] for x in used}

    def call(*x):
        return flash_attn_3.flash_attn_varlen_func(*x, **lengths, **counts, return_attn_probs=True, **WORDS[words])

    compare(leaves, call, (lengths | counts, back), WORDS[words])


def test_batches_of_which_not_all_is_in_use():
    """Without cu_seqlens, or with those of one side alone: as packed sequences, arranged as q is; also through gradients that have gaps."""
    q, k, v = qkv(2, 9, 13, grad=False)
    used = torch.tensor([5, 13], dtype=torch.int32)
    ends = torch.tensor([0, 13, 26], dtype=torch.int32)
    rows = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    d_o = randn(*q.shape, seed=9)
    o, lse = flash_attn_3.flash_attn_varlen_func(*flat, rows, ends, 9, 13, None, used, causal=True, return_attn_probs=True)
    same = {"seqused_k": used, "causal": True}
    for got, got_lse in (
        passes._flash_attn_forward(q, k, v, **same)[:2],
        passes._flash_attn_forward(q, *flat[1:], cu_seqlens_k=ends, **same)[:2],
        passes._flash_attn_forward(flat[0], k, v, cu_seqlens_q=rows, **same)[:2],
    ):
        assert torch.equal(got.reshape(o.shape), o) and torch.equal(got_lse if got.dim() == 3 else got_lse.transpose(0, 1).flatten(1), lse)
    wide = [torch.full((*x.shape[:3], 2 * x.shape[3]), torch.nan)[..., ::2] for x in (q, k, v)]
    packed = [torch.empty_like(x) for x in flat]
    whole, whole_lse = o.unflatten(0, (2, 9)), lse.unflatten(1, (2, 9)).transpose(0, 1)
    passes._flash_attn_backward(d_o, q, k, v, whole, whole_lse, None, None, None, used, None, None, *wide, is_causal=True)
    passes._flash_attn_backward(d_o.flatten(0, 1), *flat, o, lse, rows, ends, None, used, 9, 13, *packed, is_causal=True)
    for a, b in zip(wide, packed, strict=True):
        assert torch.equal(a.flatten(0, 1), b)
    assert (wide[1][0, 5:] == 0).all()


def test_caches():
    q, k, v = qkv(2, 3, 32, grad=False)
    used, new = torch.tensor([5, 9], dtype=torch.int32), randn(2, 3, 2, 16, seed=4)
    mine, theirs = ((k.clone(), v.clone()) for _ in range(2))
    out, lse, *_ = passes._flash_attn_forward(q, *mine, new, new, seqused_k=used, causal=True)
    expected = flash_attn_3.flash_attn_with_kvcache(q, *theirs, new, new, cache_seqlens=used, causal=True, return_softmax_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and torch.equal(mine[0], theirs[0])
    table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
    pages = [x.unflatten(1, (2, 16)).flatten(0, 1)[table.flatten().argsort()] for x in theirs]
    paged = passes._flash_attn_forward(q, *pages, page_table=table, seqused_k=used + 3, causal=True)
    torch.testing.assert_close(paged[0], out)
    with pytest.raises(RuntimeError, match="_flash_attn_forward: cu_seqlens_k is not supported with page_table; a cache's tokens"):
        passes._flash_attn_forward(q, *pages, page_table=table, cu_seqlens_k=CU_K)
    with pytest.raises(RuntimeError, match="flash_attn_3_passes._flash_attn_forward: seqused_k must be given with k"):
        passes._flash_attn_forward(q, *mine, new, new)


def test_earlier_words_have_earlier_results():
    leaves = q, k, v = qkv(2, 9, 13)
    o, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, window_size=(5, -1), return_attn_probs=True)
    d_o = randn(*o.shape, seed=9)
    expected = torch.autograd.grad(o, leaves, d_o)
    out = torch.empty_like(q)
    got = passes._flash_attn_forward(q.detach(), k.detach(), v.detach(), causal=True, window_size=(5, -1), out=out)
    assert torch.equal(got[0], o) and got[0] is out
    passed = d_o, *(x.detach() for x in leaves), o.detach(), lse.detach()
    *grads, delta = passes._flash_attn_backward(*passed, causal=True, window_size=(5, -1))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert delta.shape == (2, 4, 9)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'windows'"):
        passes._flash_attn_forward(*leaves, windows=(5, -1))


def test_apply_is_the_function():
    q, k, v = qkv(1, 20, 24)
    rest = (0.3, True, None, None, None, None, (5, 0), 0, 0.0, 1, None, False, 0, False)
    assert torch.equal(passes.FlashAttnFunc.apply(q, k, v, *rest), flash_attn_3.flash_attn_func(q, k, v, *rest))
    packed, used = (q[0], k[0], v[0]), torch.tensor([5, 11], dtype=torch.int32)
    got = passes.FlashAttnVarlenFunc.apply(*packed, CU_Q, CU_K, None, used, 13, 15, *rest)
    assert torch.equal(got, flash_attn_3.flash_attn_varlen_func(*packed, CU_Q, CU_K, 13, 15, None, used, *rest))
    assert "causal" in inspect.getfullargspec(passes._flash_attn_forward).args


@pytest.mark.parametrize("used", ["", "q", "qk"])
def test_sequences_that_begin_above_0(used):
    leaves = [x.detach()[0].requires_grad_() for x in qkv(1, 23, 26)]
    counts = {f"seqused_{x}": torch.tensor([5, 11], dtype=torch.int32) for x in used}
    lengths = {"cu_seqlens_q": CU_Q + 3, "cu_seqlens_k": CU_K + 2, "max_seqlen_q": 13, "max_seqlen_k": 15}
    alone = [x.detach()[n:] for x, n in zip(leaves, (3, 2, 2), strict=True)]
    zero = lengths | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    o, lse = flash_attn_3.flash_attn_varlen_func(*alone, **zero, **counts, causal=True, return_attn_probs=True)

    def call(*x):
        found = flash_attn_3.flash_attn_varlen_func(*x, **lengths, **counts, return_attn_probs=True, causal=True)
        assert torch.equal(found[0][3:], o) and torch.equal(found[1][:, 3:], lse) and (found[1][:, :3] == -torch.inf).all()
        return found

    back = lengths | {f"sequed_{x}": counts[f"seqused_{x}"] for x in used}
    compare(leaves, call, (lengths | counts, back), {"causal": True})
