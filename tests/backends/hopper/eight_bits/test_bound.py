"""Bound calls in 8 bits, with kernels and streams that need no GPU: what these are given, and which calls are kept."""

import itertools
from contextlib import nullcontext
from operator import is_
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise.backends.hopper import Hopper, short
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.eight_bits import scratch
from tilewise.backends.hopper.forward import plan
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.runtime import call_cache, operator
from tilewise.sm90 import jit

E4M3 = torch.float8_e4m3fn


class Stub(Hopper):
    """The backend on a CPU, whose kernels keep what they are given."""

    def __init__(self) -> None:
        self.launches, self.captures, self.binds, self.long = [], False, 0, 0

    def why_not(self, problem):
        return []

    def bind(self, call):
        self.binds += 1
        return super().bind(call)

    def forward(self, call):
        self.long += 1
        return super().forward(call)

    def compiled(self, launch, *_):
        return lambda *given: self.launches.append((launch, given))


@pytest.fixture
def stub(monkeypatch):
    """The only backend there is."""
    backend = Stub()
    for name, stand_in in {"current_device": lambda: None, "current_stream": lambda _: 7, "capturing": lambda: backend.captures}.items():
        monkeypatch.setattr(short, name, stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: backend.captures)
    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    monkeypatch.setattr(jit, "compiled", backend.compiled)
    monkeypatch.setattr(eight_bits, "_ONES", {})
    for module in (operator, call_cache):
        monkeypatch.setattr(module, "choose", lambda problem, name: backend)
    call_cache.forget()
    yield backend
    call_cache.forget()


def qkv(seqlen_q=20, seqlen_k=200, dim=64):
    return [torch.randn(2, n, heads, dim, dtype=torch.bfloat16) for n, heads in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))]


def given(per=("head", "head", "head"), dim=64):
    tensors, scales = zip(*(tw.quantise(x, per=each) for x, each in zip(qkv(dim=dim), per, strict=True)), strict=True)
    return tensors, dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))


