"""flash_attn_interface's functions against the oracle: second parts of scores, chunks, lengths in use, empty rows, merging, and what is refused."""

import numpy as np
import pytest
import torch
from peer_oracle import call_of, check, qkv, randn
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise as tw
from tilewise.compat import flash_attn_3
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.testing import poison

CU = torch.tensor([0, 9, 9, 21], dtype=torch.int32)
WORDS = {
    "full": ({}, tw.Full(), {}),
    "causal": ({"causal": True, "num_splits": 3, "pack_gqa": True, "sm_margin": 2}, tw.Causal(), {}),
    "window": ({"window_size": (3, 2), "softcap": 2.0}, tw.SlidingWindow(3, 2), {"softcap": 2.0}),
    "chunk": ({"attention_chunk": 4, "causal": True}, tw.ChunkedCausal(4), {}),
    "chunk, both ways": ({"attention_chunk": 4}, tw.Chunks(4), {}),
    "chunk and window": ({"attention_chunk": 4, "window_size": (2, 1)}, tw.Chunks(4) & tw.SlidingWindow(2, 1), {}),
}


@pytest.mark.parametrize("words", WORDS)
def test_batches(words):
    options, mask, fields = WORDS[words]
    leaves = q, k, v = qkv(2, 9, 13, dims=(16, 24))
    with poison.memory():
        o, lse = flash_attn_3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, **options), o)
    check(call_of(*leaves, mask, **fields), o, lse, leaves)


def test_second_part_of_scores():
    q, k, v = qkv(2, 5, 9, dims=(16, 24))
    qv = randn(2, 5, 4, 24, seed=7).requires_grad_()
    o, lse = flash_attn_3.flash_attn_func(q, k, v, qv=qv, causal=True, return_attn_probs=True)
    parts = torch.cat((q, qv), -1).detach(), torch.cat((k, v), -1).detach()
    check(call_of(*parts, v, tw.Causal()), o, lse)
    got = torch.autograd.grad(o, (q, qv), randn(*o.shape, seed=9))
    wide = parts[0].requires_grad_()
    (expected,) = torch.autograd.grad(tw.attention(wide, parts[1], v, causal=True), wide, randn(*o.shape, seed=9))
    torch.testing.assert_close(torch.cat(got, -1), expected)


def test_qkv_in_one():
    x = randn(2, 7, 8, 16).requires_grad_()  # 4 heads of q, 2 of k, 2 of v
    q, k, v = x.split((4, 2, 2), 2)
    expected = flash_attn_3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_3.flash_attn_qkvpacked_func(x, causal=True, num_heads_q=4), expected)
    threes = torch.stack((q[:, :, :2], k, v), 2)
    assert torch.equal(flash_attn_3.flash_attn_qkvpacked_func(threes), flash_attn_3.flash_attn_func(q[:, :, :2], k, v))
    for number in (3, 10, "4"):
        with pytest.raises(RuntimeError, match=f"num_heads_q must say how many of the 8 heads of qkv are queries, got {number!r}"):
            flash_attn_3.flash_attn_qkvpacked_func(x, num_heads_q=number)


@pytest.mark.parametrize("chunk", [None, float("inf"), float("nan"), 2.5, "4", (4,), torch.tensor([1, 2])], ids=str)
def test_a_chunk_is_an_integer(chunk):
    q, k, v = qkv(2, 9, 9, heads=(2, 2), grad=False)
    bounds = torch.tensor([0, 9, 18])
    for function, tensors in (
        (flash_attn_3.flash_attn_func, (q, k, v)),
        (flash_attn_3.flash_attn_qkvpacked_func, (torch.stack((q, k, v), 2),)),
        (flash_attn_3.flash_attn_varlen_func, (*(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, 9, 9)),
        (flash_attn_3.flash_attn_with_kvcache, (q, k, v)),
    ):
        with pytest.raises(ShapeError, match=f"{function.__name__}: attention_chunk must be an integer, 0 for none, got"):
            function(*tensors, attention_chunk=chunk)


def test_a_chunk_of_any_integer_type():
    q, k, v = qkv(2, 9, 9, grad=False)
    expected = flash_attn_3.flash_attn_func(q, k, v, attention_chunk=4)
    for chunk in (4.0, np.int64(4), torch.tensor(4)):
        assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, attention_chunk=chunk), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("used_q, used_k", [(None, [4, 0, 12]), ([9, 0, 5], None), ([3, 0, 0], [9, 0, 7])], ids=str)
