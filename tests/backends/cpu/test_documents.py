"""A packed document has the bits of the document alone, whatever it is packed with and however many threads there are."""

import pytest
import torch

import tilewise as tw
from tilewise.backends.cpu import Cpu, native
from tilewise.problem import Call

LENGTHS = ((5, 5), (100, 130), (1, 700), (333, 333), (0, 9), (48, 48), (96, 40), (7, 0), (3, 640), (2, 2))  # queries and keys


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": tw.SlidingWindow(20, 3)},
    "prefix": {"mask": tw.PrefixLM(4), "softcap": 3.0},
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_bits_of_the_document_alone(mask, dtype, threads):
    cu_q, cu_k = bounds([q for q, _ in LENGTHS]), bounds([k for _, k in LENGTHS])
    q, k, v = (randn(int(cu[-1]) + 3, h, d, seed=h, dtype=dtype) for cu, h, d in ((cu_q, 6, 40), (cu_k, 2, 40), (cu_k, 2, 24)))
    words = MASKS[mask] | {
        "return_lse": True,
        "return_max_logits": True,
        "sink": randn(6, seed=8),
        "alibi_slopes": randn(6, seed=9).abs() / 8,
    }
    if mask == "full":
        words = MASKS[mask] | {"return_lse": True, "return_max_logits": True}
    for number in (1, 3):
        threads(number)
        o, lse, largest = tw.attention_varlen(q, k, v, cu_q, cu_k, **words)
        for d in range(len(LENGTHS)):
            at_q, at_k = slice(*cu_q[d : d + 2].tolist()), slice(*cu_k[d : d + 2].tolist())
            alone, its_lse, its_largest = tw.attention(q[None, at_q], k[None, at_k], v[None, at_k], **words)
            assert torch.equal(o[at_q], alone[0]) and torch.equal(lse[:, at_q], its_lse[0]) and torch.equal(largest[d], its_largest[0])
        behind = torch.full_like(lse[:, -3:], -torch.inf) if "sink" not in words else words["sink"][:, None].expand(-1, 3)
        assert (o[-3:] == 0).all() and torch.equal(lse[:, -3:], behind)


@pytest.mark.parametrize("lengths", [(700, 20, 3), (64,) * 9, (1,) * 40, (900,), (300, 300, 300, 5)], ids=str)
def test_work_is_shared_out_whatever_the_lengths(lengths, threads):
    threads(2)
    cu = bounds(lengths)
    q, k = randn(int(cu[-1]), 4, 64), randn(int(cu[-1]), 2, 64, seed=1)
    o = tw.attention_varlen(q, k, k, cu, cu, causal=True)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        assert torch.equal(o[start:end], tw.attention(q[None, start:end], k[None, start:end], k[None, start:end], causal=True)[0])


def test_gradients_fit_the_forward_and_dropout_keeps_its_numbers():
    cu = bounds((40, 3, 70))
    q, k = randn(113, 4, 16).requires_grad_(), randn(113, 2, 16, seed=1).requires_grad_()
    words = {"dropout_p": 0.3, "dropout_seed": 3}
    for extra in ({}, words):
        got = torch.autograd.grad(tw.attention_varlen(q, k, k, cu, cu, causal=True, backend="cpu", **extra).square().sum(), (q, k))
        expected = torch.autograd.grad(
            tw.attention_varlen(q, k, k, cu, cu, causal=True, backend="reference", **extra).square().sum(), (q, k)
        )
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("keys", ((0, 30, 60, 90), (0, 5, 12, 18), (0, 100, 150, 300)), ids=str)
def test_distances_count_by_the_calls_lengths_under_a_mask_of_documents(keys, batch):
    """api.py's `-slope * |i + seqlen_k - seqlen_q - j|`, forward and backward, on every backend; those of attention_varlen are each document's."""
    queries, slopes = (0, 4, 10, 15), torch.tensor([0.5, 0.25])
    mask = tw.Documents(queries, keys, inner=tw.Causal())
    x = [randn(batch, n, 2, 8, seed=seed).requires_grad_() for seed, n in enumerate((15, keys[-1], keys[-1]))]
    d_o = randn(batch, 15, 2, 8, seed=7)

    distance = (torch.arange(15)[:, None] + keys[-1] - 15 - torch.arange(keys[-1])).abs()
    scores = torch.einsum("bihd,bjhd->bhij", x[0], x[1]).double() * 8**-0.5 - slopes[:, None, None] * distance
    scores = scores.masked_fill(~mask.dense(15, keys[-1]).expand_as(scores), -torch.inf)
    right = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(), x[2].double())
    wanted = right, scores.logsumexp(-1), *torch.autograd.grad(right, x, d_o.double())
    for backend in ("reference", "tiled", "cpu"):
        for _ in range(2):
            o, lse = tw.attention(*x, mask=mask, alibi_slopes=slopes, return_lse=True, backend=backend)
            for got, want in zip((o, lse, *torch.autograd.grad(o, x, d_o)), wanted, strict=True):
                torch.testing.assert_close(got.double(), want.double(), atol=3e-5, rtol=1e-5)
        out = torch.empty_like(o)
        tw.attention(*(each.detach() for each in x), mask=mask, alibi_slopes=slopes, backend=backend, out=out)
        assert torch.equal(out, o)
    packed = tw.attention_varlen(*(each[0] for each in x), torch.tensor(queries), torch.tensor(keys), causal=True, alibi_slopes=slopes)
    for q0, q1, k0, k1 in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        alone = tw.attention(x[0][:1, q0:q1], x[1][:1, k0:k1], x[2][:1, k0:k1], causal=True, alibi_slopes=slopes)
        assert torch.equal(packed[q0:q1], alone[0])


def test_documents_that_do_not_fit_are_refused():
    q = randn(5, 2, 8)
    for cu in (torch.tensor([0, 6]), torch.tensor([0, 2, 6])):
        with pytest.raises(tw.ShapeError, match="reaches position 6, but seqlen_q is 5"):
            tw.attention_varlen(q, randn(9, 2, 8), randn(9, 2, 8), cu, cu)


@pytest.mark.parametrize("isa", ("avx512_bf16", "avx512", "avx2", "generic"))
def test_every_instruction_set(isa):
    if isa not in native.library().isas:
        pytest.skip(f"this processor has no {isa}")
    mask = tw.Documents([0, 50, 51, 181], inner=tw.Causal())
    q, k = (randn(1, 181, 2, 48, seed=n, dtype=torch.bfloat16) for n in range(2))
    o, lse = Cpu(isa).forward(Call(q=q, k=k, v=k, mask=mask, scale=0.1))
    for at in (slice(0, 50), slice(50, 51), slice(51, 181)):
        alone = Cpu(isa).forward(Call(q=q[:, at], k=k[:, at], v=k[:, at], mask=tw.Causal(), scale=0.1))
        assert torch.equal(o[:, at], alone[0]) and torch.equal(lse[..., at], alone[1])
