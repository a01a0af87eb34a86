"""While SDPA is patched, torch's own ways around it still hold: modes and subclasses that override it, torch.fx, torch.jit, its tables, threads."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch_operators import normal

from tilewise.compat import sdpa

THEIRS = F.scaled_dot_product_attention
TABLE = {THEIRS: "attention"}
ours = sdpa.scaled_dot_product_attention
q, k, v = (normal(1, 2, 5, 8, dtype=torch.float32, seed=seed) for seed in range(3))


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def overriding(asks):
    """A mode that answers 7 where `asks(mode, function)`, and keeps what it was told."""

    class Mode(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.told, self.taken = [], THEIRS if asks == "attribute" else None

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == "scaled_dot_product_attention":
                self.told.append((args, kwargs))
            if ASKS[asks](self, function):
                return torch.full_like(args[0], 7.0)
            return function(*args, **(kwargs or {}))

    return Mode()


class ByConstant(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return torch.full_like(args[0], 7.0) if function is THEIRS else function(*args, **(kwargs or {}))


class ByTable(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return torch.full_like(args[0], 7.0) if function in TABLE else function(*args, **(kwargs or {}))


ASKS = {
    "name": lambda mode, function: getattr(function, "__name__", "") == "scaled_dot_product_attention",
    "what torch has now": lambda mode, function: function is F.scaled_dot_product_attention,
    "attribute": lambda mode, function: function is mode.taken,
    "nothing": lambda mode, function: False,
}
MODES = {asks: lambda asks=asks: overriding(asks) for asks in ASKS if asks != "nothing"} | {"constant": ByConstant, "table": ByTable}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "under one that passes on"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_has_its_value(mode, inside):
    """However it tells the function, by what torch's name stands for or by what it stood for before the patch."""
    passing = overriding("nothing")
    with sdpa.patch(), mode():
        if inside:
            with passing:
                got = F.scaled_dot_product_attention(q, k, v)
        else:
            got = F.scaled_dot_product_attention(q, k, v)
    assert (got == 7).all() and len(passing.told) == inside


def test_a_mode_is_told_what_the_caller_gave_and_then_it_is_ours():
    mode, mask = overriding("nothing"), torch.zeros(5, 5)
    with sdpa.patch(), mode:
        got = F.scaled_dot_product_attention(q, k, value=v, attn_mask=mask)
    (args, kwargs), *others = mode.told
    assert not others and args == (q, k) and kwargs == {"value": v, "attn_mask": mask} and torch.equal(got, ours(q, k, v, mask))


class Counted(torch.Tensor):
    told = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.told.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("which", range(4))
def test_subclasses_override_it_by_every_argument(which):
    given = [q, k, v, torch.zeros(5, 5)]
    given[which] = given[which].as_subclass(Counted)
    with sdpa.patch():
        Counted.told.clear()
        got = F.scaled_dot_product_attention(*given[:3], attn_mask=given[3])
        assert Counted.told.count(F.scaled_dot_product_attention) == 1
    assert type(got) is Counted
    torch.testing.assert_close(got.as_subclass(torch.Tensor), THEIRS(q, k, v), atol=2e-6, rtol=2e-6)


def test_ragged_tensors_and_causal_biases_are_as_without_the_patch():
    bias = pytest.importorskip("torch.nn.attention.bias").causal_lower_right(5, 5)
    lengths = [normal(n, 2, 8, dtype=torch.float32, seed=n) for n in (3, 5)]
    ragged = torch.nested.nested_tensor(lengths, layout=torch.jagged).transpose(1, 2)
    want = THEIRS(ragged, ragged, ragged), THEIRS(q, k, v, bias)
    mode = overriding("name")
    with sdpa.patch():
        got = F.scaled_dot_product_attention(ragged, ragged, ragged), F.scaled_dot_product_attention(q, k, v, bias)
        with mode:
            assert (F.scaled_dot_product_attention(q, k, v, bias) == 7).all()
    torch.testing.assert_close(got[0].values(), want[0].values())
    torch.testing.assert_close(got[1], want[1], atol=2e-6, rtol=2e-6)


def test_a_default_device_is_a_mode_that_passes_on():
    with sdpa.patch(), torch.device("cpu"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), ours(q, k, v))


def test_fx_keeps_it_a_leaf():
    with sdpa.patch():
        traced = torch.fx.symbolic_trace(Attention())
        assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [F.scaled_dot_product_attention]
    node = next(node for node in traced.graph.nodes if node.op == "call_function")
    assert node.kwargs == {"is_causal": True} and len(node.args) == 3
    want = THEIRS(q, k, v, is_causal=True)
    for each in (traced, pickle.loads(pickle.dumps(traced))):
        torch.testing.assert_close(each(q, k, v), want, atol=2e-6, rtol=2e-6)


def test_scripts_call_torchs_operator():
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), normal(2, 5, 16, dtype=torch.float32)
    modules = (layer, (x,)), (Attention(), (q, k, v)), (nn.MultiheadAttention(16, 2, batch_first=True), (x, x, x))
    for module, given in modules:
        want = module(*given)
        with sdpa.patch():
            scripted = torch.jit.script(module)
            inside = scripted(*given)
        for got in (inside, scripted(*given)):
            torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
    with sdpa.patch():
        assert "aten::scaled_dot_product_attention" in str(torch.jit.script(Attention()).graph)


def test_torchs_tables_of_functions_follow():
    name = "torch.nn.functional.scaled_dot_product_attention"
    for _ in range(2):  # in whichever order they are asked for
        with sdpa.patch():
            assert torch.overrides.resolve_name(F.scaled_dot_product_attention) == name
            assert ours in torch.overrides.get_overridable_functions()[F] and ours in torch.overrides.get_testing_overrides()
            assert not torch.overrides.is_tensor_method_or_property(F.scaled_dot_product_attention)
        assert torch.overrides.resolve_name(THEIRS) == name
        assert THEIRS in torch.overrides.get_overridable_functions()[F] and THEIRS in torch.overrides.get_testing_overrides()
        assert ours not in torch.overrides.get_testing_overrides()


def test_threads_patch_and_remove_in_any_order():
    go, fast = threading.Barrier(4), torch.backends.mha.get_fastpath_enabled()

    def run(_):
        go.wait()
        for _ in range(200):
            handle = sdpa.patch()
            assert F.scaled_dot_product_attention is ours
            handle.remove()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert F.scaled_dot_product_attention is THEIRS and torch.backends.mha.get_fastpath_enabled() is fast


def test_what_replaced_it_before_is_not_hidden():
    """As context parallelism does, which ours would pass by without a word."""

    def ring(*args, **options):
        return torch.full_like(args[0], 7.0)

    F.scaled_dot_product_attention = ring
    try:
        with pytest.raises(RuntimeError, match=r"was replaced before tilewise.compat.sdpa.patch\(\); undo that first, .*found: .*ring"):
            sdpa.patch()
        assert F.scaled_dot_product_attention is ring
    finally:
        F.scaled_dot_product_attention = THEIRS
    with sdpa.patch():
        assert F.scaled_dot_product_attention is ours


class Ring(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return torch.full_like(args[0], 7.0)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Ring, lambda: overriding("nothing"), lambda: torch.device("cpu")], ids=["ring", "passing on", "device"])
def test_compiled_programs_ask_the_modes(mode):
    torch._dynamo.reset()
    with sdpa.patch(), mode():
        got = torch.compile(Attention(), backend="aot_eager", fullgraph=True)(q, k, v)
        want = Attention()(q, k, v)
    assert torch.equal(got, want)