def test_lengths_in_use(used_q, used_k, causal):
    """Masks align by the lengths in use; the rest is neither seen nor sees, and its gradients are zero."""
    leaves = tuple(x.detach()[0].requires_grad_() for x in qkv(1, 21, 21))
    used = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (used_q, used_k)]
    with poison.memory():
        o, lse = flash_attn_3.flash_attn_varlen_func(
            *leaves, CU, CU, 12, 12, seqused_q=used[0], seqused_k=used[1], causal=causal, return_attn_probs=True
        )
    d_o = randn(*o.shape, seed=9)
    grads = torch.autograd.grad(o, leaves, d_o)
    seen = [torch.zeros(21, dtype=torch.bool) for _ in range(2)]
    for b in range(3):
        start = int(CU[b])
        rows, keys = (slice(start, int(CU[b + 1]) if x is None else start + int(x[b])) for x in used)
        seen[0][rows], seen[1][keys] = True, True
        one = tuple(x.detach()[None, at].clone().requires_grad_() for x, at in zip(leaves, (rows, keys, keys), strict=True))
        check(call_of(*one, tw.Causal() if causal else tw.Full()), o[None, rows], lse[None, :, rows])
        for got, expected, at in zip(
            grads, torch.autograd.grad(tw.attention(*one, causal=causal), one, d_o[None, rows]), (rows, keys, keys), strict=True
        ):
            torch.testing.assert_close(got[at], expected[0])
    assert (o[~seen[0]] == 0).all() and (lse[:, ~seen[0]] == -torch.inf).all() and (grads[0][~seen[0]] == 0).all()
    assert (grads[1][~seen[1]] == 0).all() and (grads[2][~seen[1]] == 0).all()


def test_lengths_in_use_are_checked():
    q, k, v = (x[0] for x in qkv(1, 21, 21))
    with pytest.raises(RuntimeError, match=r"seqused_k\[1\] is 1; it must be between 0 and 0, the document's keys"):
        flash_attn_3.flash_attn_varlen_func(q, k, v, CU, CU, 12, 12, seqused_k=torch.tensor([9, 1, 3]))
    with pytest.raises(RuntimeError, match="seqused_q has sequences 2, but cu_seqlens_q has sequences 3"):
        flash_attn_3.flash_attn_varlen_func(q, k, v, CU, CU, 12, 12, seqused_q=torch.tensor([9, 0]))
    with pytest.raises(RuntimeError, match=r"seqused_q must be between 0 and the length of each sequence, \[9, 0, 12\], got \[9, 0, 13\]"):
        flash_attn_3.flash_attn_varlen_func(q, k, v, CU, CU, 12, 12, seqused_q=torch.tensor([9, 0, 13]))


def test_lengths_in_use_of_fake_tensors():
    with FakeTensorMode() as mode:
        q = torch.empty(21, 4, 16)
        cu, used = mode.from_tensor(CU), mode.from_tensor(torch.tensor([9, 0, 12], dtype=torch.int32))
        assert flash_attn_3.flash_attn_varlen_func(q, q, q, cu, cu, 12, 12, seqused_q=used, seqused_k=used).shape == q.shape


def test_empty_rows():
    q, k, v = qkv(1, 5, 3)
    o, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[..., :2] == -torch.inf).all() and lse[..., 2:].isfinite().all() and (o[:, :2] == 0).all()


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_combine(out_dtype):
    q, k, v = qkv(2, 5, 12, grad=False)
    whole, lse = tw.attention(q, k, v, causal=True, return_lse=True)
    parts = [
        tw.attention(q, k[:, a:b], v[:, a:b], mask=tw.SlidingWindow(None, 12 - b), return_lse=True) for a, b in ((0, 4), (4, 8), (8, 12))
    ]
    partial, partial_lse = torch.stack([o for o, _ in parts]), torch.stack([each for _, each in parts]).transpose(2, 3)
    got, got_lse = flash_attn_3.flash_attn_combine(partial, partial_lse, out_dtype=out_dtype)
    assert got.dtype == (out_dtype or torch.float32)
    torch.testing.assert_close(got.float(), whole, atol=1e-6 if out_dtype is None else 1e-2, rtol=1e-6 if out_dtype is None else 1e-2)
    torch.testing.assert_close(got_lse, lse.transpose(1, 2))
    into = torch.empty_like(whole)
    assert flash_attn_3.flash_attn_combine(partial, partial_lse, into)[0] is into
    torch.testing.assert_close(into, whole)


def test_metadata_is_empty():
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    metadata = flash_attn_3.get_scheduler_metadata(2, 1, 8, 4, 2, 16, lengths)
    assert metadata.numel() == 0 and metadata.dtype == torch.int32
    q, cache = randn(2, 1, 4, 16), randn(2, 8, 2, 16)
    one, two = (
        flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=x) for x in (None, metadata)
    )
    assert torch.equal(one, two)


DESCALES = ("q_descale", "k_descale", "v_descale")


def e4m3(batch: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int] = (4, 2)):
    """q, k and v in e4m3, their descales by the peer's names, and the bf16 tensors that they stand for."""
    tensors = [x.to(torch.float8_e4m3fn) for x in qkv(batch, seqlen_q, seqlen_k, heads=heads, grad=False)]
    descales = [0.5 + torch.rand(batch, heads[1], generator=torch.Generator().manual_seed(n)) for n in range(3)]
    groups = heads[0] // heads[1], 1, 1
    wide = [x.float() * s.repeat_interleave(g, 1)[:, None, :, None] for x, s, g in zip(tensors, descales, groups, strict=True)]
    return tensors, dict(zip(DESCALES, descales, strict=True)), wide


