"""The Triton backend on a GPU: conformance, hidden NaN, equal bits, dropout's own mask."""

import pytest
import torch
from capped import held_at_the_cap
from needs_triton import NEEDS_TRITON

import tilewise as tw
from tilewise.backends.triton import Triton
from tilewise.errors import ShapeError
from tilewise.masks import Causal, ChunkedCausal, Documents, Full, SlidingWindow
from tilewise.problem import Call, Dropout
from tilewise.testing import cases, conformance
from tilewise.testing.cases import Case

pytestmark = NEEDS_TRITON
QUICK = [case for case in cases.QUICK if case.dtype != "fp64"]
FULL = [case for case in cases.FULL if case.dtype != "fp64"]
DIMS = (8, 40, 64, 72, 80, 96, 128, 160, 192, 256)


def held(case: Case, run=conformance.run_case, seed: int = 0) -> float:
    return run(Triton(), case, seed=seed, device="cuda")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_quick(case):
    held(case)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("run", [conformance.run_hidden, conformance.run_spoiled, conformance.run_scattered], ids=lambda run: run.__name__)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_nothing_hidden_is_read(case, run):
    if run is conformance.run_scattered and case.bias_hides:
        pytest.skip("the contract does not say what a bias of -inf hides of a NaN")
    held(case, run)


@pytest.mark.sampled(0.02)
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.id)
def test_full(case):
    held(case)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(100, 7), ChunkedCausal(90)], ids=repr)
def test_head_dims(mask, dim):
    for dtype in ("bf16", "fp16", "fp32"):
        held(Case(batch=2, seqlen_q=300, seqlen_k=411, heads_q=4, heads_k=2, head_dim=dim, mask=mask, dtype=dtype))


@pytest.mark.parametrize("dim", [288, 512])
def test_two_halves(dim):
    for dtype in ("bf16", "fp32"):
        held(Case(batch=1, seqlen_q=130, seqlen_k=190, heads_q=2, heads_k=1, head_dim=dim, mask=Causal(), dtype=dtype))


@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(300, 0), Documents([0, 100, 1500, 2048], inner=Causal()), ChunkedCausal(700)], ids=repr
)
@pytest.mark.parametrize("dim", [64, 128])
def test_two_hundred_runs_have_the_same_bits(mask, dim):
    q, k, v, d_o = (torch.randn(1, 2048, 4, dim, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    call = Call(q=q, k=k, v=v, mask=mask, scale=dim**-0.5, grad=True)
    first = None
    for _ in range(200):
        o, lse = Triton().forward(call)
        found = o, lse, *Triton().backward(call, o, lse, d_o, None)[:3]
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(first, found, strict=True))


def test_gradients_at_the_cap():
    held_at_the_cap(Triton(), range(5, 17), device="cuda")


def test_dropout_draws_the_mask_of_the_cpu():
    q = torch.zeros(2, 70, 2, 64, device="cuda")
    k, v = torch.zeros(2, 64, 2, 64, device="cuda"), torch.eye(64, device="cuda")[None, :, None].expand(2, 64, 2, 64).contiguous()
    dropout = Dropout(0.3, seed=2**40 + 17, offset=5)
    found, _ = Triton().forward(Call(q=q, k=k, v=v, mask=Full(), scale=1.0, dropout=dropout))
    want, _ = tw.runtime.dispatch.named("tiled").forward(Call(q=q.cpu(), k=k.cpu(), v=v.cpu(), mask=Full(), scale=1.0, dropout=dropout))
    assert torch.equal(found.cpu() > 0, want > 0)


@pytest.mark.parametrize("inner", [Full(), Causal(), SlidingWindow(50, 0)], ids=repr)
def test_varlen_reads_nothing_on_the_host(inner):
    q, k, v = (torch.randn(700, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 3, 3, 400, 401, 700], dtype=torch.int32, device="cuda")
    found = tw.attention_varlen(q, k, v, cu, cu, mask=inner, backend="triton")
    gradients = torch.autograd.grad(found.sum(), (q, k, v))
    want = tw.attention_varlen(q, k, v, cu, cu, mask=inner, backend="tiled")
    torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)
    for mine, right in zip(gradients, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(mine, right, atol=4e-2, rtol=4e-2)


GRAPHS = {
    "causal": {"causal": True},
    "window, softcap": {"mask": SlidingWindow(100, 7), "softcap": 30.0},
    "chunks": {"mask": ChunkedCausal(90)},
    "documents": {"mask": Documents([0, 100, 300], inner=Causal())},
    "fp32": {"causal": True},
    "bias": {},
    "sink, slopes": {"causal": True},
}


@pytest.mark.parametrize("kind", [*GRAPHS, "varlen"])
def test_a_graph_follows_its_tensors(kind):
    """Forward and gradients, captured once and replayed with other values: nothing is read on the host."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    q, k, v = x = [torch.randn(1, 300, heads, 64, dtype=dtype, device="cuda", requires_grad=True) for heads in (4, 2, 2)]
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    extras = {}
    if kind == "bias":
        extras["bias"] = torch.randn(1, 4, 300, 300, dtype=dtype, device="cuda", requires_grad=True)
    if kind == "sink, slopes":
        extras = {"sink": torch.randn(4, device="cuda", requires_grad=True), "alibi_slopes": torch.rand(4, device="cuda")}
    leaves = [*x, *(y for y in extras.values() if y.requires_grad)]

    def step():
        if kind == "varlen":
            o = tw.attention_varlen(q[0], k[0], v[0], cu, cu, causal=True, backend="triton")
        else:
            o = tw.attention(q, k, v, **extras, **GRAPHS[kind], backend="triton")
        return o, *torch.autograd.grad(o.float().square().sum(), leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for end in (100, 17, 299):
        for y in leaves:
            y.data.normal_()
        cu.copy_(torch.tensor([0, end, 300]))
        graph.replay()
        torch.cuda.synchronize()
        found = [y.clone() for y in captured]
        for mine, right in zip(found, step(), strict=True):
            torch.testing.assert_close(mine, right, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", [[0, 200, 100, 300], [5, 300], [0, 301], [0, 400, 300]], ids=str)
def test_bad_lengths_on_the_device_are_named(wrong):
    q = torch.randn(300, 2, 64, dtype=torch.bfloat16, device="cuda")
    cu = torch.tensor(wrong, dtype=torch.int32, device="cuda")
    with pytest.raises(ShapeError, match="cu_seqlens"):
        tw.attention_varlen(q, q, q, cu, cu, backend="triton")
