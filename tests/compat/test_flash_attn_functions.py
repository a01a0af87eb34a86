"""What is imported from inside flash_attn: autograd functions by their `apply`, and the compiled extension's functions, like the public ones."""

import pytest
import torch
from peer_oracle import qkv, randn

from tilewise.compat import flash_attn, flash_attn_2_cuda, flash_attn_functions, flash_attn_passes
from tilewise.errors import UnsupportedError

CU_Q, CU_K = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([0, 9, 24], dtype=torch.int32)
TAIL = 0.0, 0.3, True, (5, 0), 0.0, None, False


@pytest.mark.parametrize("probs", [False, True])
def test_apply_is_the_function(probs):
    q, k, v = qkv(1, 20, 24)
    square = qkv(1, 20, 20, heads=(4, 4))
    kv, all_three = torch.stack((k, v), 2).detach(), torch.stack(square, 2).detach()
    lengths = CU_Q, CU_K, 13, 15
    calls = {
        "FlashAttnFunc": (flash_attn.flash_attn_func, (q, k, v, *TAIL, probs)),
        "FlashAttnKVPackedFunc": (flash_attn.flash_attn_kvpacked_func, (q, kv, *TAIL, probs)),
        "FlashAttnQKVPackedFunc": (flash_attn.flash_attn_qkvpacked_func, (all_three, *TAIL, probs)),
        "FlashAttnVarlenFunc": (flash_attn.flash_attn_varlen_func, (q[0], k[0], v[0], *lengths, *TAIL, probs, None)),
        "FlashAttnVarlenKVPackedFunc": (flash_attn.flash_attn_varlen_kvpacked_func, (q[0], kv[0], *lengths, *TAIL, probs)),
        "FlashAttnVarlenQKVPackedFunc": (flash_attn.flash_attn_varlen_qkvpacked_func, (all_three[0], CU_Q, 13, *TAIL, probs)),
    }
    assert set(calls) == {name for name in flash_attn_functions.__all__ if name.startswith("FlashAttn")}
    for name, (function, args) in calls.items():
        apply = getattr(flash_attn_functions, name).apply
        expected = function(*args)
        got, without = apply(*args, True), apply(*args, False)
        for a, b, c in zip(*((x if probs else (x,)) for x in (got, expected, without)), strict=True):
            assert torch.equal(a, b) and torch.equal(a, c) and not c.requires_grad
        first = got[0] if probs else got
        assert first.requires_grad is any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        with pytest.raises(TypeError, match=rf"{name}.apply takes the \d+ arguments of {function.__name__} and is_grad_enabled, by place"):
            apply(*args)


def test_names_of_the_interface():
    x = torch.zeros(4, 6)
    assert flash_attn_functions.maybe_contiguous(x) is x and flash_attn_functions.maybe_contiguous(None) is None
    assert flash_attn_functions.maybe_contiguous(x.T).stride(-1) == 1
    assert [flash_attn_functions.round_multiple(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert flash_attn_functions.flash_attn_gpu.fwd is flash_attn_2_cuda.fwd


def test_the_extension_both_ways():
    q, k, v = qkv(2, 9, 6, grad=False)
    d_o, window = randn(*q.shape, seed=9), (5, 0)
    scores = 0.0, 0.3, True, *window, 0.0
    out = torch.full_like(q, torch.nan)
    o, lse, s_dmask, rng = flash_attn_2_cuda.fwd(q, k, v, out, None, *scores, False, None)
    expected = flash_attn_passes._flash_attn_forward(q, k, v, *scores, None, False)
    assert o is out and torch.equal(o, expected[0]) and torch.equal(lse, expected[1]) and s_dmask.numel() == 0
    dk = torch.full_like(k, torch.nan)
    found = flash_attn_2_cuda.bwd(d_o, q, k, v, o, lse, None, dk, None, None, *scores, False, None, rng)
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    delta = flash_attn_passes._flash_attn_backward(d_o, q, k, v, o, lse, *wanted, *scores, None, False, rng)
    assert found[1] is dk
    for got, expected in zip(found, (*wanted, delta), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(UnsupportedError, match="unused_generator_compat is not supported; random numbers are drawn from torch's generator"):
        flash_attn_2_cuda.fwd(q, k, v, None, None, *scores, False, torch.Generator())
    with pytest.raises(RuntimeError, match="out_ has shape .*1, 4, 16.*"):
        flash_attn_2_cuda.fwd(q, k, v, out[:, :1], None, *scores, False, None)


def test_the_extension_of_sequences():
    q, k, v = (x[0] for x in qkv(1, 20, 24, grad=False))
    d_o, scores = randn(*q.shape, seed=9), (0.0, 0.3, True, -1, -1, 0.0)
    lengths = CU_Q, CU_K, 13, 15
    o, lse, _, rng = flash_attn_2_cuda.varlen_fwd(
        q, k, v, None, CU_Q, CU_K, None, None, None, None, 13, 15, 0.0, 0.3, False, *scores[2:], False, None
    )
    expected = flash_attn_passes._flash_attn_varlen_forward(q, k, v, *lengths, *scores)
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
    found = flash_attn_2_cuda.varlen_bwd(
        d_o, q, k, v, o, lse, None, None, None, CU_Q, CU_K, None, 13, 15, 0.0, 0.3, False, *scores[2:], False, None, rng
    )
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    delta = flash_attn_passes._flash_attn_varlen_backward(d_o, q, k, v, o, lse, *wanted, *lengths, *scores, None, False, rng)
    for got, expected in zip(found, (*wanted, delta), strict=True):
        assert torch.equal(got, expected)


def test_the_extension_of_caches():
    q, k, v = qkv(2, 3, 32, grad=False)
    lengths, out = torch.tensor([5, 9], dtype=torch.int32), torch.empty_like(q)
    new = randn(2, 3, 2, 16, seed=4)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    found = flash_attn_2_cuda.fwd_kvcache(
        q, *caches[0], new, new, lengths, None, None, None, None, None, None, out, 0.3, True, -1, -1, 0.0, True, 0
    )
    expected = flash_attn.flash_attn_with_kvcache(
        q, *caches[1], new, new, cache_seqlens=lengths, softmax_scale=0.3, causal=True, return_softmax_lse=True
    )
    assert found[0] is out and torch.equal(out, expected[0]) and torch.equal(found[1], expected[1])
    assert torch.equal(caches[0][0], caches[1][0])
    with pytest.raises(RuntimeError, match="fwd_kvcache: seqlens_k_ must be given with k"):
        flash_attn_2_cuda.fwd_kvcache(q, *caches[0], new, new, *[None] * 8, 0.3, True, -1, -1, 0.0, True, 0)
