"""decode as an operator: what traces, maps or wraps a call gets the right values, or one sentence; and values are read when the operator runs."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import tilewise as tw
from tilewise import ShapeError
from tilewise.runtime import decode_operator
from tilewise.runtime.decode_operator import Operands

LENGTHS = torch.tensor([3, 9])
TABLE = torch.tensor([[2, 0, 5], [1, 3, 4]])


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def inputs():
    """q (2, 1, 4, 8), k_cache (2, 9, 2, 8), v_cache (2, 9, 2, 6)."""
    return random(2, 1, 4, 8), random(2, 9, 2, 8, seed=1), random(2, 9, 2, 6, seed=2)


@pytest.fixture
def pages(inputs):
    """The same q, and caches of 6 pages of 3 tokens."""
    return inputs[0], random(6, 3, 2, 8, seed=1), random(6, 3, 2, 6, seed=2)


def operands(q, k, v, **fields):
    present = {"q": q, "k_cache": k, "v_cache": v, "mask_tensors": [], "mask": "Causal()", "softcap": 0.0}
    present |= {"shared_prefix": 0, "interleaved": False, "check": False}
    return tuple(Operands(**(dict.fromkeys(Operands._fields) | Operands._field_defaults | present | fields)))


OPCHECKS = {
    "plain": {},
    "lengths": {"cache_seqlens": LENGTHS},
    "one length": {"length": 4},
    "sink and slopes": {"sink": random(4), "alibi_slopes": random(1, 4), "softcap": 2.0, "scale": 0.3},
    "dense": {"mask": "Dense(#0)&Causal()", "mask_tensors": [random(2, 1, 1, 9) > 0]},
    "tiled": {"backend": "tiled", "cache_seqlens": LENGTHS},
    "share": {"cache_seqlens": LENGTHS, "cp_rank": 1, "cp_world": 2},
}


@pytest.mark.parametrize("extra", OPCHECKS.values(), ids=OPCHECKS)
def test_opcheck(extra, inputs):
    torch.library.opcheck(decode_operator.operator, operands(*inputs, **extra))


def test_opcheck_paged(pages):
    torch.library.opcheck(decode_operator.operator, operands(*pages, page_table=TABLE, cache_seqlens=LENGTHS))


def test_plain_calls_do_not_pay_for_the_operator(inputs, monkeypatch):
    monkeypatch.setattr(decode_operator, "operator", None)
    assert tw.decode(*inputs, cache_seqlens=LENGTHS).shape == (2, 1, 4, 6)


def counting(traced):
    def backend(graph, inputs):
        traced.append(1)
        return graph.forward

    return backend


@pytest.mark.parametrize("paged", [False, True])
def test_compile_with_other_lengths_does_not_recompile(paged, inputs, pages):
    torch._dynamo.reset()
    traced = []
    q, k, v = pages if paged else inputs
    table = TABLE if paged else None
    run = torch.compile(
        lambda q, n: tw.decode(q, k, v, cache_seqlens=n, page_table=table, return_lse=True), fullgraph=True, backend=counting(traced)
    )
    for lengths in ([3, 9], [1, 2], [9, 0]):
        n = torch.tensor(lengths)
        for got, expected in zip(run(q, n), tw.decode(q, k, v, cache_seqlens=n, page_table=table, return_lse=True), strict=True):
            assert torch.equal(got, expected)
    assert len(traced) == 1


def test_compile_with_one_length_for_all(inputs):
    torch._dynamo.reset()
    traced = []
    run = torch.compile(lambda *x, n: tw.decode(*x, cache_seqlens=n), fullgraph=True, dynamic=True, backend=counting(traced))
    for n in (3, 5, 8, 9):
        assert torch.equal(run(*inputs, n=n), tw.decode(*inputs, cache_seqlens=n))
    assert len(traced) == 1


def test_compile_with_growing_caches_and_masks_made_in_the_graph():
    torch._dynamo.reset()

    def run(q, k, v, n):
        shown = torch.arange(k.shape[1]) >= n[:, None, None, None] // 2
        return tw.decode(q, k, v, cache_seqlens=n, mask=tw.Dense(shown)), tw.decode(q, k, v, mask=tw.SlidingWindow(3, 0))

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for capacity in (9, 12, 40):
        x = random(2, 1, 4, 8), random(2, capacity, 2, 8, seed=1), random(2, capacity, 2, 6, seed=2), torch.tensor([4, capacity])
        assert all(torch.equal(a, b) for a, b in zip(compiled(*x), run(*x), strict=True))


def test_values_are_checked_when_the_operator_runs(inputs, pages):
    torch._dynamo.reset()
    run = torch.compile(lambda n: tw.decode(*inputs, cache_seqlens=n), fullgraph=True, backend="aot_eager")
    run(LENGTHS)
    with pytest.raises(ShapeError, match=r"cache_seqlens\[1\] is 10, but the cache holds between 0 and 9"):
        run(torch.tensor([3, 10]))
    run = torch.compile(lambda table: tw.decode(*pages, page_table=table), fullgraph=True, backend="aot_eager")
    run(TABLE)
    with pytest.raises(ShapeError, match=r"page_table\[0\] names pages \[3, 1, 6\], but k_cache has pages 0..5"):
        run(TABLE + 1)


class Module(torch.nn.Module):
    def forward(self, q, k, v, n):
        return tw.decode(q, k, v, cache_seqlens=n)


@pytest.mark.parametrize("strict", [False, True])
def test_export_runs_with_other_lengths_and_capacities(strict, inputs):
    capacity = torch.export.Dim("capacity", min=2, max=512)
    program = torch.export.export(
        Module(), (*inputs, LENGTHS), dynamic_shapes=(None, {1: capacity}, {1: capacity}, None), strict=strict
    ).module()
    other = random(2, 1, 4, 8, seed=5), random(2, 33, 2, 8, seed=6), random(2, 33, 2, 6, seed=7), torch.tensor([20, 33])
    assert torch.equal(program(*other), Module()(*other))


def test_export_of_an_int_length(inputs):
    class One(torch.nn.Module):
        def forward(self, q, k, v):
            return tw.decode(q, k, v, cache_seqlens=k.shape[1] - 1)

    capacity = torch.export.Dim("capacity", min=2, max=512)
    program = torch.export.export(One(), inputs, dynamic_shapes=(None, {1: capacity}, {1: capacity}), strict=False).module()
    other = random(2, 1, 4, 8, seed=5), random(2, 33, 2, 8, seed=6), random(2, 33, 2, 6, seed=7)
    assert torch.equal(program(*other), One()(*other))


def test_fake_tensors(inputs):
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in inputs)
        o, lse = tw.decode(q, k, v, return_lse=True)
    assert o.shape == (2, 1, 4, 6) and lse.shape == (2, 4, 1) and lse.dtype == torch.float32
    assert tw.decode(q, k, v).shape == o.shape  # outside of the mode too


def test_functionalize(inputs):
    q, k, v = inputs
    expected = tw.decode(*inputs, cache_seqlens=LENGTHS)
    assert torch.equal(torch.func.functionalize(lambda q: tw.decode(q, k, v, cache_seqlens=LENGTHS))(q), expected)
    assert torch.equal(torch.func.functionalize(lambda k, n: tw.decode(q, k, v, cache_seqlens=n))(k, LENGTHS), expected)
    functional = torch._to_functional_tensor(k)
    got = tw.decode(q, functional, v, cache_seqlens=LENGTHS)
    assert torch.equal(torch._from_functional_tensor(got) if torch._is_functional_tensor(got) else got, expected)


VMAPS = {
    "all": (0, 0, 0, 0, None),
    "q": (0, None, None, None, None),
    "another axis": (2, 1, None, None, None),
    "lengths": (None, None, None, 1, None),
    "sink": (None, None, None, None, 0),
}


@pytest.mark.parametrize("in_dims", VMAPS.values(), ids=VMAPS)
@pytest.mark.parametrize("paged", [False, True])
def test_vmap_equals_the_loop(in_dims, paged, inputs, pages):
    plain = (*(pages if paged else inputs), LENGTHS, random(4, seed=4))
    mapped = [x if d is None else torch.stack([x, x.flip(0), x.roll(1, -1)], d) for x, d in zip(plain, in_dims, strict=True)]
    table = TABLE if paged else None

    def run(q, k, v, n, sink):
        return tw.decode(q, k, v, cache_seqlens=n, sink=sink, page_table=table, return_lse=True)

    entries = [[x if d is None else x.select(d, n) for x, d in zip(mapped, in_dims, strict=True)] for n in range(3)]
    for got, expected in zip(torch.vmap(run, in_dims)(*mapped), zip(*(run(*x) for x in entries), strict=True), strict=True):
        assert torch.equal(got, torch.stack(expected))


def test_vmap_over_masks_page_tables_and_nothing(pages, inputs):
    tables = torch.stack([TABLE, TABLE.flip(1)])
    got = torch.vmap(lambda t: tw.decode(*pages, page_table=t))(tables)
    assert torch.equal(got, torch.stack([tw.decode(*pages, page_table=t) for t in tables]))
    shown = random(3, 1, 9) > 0
    got = torch.vmap(lambda m: tw.decode(*inputs, mask=tw.Dense(m)))(shown)
    assert torch.equal(got, torch.stack([tw.decode(*inputs, mask=tw.Dense(m)) for m in shown]))
    o, lse = torch.vmap(lambda q: tw.decode(q, *inputs[1:], return_lse=True))(inputs[0].new_zeros(0, 2, 1, 4, 8))
    assert o.shape == (0, 2, 1, 4, 6) and lse.shape == (0, 2, 4, 1)


def test_gradients_are_refused_in_every_mode(inputs):
    q, k, v = inputs
    with pytest.raises(ValueError, match=r"q requires grad, but decode is for inference and has no gradient"):
        torch.func.grad(lambda q: tw.decode(q, k, v).sum())(q)
    with pytest.raises(
        ValueError, match=r"k_cache has a forward-mode tangent, but decode is for inference .*unpack_dual\(k_cache\)\.primal"
    ):
        torch.func.jvp(lambda k: tw.decode(q, k, v), (k,), (k,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(ValueError, match=r"q has a forward-mode tangent"):
            tw.decode(dual, k, v)
        assert torch.equal(tw.decode(torch.autograd.forward_ad.unpack_dual(dual).primal, k, v), tw.decode(q, k, v))


class Wrapper(torch.Tensor):
    """A tensor that holds another, and whose own memory is nothing."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("wrapped", ["q", "k_cache", "v_cache", "cache_seqlens", "sink", "alibi_slopes", "mask"])
