"""Transforms of torch around every function: batched gradients, vmap, functionalisation, and forward-mode derivatives, which are refused."""

from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from surroundings import FUNCTIONS, WRITING, Function, check_close, check_equal, check_refused, normal, plain, qkv
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise as tw
from tilewise.runtime import call_cache

WITH_GRADIENTS = [name for name, function in FUNCTIONS.items() if function.grads]
DRAWN = "attention, seed drawn"  # whose random numbers a vmap draws otherwise
BATCH = 3


@pytest.fixture(autouse=True, params=("cold", "warm"))
def calls_before(request):
    call_cache.forget()
    if request.param == "warm":
        for name in ("attention", "decode"):
            for _ in range(2):
                plain_call(FUNCTIONS[name])
    yield
    call_cache.forget()


def plain_call(function: Function) -> tuple[Tensor, ...]:
    return function.call(**function.make())


def prepared(name: str) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Outputs, the leaves that they depend on, and BATCH gradients for each output."""
    function = FUNCTIONS[name]
    tensors = {key: x.detach().requires_grad_(key in function.grads) for key, x in function.make().items()}
    outputs = function.call(**tensors)
    leaves = [tensors[key] for key in function.grads]
    return outputs, leaves, [normal(BATCH, *x.shape, seed=20 + n) for n, x in enumerate(outputs)]


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_batched_gradients(name):
    outputs, leaves, weights = prepared(name)
    got = torch.autograd.grad(outputs, leaves, weights, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(outputs, leaves, [w[n] for w in weights], retain_graph=True) for n in range(BATCH)]
    check_close(got, [torch.stack(each) for each in zip(*loop, strict=True)])


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_batched_gradients_by_vmap(name):
    outputs, leaves, weights = prepared(name)
    got = torch.vmap(lambda *w: torch.autograd.grad(outputs, leaves, w, retain_graph=True))(*weights)
    check_close(got, torch.autograd.grad(outputs, leaves, weights, is_grads_batched=True))


def test_batched_gradients_of_one_output_alone():
    """The gradient that reaches the LSE, or O, is absent."""
    for at in (0, 1):
        outputs, leaves, weights = prepared("attention, lse")
        got = torch.autograd.grad(outputs[at], leaves, weights[at], is_grads_batched=True, retain_graph=True, allow_unused=True)
        loop = [torch.autograd.grad(outputs[at], leaves, w, retain_graph=True) for w in weights[at]]
        check_close(got, [torch.stack(each) for each in zip(*loop, strict=True)])


def test_batched_gradients_within_each_other():
    (o,), leaves, _ = prepared("attention")
    weights = normal(2, BATCH, *o.shape, seed=5)

    def batched(w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, w, is_grads_batched=True, retain_graph=True)

    want = [torch.stack(each) for each in zip(*map(batched, weights), strict=True)]
    check_close(torch._vmap_internals._vmap(batched, 0)(weights), want)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_jacobians(name):
    function = FUNCTIONS[name]
    tensors = function.make()
    first = function.grads[0]

    def run(x: Tensor) -> Tensor:
        return function.call(**tensors | {first: x})[0].flatten()[:6]

    want = torch.autograd.functional.jacobian(run, tensors[first])
    check_close([torch.autograd.functional.jacobian(run, tensors[first], vectorize=True)], [want])
    if name != DRAWN:
        check_close([torch.func.jacrev(run)(tensors[first])], [want])


def test_second_derivatives_of_batched_gradients_are_refused():
    (o,), leaves, (weights,) = prepared("attention")
    got = torch.autograd.grad(o, leaves, weights, is_grads_batched=True, create_graph=True)
    check_refused(lambda: got[0].sum().backward(), "no second derivative")


@pytest.mark.parametrize("call", (partial(tw.attention, causal=True), tw.decode), ids=("attention", "decode"))
def test_the_older_vmap_of_the_forward(call):
    tensors = [normal(BATCH, *x.shape, seed=n) for n, x in enumerate(qkv().values())]
    got = torch._vmap_internals._vmap(lambda q, k, v: call(q, k, v), (0, 0, 0))(*tensors)
    check_close([got], [torch.stack([call(*each) for each in zip(*tensors, strict=True)])])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in (DRAWN, *WRITING)])
def test_vmap(name):
    """Over each tensor alone that has a batch of values."""
    function = FUNCTIONS[name]
    tensors = function.make()
    for key, x in tensors.items():
        if x.is_floating_point():
            many = torch.stack([x, x * 0.5, x + 0.25])
            got = torch.vmap(lambda one, key=key: function.call(**tensors | {key: one}))(many)
            loop = [function.call(**tensors | {key: one}) for one in many]
            check_close(got, [torch.stack(each) for each in zip(*loop, strict=True)])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != DRAWN])
def test_make_fx(name):
    """What a graph of the call, and of its gradients, gives for other numbers."""
    function, tensors = FUNCTIONS[name], FUNCTIONS[name].make()

    def run(q: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors | {first: q.detach().requires_grad_(bool(function.grads))}
        outputs = function.call(**inputs)
        return *outputs, *(torch.autograd.grad(outputs[0].sum(), inputs[first]) if function.grads else ())

    first = next(iter(tensors))
    x = tensors[first]
    for _ in range(3):
        run(x)
    check_equal([y.detach() for y in make_fx(run)(x)(x + 1)], [y.detach() for y in run(x + 1)])


@pytest.mark.parametrize("name", WRITING)
def test_transforms_of_what_is_written_in_place_are_refused(name):
    tensors = FUNCTIONS[name].make()
    keys, words = list(tensors), "append writes its caches in place, which torch.vmap, torch.func.functionalize .* do not follow"
    run = lambda *x: FUNCTIONS[name].call(**dict(zip(keys, x, strict=True)))  # noqa: E731
    many = [torch.stack([x, x]) for x in tensors.values()]
    for call in (lambda: torch.func.functionalize(run)(*tensors.values()), lambda: torch.vmap(run)(*many)):
        with pytest.raises(tw.UnsupportedError, match=words):
            call()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in WRITING])
def test_functionalize(name):
    function, tensors = FUNCTIONS[name], FUNCTIONS[name].make()
    keys = list(tensors)
    for _ in range(2):
        got = torch.func.functionalize(lambda *x: function.call(**dict(zip(keys, x, strict=True))))(*tensors.values())
        check_equal(got, plain(name, grad=False))


def test_derivatives_under_functionalize_are_refused():
    tensors = qkv()
    run = lambda q: tw.attention(q, tensors["k"], tensors["v"]).sum()  # noqa: E731
    ways = (
        lambda q: torch.func.grad(torch.func.functionalize(run))(q),
        lambda q: torch.func.functionalize(torch.func.grad(run))(q),
        lambda q: torch.func.jvp(torch.func.functionalize(run), (q,), (q,)),
    )
    for way in ways:
        check_refused(lambda way=way: way(normal(2, 5, 4, 8)), "functionalize")
    q = normal(2, 5, 4, 8).requires_grad_()
    check_equal(torch.autograd.grad(torch.func.functionalize(run)(q), q), torch.autograd.grad(run(q), q))
    many = normal(BATCH, 2, 5, 4, 8)
    check_close([torch.vmap(torch.func.functionalize(run))(many)], [torch.stack([run(q) for q in many])])
    check_close([torch.func.functionalize(torch.vmap(run))(many)], [torch.stack([run(q) for q in many])])


SENTENCE = "no forward-mode derivative"
FOR_INFERENCE = "is for inference and has no gradient"
IN_PLACE = "in-place operation"  # torch's own word, where it sees that a cache is written


def dual(run, x: Tensor):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def exported(run, x: Tensor):
    class Module(torch.nn.Module):
        def forward(self, x):
            return run(x)

    return torch.export.export(Module(), (x,), strict=False).module()


FORWARD_MODE = {
    "make_dual": dual,
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x,)),
    "jacfwd": lambda run, x: torch.func.jacfwd(run)(x),
    "linearize": lambda run, x: torch.func.linearize(run, x)[1](x),
    "hessian": lambda run, x: torch.func.hessian(lambda x: run(x).sum())(x),
    "jacobian": lambda run, x: torch.autograd.functional.jacobian(run, x, strategy="forward-mode", vectorize=True),
    "gradcheck": lambda run, x: torch.autograd.gradcheck(run, x.requires_grad_(), check_forward_ad=True, fast_mode=True),
    "no_grad": torch.no_grad()(dual),
    "no_grad, compiled": lambda run, x: torch.no_grad()(dual)(torch.compile(run, backend="aot_eager"), x),
    "compiled": lambda run, x: dual(torch.compile(run, backend="aot_eager"), x),
    "jvp, traced": lambda run, x: torch.func.jvp(torch.jit.trace(run, (x,), check_trace=False), (x,), (x,)),
    "jvp, graph": lambda run, x: torch.func.jvp(make_fx(run)(x), (x,), (x,)),
    "exported": lambda run, x: torch.func.jacfwd(exported(run, x))(x),
    "jvp, compiled": lambda run, x: torch.compile(lambda x: torch.func.jvp(run, (x,), (x,)), backend="aot_eager")(x),
}


def alone(function: Function, tensors: dict[str, Tensor], key: str):
    """The first result as a function of one operand."""
    return lambda x: function.call(**tensors | {key: x})[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", FORWARD_MODE)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("merge", DRAWN)])  # torch refuses to draw numbers under a vmap
def test_forward_mode_is_refused(name, how):
    if (how == "gradcheck") > (name == "attention"):
        pytest.skip("gradcheck takes long, and fp64")
    if name == "append" and how in ("jvp, traced", "jvp, graph", "exported"):
        pytest.skip("torch.func hides tangents from an operator that writes, where a graph calls it")
    function, tensors = FUNCTIONS[name], FUNCTIONS[name].make()
    if how == "gradcheck":
        tensors = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
    inference = name == "append" or name.startswith("decode")
    words = (FOR_INFERENCE, IN_PLACE) if name in WRITING else (FOR_INFERENCE if inference else SENTENCE,)
    inputs = {"q", "k", "v", "k_cache", "v_cache", "sink", "slopes", "k_scale", "v_scale", "cos", "sin"}
    for key in {key for key in tensors.keys() & inputs if tensors[key].is_floating_point()} if inference else function.grads:
        run, x = alone(function, tensors, key), tensors[key].clone()
        check_refused(lambda run=run, x=x: FORWARD_MODE[how](run, x), *words)


def test_derivatives_inside_of_a_compiled_function_are_refused_by_torch():
    """The way out is the derivative of a compiled function."""
    tensors = qkv()
    for call in (tw.attention, tw.decode):
        run = lambda q, call=call: call(q, tensors["k"], tensors["v"]).square().sum()  # noqa: E731
        check_refused(lambda run=run: torch.compile(torch.func.grad(run), backend="aot_eager")(tensors["q"]), "autograd", "requires grad")
    run = lambda q: tw.attention(q, tensors["k"], tensors["v"]).square().sum()  # noqa: E731
    check_equal([torch.func.grad(torch.compile(run, backend="aot_eager"))(tensors["q"])], [torch.func.grad(run)(tensors["q"])])


def test_graphs_of_others_than_who_has_the_tangent_run():
    """Below a jvp, an operator whose operands have no tangents gives what it gives elsewhere."""
    for name in ("attention", "decode"):
        run = alone(FUNCTIONS[name], FUNCTIONS[name].make(), "q")
        q = FUNCTIONS[name].make()["q"]
        graph = make_fx(run)(q)
        o, tangent = torch.func.jvp(lambda x, graph=graph, q=q: graph(q * 1) + x, (q,), (q,))
        check_equal([o, tangent], [run(q) + q, q])


def test_a_tangent_of_what_reaches_the_output_is_refused():
    for _ in range(2):
        (o,), leaves, _ = prepared("attention")
        with forward_ad.dual_level():
            reaching = forward_ad.make_dual(normal(*o.shape), normal(*o.shape, seed=1))
            check_refused(lambda o=o, leaves=leaves, reaching=reaching: torch.autograd.grad(o, leaves, reaching), SENTENCE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dual_level_without_tangents_changes_nothing(name):
    want = plain(name)
    function = FUNCTIONS[name]
    for _ in range(2):
        with forward_ad.dual_level():
            tensors = {key: x.detach().requires_grad_(key in function.grads) for key, x in function.make().items()}
            check_equal(function.call(**tensors), want[: len(want) - len(function.grads)])


def test_merge_has_tangents():
    tensors = FUNCTIONS["merge"].make()
    run = lambda o: FUNCTIONS["merge"].call(**tensors | {"o": o})[0]  # noqa: E731
    assert dual(run, tensors["o"]).abs().max() > 0
