"""Packed documents with a bias or slopes of their own, and keys that are not used: the oracle, a document at a time."""

import itertools

import pytest
import torch

import tilewise as tw
from tilewise.errors import ShapeError
from tilewise.problem import Call, Dropout, Gradients
from tilewise.testing import poison, tolerance

HEADS, DOCUMENTS = 4, 4
CU_Q, CU_K = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32), torch.tensor([0, 7, 9, 9, 30], dtype=torch.int32)
USED = torch.tensor([3, 2, 0, 20])
SHAPES = ((DOCUMENTS, HEADS, 8, 21), (1, HEADS, 9, 25), (9, 25), (HEADS, 1, 25), (DOCUMENTS, 1, 9, 1), (1, 1))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries and keys with some that are in no document."""
    shapes = ((23, HEADS, 8), (31, 2, 8), (31, 2, 6))
    return [randn(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes)]


def each(used):
    """(document, its queries, its keys)"""
    for d, ((q0, q1), (k0, k1)) in enumerate(zip(itertools.pairwise(CU_Q.tolist()), itertools.pairwise(CU_K.tolist()), strict=True)):
        yield d, slice(q0, q1), slice(k0, k1 if used is None else k0 + int(used[d]))


def part(bias, d, rows, keys):
    """The bias of a document, (1, heads or 1, queries, keys)."""
    bias = bias[(None,) * (4 - bias.dim())].expand(DOCUMENTS, -1, -1, -1)[d : d + 1]
    bias = bias[:, :, : rows.stop - rows.start, : keys.stop - keys.start]
    return bias.expand(-1, -1, -1, keys.stop - keys.start)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("used", [None, USED], ids=["all keys", "used"])
@pytest.mark.parametrize("slopes", [None, (HEADS,), (DOCUMENTS, HEADS)], ids=str)
@pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
@pytest.mark.parametrize("backend, dtype", [("cpu", torch.bfloat16), ("tiled", torch.float32)], ids=str)
def test_each_document_is_a_call(backend, dtype, shape, slopes, used):
    q, k, v = tensors(dtype)
    bias = None if shape is None else randn(*shape, seed=5, dtype=dtype).requires_grad_()
    slopes = None if slopes is None else randn(*slopes, seed=6).abs()
    sink = randn(HEADS, seed=7)
    options = {"causal": True, "sink": sink, "seqused_k": used, "backend": backend, "return_lse": True}
    with poison.memory():
        o, lse = tw.attention_varlen(q, k, v, CU_Q, CU_K, bias=bias, alibi_slopes=slopes, **options)
    d_o = randn(*o.shape, seed=8, dtype=dtype)
    leaves = [q, k, v] + ([] if bias is None else [bias])
    grads = torch.autograd.grad(o, leaves, d_o)
    rest = torch.ones(31, dtype=torch.bool)
    for d, rows, keys in each(used):
        rest[keys] = False
        if rows.start == rows.stop:
            rest[keys] = True
            continue
        own = None if bias is None else part(bias.detach(), d, rows, keys)
        own_slopes = None if slopes is None else slopes.expand(DOCUMENTS, HEADS)[d : d + 1]
        one = Call(
            q=q.detach()[None, rows], k=k.detach()[None, keys], v=v.detach()[None, keys], mask=tw.Causal(), scale=8**-0.5,
            bias=own, alibi_slopes=own_slopes, sink=sink, grad=True,
        )  # fmt: skip
        tolerance.check_outputs(one, o.detach()[None, rows], lse.detach()[None, :, rows])
        want = tolerance.expected(one, d_o[None, rows])
        for name, x, at in zip("qkv", grads, (rows, keys, keys), strict=False):
            tolerance.hold(f"d{name}", x[None, at], getattr(want, name))
        if shape == SHAPES[0]:  # the bias of a document is its own
            tolerance.hold("dbias", grads[3][d : d + 1, :, : rows.stop - rows.start, : keys.stop - keys.start], want.bias)
    assert (o[20:] == 0).all() and (lse[:, 20:] == sink[:, None]).all() and (grads[0][20:] == 0).all()
    assert (grads[1][rest] == 0).all() and (grads[2][rest] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradients_of_a_bias_and_a_sink_that_are_shared(shape):
    """Those of a loop over the documents, in fp64, and nothing where no document reaches."""
    leaves = q, k, v, sink = *tensors(torch.float64), randn(HEADS, seed=7, dtype=torch.float64).requires_grad_()
    bias = randn(*shape, seed=5, dtype=torch.float64).requires_grad_()
    o, lse = tw.attention_varlen(q, k, v, CU_Q, CU_K, bias=bias, sink=sink, seqused_k=USED, return_lse=True)
    d_o, d_lse = randn(*o.shape, seed=8, dtype=torch.float64), randn(*lse.shape, seed=9, dtype=torch.float64)
    d_lse[:, 20:] = 0.0  # of no document
    found = torch.autograd.grad((o, lse), (*leaves, bias), (d_o, d_lse))
    total = 0.0
    for d, rows, keys in each(USED):
        options = {"bias": part(bias, d, rows, keys), "sink": sink, "backend": "reference", "return_lse": True}
        one_o, one_lse = tw.attention(q[None, rows], k[None, keys], v[None, keys], **options)
        total = total + (one_o[0] * d_o[rows]).sum() + (one_lse[0] * d_lse[:, rows]).sum()
    for x, want in zip(found, torch.autograd.grad(total, (*leaves, bias)), strict=True):
        torch.testing.assert_close(x, want)


def test_dropout_drops_other_pairs_in_each_document():
    q, k, v = tensors(torch.float32)
    slopes = torch.zeros(DOCUMENTS, HEADS)
    with pytest.raises(AssertionError, match="not equal|not close"):
        torch.testing.assert_close(
            *(tw.attention_varlen(q, k, v, CU_Q, CU_K, alibi_slopes=slopes, dropout_p=0.4, dropout_seed=s) for s in (1, 2))
        )
    o = tw.attention_varlen(q, k, v, CU_Q, CU_K, alibi_slopes=slopes, dropout_p=0.4, dropout_seed=3, dropout_offset=2**32 - 2)
    d_o = randn(*o.shape, seed=8)
    grads = torch.autograd.grad(o, (q, k, v), d_o)
    for d, rows, keys in each(None):
        if rows.start < rows.stop:
            dropout = Dropout(0.4, 3, (2**32 - 2 + d) % 2**32)
            given = {"q": q[None, rows], "k": k[None, keys], "v": v[None, keys]}
            one = Call(**{name: x.detach() for name, x in given.items()}, mask=tw.Full(), scale=8**-0.5, dropout=dropout, grad=True)
            tolerance.hold("o", o.detach()[None, rows], tolerance.expected(one, None).o)
            found = Gradients(grads[0][None, rows], grads[1][None, keys], grads[2][None, keys], None, None)
            tolerance.check_gradients(one, found, d_o[None, rows])


def test_largest_scores_of_each_document():
    q, k, v = (x.detach() for x in tensors(torch.float32))
    bias = randn(DOCUMENTS, HEADS, 8, 21, seed=5)
    _, largest = tw.attention_varlen(q, k, v, CU_Q, CU_K, bias=bias, return_max_logits=True)
    for d, rows, keys in each(None):
        options = {"bias": part(bias, d, rows, keys), "return_max_logits": True}
        torch.testing.assert_close(largest[d], tw.attention(q[None, rows], k[None, keys], v[None, keys], **options)[1][0])


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_no_queries_and_no_documents(backend):
    q, k, v = tensors(torch.float32)
    none = torch.zeros(1, dtype=torch.int32)
    o, lse = tw.attention_varlen(q, k, v, none, none, bias=torch.zeros(1, 1), return_lse=True, backend=backend)
    assert (o == 0).all() and (lse == -torch.inf).all() and all((x == 0).all() for x in torch.autograd.grad(o.sum(), (q, k, v)))
    o = tw.attention_varlen(q[:0], k, v, CU_Q * 0, CU_K, alibi_slopes=torch.ones(DOCUMENTS, HEADS), backend=backend)
    assert o.shape == (0, HEADS, 6)


BAD = {
    "too many used": ({"seqused_k": USED + 9}, r"seqused_k\[0\] is 12; it must be between 0 and 7, the document's keys"),
    "used of others": ({"seqused_k": USED[:2]}, "seqused_k has documents 2, but cu_seqlens_q has documents 4"),
    "used in floats": ({"seqused_k": USED.float()}, "seqused_k must be int32 or int64, got float32"),
    "few queries": ({"bias": torch.zeros(HEADS, 4, 25)}, r"for documents of up to 4 queries, but document 0 has 5; its shape \(1, 4, 4, 25\)"),
    "few keys": ({"bias": torch.zeros(HEADS, 8, 20)}, "bias is for documents of up to 20 keys, but document 3 has 21"),
    "documents": ({"bias": torch.zeros(3, HEADS, 9, 25)}, r"bias has documents 3, expected 4 or 1 \(broadcast\)"),
    "heads": ({"bias": torch.zeros(3, 9, 25)}, "bias has heads_q 3, expected 4 or 1"),
    "dims": ({"bias": torch.zeros(9)}, r"bias must have 2, 3 or 4 dimensions, the last of \(documents or 1, .*, max_seqlen_k or 1\), got 1"),
    "slopes": ({"alibi_slopes": torch.zeros(3, HEADS)}, "alibi_slopes has documents 3, but cu_seqlens_q has documents 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    options, words = BAD[case]
    with pytest.raises(ShapeError, match=words):
        tw.attention_varlen(*tensors(torch.float32), CU_Q, CU_K, **options)


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}, {"mask": tw.SlidingWindow(40, 3)}], ids=str)
def test_batch_invariant_documents_have_the_bits_of_a_loop(dtype, options):
    """O, LSE and gradients, eagerly and compiled; the last number of each is nobody's."""
    torch._dynamo.reset()
    used, bounds = [90, 0, 3, 33], torch.tensor([0, 90, 91, 96, 130])
    source = torch.Generator().manual_seed(1)
    leaves = [torch.randn(131, heads, 24, generator=source).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    d_o = torch.randn(131, 4, 24, generator=source).to(dtype)

    def call(q, k, v):
        words = {"seqused_k": torch.tensor(used), "return_lse": True, "batch_invariant": True}
        return tw.attention_varlen(q, k, v, bounds, bounds, **words, **options)

    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        o, lse = run(*leaves)
        grads = torch.autograd.grad(o, leaves, d_o)
        for d, n in enumerate(used):
            at, keys = slice(bounds[d], bounds[d + 1]), slice(bounds[d], bounds[d] + n)
            alone = [x[None, s].detach().requires_grad_() for x, s in zip(leaves, (at, keys, keys), strict=True)]
            want, want_lse = tw.attention(*alone, return_lse=True, **options)
            assert torch.equal(o[at], want[0]) and torch.equal(lse[:, at], want_lse[0])
            for got, expected, s in zip(grads, torch.autograd.grad(want, alone, d_o[None, at]), (at, keys, keys), strict=True):
                assert torch.equal(got[s], expected[0])
        assert all((x[-1] == 0).all() for x in (o, *grads))