def off(got, want) -> float:
    return float((got.double() - want.double()).square().mean().sqrt() / want.double().square().mean().sqrt())


@pytest.mark.parametrize("causal", [False, True])
def test_e4m3_with_descales(causal):
    """P is rounded to e4m3, whose half ulp is 1 / 16; its errors are averaged over the keys."""
    tensors, descales, wide = e4m3(2, 21, 150)
    want = tw.attention(*wide, causal=causal)
    got = flash_attn_3.flash_attn_func(*tensors, causal=causal, **descales)
    assert got.dtype == torch.bfloat16 and 1e-4 < off(got, want) < 0.04
    for name in DESCALES:  # each one counts
        assert off(flash_attn_3.flash_attn_func(*tensors, causal=causal, **descales | {name: None}), want) > 0.04


def test_e4m3_packed():
    tensors, descales, wide = e4m3(2, 21, 150)
    cu = [torch.tensor([0, x.shape[1], 2 * x.shape[1]], dtype=torch.int32) for x in tensors[:2]]
    flat, used = [x.flatten(0, 1) for x in tensors], torch.tensor([20, 3])
    got = flash_attn_3.flash_attn_varlen_func(*flat, *cu, 21, 150, **descales)
    assert torch.equal(got.unflatten(0, (2, 21)), flash_attn_3.flash_attn_func(*tensors, **descales))
    short = flash_attn_3.flash_attn_varlen_func(*flat, *cu, 21, 150, seqused_q=used, seqused_k=used, **descales)
    for b, n in enumerate(used.tolist()):
        want = tw.attention(*(x[b : b + 1, :n] for x in wide))
        rows = short.unflatten(0, (2, 21))[b]
        assert off(rows[:n], want[0]) < 0.04 and not rows[n:].any()


def test_e4m3_qkv_in_one():
    tensors, descales, wide = e4m3(2, 21, 21, heads=(2, 2))
    packed = torch.stack(tensors, 2)
    assert off(flash_attn_3.flash_attn_qkvpacked_func(packed, **descales), tw.attention(*wide)) < 0.04


def test_e4m3_that_requires_a_gradient_goes_forward_alone():
    tensors, descales, _ = e4m3(2, 5, 7)
    want = flash_attn_3.flash_attn_func(*tensors, **descales)
    tensors[1].requires_grad_()
    out = flash_attn_3.flash_attn_func(*tensors, **descales)
    assert torch.equal(out, want)
    with pytest.raises(UnsupportedError, match="q, k and v of 8 bits have no gradient; attend with them in 16 bits"):
        out.sum().backward()


@pytest.mark.parametrize("packed", [False, True])
def test_e4m3_caches(packed):
    """Nothing is rounded to 8 bits here."""
    tensors, descales, wide = e4m3(2, 1, 40)
    lengths = torch.tensor([7, 40], dtype=torch.int32)
    want = tw.decode(*(x.bfloat16() for x in wide), cache_seqlens=lengths)
    words = {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)} if packed else {}
    q = tensors[0][:, 0] if packed else tensors[0]
    got = flash_attn_3.flash_attn_with_kvcache(q, *tensors[1:], cache_seqlens=lengths, **words, **descales)
    assert got.dtype == torch.bfloat16 and off(got.view(want.shape), want) < 0.01


@pytest.mark.parametrize("name", DESCALES)
def test_descales_are_for_eight_bits(name):
    q, k, v = qkv(1, 3, 3, heads=(2, 2))
    cu = torch.tensor([0, 3])
    for function, arguments in (
        (flash_attn_3.flash_attn_func, (q, k, v)),
        (flash_attn_3.flash_attn_qkvpacked_func, (torch.stack((q, k, v), 2),)),
        (flash_attn_3.flash_attn_varlen_func, (q[0], k[0], v[0], cu, cu, 3, 3)),
        (flash_attn_3.flash_attn_with_kvcache, (q, k, v)),
    ):
        with pytest.raises(
            ShapeError, match=rf"{function.__name__}: {name} is for (tensors|caches) of 8 bits, but {name[0]}.* is .*; leave it out"
        ):
            function(*arguments, **{name: torch.ones(1, 2)})


def test_what_e4m3_has_not():
    (q, k, v), descales, _ = e4m3(1, 3, 3)
    with pytest.raises(ShapeError, match="q_descale has heads_k 4, but k has heads_k 2"):
        flash_attn_3.flash_attn_func(q, k, v, q_descale=torch.ones(1, 4))
    with pytest.raises(UnsupportedError, match="qv is not supported with q_descale; pass q, k, v and qv in bf16"):
        flash_attn_3.flash_attn_func(q, k, v, qv=q, **descales)
    with pytest.raises(UnsupportedError, match="qv is not supported with a k_cache of torch.float8_e4m3fn"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, qv=q, cache_seqlens=3)