def test_a_wrapper_beside_plain_tensors_is_dispatched(wrapped, inputs):
    given = dict(zip(("q", "k_cache", "v_cache"), inputs, strict=True)) | {
        "cache_seqlens": LENGTHS,
        "sink": random(4),
        "alibi_slopes": random(4),
    }
    given |= {"mask": torch.ones(1, 9, dtype=torch.bool)} if wrapped == "mask" else {}
    run = lambda x: tw.decode(**(x | ({"mask": tw.Dense(x["mask"])} if "mask" in x else {})))  # noqa: E731
    assert torch.equal(run(given | {wrapped: Wrapper(given[wrapped])}), run(given))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace says that it is old
def test_a_traced_call_has_no_gradient(inputs):
    q, k, v = inputs
    traced = torch.jit.trace(lambda q: tw.decode(q, k, v), (q,))
    with pytest.raises(RuntimeError, match="decode is for inference and has no gradient; call attention where one is wanted"):
        traced(q.clone().requires_grad_()).sum().backward()


def test_a_dispatch_mode_sees_the_operator(inputs):
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        tw.decode(*inputs)
    assert "tilewise.decode.default" in seen


def test_lazily_negated_tensors(inputs):
    q, k, v = inputs
    sink = torch.complex(torch.zeros(4), random(4)).conj().imag
    assert sink.is_neg()
    assert torch.equal(tw.decode(q, k, v, sink=sink), tw.decode(q, k, v, sink=sink.clone()))


