"""The way from Python to a Hopper kernel: calls like one before, on streams, in graphs, on several devices, of new lengths."""

import threading

import pytest
import torch

import tilewise as tw
from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward.bound import Bound as BoundGradients
from tilewise.backends.hopper.bound import Bound
from tilewise.backends.hopper.forward import config
from tilewise.errors import ShapeError
from tilewise.masks import Causal, Documents, SlidingWindow
from tilewise.runtime import call_cache, operator
from tilewise.sm90 import jit
from tilewise.sm90.jit import why_not_here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

OPTIONS = ({}, {"causal": True}, {"mask": SlidingWindow(20, 0), "scale": 0.3}, {"causal": True, "return_lse": True})


@pytest.fixture(autouse=True)
def fresh():
    call_cache.forget()
    yield
    call_cache.forget()


def qkv(seqlen=200, heads=4, head_dim=64, device="cuda", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(torch.randn(2, seqlen, heads, head_dim, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(3))


def bound_calls() -> list[Bound]:
    return [known.bound for known in call_cache._KNOWN.values()]


def same(a, b) -> bool:
    a, b = ((x,) if isinstance(x, torch.Tensor) else x for x in (a, b))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seqlen", (1, 200, 5000))
def test_the_short_way_gives_the_same_bits(options, seqlen):
    first, second = qkv(seqlen, seed=1), qkv(seqlen, seed=2)
    tw.attention(*first, backend="hopper", **options)
    assert [type(short) for short in bound_calls()] == [Bound]
    short = [tw.attention(*second, backend="hopper", **options) for _ in range(3)]
    call_cache.forget()
    long = tw.attention(*second, backend="hopper", **options)
    assert all(same(each, long) for each in short)


def test_views_and_pointers_that_are_not_aligned():
    packed = torch.randn(2, 100, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    views = packed.unbind(2)
    right = tw.attention(*(x.contiguous() for x in views), causal=True)
    for _ in range(3):
        o = tw.attention(*views, causal=True)
        assert o.is_contiguous() and torch.equal(o, right)
    whole = torch.randn(3, 2 * 100 * 4 * 64 + 8, device="cuda", dtype=torch.bfloat16)
    for offset in (8, 0, 1, 4):  # the first is remembered, and the last two do not begin at a multiple of 16 bytes
        q, k, v = (row[offset : offset + 2 * 100 * 4 * 64].view(2, 100, 4, 64) for row in whole)
        expected = tw.attention(q.clone(), k.clone(), v.clone(), causal=True)
        assert torch.equal(tw.attention(q, k, v, causal=True), expected)


DOCUMENTS = Documents((0, 70, 70, 300), (0, 70, 70, 300), inner=Causal())
TRAINED = ({}, {"causal": True}, {"mask": SlidingWindow(20, 0), "scale": 0.3}, {"mask": DOCUMENTS}, {"causal": True, "softcap": 5.0})


@pytest.mark.parametrize("head_dim", (40, 64, 128, 256))
@pytest.mark.parametrize("options", TRAINED, ids=str)
def test_gradients_by_the_short_way(options, head_dim):
    first, second = ([x.requires_grad_() for x in qkv(300, head_dim=head_dim, seed=seed)] for seed in (1, 2))
    ready = torch.randn(2, 300, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    turned = torch.randn(2, 4, 300, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    one = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(ready.shape)

    def run(x, d_o):
        o = tw.attention(*x, backend="hopper", **options)
        return o, *torch.autograd.grad(o, x, d_o)

    run(first, ready)
    (known,) = call_cache._KNOWN.values()
    assert type(known.bound) is Bound
    for d_o in (ready, turned, one, ready):
        short = [run(second, d_o) for _ in range(3)]
        assert type(known.bound.back) is BoundGradients
        call = operator.call_of(known.given._replace(**dict(zip("qkv", (x.detach() for x in second), strict=True))))
        o, lse = Hopper().forward(call)
        long = o, *Hopper().backward(call, o, lse, d_o, None)[:3]
        assert all(same(each, long) for each in short)


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"mask": DOCUMENTS}), ids=str)
@pytest.mark.parametrize("seqlen", (60, 300, 3000))
def test_gradients_lie_as_their_inputs(options, head_dim, seqlen):
    """The bits of calls bound anew; q in any order of dimensions but where its gradient lends memory."""
    if options.get("mask") is DOCUMENTS and seqlen != 300:
        pytest.skip("other documents")
    x = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in qkv(seqlen, head_dim=head_dim)[:2]]
    x = [each.requires_grad_() for each in (*x, qkv(seqlen, head_dim=head_dim)[2])]
    d_o = torch.randn(2, seqlen, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    long, *short = [torch.autograd.grad(tw.attention(*x, backend="hopper", **options), x, d_o) for _ in range(3)]
    assert all(same(each, long) for each in short)
    (known,) = call_cache._KNOWN.values()
    assert type(known.bound.back) is BoundGradients
    lends = known.bound.back.plan.lends
    assert all(grad.stride() == each.stride() for grad, each in list(zip(short[1], x, strict=True))[lends:])


def more(kind, seed):
    """q, k, v and the other arguments of a call, whose leaves have gradients."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def new(*shape, dtype=torch.bfloat16, grad=True):
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator, requires_grad=grad)

    x = [new(2, 200, 4, 64) for _ in range(3)]
    match kind:
        case "bias":
            return x, {"bias": new(2, 4, 200, 200)}
        case "row":
            return x, {"bias": new(1, 1, 1, 200, dtype=torch.float32), "softcap": 5.0}
        case "fixed bias":
            return x, {"bias": new(1, 4, 200, 200, grad=False), "causal": True}
        case "sink":
            return x, {"sink": new(4), "mask": SlidingWindow(20, 0)}
        case "slopes":
            return x, {"alibi_slopes": new(4, dtype=torch.float32, grad=False).abs(), "causal": True}
        case "lse":
            return x, {"causal": True}
        case "one query":
            return [new(2, 1, 8, 64), new(2, 200, 2, 64), new(2, 200, 2, 64)], {"causal": True}
        case "few queries, one key head":
            return [new(2, 5, 8, 64), new(2, 200, 1, 64), new(2, 200, 1, 64)], {}
        case "documents":
            cu = torch.tensor([0, 10 + seed, 130, 190], device="cuda", dtype=torch.int32)
            return [new(200, 4, 64) for _ in range(3)], {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True, "sink": new(4)}
    raise AssertionError(kind)


KINDS = "bias", "row", "fixed bias", "sink", "slopes", "lse", "one query", "few queries, one key head", "documents"


@pytest.mark.parametrize("kind", KINDS)
def test_calls_with_more_tensors(kind, monkeypatch):
    """The bits of calls bound anew, forward and backward, with and without gradients, on other tensors than those that were remembered."""
    attend = tw.attention_varlen if kind == "documents" else tw.attention

    def run(x, options):
        leaves = [each for each in (*x, *options.values()) if isinstance(each, torch.Tensor) and each.requires_grad]
        o, lse = attend(*x, **options, return_lse=True)
        with torch.no_grad():
            plain = attend(*x, **options)
        return plain, o, lse, *torch.autograd.grad((o, lse), leaves, (o.detach(), lse.detach().cos()))

    run(*more(kind, 1))
    known = len(call_cache._KNOWN)
    x, options = more(kind, 2)
    short = [run(x, options) for _ in range(3)]
    assert known == len(call_cache._KNOWN) == 2
    monkeypatch.setattr(call_cache, "find", lambda *_: None)
    assert all(same(each, run(x, options)) for each in short)


def test_documents_whose_lengths_change_in_place():
    x, options = more("documents", 1)
    cu = options["cu_seqlens_q"]
    for ends in ([0, 10, 130, 190], [0, 50, 60, 200], [0, 0, 0, 1]):
        cu.copy_(torch.tensor(ends))
        fresh = options | {"cu_seqlens_q": cu.clone(), "cu_seqlens_k": cu.clone()}
        found = [tw.attention_varlen(*x, **given) for given in (options, options, fresh)]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
    cu[-1] = 201
    with pytest.raises(ShapeError, match="cu_seqlens"):
        tw.attention_varlen(*x, **options)


def test_gradients_in_a_graph():
    """Captured after a repeated call, replayed on new values while eager calls of the same shapes run."""
    x = [each.requires_grad_() for each in qkv(300)]
    d_o = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def run(*tensors):
        return torch.autograd.grad(tw.attention(*tensors, mask=DOCUMENTS), tensors, d_o)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run(*x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*x)
    for seed in (5, 6):
        with torch.no_grad():
            for mine, new in zip(x, qkv(300, seed=seed), strict=True):
                mine.copy_(new)
        graph.replay()
        found = [each.clone() for each in captured]
        assert same(found, run(*x))


IN_EIGHT_BITS = "int8", "int8_qk", "fp8", "e4m3", "e4m3 with scales", "e4m3 with scales of tokens"


def in_eight_bits(kind, seed, seqlen=700, head_dim=128):
    """q, k, v and the other arguments of a call."""
    x = qkv(seqlen, head_dim=head_dim, seed=seed)
    if kind in RECIPES:
        return x, {"precision": kind}
    per = "token" if kind.endswith("tokens") else "head"
    tensors, scales = zip(*(tw.quantise(each, per=per) for each in x), strict=True)
    return tensors, {} if kind == "e4m3" else dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))


@pytest.mark.parametrize("options", (*OPTIONS, {"causal": True, "softcap": 5.0}), ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("kind", IN_EIGHT_BITS)
def test_the_short_way_in_eight_bits(kind, head_dim, options):
    (first, given), (second, others) = (in_eight_bits(kind, seed, head_dim=head_dim) for seed in (1, 2))
    tw.attention(*first, **given, **options)
    assert [type(short) for short in bound_calls()] == [Bound]
    short = [tw.attention(*second, **others, **options) for _ in range(3)]
    call_cache.forget()
    long = tw.attention(*second, **others, **options)
    assert all(same(each, long) for each in short)


@pytest.mark.parametrize("before", (0, 2))
@pytest.mark.parametrize("kind", IN_EIGHT_BITS)
def test_graphs_in_eight_bits(kind, before):
    """Captured after so many calls like those in it, and replayed beside eager ones on another stream: nobody has another's scratch."""
    (x, given), (other, others) = (in_eight_bits(kind, seed, 3000) for seed in (1, 2))
    right, of_others = tw.attention(*x, causal=True, **given), tw.attention(*other, causal=True, **others)
    call_cache.forget()
    for _ in range(before):
        tw.attention(*x, causal=True, **given)
    static, numbers = (
        tuple(each.clone() for each in other),
        {name: y.clone() if isinstance(y, torch.Tensor) else y for name, y in others.items()},
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [tw.attention(*static, causal=True, **numbers) for _ in range(3)]
    for mine, new in zip((*static, *numbers.values()), (*x, *given.values()), strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(new)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(side):
            graph.replay()
        eager = [tw.attention(*other, causal=True, **others) for _ in range(5)]
        torch.cuda.synchronize()
        assert all(torch.equal(o, right) for o in outputs) and all(torch.equal(o, of_others) for o in eager)


@pytest.mark.parametrize("kind", IN_EIGHT_BITS)
def test_streams_that_run_at_once_in_eight_bits(kind):
    problems = [in_eight_bits(kind, seed, 3000) for seed in range(4)]
    expected = [tw.attention(*x, causal=True, **given) for x, given in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, (x, given) in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append([tw.attention(*x, causal=True, **given) for _ in range(8)])
        torch.cuda.synchronize()
        assert all(torch.equal(o, right) for mine, right in zip(results, expected, strict=True) for o in mine)


def test_the_lse_is_not_overwritten_by_the_next_call():
    first, second = qkv(seed=1), qkv(seed=2)
    results = [tw.attention(*x, return_lse=True) for x in (first, first, second, first, second)]
    assert same(results[0], results[1]) and same(results[0], results[3]) and same(results[2], results[4])
    assert not torch.equal(results[0][1], results[2][1])


def test_streams_that_run_at_once():
    problems = [qkv(3000, seed=seed) for seed in range(6)]
    expected = [tw.attention(*x, causal=True) for x in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, x in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append([tw.attention(*x, causal=True) for _ in range(8)])
        torch.cuda.synchronize()
        assert all(torch.equal(o, right) for mine, right in zip(results, expected, strict=True) for o in mine)


def test_a_graph_beside_eager_calls():
    """The graph is replayed on another stream while calls like those that it holds run on the first."""
    x, other = qkv(3000, seed=1), qkv(3000, seed=2)
    right, others = tw.attention(*x, causal=True), tw.attention(*other, causal=True)
    tw.attention(*x, causal=True)
    static = tuple(torch.zeros_like(each) for each in x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [tw.attention(*static, causal=True) for _ in range(4)]
    for mine, given in zip(static, x, strict=True):
        mine.copy_(given)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(side):
            graph.replay()
        eager = [tw.attention(*other, causal=True) for _ in range(8)]
        torch.cuda.synchronize()
        assert all(torch.equal(o, right) for o in outputs) and all(torch.equal(o, others) for o in eager)


def test_threads():
    problems = [qkv(500, seed=seed) for seed in range(4)]
    expected = [tw.attention(*x, causal=True) for x in problems]
    wrong = []

    def run(x, right):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                o = tw.attention(*x, causal=True)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(o, right):
                    wrong.append(x)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=each) for each in zip(problems, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_new_lengths_compile_nothing(monkeypatch):
    """One call for each step of lengths (config.Choice) leaves nothing to compile for any other."""
    for seqlen in config.lengths():
        tw.attention(*qkv(seqlen), causal=True)
    monkeypatch.setattr(jit, "build", None)
    monkeypatch.setattr(jit.cache, "load", None)
    for seqlen in (1, 101, 257, 1000, 3000):
        assert tw.attention(*qkv(seqlen, heads=seqlen % 5 + 1), causal=True).shape[1] == seqlen


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_another_device_than_the_current_one():
    problems = [qkv(700, device=f"cuda:{index}", seed=3) for index in range(2)]
    results = []
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for x in (*problems, *problems):
                results.append(tw.attention(*x, causal=True, return_lse=True))
            assert torch.cuda.current_device() == current
    for o, lse in results:
        assert torch.equal(o.to("cuda:0"), results[0][0]) and torch.equal(lse.to("cuda:0"), results[0][1])
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream(1)):
        assert torch.equal(tw.attention(*problems[1], causal=True), results[1][0])


def test_what_is_bound_anew_or_copied():
    q, k, v = qkv()
    negative = tw.attention(-q, k, v, scale=1.0, backend="hopper")
    assert all(torch.equal(tw.attention(q, k, v, scale=-1.0, backend="hopper"), negative) for _ in range(2))
    assert not Hopper().bind(_call(q, k[:, :0], v[:, :0])).kept
    odd = torch.randn(2, 200, 4, 68, device="cuda", dtype=torch.bfloat16)[..., :64]
    right = tw.attention(odd.contiguous(), k, v, backend="hopper")
    assert all(torch.equal(tw.attention(odd, k, v, backend="hopper"), right) for _ in range(2))


def _call(q, k, v, scale=1.0):
    from tilewise.masks import Full
    from tilewise.problem import Call

    return Call(q=q, k=k, v=v, mask=Full(), scale=scale)
