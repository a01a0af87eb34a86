"""Cached calls: the same bits as of calls bound anew, and nothing that an operator would have seen is lost."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.errors import ShapeError
from tilewise.masks import Causal, Dense, SlidingWindow
from tilewise.problem import NO_EXTRAS
from tilewise.runtime import bound_call, call_cache
from tilewise.runtime.call_cache import Options


@pytest.fixture(autouse=True)
def fresh():
    call_cache.forget()
    yield
    call_cache.forget()


def qkv(seqlen_q=5, seqlen_k=7, dtype=torch.float32):
    return tuple(torch.randn(2, n, 2, 8).to(dtype) for n in (seqlen_q, seqlen_k, seqlen_k))


def remembered() -> int:
    return len(call_cache._KNOWN)


OPTIONS = (
    {},
    {"causal": True},
    {"mask": SlidingWindow(2, 0), "scale": 0.3},
    {"softcap": 2.0, "return_lse": True},
    {"mask": {(0, 1): Causal(), (1, 2): SlidingWindow(1, 1)}},
    {"backend": "cpu"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", ((5, 7), (1, 300), (70, 70)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_the_short_way_gives_the_same_bits(options, lengths, dtype):
    first, second = qkv(*lengths, dtype), qkv(*lengths, dtype)
    tw.attention(*first, **options)
    short = tw.attention(*second, **options)
    call_cache.forget()
    long = tw.attention(*second, **options)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True)) and type(short) is type(long)


@pytest.mark.parametrize("causal", (False, True))
def test_one_way_for_each_signature(causal):
    q, k, v = qkv()
    for _ in range(3):
        tw.attention(q, k, v, causal=causal)
    assert remembered() == 1
    tw.attention(q.transpose(0, 1), k[:5].transpose(0, 1)[:5], v.transpose(0, 1)[:5], causal=causal)
    tw.attention(*(x.double() for x in (q, k, v)), causal=causal)  # nothing is bound there
    assert remembered() == 2


def test_bad_input_still_gets_its_error():
    q, k, v = qkv()
    tw.attention(q, k, v)
    tw.attention(q, k, v, scale=1.0)
    for bad in (
        {"causal": 0},
        {"return_lse": 0},
        {"deterministic": 0.0},
        {"scale": True},
        {"scale": [1]},
        {"softcap": False},
        {"dropout_p": False},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            tw.attention(q, k, v, **bad)
    for bad in ((q.numpy(), k, v), (q, k.to_sparse(), v), (q, k, v.to("meta")), (q, k.half(), v), (q.tolist(), k, v)):
        with pytest.raises(ShapeError):
            tw.attention(*bad)
    with pytest.raises(ValueError, match="dropout_seed"):
        tw.attention(q, k, v, dropout_p=0.5, dropout_seed=-1)


def test_what_else_takes_part_is_not_bypassed():
    q, k, v = qkv()
    plain = tw.attention(q, k, v)
    assert remembered() == 1
    with_grad = tw.attention(q, k, v.clone().requires_grad_())
    assert with_grad.requires_grad and torch.equal(plain, with_grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(q, k, v).dtype == torch.bfloat16
    stacked = torch.vmap(tw.attention)(*(torch.stack((x, x)) for x in (q, k, v)))
    assert torch.equal(stacked[1], plain)
    with FlopCounterMode(display=False):
        assert torch.equal(tw.attention(q, k, v), plain)
    negated = tw.attention(torch._neg_view(-q), k, v)
    assert torch.equal(negated, plain)
    assert remembered() == 2  # without and with gradient
    assert not torch.equal(tw.attention(q, k, v, bias=torch.randn(1, 1, 5, 7)), plain)


def test_what_a_transform_left_behind_goes_the_long_way():
    """A tensor of torch.func.grad that outlives it: a cached call does not look for such."""
    left, (q, k, v) = [], qkv()
    torch.func.grad(lambda x: left.append(x * 1.0) or x.sum())(q)
    k.requires_grad_()
    right = [tw.attention(q, k, v) for _ in range(2)][1]
    assert remembered() == 1
    for _ in range(3):
        o = tw.attention(left[0], k, v)
        assert torch.equal(o, right) and remembered() == 1
        assert torch.equal(torch.autograd.grad(o.sum(), k)[0], torch.autograd.grad(right.sum(), k, retain_graph=True)[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_by_the_short_way(options):
    tensors = [x.requires_grad_() for x in qkv(70, 40)]
    d_o, given = torch.randn(2, 70, 2, 8), {**options, "return_lse": False}

    def gradients(d_o, **how):
        return torch.autograd.grad(tw.attention(*tensors, **given), tensors, d_o, **how)

    long = gradients(d_o)
    transposed = d_o.transpose(1, 2).contiguous().transpose(1, 2)
    for short in (gradients(d_o), gradients(transposed), gradients(d_o, create_graph=True), gradients(torch._neg_view(-d_o))):
        assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradients(d_o, create_graph=True)[0].sum(), tensors)
    some = torch.autograd.grad(tw.attention(tensors[0], *(x.detach() for x in tensors[1:]), **given), tensors[0], d_o)
    assert torch.equal(some[0], long[0])


ORDERS = {"heads first": (0, 2, 1, 3), "tokens first": (0, 1, 2, 3), "batch inside": (1, 2, 0, 3), "columns outside": (3, 0, 1, 2)}


@pytest.fixture
def poisoned():
    """What torch allocates is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("gaps", (False, True))