def test_autocast_computes_in_its_dtype(inputs):
    q, k, v = inputs
    low = [x.bfloat16() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        for mixed in ((q, k, v), (low[0], k, v), (q, low[1], low[2])):
            assert torch.equal(tw.decode(*mixed), tw.decode(*low))
        torch._dynamo.reset()
        assert torch.equal(torch.compile(tw.decode, fullgraph=True, backend="aot_eager")(q, k, v), tw.decode(*low))


@pytest.mark.parametrize("paged", [False, True])
def test_other_default_dtypes_and_devices(paged, inputs, pages):
    given = {"page_table": TABLE, "cache_seqlens": LENGTHS, "sink": random(4), "return_lse": True} if paged else {"return_lse": True}
    x = pages if paged else inputs
    expected = tw.decode(*x, **given)
    default = torch.get_default_dtype()
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            got = tw.decode(*x, **given)
        finally:
            torch.set_default_dtype(default)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with torch.device("meta"):
        got = tw.decode(*x, **given)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_distributed_tensors_are_refused_in_one_sentence(inputs):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for at in range(3):
            mixed = [distribute_tensor(x, mesh, [Replicate()]) if n == at else x for n, x in enumerate(inputs)]
            with pytest.raises(tw.UnsupportedError, match=r"is a DTensor, which decode does not take; .*local_map\(tilewise\.decode"):
                tw.decode(*mixed)
    finally:
        torch.distributed.destroy_process_group()
