"""What torch expects of an operator: opcheck, gradcheck, compile, export, autocast, checkpointing, functorch, second derivatives refused."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise import masks
from tilewise.runtime import operator


def qkv(batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_k=2, head_dim=3, head_dim_v=2, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_k, head_dim), (batch, seqlen_k, heads_k, head_dim_v)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


def operands(q, k, v, mask=masks.Causal(), **fields):  # noqa: B008
    tensors = []
    absent = dict.fromkeys(operator.Operands._fields)
    settings = {
        "softcap": 0.0,
        "dropout_p": 0.0,
        "deterministic": False,
        "grad": True,
        "row_max": False,
        "by_document": False,
        "mask": mask.text(tensors),
        "mask_tensors": tensors,
    }
    return tuple(operator.Operands(**(absent | dict(q=q, k=k, v=v) | settings | fields)))


OPCHECKS = {
    "plain": {},
    "largest scores": {"row_max": True},
    "sink": {"sink": torch.randn(4, dtype=torch.float64, requires_grad=True)},
    "bias": {"bias": torch.randn(1, 4, 1, 7, dtype=torch.float64, requires_grad=True)},
    "dropout": {"rng": torch.tensor([3, 4]), "dropout_p": 0.25},
    "dense": {"mask": masks.Dense(torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.4)},
}


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("extra", OPCHECKS.values(), ids=OPCHECKS)
def test_opcheck(extra, backend):
    given = operands(*qkv(), **extra, backend=backend)
    for op in (operator.forward, operator.forward_reading):
        torch.library.opcheck(op, given)


FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "causal top left": {"mask": masks.Causal(align="top_left")},
    "window": {"mask": masks.SlidingWindow(2, 1)},
    "prefix": {"mask": masks.PrefixLM(3)},
    "chunked": {"mask": masks.ChunkedCausal(3)},
    "dense": {"mask": masks.Dense(torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.5)},
    "heads": {"mask": {(0, 1): masks.Causal(), (1, 4): masks.Full()}},
    "algebra": {"mask": (masks.SlidingWindow(1, 0) | masks.FirstKeys(2)) - masks.FirstKeys(1)},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 11},
    "everything": {"causal": True, "softcap": 2.0, "scale": 0.4, "alibi_slopes": torch.rand(2, 4), "dropout_p": 0.2, "dropout_seed": 5},
}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature, backend):
    def run(q, k, v, bias, sink):
        return tw.attention(q, k, v, bias=bias, sink=sink, return_lse=True, backend=backend, **FEATURES[feature])

    batch = (
        2 if "dropout_p" in FEATURES[feature] else 1
    )  # which batch it is changes nothing else; a bias's broadcasts have a test of their own
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(1, 4, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (*qkv(batch), bias, sink), atol=1e-6)


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (2, 1, 5, 7), (1, 4, 1, 7), (2, 4, 5, 7), (1, 1, 5, 7)], ids=str)
def test_gradcheck_bias_broadcasts(shape):
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: tw.attention(*x[:3], causal=True, bias=x[3]), (*qkv(), bias), atol=1e-6)


def test_gradcheck_packed():
    q, k, v = (x[0].detach().requires_grad_() for x in qkv())
    cu_q, cu_k = torch.tensor([0, 2, 2, 4]), torch.tensor([0, 3, 4, 7])
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    run = lambda *x: tw.attention_varlen(*x, cu_q, cu_k, causal=True, alibi_slopes=slopes, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(lambda *x: [y[..., :4, :] if y.dim() == 3 else y[:, [1, 3]] for y in run(*x)], (q, k, v), atol=1e-6)


def test_empty_rows_have_zero_gradients_and_minus_infinity():
    q, k, v = qkv(seqlen_q=7, seqlen_k=3)
    o, lse = tw.attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :4] == 0).all() and (lse[..., :4] == -torch.inf).all() and lse[..., 4:].isfinite().all()
    (o.sum() + lse[..., 4:].sum()).backward()
    assert (q.grad[:, :4] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


def test_second_derivative_is_refused():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(tw.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_compile_full_graph_equals_eager():
    def loss(q, k, v, sink):
        o, lse = tw.attention(q, k, v, mask=tw.SlidingWindow(2, 0) & tw.Causal(), sink=sink, return_lse=True)
        return o.square().sum() + lse.sum()

    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    grads = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in (*qkv(), sink)]
        run(*leaves).backward()
        grads.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


MASKS_IN_GRAPH = {
    "closure": lambda q, k, v, mask=tw.SlidingWindow(3, 1): tw.attention(q, k, v, mask=mask),  # noqa: B008
    "heads": lambda q, k, v: tw.attention(q, k, v, mask={(0, 1): tw.Causal(), (1, 4): tw.Full()}),
    "algebra": lambda q, k, v: tw.attention(q, k, v, mask=tw.PrefixLM(2) - tw.FirstKeys(1)),
    "dropout": lambda q, k, v: tw.attention(q, k, v, dropout_p=0.5, dropout_seed=3),
    "alibi": lambda q, k, v: tw.attention(q, k, v, causal=True, alibi_slopes=torch.full((4,), 0.5)),
    "packed": lambda q, k, v: tw.attention_varlen(q[0], k[0], v[0], torch.tensor([0, 3, 5]), torch.tensor([0, 3, 7]), causal=True),
    "top left": lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal(align="top_left"), scale=0.3, softcap=5.0),
}


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("run", MASKS_IN_GRAPH.values(), ids=MASKS_IN_GRAPH)
def test_compile_every_way_to_say_a_mask(run):
    q, k, v = qkv(grad=False, dtype=torch.float32)
    assert torch.equal(run(q, k, v), torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v))


def test_compile_dense_mask_made_in_the_graph():
    def run(q, k, v, lengths):
        visible = torch.arange(k.shape[1]) < lengths[:, None, None, None]
        return tw.attention(q, k, v, mask=tw.Dense(visible) & tw.Causal())

    q, k, v = qkv(grad=False, dtype=torch.float32)
    lengths = torch.tensor([4, 7])
    assert torch.equal(run(q, k, v, lengths), torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, lengths))


def test_no_recompilation_when_only_lengths_change():
    torch._dynamo.reset()
    traced = []

    def count(graph, inputs):
        traced.append(1)
        return graph.forward

    run = torch.compile(lambda q, k, v: tw.attention(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=count)
    for seqlen in (16, 17, 40, 129, 300):
        q, k, v = qkv(seqlen_q=seqlen, seqlen_k=seqlen, grad=False, dtype=torch.float32)
        assert torch.equal(run(q, k, v), tw.attention(q, k, v, causal=True))
    assert len(traced) == 1


def test_no_recompilation_when_documents_change():
    torch._dynamo.reset()
    traced = []

    def count(graph, inputs):
        traced.append(1)
        return graph.forward

    run = torch.compile(lambda q, k, v, cu: tw.attention_varlen(q, k, v, cu, cu, causal=True), fullgraph=True, dynamic=True, backend=count)
    for lengths in ([3, 4], [2, 9, 5], [16], [1, 1, 1, 30]):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        q, k, v = (x[0] for x in qkv(seqlen_q=sum(lengths), seqlen_k=sum(lengths), grad=False, dtype=torch.float32))
        assert torch.equal(run(q, k, v, cu), tw.attention_varlen(q, k, v, cu, cu, causal=True))
    assert len(traced) <= 2  # a batch of one document is a size of its own


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return tw.attention(q, k, v, mask=tw.SlidingWindow(2, 0))


def test_export_runs_at_other_lengths():
    q, k, v = qkv(seqlen_q=7, grad=False, dtype=torch.float32)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(Module(), (q, k, v), dynamic_shapes=({1: length}, {1: length}, {1: length}))
    q, k, v = qkv(seqlen_q=33, seqlen_k=33, grad=False, dtype=torch.float32)
    assert torch.equal(program.module()(q, k, v), Module()(q, k, v))


def test_autocast_computes_in_its_dtype():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = tw.attention(q, k, v, causal=True)
    assert o.dtype == torch.bfloat16 and torch.equal(o, tw.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True))
    o.sum().backward()
    assert q.grad.dtype == torch.float32


def test_autocast_takes_mixed_inputs_as_torch_does():
    q, k, v = qkv(dtype=torch.float32, grad=False)
    bias = torch.randn(1, 4, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        o = tw.attention(q, k, v.bfloat16(), bias=bias.half())
        wide = tw.attention(q, k, v, bias=bias)
        packed = tw.attention_varlen(q[0], k[0], v[0].bfloat16(), torch.tensor([0, 5]), torch.tensor([0, 7]))
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(o, tw.attention(*low, bias=bias.half().bfloat16())) and torch.equal(wide, tw.attention(*low, bias=bias))
    assert torch.equal(packed, tw.attention(*(x[:1] for x in low))[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(reentrant):
    def run(q, k, v):
        return tw.attention(q, k, v, causal=True, dropout_p=0.4)

    results = []
    for wrap in (run, lambda *x: checkpoint(run, *x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        q, k, v = qkv()
        wrap(q, k, v).square().sum().backward()
        results.append((q.grad, k.grad, v.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_functional_gradient():
    q, k, v = qkv()
    loss = lambda *x: tw.attention(*x, causal=True).square().sum()  # noqa: E731
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(q.detach(), k.detach(), v.detach())
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


VMAPS = {"qkv": (0, 0, 0), "q alone": (0, None, None), "second axis": (1, 0, 2)}


@pytest.mark.parametrize("in_dims", VMAPS.values(), ids=VMAPS)
def test_vmap_equals_the_loop(in_dims):
    inputs = [torch.randn(x.shape if dim is None else (*x.shape[:dim], 3, *x.shape[dim:])) for x, dim in zip(qkv(), in_dims, strict=True)]
    run = lambda *x: tw.attention(*x, causal=True, return_lse=True)  # noqa: E731
    slices = [[x if dim is None else x.select(dim, n) for x, dim in zip(inputs, in_dims, strict=True)] for n in range(3)]
    for got, expected in zip(torch.vmap(run, in_dims)(*inputs), zip(*(run(*x) for x in slices), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.parametrize("shape", [(0, 2, 5, 4, 3), (3, 0, 5, 4, 3), (3, 2, 0, 4, 3)], ids=str)
def test_vmap_over_empty_dimensions(shape):
    q, k = torch.randn(shape), torch.randn(*shape[:2], 0, 2, 3)
    o, lse = torch.vmap(lambda *x: tw.attention(*x, return_lse=True))(q, k, k)
    assert o.shape == shape and lse.shape == (*shape[:2], shape[3], shape[2]) and (o == 0).all()


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_forward_mode_is_refused(transform):
    q, k, v = qkv(grad=False)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        transform(lambda q: tw.attention(q, k, v).sum())(q)


def test_vmap_of_gradients_of_sink_and_bias():
    q, k, v = (x.detach() for x in qkv())
    sink, bias = torch.randn(3, 4, dtype=torch.float64), torch.randn(1, 4, 5, 7, dtype=torch.float64)
    loss = lambda sink, bias: tw.attention(q, k, v, sink=sink, bias=bias).square().sum()  # noqa: E731
    run = torch.func.grad(loss, argnums=(0, 1))
    got = torch.vmap(run, (0, None))(sink, bias)
    for a, b in zip(got, zip(*(run(row, bias) for row in sink), strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))


def test_per_sample_gradients():
    q, k, v = (torch.randn(3, *x.shape) for x in qkv())
    run = torch.func.grad(lambda *x: tw.attention(*x, mask=tw.SlidingWindow(2, 0)).square().sum(), argnums=(0, 1, 2))
    for a, b in zip(torch.vmap(run)(q, k, v), zip(*(run(*x) for x in zip(q, k, v, strict=True)), strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))