@pytest.mark.parametrize("kind", ("alone", "bias", "sink"))
def test_gradients_lie_as_their_inputs(order, gaps, kind, poisoned):
    """Each in the order of its own input's dimensions, so that autograd copies none of a leaf; contiguous where the input's rows are not."""

    def lying(x):
        x = x.permute(order).contiguous()
        if gaps:
            last = order.index(3)
            x = torch.stack((x, torch.full_like(x, torch.nan)), last).select(last, 0)
        return x.permute([order.index(dim) for dim in range(4)]).requires_grad_()

    options, found = {"causal": True} | (beside(True)[kind] if kind != "alone" else {}), []
    for _ in range(3):  # the first is bound
        torch.manual_seed(0)
        x = q, k, v = [lying(each) if n != 1 else each.requires_grad_() for n, each in enumerate(qkv())]
        found.append(torch.autograd.grad(tw.attention(q, k, v, **options), x, torch.ones(2, 5, 2, 8)))
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
    for grad, each in zip(found[2], x, strict=True):
        assert grad.stride() == torch.empty_like(each).stride() if order[-1] == 3 else grad.is_contiguous()


def beside(grad=False, seqlen_q=5, seqlen_k=7, dtype=torch.float32):
    """Calls' other tensors, by name."""
    new = {"dtype": dtype, "requires_grad": grad}
    return {
        "bias": {"bias": torch.randn(2, 2, seqlen_q, seqlen_k, **new)},
        "one bias for all": {"bias": torch.randn(1, 1, 1, seqlen_k, **new)},
        "bias in fp32": {"bias": torch.randn(1, 2, seqlen_q, seqlen_k, requires_grad=grad), "softcap": 2.0},
        "turned bias": {"bias": torch.randn(1, seqlen_q, seqlen_k, 2, **new).permute(0, 3, 1, 2)},
        "sink": {"sink": torch.randn(2, **new), "mask": SlidingWindow(2, 0)},
        "slopes": {"alibi_slopes": torch.rand(2), "causal": True},
        "slopes of entries": {"alibi_slopes": torch.rand(2, 2, dtype=torch.float64)},
        "all": {
            "bias": torch.randn(1, 2, 1, seqlen_k, **new),
            "sink": torch.randn(2, **new),
            "alibi_slopes": torch.rand(2),
            "causal": True,
        },
    }


