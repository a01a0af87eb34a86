"""Every step of the derivation equals the textbook formula in fp64, whatever the tiles, and so do the gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.ladder import derivation

FORWARDS = {
    "one_pass": lambda q, k, v, tile_m, tile_n, **kw: derivation.attention_one_pass(q, k, v, **kw),
    "tiled_keys": lambda q, k, v, tile_m, tile_n, **kw: derivation.attention_tiled_keys(q, k, v, tile_n=tile_n, **kw),
    "tiled_queries": lambda q, k, v, tile_m, tile_n, **kw: derivation.attention_tiled_queries(q, k, v, tile_m=tile_m, tile_n=tile_n, **kw),
    "flash1": lambda q, k, v, tile_m, tile_n, **kw: derivation.flash1_forward(q, k, v, tile_m=tile_m, tile_n=tile_n, **kw)[0],
    "flash2": lambda q, k, v, tile_m, tile_n, **kw: derivation.flash2_forward(q, k, v, tile_m=tile_m, tile_n=tile_n, **kw)[0],
}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def inputs(seqlen_q, seqlen_k, head_dim=8, head_dim_v=6):
    return draw(seqlen_q, head_dim), draw(seqlen_k, head_dim, seed=1), draw(seqlen_k, head_dim_v, seed=2)


def textbook(q, k, v, causal=False, scale=None):
    """(O, LSE) by the whole matrix; rows that see nothing are 0 and -inf."""
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.T
    if causal:
        i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
        s = s.masked_fill(j > i + len(k) - len(q), -math.inf)
    lse = torch.logsumexp(s, dim=1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[:, None])
    return p @ v, lse


@pytest.mark.parametrize("softmax", [derivation.safe_softmax_3pass, derivation.online_softmax_2pass])
@pytest.mark.parametrize("x", [[0.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [-math.inf, 0.0, 5.0], [1e4, -1e4, 1e4 - 1.0], [500.0] * 5])
def test_softmax(softmax, x):
    x = torch.tensor(x, dtype=torch.float64)
    torch.testing.assert_close(softmax(x), torch.softmax(x, 0), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("softmax", [derivation.safe_softmax_3pass, derivation.online_softmax_2pass])
def test_softmax_of_random_rows(softmax):
    for n in (1, 2, 17, 64):
        x = 10 * draw(n)
        torch.testing.assert_close(softmax(x), torch.softmax(x, 0), rtol=1e-12, atol=0.0)
    assert softmax(draw(0)).shape == (0,)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "seqlen_q,seqlen_k,tile_m,tile_n", [(1, 1, 1, 1), (13, 29, 4, 8), (29, 13, 8, 5), (16, 16, 16, 16), (20, 20, 64, 3)]
)
def test_forward(name, causal, seqlen_q, seqlen_k, tile_m, tile_n):
    q, k, v = inputs(seqlen_q, seqlen_k)
    o, _ = textbook(q, k, v, causal)
    torch.testing.assert_close(FORWARDS[name](q, k, v, tile_m, tile_n, causal=causal), o, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", FORWARDS)
def test_large_scores_and_own_scale(name):
    q, k, v = inputs(9, 21)
    o, _ = textbook(100 * q, k, v, scale=0.7)
    torch.testing.assert_close(FORWARDS[name](100 * q, k, v, 4, 4, scale=0.7), o, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype,tol", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_dtypes(name, dtype, tol):
    q, k, v = (x.to(dtype) for x in inputs(11, 23))
    o, _ = textbook(q.double(), k.double(), v.double(), causal=True)
    got = FORWARDS[name](q, k, v, 4, 8, causal=True)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), o, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(0, 5), (5, 0), (0, 0)])
def test_empty(name, seqlen_q, seqlen_k):
    q, k, v = inputs(seqlen_q, seqlen_k)
    assert torch.equal(FORWARDS[name](q, k, v, 4, 4), torch.zeros(seqlen_q, 6, dtype=torch.float64))


def test_statistics():
    q, k, v = inputs(17, 30)
    _, lse = textbook(q, k, v, causal=True)
    _, m, l = derivation.flash1_forward(q, k, v, tile_m=4, tile_n=8, causal=True)
    torch.testing.assert_close(m + l.log(), lse)
    torch.testing.assert_close(derivation.flash2_forward(q, k, v, tile_m=4, tile_n=8, causal=True)[1], lse)
    blind = derivation.flash2_forward(*inputs(9, 4), tile_m=4, tile_n=4, causal=True)[1]
    assert (blind[:5] == -math.inf).all() and blind[5:].isfinite().all()


def test_flash2_never_reads_tiles_beyond_the_diagonal():
    q, k, v = inputs(16, 16)
    k[8:], v[8:] = math.nan, math.nan
    o, lse = derivation.flash2_forward(q, k, v, tile_m=8, tile_n=8, causal=True)
    assert o[:8].isfinite().all() and lse[:8].isfinite().all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_backward(seqlen_q, seqlen_k, tile_m, tile_n, causal):
    q, k, v = (x.requires_grad_() for x in inputs(seqlen_q, seqlen_k))
    d_o = draw(seqlen_q, 6, seed=3)
    want = torch.autograd.grad(textbook(q, k, v, causal)[0], (q, k, v), d_o)
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse = derivation.flash2_forward(q, k, v, tile_m=tile_m, tile_n=tile_n, causal=causal)
    got = derivation.flash2_backward(q, k, v, o, lse, d_o, tile_m=tile_n, tile_n=tile_m, causal=causal)
    of_flash1 = derivation.flash1_forward(q, k, v, tile_m=tile_m, tile_n=tile_n, causal=causal)
    both = got, derivation.flash1_backward(q, k, v, *of_flash1, d_o, tile_m=tile_n, tile_n=tile_m, causal=causal)
    for which, each in enumerate(both):
        for name, a, b in zip("qkv", each, want, strict=True):
            torch.testing.assert_close(a, b.nan_to_num(), rtol=1e-10, atol=1e-12, msg=lambda m, at=(which, name): f"{at}: {m}")
