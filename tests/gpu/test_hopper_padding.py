"""On a GPU: head dims between those that the kernels load, padded batches, and what the public functions make of biases, documents and `out=`."""

import pytest
import torch
from hopper_problems import NEEDS_HOPPER, held_each_way

import tilewise as tw
from tilewise.backends.hopper import coverage, widths
from tilewise.errors import ShapeError
from tilewise.masks import Causal, Documents, Full, Padding, SlidingWindow
from tilewise.problem import Call, Gradients
from tilewise.testing import tolerance
from tilewise.testing.cases import Case, make

pytestmark = NEEDS_HOPPER

DIMS = ((1, 1), (33, 33), (59, 111), (67, 37), (111, 111), (127, 64), (129, 130), (191, 128), (255, 255))
MASKS = (Full(), Causal(), SlidingWindow(40, 3), Documents((0, 90, 260), (0, 130, 300), Causal()))
PADDED = (
    (Padding((300, 170)) & Causal(), True),
    (Padding((0, 1)) & SlidingWindow(90, 20, "top_left"), True),
    (Padding(None, (0, 130)) & SlidingWindow(60, 0), True),
    (Padding(None, (299, 300)) & Causal() & SlidingWindow(30, None), True),
    (Padding((100, 200), (150, 7), Causal()), True),
    (Padding((100, 200), (150, 7), SlidingWindow(50, 9, "top_left")), True),
    (Padding((100, 200), (150, 7)) & Causal(), False),
    (Padding((300, 170)) - SlidingWindow(20, 20), False),
)
CHANGES = ({}, {"softcap": 3.0, "sink": True, "lse_grad": True}, {"alibi": "h"}, {"alibi": "bh"}, {"bias": "bhq", "bias_hides": True})
SHAPE = {"batch": 2, "seqlen_q": 260, "seqlen_k": 300, "heads_q": 4, "heads_k": 2, "dtype": "bf16"}


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims):
    for turn, mask in enumerate(MASKS):
        held_each_way(Case(**SHAPE | {"batch": 1}, head_dim=dims[0], head_dim_v=dims[1], mask=mask), seed=turn)


@pytest.mark.parametrize("change", CHANGES[1:], ids=str)
def test_head_dims_with_changed_scores(change):
    held_each_way(Case(**SHAPE, head_dim=67, head_dim_v=37, mask=Causal(), **change))


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("mask, folds", PADDED, ids=str)
def test_padded_batches(mask, folds, change):
    case = Case(**SHAPE, mask=mask, head_dim=64, **change)
    call = make(case, device="cuda")
    assert (coverage.launched(call) is not call) == (folds and change.get("alibi") != "bh" and "bias" not in change)
    held_each_way(case)


def test_padded_batches_of_odd_head_dims_and_few_queries():
    held_each_way(Case(**SHAPE, mask=PADDED[0][0], head_dim=59))
    for queries in (1, 5, 127, 128):
        held_each_way(Case(**SHAPE | {"seqlen_q": queries}, mask=Padding((300, 170)) & Causal(), head_dim=128))


def qkv(*lead, dim=64, grad=True):
    return [torch.randn(*lead, heads, dim, device="cuda", dtype=torch.bfloat16).requires_grad_(grad) for heads in (4, 2, 2)]


def test_lengths_stay_on_the_gpu():
    """In a CUDA graph, where they cannot be read, other lengths are another mask."""
    q, k, v = qkv(2, 200, grad=False)
    lengths = torch.tensor([200, 50], device="cuda")

    def call():
        return tw.attention(q, k, v, causal=True, mask=Padding(lengths))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for given in ([200, 50], [3, 199]):
        lengths.copy_(torch.tensor(given))
        graph.replay()
        want = tw.attention(q, k, v, causal=True, mask=Padding(given))
        torch.testing.assert_close(found, want)
    lengths.fill_(201)
    with pytest.raises(ShapeError, match="batch entry 0 has the keys 0 to 201"):
        call()