KINDS = tuple(beside())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("return_lse", (False, True))
def test_calls_with_more_tensors(kind, dtype, return_lse, monkeypatch):
    """Forward and gradients of a cached call have the bits of one bound anew, for other tensors than those that were remembered."""

    def run():
        leaves = [x for x in (*tensors, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
        results = tw.attention(*tensors, **options, return_lse=return_lse)
        results = results if return_lse else (results,)
        d_results = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) for x in results]
        return *results, *torch.autograd.grad(results, leaves, d_results)

    for turn in range(3):
        torch.manual_seed(turn)
        tensors, options = [x.requires_grad_() for x in qkv(dtype=dtype)], beside(True, dtype=dtype)[kind]
        if turn == 0:
            run()
        else:
            with monkeypatch.context() as patched:
                patched.setattr(call_cache.operator, "attend", None)  # the operator
                patched.setattr(call_cache.operator, "differentiate", None)
                short = run()
            kept = dict(call_cache._KNOWN)
            call_cache.forget()
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(short, run(), strict=True))
            call_cache._KNOWN.update(kept)
    assert remembered() == 1


def test_more_tensors_are_told_apart():
    """Each call after each other: the layout, dtype or shape of a bias differs, or which tensors there are."""
    q, k, v = qkv(7, 7, torch.bfloat16)
    bias, row = torch.randn(2, 2, 7, 7), torch.randn(2, 1, 1, 7)
    some = torch.randn(2, 2)
    ways = {
        "none": {},
        "bias": {"bias": bias},
        "strides": {"bias": bias.transpose(2, 3)},
        "gaps": {"bias": torch.cat((bias, bias), 3)[..., :7]},
        "dtype": {"bias": bias.bfloat16()},
        "broadcast": {"bias": row},
        "expanded": {"bias": row.expand(2, 2, 7, 7)},
        "sink": {"sink": some[0]},
        "sink in bf16": {"sink": some[0].bfloat16()},
        "slopes": {"alibi_slopes": some[0]},
        "slopes of entries": {"alibi_slopes": some},
        "sink as slopes": {"alibi_slopes": some[0], "sink": some[0]},
        "bias and sink": {"bias": bias, "sink": some[1]},
        "leaf": {"bias": bias.clone().requires_grad_()},
    }
    expected = {}
    for name, options in ways.items():
        call_cache.forget()
        expected[name] = tw.attention(q, k, v, **options)
    call_cache.forget()
    for first in ways:
        for second in ways:
            for name in (first, second, second):
                o = tw.attention(q, k, v, **ways[name])
                assert torch.equal(o, expected[name]) and o.requires_grad == (name == "leaf"), (first, second, name)


