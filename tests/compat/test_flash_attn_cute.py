"""flash_attn.cute's two functions against the oracle: sinks, windows, sequences given in every way, and what is refused."""

import pytest
import torch
from peer_oracle import call_of, check, qkv, randn

import tilewise as tw
from tilewise.compat import flash_attn_cute
from tilewise.errors import ShapeError, UnsupportedError

WORDS = {
    "full": ({}, tw.Full()),
    "causal": ({"causal": True}, tw.Causal()),
    "window": ({"window_size": (3, None), "softcap": None}, tw.SlidingWindow(3, None)),
    "causal window": ({"causal": True, "window_size": (3, 7)}, tw.SlidingWindow(3, 0)),
    "none": ({"window_size": (-1, -1)}, tw.Full()),
    "none, causal": ({"window_size": (-1, -1), "causal": True}, tw.Causal()),
}


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("words", WORDS)
def test_batches(words, sink):
    options, mask = WORDS[words]
    leaves = q, k, v = qkv(2, 9, 13, dims=(16, 24))
    sinks = randn(4, seed=8).requires_grad_() if sink else None
    o, lse = flash_attn_cute.flash_attn_func(q, k, v, learnable_sink=sinks, return_lse=True, **options)
    again, nothing = flash_attn_cute.flash_attn_func(q, k, v, learnable_sink=sinks, **options)
    assert nothing is None and torch.equal(again, o)
    check(call_of(*leaves, mask, sink=sinks), o, lse, leaves + ((sinks,) if sink else ()))


def test_empty_rows():
    q, k, v = qkv(1, 5, 3)
    _, lse = flash_attn_cute.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (lse[..., :2] == -torch.inf).all() and lse[..., 2:].isfinite().all()


def test_heads_come_last_with_a_second_part():
    q, k, v = qkv(2, 5, 9)
    qv = randn(2, 5, 4, 16, seed=7)
    o, lse = flash_attn_cute.flash_attn_func(q, k, v, qv, return_lse=True)
    assert lse.shape == (2, 5, 4)
    check(call_of(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, tw.Full()), o, lse.transpose(1, 2))


@pytest.mark.parametrize("keys", ["batch", "packed", "pages"])
@pytest.mark.parametrize("queries", ["batch", "packed"])
def test_sequences(queries, keys):
    used_q, used_k = torch.tensor([5, 2], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    q, k, v = qkv(2, 5, 8, grad=False)
    words = {"causal": True, "return_lse": True, "seqused_q": used_q}
    given = [q, k, v]
    if queries == "packed":
        given[0], words["cu_seqlens_q"] = q.flatten(0, 1), torch.tensor([0, 5, 10], dtype=torch.int32)
    if keys == "packed":
        given[1:] = k.flatten(0, 1), v.flatten(0, 1)
        words["cu_seqlens_k"] = torch.tensor([0, 8, 16], dtype=torch.int32)
    if keys == "pages":
        given[1:] = k.flip(0).reshape(4, 4, 2, 16), v.flip(0).reshape(4, 4, 2, 16)
        words["page_table"] = torch.tensor([[2, 3], [0, 1]], dtype=torch.int32)
    o, lse = flash_attn_cute.flash_attn_varlen_func(*given, **words, seqused_k=used_k)
    assert o.shape == given[0].shape and lse.shape == ((2, 4, 5) if queries == "batch" else (4, 10))
    o, lse = o.reshape(2, 5, 4, 16), lse if queries == "batch" else lse.unflatten(1, (2, 5)).transpose(0, 1)
    for b in range(2):
        one, two = int(used_q[b]), int(used_k[b])
        check(call_of(q[b : b + 1, :one], k[b : b + 1, :two], v[b : b + 1, :two], tw.Causal()), o[b : b + 1, :one], lse[b : b + 1, :, :one])
        assert (o[b, one:] == 0).all()


@pytest.mark.parametrize("sink", [False, True])
def test_gradients_of_sequences(sink):
    leaves = qkv(1, 20, 24)
    sinks = randn(4, seed=8).requires_grad_() if sink else None
    cu_q, cu_k = torch.tensor([0, 6, 20]), torch.tensor([0, 10, 24])
    o, lse = flash_attn_cute.flash_attn_varlen_func(
        *(x[0] for x in leaves), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, learnable_sink=sinks, return_lse=True
    )
    mask = tw.Documents(cu_q, cu_k, inner=tw.Causal())
    check(call_of(*leaves, mask, sink=sinks), o[None], lse[None], leaves + ((sinks,) if sink else ()))


REFUSED = ["gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors"]


@pytest.mark.parametrize("name", [*REFUSED, "block_sparse_tensors_bwd"])
def test_programs_are_refused(name):
    for function in (flash_attn_cute.flash_attn_func, flash_attn_cute.flash_attn_varlen_func):
        if name == "block_sparse_tensors_bwd" and function is flash_attn_cute.flash_attn_varlen_func:
            continue
        with pytest.raises(UnsupportedError, match=rf"flash_attn_cute.{function.__name__}: {name} is not supported; \w+") as caught:
            function(*qkv(1, 3, 3), **{name: (1,)})
        assert isinstance(caught.value, RuntimeError)


def test_errors_name_the_peers_arguments():
    q, k, v = qkv(1, 3, 3)
    with pytest.raises(RuntimeError, match="learnable_sink has heads_q 3, but q has heads_q 4"):
        flash_attn_cute.flash_attn_func(q, k, v, learnable_sink=torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"window_size must have no negative bound beside another, got \(-1, 3\); use tilewise.Band"):
        flash_attn_cute.flash_attn_func(q, k, v, window_size=(-1, 3))
    for window in (None, 3, "ab", ("1", "2"), (1.5, 2), (1, 2, 3), ([], 1), (torch.inf, 1), (torch.tensor([1, 2]), 1)):
        with pytest.raises(ShapeError, match=r"window_size must be two integers \(left, right\), None for unbounded, got "):
            flash_attn_cute.flash_attn_func(q, k, v, window_size=window)
    with pytest.raises(RuntimeError, match="seqused_k must be given with page_table"):
        flash_attn_cute.flash_attn_varlen_func(q, k, v, page_table=torch.zeros(1, 1, dtype=torch.int32))
