"""Each head's largest score, as the functions return it: against the formula written out, and beside what else they return."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.backends.cpu import Cpu
from tilewise.errors import UnsupportedError
from tilewise.runtime import call_cache, dispatch

BACKENDS = ("cpu", "tiled", "reference")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def qkv(seqlen_q=37, seqlen_k=53, heads_q=4, heads_k=2, dim=24, dtype=torch.float32):
    return normal(2, seqlen_q, heads_q, dim, dtype=dtype), *(normal(2, seqlen_k, heads_k, dim, seed=s, dtype=dtype) for s in (1, 2))


def largest(q, k, shown, softcap=0.0, bias=0.0, slopes=0.0):
    """(batch, heads_q) in fp64; shown: bool (seqlen_q, seqlen_k), or more."""
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)) * q.shape[3] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])
    s = s + bias - slopes * (i + s.shape[3] - s.shape[2] - j).abs()
    return s.masked_fill(~shown, -math.inf).amax((2, 3))


def close(got, want):
    assert got.shape == want.shape and got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_largest_score_before_the_sink(backend, dtype):
    q, k, v = qkv(dtype=dtype)
    full = torch.ones(37, 53, dtype=torch.bool)
    causal = full.tril(53 - 37)
    dense = normal(37, 53, seed=3) > 0.5
    bias = normal(1, 4, 37, 53, seed=4)
    bias[bias > 1.0] = -math.inf
    slopes, sink = normal(4, seed=5).abs(), torch.full((4,), 50.0, dtype=dtype)
    for options, want in (
        ({}, largest(q, k, full)),
        ({"causal": True, "sink": sink}, largest(q, k, causal)),
        ({"mask": tw.SlidingWindow(5, 0), "softcap": 0.7}, largest(q, k, causal & ~causal.tril(-6 + 53 - 37), softcap=0.7)),
        ({"mask": tw.Dense(dense), "softcap": 2.0, "dropout_p": 0.6}, largest(q, k, dense, softcap=2.0)),
        (
            {"causal": True, "bias": bias, "alibi_slopes": slopes, "sink": sink},
            largest(q, k, causal, bias=bias.double(), slopes=slopes.double()[:, None, None]),
        ),
    ):
        o, lse, found = tw.attention(q, k, v, backend=backend, return_lse=True, return_max_logits=True, **options)
        close(found, want)
        if "dropout_p" not in options:
            plain = tw.attention(q, k, v, backend=backend, return_lse=True, **options)
            assert torch.equal(o, plain[0]) and torch.equal(lse, plain[1])
        torch.manual_seed(0)
        o = tw.attention(q, k, v, backend=backend, **options)
        torch.manual_seed(0)
        pair = tw.attention(q, k, v, backend=backend, return_max_logits=True, **options)
        assert len(pair) == 2 and torch.equal(pair[0], o) and torch.equal(pair[1], found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_see_nothing_and_scores_that_are_not_finite(backend):
    q, k, v = qkv()
    dense = torch.ones(2, 4, 37, 53, dtype=torch.bool)
    dense[0, 1] = False  # a head that sees no pair
    dense[:, :, :, 20] = False
    k[0, 20, 0] = math.nan  # which nobody sees
    want = largest(q, k.nan_to_num(), dense)
    close(tw.attention(q, k, v, mask=tw.Dense(dense), backend=backend, return_max_logits=True)[1], want)
    assert want[0, 1] == -math.inf
    k = k.nan_to_num()
    for value in (math.nan, math.inf):
        spoiled = k.clone()
        spoiled[1, 7, 1, 3] = value  # which heads 2 and 3 read
        _, found = tw.attention(q.abs(), spoiled, v, backend=backend, return_max_logits=True)
        assert found.isnan().tolist() == [[False] * 4, [False, False, True, True]]
    bias = torch.zeros(37, 53)
    bias[5], bias[:, 3] = -math.inf, -1e9
    want = largest(q, k, torch.ones(37, 53, dtype=torch.bool), bias=bias.double())
    close(tw.attention(q, k, v, bias=bias[None, None], backend=backend, return_max_logits=True)[1], want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (1, 1)])
def test_without_rows_or_keys(backend, seqlen_q, seqlen_k):
    q, k, v = qkv(seqlen_q, seqlen_k)
    _, found = tw.attention(q, k, v, sink=torch.ones(4), backend=backend, return_max_logits=True)
    close(
        found,
        largest(q, k, torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)) if seqlen_q * seqlen_k else torch.full((2, 4), -torch.inf).double(),
    )


def test_the_dtype_of_fp64():
    q, k, v = (x.double() for x in qkv())
    _, found = tw.attention(q, k, v, return_max_logits=True)
    torch.testing.assert_close(found, largest(q, k, torch.ones(37, 53, dtype=torch.bool)), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_documents(backend):
    """A document without queries, one without keys, and tokens behind the last."""
    q, k, v = (x.flatten(0, 1) for x in qkv())
    cu_q, cu_k = torch.tensor([0, 20, 20, 45, 60], dtype=torch.int32), torch.tensor([0, 40, 50, 50, 90])
    slopes = normal(4, seed=5).abs()
    for options in ({"causal": True}, {"mask": tw.SlidingWindow(3, 0), "alibi_slopes": slopes, "softcap": 1.5}):
        o, _, found = tw.attention_varlen(q, k, v, cu_q, cu_k, backend=backend, return_lse=True, return_max_logits=True, **options)
        assert found.shape == (4, 4) and (found[1] == -math.inf).all() and (found[2] == -math.inf).all()
        for n in (0, 3):
            one, each = (slice(int(cu[n]), int(cu[n + 1])) for cu in (cu_q, cu_k))
            alone = tw.attention(q[None, one], k[None, each], v[None, each], backend=backend, return_max_logits=True, **options)
            torch.testing.assert_close(found[n], alone[1][0])
        pair = tw.attention_varlen(q, k, v, cu_q, cu_k, backend=backend, return_max_logits=True, **options)
        assert torch.equal(pair[0], o) and torch.equal(pair[1], found)
    none = torch.zeros(1, dtype=torch.int32)
    assert tw.attention_varlen(q, k, v, none, none, backend=backend, return_max_logits=True)[1].shape == (0, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_as_without(backend):
    options = {"causal": True, "softcap": 3.0, "sink": torch.zeros(4), "backend": backend}
    found = []
    for more in (False, True):
        tensors = [x.requires_grad_() for x in qkv()]
        o, lse, *rest = tw.attention(*tensors, return_lse=True, return_max_logits=more, **options)
        assert len(rest) == more and not any(x.requires_grad for x in rest)
        found.append(torch.autograd.grad((o.square().sum() + lse.sum()), tensors))
        tensors = [x.requires_grad_() for x in qkv()]
        o = tw.attention(*tensors, return_max_logits=more, backend=backend)
        found[-1] += torch.autograd.grad((o[0] if more else o).sum(), tensors)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_under_checkpointing_and_compilation():
    q, k, v = (x.requires_grad_() for x in qkv())
    cu = torch.tensor([0, 20, 37])

    def call(q, k, v):
        return tw.attention(q, k, v, causal=True, return_max_logits=True)

    def packed(q, k, cu):
        return tw.attention_varlen(q[0], k[0], k[0], cu, cu, causal=True, return_max_logits=True)

    want = call(q, k, v)
    gradients = torch.autograd.grad(want[0].sum(), (q, k, v), retain_graph=True)
    for reentrant in (False, True):
        got = checkpoint(call, q, k, v, use_reentrant=reentrant)
        assert torch.equal(got[1], want[1])
        got[0].sum().backward()
        for x, g in zip((q, k, v), gradients, strict=True):
            assert torch.equal(x.grad, g)
            x.grad = None
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    got = compiled(q, k, v)
    assert torch.equal(got[1], want[1]) and not got[1].requires_grad
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(got[0].sum(), (q, k, v)), gradients, strict=True))
    shorter = compiled(q[:, :20], k, v)
    assert torch.equal(shorter[1], call(q[:, :20], k, v)[1])
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True, dynamic=True)
    for offsets in (cu, torch.tensor([0, 5, 9, 37])):
        assert all(torch.equal(x, y) for x, y in zip(compiled(q, k[:, :37], offsets), packed(q, k[:, :37], offsets), strict=True))


def test_under_vmap():
    q, k, v = qkv()
    many = torch.stack((q, 2.0 * q, -q))
    bias = normal(3, 1, 1, 37, 53, seed=7)
    got = torch.vmap(lambda q: tw.attention(q, k, v, causal=True, return_max_logits=True))(many)
    loop = [tw.attention(q, k, v, causal=True, return_max_logits=True) for q in many]
    assert all(torch.equal(x, torch.stack(each)) for x, each in zip(got, zip(*loop, strict=True), strict=True))
    got = torch.vmap(lambda q, bias: tw.attention(q, k, v, bias=bias, return_max_logits=True)[1])(many, bias)
    assert torch.equal(
        got, torch.stack([tw.attention(q, k, v, bias=b, return_max_logits=True)[1] for q, b in zip(many, bias, strict=True)])
    )
    plain = torch.func.grad(lambda q: tw.attention(q, k, v, causal=True).square().sum())(q)

    def loss(q):
        o, found = tw.attention(q, k, v, causal=True, return_max_logits=True)
        return o.square().sum(), found

    gradient, found = torch.func.grad(loss, has_aux=True)(q)
    assert torch.equal(gradient, plain) and torch.equal(found, loop[0][1])


def test_calls_like_one_before_stay_apart():
    """Cached calls know no largest scores; who wants them calls the operator."""
    call_cache.forget()
    q, k, v = qkv()
    for _ in range(3):
        o = tw.attention(q, k, v, causal=True)
        pair = tw.attention(q, k, v, causal=True, return_max_logits=True)
        assert isinstance(o, torch.Tensor) and len(pair) == 2 and torch.equal(pair[0], o)
    assert len(call_cache._KNOWN) == 1
    call_cache.forget()


def test_a_backend_that_keeps_none_is_passed_over(monkeypatch):
    q, k, v = qkv()
    monkeypatch.setattr(Cpu, "keeps_row_max", False)
    caches = dispatch.reasons, dispatch.choose
    for cached in caches:
        cached.cache_clear()
    try:
        found = tw.explain(q, k, v, return_max_logits=True)
        assert found.backend == "tiled" and found.reasons["cpu"] == ["it keeps no largest scores (return_max_logits)"]
        assert tw.explain(q, k, v).backend == "cpu"
        close(tw.attention(q, k, v, return_max_logits=True)[1], largest(q, k, torch.ones(37, 53, dtype=torch.bool)))
        with pytest.raises(UnsupportedError, match="backend 'cpu' cannot run this problem: it keeps no largest scores"):
            tw.attention(q, k, v, return_max_logits=True, backend="cpu")
    finally:
        for cached in caches:
            cached.cache_clear()


def test_the_flag_is_one():
    q, k, v = (x[0] for x in qkv())
    cu = torch.tensor([0, 37])
    for call in (
        lambda: tw.attention(q[None], k[None], v[None], return_max_logits=1),
        lambda: tw.attention_varlen(q, k, v, cu, cu, return_max_logits="yes"),
        lambda: tw.explain(q[None], k[None], v[None], return_max_logits=None),
    ):
        with pytest.raises(ValueError, match="return_max_logits must be True or False"):
            call()