def span(x):
    """The bytes from the first to the last of a tensor."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@pytest.mark.parametrize("precision", ["int8", "int8_qk", "fp8"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "sink": torch.zeros(4)}, {"mask": tw.PrefixLM(5)}], ids=str)
def test_a_recipe(stub, precision, options):
    """The kernels get the same at each call, in tensors that lie apart."""
    forms = []
    for _ in range(3):
        q, k, v = qkv()
        tw.attention(q, k, v, precision=precision, **options)
        (_, of_quantiser), (_, of_kernel) = stub.launches[-2:]
        tensors, scales, _, band, scores = of_kernel
        assert (
            tensors[5] is v
            and all(map(is_, of_quantiser[0], (q, k, v, None)))
            and all(map(is_, tensors, of_quantiser[1]))
            and scales is of_quantiser[2]
        )
        parts = [x for x in (*of_quantiser[1], *scales, of_quantiser[3]) if x is not None]
        assert (tensors[2] is None) == (scales[2] is None) == (precision == "int8_qk")
        spans = sorted(map(span, parts))
        assert all((start - spans[0][0]) % scratch.ALIGNED == 0 for start, _ in spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        form = [(x.dtype, x.shape, x.stride()) for x in parts], tuple(scores)[:3], tuple(band)[:6], of_quantiser[4], (scales[6] is None)
        forms.append(form)
    assert forms[0] == forms[1] == forms[2] and stub.binds == 1 and len(stub.launches) == 6 and (scales[6] is None) == (precision == "fp8")


@pytest.mark.parametrize("per", [("head", "head", "head"), ("token", "tile", "tensor")])
@pytest.mark.parametrize("dim", [64, 256])
def test_tensors_with_scales(stub, per, dim):
    """Their scales are those of each call, spread; without one it is 1."""
    forms = []
    for _ in range(3):
        tensors, scales = given(per, dim)
        tw.attention(*tensors, **scales)
        launches, stub.launches = stub.launches, []
        assert [launch for launch, _ in launches] == [eight_bits.TRANSPOSE, eight_bits.LAUNCH]
        (_, (v, turned, tokens)), (_, (operands, found, *_)) = launches
        assert tokens is None
        assert v.data_ptr() == tensors[2].data_ptr() and turned.shape == (2, 2, dim, 208)
        assert span(operands[2]) == span(turned) and operands[3].shape[3] == dim
        assert [x.data_ptr() for x in operands[:2]] == [x.data_ptr() for x in tensors[:2]]
        for x, scale, heads, last in zip(found, scales.values(), (4, 2, 2), (20, 2, 2), strict=False):
            assert x.data_ptr() == scale.data_ptr() and x.shape == (2, heads, last)
        forms.append([(x.shape, x.stride()) for x in found[:3]])
    assert all(form == forms[0] for form in forms) and stub.binds == 1
    for _ in range(2):
        tw.attention(*tensors, k_scale=scales["k_scale"])
        *_, (_, (_, found, *_)) = stub.launches
        assert float(found[0]) if found[0].numel() == 1 else (found[0] == 1.0).all() and found[1].data_ptr() == scales["k_scale"].data_ptr()


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("per", [("head", "token", "token"), ("token", "token", "tile"), ("tensor", "head", "token")])
def test_scales_of_tokens(stub, per, dim):
    """They go to the transposing kernel, which writes what the kernel reads."""
    forms = []
    for _ in range(3):
        tensors, scales = given(per, dim)
        tw.attention(*tensors, **scales)
        ((_, (_, turned, tokens)), (_, (_, found, *_))), stub.launches = stub.launches, []
        wide = [each == "token" for each in per[1:]]
        for x, scale, there in zip(tokens, list(scales.values())[1:], wide, strict=False):
            assert (x.data_ptr() == scale.data_ptr() and x.shape == (2, 2, 200)) if there else x is None
        columns, weights, units = tokens[2:]
        assert [x is not None for x in tokens[2:]] == [*wide, wide[1]]
        made = [x for x in (turned, *tokens[2:]) if x is not None]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(map(span, made))))
        assert all(x.shape == (2, 2, 256) for x in (columns, weights) if x is not None) and (units is None or units.shape == (2, 2, 2))
        assert found[7] is columns and found[8] is weights and found[1].shape == found[2].shape == (2, 2, 2)
        assert found[0].data_ptr() == scales["q_scale"].data_ptr()
        assert (found[1] == 1.0).all() if wide[0] else found[1].data_ptr() == scales["k_scale"].data_ptr()
        assert found[2] is units if wide[1] else found[2].data_ptr() == scales["v_scale"].data_ptr()
        forms.append([x is None or (x.shape, x.stride()) for x in (*found, *tokens)])
    assert all(form == forms[0] for form in forms) and stub.binds == 1


def test_which_tensors_there_are_is_told_apart(stub):
    tensors, scales = given(("tensor", "tensor", "tensor"))
    a, b, _ = scales.values()
    kinds = [
        {},
        {"q_scale": a},
        {"k_scale": a},
        {"q_scale": a, "k_scale": b},
        {"q_scale": a, "k_scale": a},
        dict.fromkeys(scales, a),
        scales,
    ]
    for kind in kinds * 3:
        tw.attention(*tensors, **kind)
        *_, (_, (_, found, *_)) = stub.launches
        want = [kind.get(name, eight_bits.one(a.device)).data_ptr() for name in scales]
        assert [x.data_ptr() for x in found[:3]] == want
    assert stub.binds == len(call_cache._KNOWN) == len(kinds)
    for precision in (None, "int8", "fp8") * 3:
        tw.attention(*qkv(), precision=precision)
    assert stub.binds == len(call_cache._KNOWN) == len(kinds) + 3


def test_bad_input_after_good_gets_its_error(stub):
    (q, k, v), scales = given()
    wide = qkv()
    for _ in range(2):
        tw.attention(q, k, v, **scales)
        tw.attention(*wide, precision="int8")
    for bad, error, text in (
        ((*wide, {"precision": "fp4"}), ValueError, "precision"),
        ((*wide, {"precision": ["int8"]}), ValueError, "precision"),
        ((*wide, {"precision": "int8", "bias": torch.zeros(20, 200)}), UnsupportedError, "bias"),
        ((*wide, {"precision": "int8", "dropout_p": 0.5}), UnsupportedError, "dropout_p"),
        ((*wide, {"precision": "int8", **scales}), ShapeError, "q_scale"),
        ((q, k, v, {"precision": "int8"}), ValueError, "precision"),
        ((q, k, v, scales | {"k_scale": scales["k_scale"][:1]}), ShapeError, "k_scale"),
        ((q, k, v, scales | {"k_scale": scales["k_scale"].clone().requires_grad_()}), ValueError, "k_scale"),
        ((q, k, v, scales | {"v_scale": 1.0}), ShapeError, "v_scale"),
    ):
        with pytest.raises(error, match=text):
            tw.attention(*bad[:3], **bad[3])


def test_what_is_not_kept(stub):
    leaves = [x.requires_grad_() for x in qkv()]
    (q, k, v), scales = given()
    for _ in range(2):
        tw.attention(*leaves, precision="int8")
        tw.attention(q, k, v, **scales, scale=-1.0)
        assert torch.equal(stub.launches[-1][1][0][0].view(E4M3).float(), -q.float())
        tw.attention(q, k, v, **{name: x.half() for name, x in scales.items()})
        tw.attention(q, k, v, **scales, return_max_logits=True)
    assert stub.long == 6 and stub.binds == len(call_cache._KNOWN) == 1  # of the negative scale
    with torch.no_grad():
        for _ in range(2):
            tw.attention(*leaves, precision="int8")
    assert stub.long == 6 and stub.binds == len(call_cache._KNOWN) == 2


def test_a_graph_has_a_one_of_its_own(stub):
    (q, k, v), _ = given()

    def of_q():
        tw.attention(q, k, v)
        return stub.launches[-1][1][1][0].data_ptr()

    stub.captures = True
    captured = [of_q() for _ in range(2)]
    assert not eight_bits._ONES
    stub.captures = False
    assert of_q() == of_q() == eight_bits.one(q.device).data_ptr() and stub.binds == 1 and len(captured) == 2


def test_nothing_of_a_call_is_held(stub):
    import weakref

    tensors, scales = given()
    tw.attention(*tensors, **scales)
    held = [weakref.ref(x) for x in (*tensors, *scales.values())]
    stub.launches.clear()
    del tensors, scales
    assert len(call_cache._KNOWN) == 1 and not any(ref() is not None for ref in held)


def test_tensors_that_are_allocated_together():
    layouts = [(torch.int8, (3, 5, 7, 3)), (torch.float32, (3, 5)), (torch.int8, (1,)), (torch.float32, (2, 2, 2)), None]
    found = scratch.together(layouts, torch.device("cpu"), turned=1)()
    assert found.pop() is layouts.pop() is None
    assert [(x.dtype, x.shape) for x in found] == [(torch.int8, (3, 7, 5, 3)), *layouts[1:]]
    assert found[0].transpose(1, 2).is_contiguous() and all(x.is_contiguous() for x in found[1:])
    for n, x in enumerate(found):
        x.fill_(n)
    assert all((x == n).all() for n, x in enumerate(found)) and len({x.untyped_storage().data_ptr() for x in found}) == 1