def test_values_of_more_tensors_are_read_at_each_call():
    q, k, v = qkv()
    for options in beside().values():
        tw.attention(q, k, v, **options)
        before = tw.attention(q, k, v, **options)
        changed = {name: x.mul_(2.0) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        short = tw.attention(q, k, v, **changed)
        call_cache.forget()
        assert not torch.equal(short, before) and torch.equal(short, tw.attention(q, k, v, **changed))


@pytest.mark.parametrize("name", ["bias", "sink", "alibi_slopes"])
def test_bad_tensors_after_good_ones_get_their_error(name):
    q, k, v = qkv()
    good = {"bias": torch.randn(2, 2, 5, 7), "sink": torch.randn(2), "alibi_slopes": torch.rand(2)}[name]
    freed = good.clone()
    freed.untyped_storage().resize_(0)
    bad = [good[..., :-1], good.int(), good.to("meta"), good.tolist(), good.to_sparse(), freed, torch.nested.nested_tensor([good, good])]
    if name == "alibi_slopes":
        bad.append(good.clone().requires_grad_())
    for wrong in bad:
        for _ in range(2):
            tw.attention(q, k, v, **{name: good})
        with pytest.raises(ValueError, match=name):
            tw.attention(q, k, v, **{name: wrong})


def test_more_tensors_under_what_else_takes_part():
    q, k, v = qkv()
    for kind, options in beside().items():
        for _ in range(2):
            right = tw.attention(q, k, v, **options)
        first = next(name for name in ("bias", "sink", "alibi_slopes") if name in options)
        rest = {name: x for name, x in options.items() if name != first}
        stacked = torch.vmap(lambda x, first=first, rest=rest: tw.attention(q, k, v, **{first: x}, **rest))(
            torch.stack([options[first]] * 2)
        )
        assert torch.equal(stacked[1], right), kind
        negated = tw.attention(q, k, v, **{first: torch._neg_view(-options[first])}, **rest)
        assert torch.equal(negated, right), kind
        with torch.autocast("cpu", torch.bfloat16):
            assert tw.attention(q, k, v, **options).dtype == torch.bfloat16
        with torch.inference_mode():
            for _ in range(2):
                assert torch.equal(tw.attention(q, k, v, **options), right), kind
        assert torch.equal(tw.attention(q, k, v, **options), right), kind


def test_hooks_on_saved_tensors_see_more_tensors_and_may_copy_them():
    for options in beside(True).values():
        x = [each.requires_grad_() for each in qkv()]
        leaves = [*x, *(each for each in options.values() if isinstance(each, torch.Tensor) and each.requires_grad)]
        packed, grads = [], []
        for _ in range(3):
            pack = lambda t, packed=packed: packed.append(t.shape) or t.clone()  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.double().to(t.dtype)):
                o = tw.attention(*x, **options)
                grads.append(torch.autograd.grad(o.square().sum(), leaves))
        assert packed[: len(packed) // 3] == packed[len(packed) // 3 : 2 * len(packed) // 3]
        assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


def test_an_lse_alone_has_a_gradient():
    x = [each.requires_grad_() for each in qkv()]
    long, short = (torch.autograd.grad(tw.attention(*x, return_lse=True)[1].sum(), x[:2]) for _ in range(2))
    assert remembered() == 1 and all(map(torch.equal, long, short))


def test_equal_numbers_are_the_same_scale():
    q, k, v = qkv()
    right = [tw.attention(q, k, v, scale=float(f"0.{n}")) for n in (25, 5)]
    assert all(torch.equal(tw.attention(q, k, v, scale=float(f"0.{n}")), o) for n, o in zip((25, 5), right, strict=True))
    tw.attention(q, k, v, scale=1.0)
    with pytest.raises(ValueError, match="scale"):
        tw.attention(q, k, v, scale=True)


def test_values_are_no_part_of_it():
    q, k, v = qkv(4, 4)
    shown = torch.ones(4, 4, dtype=torch.bool)
    tw.attention(q, k, v, mask=Dense(shown))
    assert remembered() == 0
    torch.manual_seed(0)
    first, second = (tw.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert remembered() == 1 and not torch.equal(first, second)
    tw.attention(q, k, v)
    q.mul_(2)
    assert torch.equal(tw.attention(q, k, v), tw.attention(q.clone(), k, v)) and remembered() == 2


def test_threads_are_read_at_each_call():
    q, k, v = qkv(300, 300)
    before, one = torch.get_num_threads(), tw.attention(q, k, v)
    try:
        torch.set_num_threads(1)
        assert torch.equal(tw.attention(q, k, v), one)
    finally:
        torch.set_num_threads(before)


def test_it_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(call_cache, "MOST", 3)
    for n in range(1, 9):
        tw.attention(*qkv(n, n))
        assert remembered() <= 3


def test_the_call_before_is_found_without_a_signature(monkeypatch):
    x = qkv()
    for _ in range(2):
        tw.attention(*x, causal=True)
    monkeypatch.setattr(call_cache, "signature", None)
    assert torch.equal(tw.attention(*x, causal=True), tw.attention(*x, causal=True))
    monkeypatch.undo()
    assert remembered() == 1


def test_a_call_that_wants_fewer_gradients_is_found_without_a_signature_too(monkeypatch):
    """Of the same sizes: a bias that is trained and one that is not, keys that are."""
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.randn(1, 1, 5, 7)
    calls = [(q, k, v, bias), (q, k, v, bias.clone().requires_grad_()), (q, k.detach(), v, bias)]
    for *x, added in calls * 2:
        tw.attention(*x, bias=added)
    monkeypatch.setattr(call_cache, "signature", None)
    for *x, added in calls * 2:
        leaves = [each for each in (*x, added) if each.requires_grad]
        torch.autograd.grad(tw.attention(*x, bias=added).sum(), leaves)
    assert remembered() == 3


def test_what_differs_from_the_call_before_is_seen():
    """Each way to call in turn after each other, and after itself: the results are those of calls bound anew."""
    q, k, v = qkv(7, 7)
    wider = torch.randn(2, 7, 2, 16)[..., :8]
    ways = {
        "plain": lambda: tw.attention(q, k, v, causal=True),
        "options": lambda: tw.attention(q, k, v),
        "scale": lambda: tw.attention(q, k, v, causal=True, scale=1.0),
        "lse": lambda: tw.attention(q, k, v, causal=True, return_lse=True)[0],
        "shape": lambda: tw.attention(q[:, :5], k, v, causal=True),
        "strides": lambda: tw.attention(wider, k, v, causal=True),
        "dtype": lambda: tw.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True),
        "negative": lambda: tw.attention(torch._neg_view(q), k, v, causal=True),
        "gradient": lambda: tw.attention(q.detach().requires_grad_(), k, v, causal=True),
        "autocast": lambda: _autocast(lambda: tw.attention(q, k, v, causal=True)),
        "vmap": lambda: torch.func.vmap(lambda x: tw.attention(x, k, v, causal=True))(q[None])[0],
    }
    expected = {}
    for name, call in ways.items():
        call_cache.forget()
        expected[name] = call()
    call_cache.forget()
    for first in ways:
        for second in ways:
            for name in (first, first, second, second):
                o = ways[name]()
                assert torch.equal(o, expected[name]) and o.dtype == expected[name].dtype, (first, second, name)
                assert o.requires_grad == (name == "gradient")


def test_gradients_are_not_lost_after_a_call_without():
    x = [each.requires_grad_() for each in qkv()]
    for _ in range(3):
        with torch.no_grad():
            assert not tw.attention(*x).requires_grad
        assert tw.attention(*x).requires_grad


@pytest.mark.parametrize("wrong", [1, 0.0, "yes"], ids=repr)
def test_flags_that_equal_others_are_still_refused(wrong):
    x = qkv()
    for _ in range(3):
        tw.attention(*x, causal=True)
        with pytest.raises(ValueError, match="causal"):
            tw.attention(*x, causal=wrong)
    with pytest.raises(ShapeError):
        tw.attention(x[0], x[1], None, causal=True)


def test_without_torchs_check_the_signature_serves(monkeypatch):
    for module in (call_cache, bound_call):
        monkeypatch.setattr(module, "guard", lambda *_: None)
    x = qkv()
    right = tw.attention(*x, causal=True)
    assert all(torch.equal(tw.attention(*x, causal=True), right) for _ in range(3)) and call_cache._recent == () and remembered() == 1


def _autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return call()


class Front:
    """A front end's function, whose tensors are arranged in another way than `tw.attention`'s."""

    def __init__(self, arrangement: str, return_lse: bool = False) -> None:
        self.arrangement, self.return_lse, self.name, self.short = arrangement, return_lse, f"test {arrangement}", 0
        call_cache.forget()

    def leaves(self, grads=(True, True, True)) -> list[torch.Tensor]:
        shape = {bound_call.PACKED: (6, 4, 8), "": (1, 6, 4, 8)}.get(self.arrangement, (1, 4, 6, 8))
        return [torch.randn(shape).requires_grad_(grad) for grad in grads]

    def __call__(self, q, k, v):
        options = Options(True, None, 0.0, 0.0, False, None, None, None, self.return_lse, self.name)
        if (known := call_cache.find(q, k, v, options)) is not None:
            self.short += 1
            return known(q, k, v)
        inside = [bound_call.INSIDE[self.arrangement](x) for x in (q, k, v)]
        results = tw.attention(*inside, causal=True, return_lse=self.return_lse)
        call = *inside, options._replace(frontend=""), NO_EXTRAS
        call_cache.bind_as(self.arrangement, q, k, v, options, NO_EXTRAS, call)
        o, *lse = results if self.return_lse else (results,)
        o = o if self.arrangement == bound_call.BHSD_INPUTS else bound_call.OUTSIDE[self.arrangement](o)
        return (o, lse[0].squeeze(0) if self.arrangement == bound_call.PACKED else lse[0]) if self.return_lse else o


ARRANGEMENTS = bound_call.PACKED, bound_call.BHSD, bound_call.BHSD_INPUTS


def arriving(o: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of o that lie in different ways."""
    x = torch.randn(*o.shape[:-1], 2 * o.shape[-1])
    return [x[..., : o.shape[-1]].contiguous(), x[..., ::2], torch.ones(()).expand(o.shape), x[..., 1::2].mT.contiguous().mT]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arranged_calls_have_the_long_ways_gradients(arrangement, return_lse):
    """Of some leaves or all, twice from one graph, and of whatever arrives."""
    front = Front(arrangement, return_lse)
    for grads in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        leaves = front.leaves(grads)
        wanted = [x for x in leaves if x.requires_grad]
        call_cache.forget()
        long = front(*leaves)
        for turn in range(3):
            short = front(*leaves)
            o, of = (long[0], short[0]) if return_lse else (long, short)
            more = [torch.randn(long[1].shape)] if return_lse and turn else []
            for d_o in arriving(o):
                right = torch.autograd.grad([o, *long[1:]] if more else o, wanted, [d_o, *more], retain_graph=True)
                for _ in range(2):
                    found = torch.autograd.grad([of, *short[1:]] if more else of, wanted, [d_o, *more], retain_graph=True)
                    assert all(map(torch.equal, found, right)) and torch.equal(o, of)
                    assert [x.stride() for x in found] == [x.stride() for x in wanted]
    assert front.short == 12


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arranged_tensors_that_are_changed_in_place_are_noticed(arrangement):
    front = Front(arrangement)
    leaves = front.leaves()
    front(*leaves)
    for which in range(4):
        inputs = [x * 1.0 for x in leaves]
        o = front(*inputs)
        (*inputs, o)[which].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
            torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert front.short >= 3
    o = front(*leaves)
    o.detach()[:] = 0.0  # of which autograd knows as well
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        torch.autograd.grad(o, leaves, torch.ones_like(o))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arranged_calls_give_hooks_what_the_long_way_gives(arrangement, return_lse):
    front = Front(arrangement, return_lse)
    leaves, seen, grads = front.leaves(), [], []

    def pack(x):
        seen.append((x.shape, x.dtype))
        return x.clone()

    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found = front(*leaves)
        o = found[0] if return_lse else found
        assert o.add_(0.0).requires_grad
        grads.append(torch.autograd.grad(o, leaves, torch.ones_like(o)))
    assert front.short == 2 and seen[:5] == seen[5:10] == seen[10:] and all(map(torch.equal, grads[0], grads[2]))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arranged_calls_are_checkpointed(arrangement):
    front, plain = Front(arrangement), []
    leaves = front.leaves()
    for turn in range(3):
        o = front(*leaves) if turn == 1 else checkpoint(front, *leaves, use_reentrant=False)
        plain.append(torch.autograd.grad(o, leaves, torch.ones_like(o)))
    assert front.short == 4 and all(map(torch.equal, plain[0], plain[1])) and all(map(torch.equal, plain[0], plain[2]))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arranged_calls_refuse_second_derivatives(arrangement):
    front = Front(arrangement)
    leaves = front.leaves()
    for _ in range(3):
        o = front(*leaves)
        grads = torch.autograd.grad(o, leaves, torch.ones_like(o), create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grads[0].sum(), leaves)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("arrangement", ["", *ARRANGEMENTS])
def test_nothing_of_a_call_is_held(arrangement, return_lse):
    """Neither by its gradient, once that was computed, nor by what nobody asked the gradient of; and nobody has to collect circles."""
    front = Front(arrangement, return_lse)
    front(*front.leaves())
    gc.disable()
    try:
        for backward in (True, False):
            leaves = front.leaves()
            inputs = [x * 1.0 for x in leaves]
            found = front(*inputs)
            o = found[0] if return_lse else found
            held = [StorageWeakRef(x.untyped_storage()) for x in (*inputs, o)]
            if backward:
                torch.autograd.grad(o, leaves, torch.ones_like(o))
                del inputs
                assert [ref.expired() for ref in held] == [True, True, True, False]
            del found, o, leaves
            inputs = None
            assert all(ref.expired() for ref in held)
    finally:
        gc.enable()
    assert front.short == 2