@pytest.mark.parametrize("shape", [(130, 1), (4, 1, 170), (2, 1, 130, 1), (1, 170), (1, 1)], ids=str)
def test_biases_of_every_broadcast(shape):
    (q, _, _), (_, k, v) = qkv(2, 130), qkv(2, 170)
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    o, lse = tw.attention(q, k, v, causal=True, bias=bias, return_lse=True)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    *found, d_bias = torch.autograd.grad((o, lse), (q, k, v, bias), (d_o, d_lse))
    whole = bias.detach().expand(2, 4, 130, 170)
    call = Call(q=q.detach(), k=k.detach(), v=v.detach(), mask=Causal(), scale=64**-0.5, bias=whole, grad=True)
    expect = tolerance.expected(call, d_o, d_lse)
    tolerance.check_outputs(call, o.detach(), lse.detach())
    tolerance.check_gradients(call, Gradients(*found, None, None), d_o, d_lse, expect)
    assert d_bias.shape == shape
    want = expect.bias.ref.sum_to_size(shape)
    naive = expect.bias.ref.bfloat16().double().sum_to_size(shape).bfloat16()  # of gradients that are rounded before they are summed up
    allowed = 2 * (naive.double() - want).norm() + 2**-7 * want.norm() + 2**-8 * expect.bias.ref.square().sum_to_size(shape).sqrt().norm()
    assert (d_bias.double() - want).norm() <= allowed


@pytest.mark.parametrize(
    "options", [{}, {"seqused_k": [3, 2, 0, 150]}, {"slopes": 4}, {"slopes": 4, "bias": True, "seqused_k": [7, 0, 0, 199]}], ids=str
)
@pytest.mark.parametrize("dim", [64, 59])
def test_packed_documents(dim, options):
    """A loop of calls over the documents."""
    cu_q, cu_k = (torch.tensor(ends, device="cuda", dtype=torch.int32) for ends in ([0, 50, 50, 121, 300], [0, 70, 90, 90, 290]))
    (q, _, _), (_, k, v) = qkv(310, dim=dim), qkv(300, dim=dim)
    used = options.get("seqused_k")
    given = {"seqused_k": None if used is None else torch.tensor(used, device="cuda")}
    slopes = torch.rand(4, 4, device="cuda") if "slopes" in options else None
    bias = torch.randn(4, 4, 180, 200, device="cuda", dtype=torch.bfloat16) if "bias" in options else None
    o, lse = tw.attention_varlen(q, k, v, cu_q, cu_k, causal=True, alibi_slopes=slopes, bias=bias, return_lse=True, **given)
    d_o = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), d_o)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for d in (0, 2, 3):
        rows = slice(ends_q[d], ends_q[d + 1])
        keys = slice(ends_k[d], ends_k[d + 1] if used is None else ends_k[d] + used[d])
        own = None if bias is None else bias[d : d + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        tensors = {"q": q.detach()[None, rows], "k": k.detach()[None, keys], "v": v.detach()[None, keys]}
        call = Call(
            **tensors, mask=Causal(), scale=dim**-0.5, bias=own, alibi_slopes=None if slopes is None else slopes[d : d + 1], grad=True
        )
        tolerance.check_outputs(call, o.detach()[None, rows], lse.detach()[None, :, rows])
        tolerance.check_gradients(call, Gradients(dq[None, rows], dk[None, keys], dv[None, keys], None, None), d_o[None, rows])


@pytest.mark.parametrize("dim", [64, 59])
@pytest.mark.parametrize("seqlen", [1, 200])
def test_out(seqlen, dim):
    """Contiguous, among other heads, and where the kernel cannot write."""
    q, k, v = qkv(2, seqlen, dim=dim, grad=False)
    want = tw.attention(q, k, v, causal=True)
    for heads, behind in ((4, 0), (5, 8), (5, 3)):
        memory = torch.full((2, seqlen, heads, dim + behind), torch.nan, device="cuda", dtype=torch.bfloat16)
        out = memory[:, :, -4:, :dim]
        assert tw.attention(q, k, v, causal=True, out=out) is out and torch.equal(out, want)
        assert memory.isnan().sum() == memory.numel() - out.numel()


def test_what_is_launched_fits():
    call = make(Case(**SHAPE, head_dim=59, head_dim_v=61), device="cuda")
    wider = coverage.launched(call)
    assert not widths.fits(call) and widths.fits(wider) and (wider.head_dim, wider.head_dim_v) == (64, 64)
