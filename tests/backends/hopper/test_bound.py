"""Calls whose kernel and arguments are found once, with kernels and streams that need no GPU."""

import itertools
import math
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise import api
from tilewise.backends.hopper import Hopper, bound, short
from tilewise.backends.hopper.backward import bound as backward_bound
from tilewise.backends.hopper.backward import call as backward_call
from tilewise.backends.hopper.backward import plan as backward_plan
from tilewise.backends.hopper.backward.bias import call as bias_call
from tilewise.backends.hopper.backward.repair import call as repairs
from tilewise.backends.hopper.backward.sink import call as sink_call
from tilewise.backends.hopper.forward import call as forward
from tilewise.backends.hopper.forward import plan
from tilewise.backends.hopper.operands import Packed
from tilewise.backends.tables import keeping
from tilewise.backends.tiled import Tiled
from tilewise.compat import sdpa, torch_flash
from tilewise.errors import ShapeError
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.problem import NO_EXTRAS, Call, Dropout
from tilewise.runtime import call_cache, operator

BF16 = torch.bfloat16


class Device:
    """What torch.cuda says: the current device and stream, and whether it captures."""

    def __init__(self, monkeypatch) -> None:
        self.current, self.stream, self.captures, self.entered = None, 7, False, []
        monkeypatch.setattr(short, "current_device", lambda: self.current)
        monkeypatch.setattr(short, "current_stream", lambda index: self.stream)
        monkeypatch.setattr(short, "capturing", lambda: self.captures)
        monkeypatch.setattr(torch.cuda, "device", self.enter)

    @contextmanager
    def enter(self, index):
        before, self.current = self.current, index
        self.entered.append(index)
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


class Kernel:
    """Writes what it was given: O is Q's first columns, LSE is `number`."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, tensors, work, band, scores):
        (q, k, v, o, lse), (counter,), (number,), (scale,) = tensors, work, band, scores
        if any(x.data_ptr() % 16 for x in (q, k, v)):
            raise ValueError("Misaligned Tensor data on argument #0")
        assert o.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
        self.calls.append((q, o, lse, counter, number, scale))
        o.copy_(q[..., : o.shape[-1]])
        lse.fill_(number)
        counter += 1


def qkv(seqlen=5, head_dim_v=64, dtype=BF16):
    return tuple(torch.randn(2, seqlen, 3, dim, dtype=dtype) for dim in (64, 64, head_dim_v))


def make(q, k, v, number=1.5):
    kernel = Kernel()
    call = Call(q=q, k=k, v=v, mask=Full(), scale=1.0)
    return bound.Bound(call, kernel, lambda: (torch.zeros(1, dtype=torch.int32),), rest=((number,), (0.5,))), kernel


@pytest.mark.parametrize("head_dim_v", [64, 40])
def test_outputs_and_numbers(device, head_dim_v):
    again, kernel = make(*qkv(head_dim_v=head_dim_v))
    for _ in range(2):
        q, k, v = qkv(head_dim_v=head_dim_v)
        o, lse = again.forward(q, k, v, NO_EXTRAS, True)
        assert torch.equal(o, q[..., :head_dim_v]) and o.dtype == BF16 and lse.shape == (2, 3, 5) and (lse == 1.5).all()
    assert kernel.calls[0][4:] == (1.5, 0.5) and len(kernel.calls) == 2


def test_strided_inputs_give_contiguous_outputs(device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    again, _ = make(q, k, v)
    o, _ = again.forward(q, k, v, NO_EXTRAS, False)
    assert o.is_contiguous() and torch.equal(o, q)


def test_what_begins_between_two_multiples_of_16_bytes_is_copied(device):
    again, kernel = make(*qkv())
    q = torch.randn(2 * 5 * 3 * 64 + 1, dtype=BF16)[1:].view(2, 5, 3, 64)
    _, k, v = qkv()
    assert torch.equal(again.forward(q, k, v, NO_EXTRAS, False)[0], q) and kernel.calls[0][0] is not q


def test_an_lse_that_is_wanted_is_the_callers(device):
    again, _ = make(*qkv())
    first, second = (again.forward(*qkv(), NO_EXTRAS, True)[1] for _ in range(2))
    unwanted = [again.forward(*qkv(), NO_EXTRAS, False)[1] for _ in range(2)]
    assert first.data_ptr() != second.data_ptr() and unwanted[0] is unwanted[1]
    assert unwanted[0].data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_a_large_lse_is_not_kept(device, monkeypatch):
    monkeypatch.setattr(bound, "KEPT_BYTES", 2 * 3 * 5 * 4 - 1)
    again, _ = make(*qkv())
    first, second = (again.forward(*qkv(), NO_EXTRAS, False)[1] for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_each_stream_has_its_own(device):
    again, kernel = make(*qkv())
    for device.stream in (1, 2, 1, 2, 2):
        again.forward(*qkv(), NO_EXTRAS, False)
    counters = [call[3] for call in kernel.calls]
    assert counters[0] is counters[2] and counters[1] is counters[3] is counters[4] and counters[0] is not counters[1]
    assert [int(counter) for counter in counters[:2]] == [2, 3] and kernel.calls[0][2] is not kernel.calls[1][2]


def test_a_captured_call_has_its_own(device):
    again, kernel = make(*qkv())
    again.forward(*qkv(), NO_EXTRAS, False)
    device.captures = True
    for _ in range(2):
        again.forward(*qkv(), NO_EXTRAS, False)
    device.captures = False
    again.forward(*qkv(), NO_EXTRAS, False)
    eager, first, second, after = ((call[2].data_ptr(), call[3].data_ptr()) for call in kernel.calls)
    assert eager == after and not {*eager} & {*first, *second} and not {*first} & {*second}
    assert keeping._OF_GRAPHS[id(again.rest)] is again.rest  # a mask's tables, where it has some


def test_another_device_is_entered(device):
    again, _ = make(*qkv())
    again.forward(*qkv(), NO_EXTRAS, False)
    assert not device.entered
    device.current = 3
    q, k, v = qkv()
    assert torch.equal(again.forward(q, k, v, NO_EXTRAS, False)[0], q) and device.entered == [None] and device.current == 3


def test_nothing_of_the_first_call_is_held(device):
    import weakref

    q, k, v = qkv()
    again, _ = make(q, k, v)
    held = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    assert again and not any(ref() is not None for ref in held)


class Stub(Hopper):
    """The backend on a CPU: its kernels and its `backward` are those of the portable backend."""

    def __init__(self) -> None:
        self.forwards, self.backwards, self.repairs, self.mask, self.dropout_p = 0, 0, 0, Causal(), 0.0

    def why_not(self, problem):
        return []

    def backward(self, call, *given, **options):
        self.backwards += 1
        return Tiled().backward(call, *given, **options)

    def call(self, q, k, v, bundle, tables, sink=None) -> Call:
        """What a kernel's operands say. `mask` is that of the calls; of documents, what `find` left in the tables."""
        mask, found = self.mask, getattr(tables, "rows", None) if tables is None or hasattr(tables, "rows") else tables.keys
        if found is not None:
            numbers = int(found[0, 0])
            mask = Documents(found[0, 1 : 1 + numbers].tolist(), found[1, :numbers].tolist(), inner=mask)
        bias, slopes, inner = (None, None, None) if bundle is None else (bundle.bias, bundle.slopes, bundle.inner)
        scale = q.shape[-1] ** -0.5
        softcap = 0.0 if inner is None else scale / inner
        draw, dropout = getattr(bundle, "draw", None), None
        if draw is not None:
            low, high, offset = (word % (1 << 32) for word in (*draw.keys[:2], draw.offset))
            dropout = Dropout(self.dropout_p, low + (high << 32), offset)
        return Call(q=q, k=k, v=v, mask=mask, scale=scale, softcap=softcap, bias=bias, alibi_slopes=slopes, sink=sink, dropout=dropout)


def find(packed, *tables):
    """In place of the kernels that look at cu_seqlens: their numbers, into the first table of two rows."""
    packed = Packed(*packed)
    (ends,) = (x for x in tables[:2] if x.shape[0] == 2 and x is not tables[1]) if tables[0].shape[0] == 2 else (tables[1],)
    numbers = packed.cu_seqlens_q.shape[0]
    ends[0, 0] = numbers
    ends[0, 1 : 1 + numbers], ends[1, :numbers] = packed.cu_seqlens_q, packed.cu_seqlens_k


@pytest.fixture
def stub(device, monkeypatch):
    """The only backend there is."""
    backend, sums = Stub(), {}

    def backward(given, gradients, scratch, turns, scalars, band, changed):
        assert given.dO.stride(-1) == 1 and scratch.turns.dtype == torch.int32
        backend.backwards += 1
        q, k, v, o, lse, d_o, d_lse = given
        call = backend.call(q, k, v, changed, band.tables)
        sums["gradients"] = found = Tiled().backward(
            call, o, lse, d_o, d_lse if scalars.has_dL else None, changed is not None and changed.bias is not None
        )
        for mine, right in zip(gradients, found[:3], strict=True):
            mine.copy_(right)
        scratch.lse.fill_(math.inf)
        natural = changed is not None and (changed.bias is not None or changed.slopes is not None)
        scratch.lse[..., : lse.shape[-1]] = lse if natural else lse / math.log(2)
        scratch.minus_delta.zero_()
        scratch.minus_delta[..., : lse.shape[-1]] = -(o.float() * d_o.float()).sum(-1).transpose(1, 2)
        if scalars.has_dL:
            scratch.minus_delta[..., : lse.shape[-1]] += d_lse
        if call.dropout is not None:
            scratch.minus_delta.mul_(changed.draw.kept)

        sums["given"] = given, gradients, band.tables, changed

    def repair(repaired, spoiled, numbers, band, changed):
        backend.repairs += 1
        given, written, tables, changes = sums.pop("given")
        assert all(x is y for x, y in zip(repaired, (given.Q, given.K, given.V, given.dO, *written), strict=True)) and changed == changes
        assert band.tables.queries is tables.queries and band.tables.walks is None and spoiled.spoiled.dtype == torch.int32
        assert (spoiled.minus_delta.shape, numbers.blocks) == (spoiled.lse.shape, 132)

    def of_bias(v, d_o, tensors, band, changed):
        tensors.dB.zero_()[0] = sums["gradients"].bias

    def kernel(tensors, work, band, scores):
        q, k, v, o, lse = tensors
        backend.forwards += 1
        for mine, right in zip((o, lse), Tiled().forward(backend.call(q, k, v, scores, band.tables, scores.sink)), strict=True):
            mine.copy_(right)

    def of_sink(tensors, numbers):
        below = (tensors[0][:, None] - numbers.unit * tensors[1]).clamp(max=0.0)
        tensors[3].copy_((below.exp() * tensors[2]).sum((0, 2)) * numbers.rest)

    kernels = {
        forward.LAUNCH: kernel,
        backward_call.LAUNCH: backward,
        bias_call.LAUNCH: of_bias,
        sink_call.LAUNCH: of_sink,
        repairs.LAUNCH: repair,
    }
    monkeypatch.setattr(forward, "_counter", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    monkeypatch.setattr(backward_plan, "gpu_of", lambda device: backward_plan.Gpu(132, 0))
    monkeypatch.setattr(forward.jit, "compiled", lambda launch, *_: kernels.get(launch, find))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: SimpleNamespace(cuda_stream=device.stream))
    monkeypatch.setattr(api, "_on_gpu", lambda *cu_seqlens: True)
    monkeypatch.setattr(call_cache, "choose", lambda problem, name: backend)
    monkeypatch.setattr(operator, "choose", lambda problem, name: backend)
    call_cache.forget()
    yield backend
    call_cache.forget()


def test_a_bound_call_serves_more(stub, monkeypatch):
    first, second = qkv(), qkv()
    monkeypatch.setattr(stub, "forward", None)
    tw.attention(*first, causal=True)
    torch.testing.assert_close(tw.attention(*second, causal=True), Tiled().forward(_causal(*second))[0], atol=0, rtol=0)
    assert stub.forwards == 2


def test_gradients(stub, monkeypatch):
    without_the_operators(monkeypatch, stub)
    results, x = [], [each.requires_grad_() for each in qkv()]
    for _ in range(3):
        o = tw.attention(*x, causal=True)
        results.append((o, *torch.autograd.grad(o, x, torch.ones_like(o))))
    assert stub.forwards == stub.backwards == stub.repairs == 3 and len(call_cache._KNOWN) == 1
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_gradients_of_any_strides(stub, monkeypatch):
    """That of a sum is one number for all; one may have its heads before its tokens, begin between two addresses, or have gaps."""
    x = [each.requires_grad_() for each in qkv()]
    tw.attention(*x, causal=True).sum().backward()
    monkeypatch.setattr(stub, "backward", None)
    shape = tw.attention(*x, causal=True).shape
    spread = torch.randn(*shape[:-1], 2 * shape[-1], dtype=BF16)[..., ::2]
    late = torch.randn(math.prod(shape) + 1, dtype=BF16)[1:].view(shape)
    turned = torch.randn(shape[0], shape[2], shape[1], shape[3], dtype=BF16).transpose(1, 2)
    for d_o in (torch.ones(1, dtype=BF16).expand(shape), spread, late, turned):
        found, right = (torch.autograd.grad(tw.attention(*x, causal=True), x, each) for each in (d_o, d_o.contiguous()))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def run(attend, tensors, options, return_lse):
    """Results and gradients of all leaves."""
    results = attend(*tensors, **options, return_lse=return_lse)
    results = results if return_lse else (results,)
    leaves = [x for x in (*tensors, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    d_results = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) for x in results]
    return *results, *torch.autograd.grad(results, leaves, d_results)


def without_the_operators(monkeypatch, stub):
    monkeypatch.setattr(stub, "forward", None)
    monkeypatch.setattr(stub, "backward", None)


def beside(kind, dtype=BF16):
    return {
        "bias": lambda: {"bias": torch.randn(2, 3, 5, 5, dtype=dtype, requires_grad=True)},
        "row": lambda: {"bias": torch.randn(1, 1, 1, 5, requires_grad=True), "softcap": 2.0},
        "sink": lambda: {"sink": torch.randn(3, dtype=dtype, requires_grad=True)},
        "slopes": lambda: {"alibi_slopes": torch.rand(3)},
        "all": lambda: {
            "bias": torch.randn(2, 3, 5, 5, requires_grad=True),
            "sink": torch.randn(3, requires_grad=True),
            "alibi_slopes": torch.rand(2, 3),
        },
    }[kind]()


@pytest.mark.parametrize("kind", ["bias", "row", "sink", "slopes", "all"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_calls_with_more_tensors(stub, monkeypatch, kind, return_lse):
    """Forward and backward by the kernels of the first call, on the second's tensors."""
    run(tw.attention, [x.requires_grad_() for x in qkv()], {"causal": True, **beside(kind)}, return_lse)
    x, options = [x.requires_grad_() for x in qkv()], {"causal": True, **beside(kind)}
    long = []
    with monkeypatch.context() as patched:
        patched.setattr(call_cache, "find", lambda *_: None)
        long = run(tw.attention, x, options, return_lse)
    without_the_operators(monkeypatch, stub)
    for a, b in zip(run(tw.attention, x, options, return_lse), long, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2 if "sink" in options else 0, rtol=1e-2 if "sink" in options else 0)
    assert len(call_cache._KNOWN) == 1


@pytest.mark.parametrize("kind", [None, "bias", "sink", "all"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_dropout_is_drawn_at_each_call(stub, monkeypatch, kind, dtype):
    """By the kernels of the first call; the seed may be given, or come from torch's generator as by the long way."""
    stub.dropout_p, given = 0.9, {"causal": True, "dropout_p": 0.9}
    run(tw.attention, [x.requires_grad_() for x in qkv(dtype=dtype)], given | (beside(kind, dtype) if kind else {}), False)
    x, options = [x.requires_grad_() for x in qkv(dtype=dtype)], given | (beside(kind, dtype) if kind else {})
    seeds = ({}, {}, {"dropout_seed": 5}, {"dropout_seed": (1 << 63) - 1, "dropout_offset": (1 << 32) - 1}, {"dropout_seed": 5})

    def results():
        torch.manual_seed(3)
        return [run(tw.attention, x, options | seed, False) for seed in seeds]

    with monkeypatch.context() as patched:
        patched.setattr(call_cache, "find", lambda *_: None)
        long = results()
    without_the_operators(monkeypatch, stub)
    short = results()
    for a, b in itertools.chain(*(zip(*each, strict=True) for each in zip(short, long, strict=True))):
        torch.testing.assert_close(a, b, atol=2e-2 if "sink" in options else 0, rtol=1e-2 if "sink" in options else 0)
    assert not any(torch.equal(short[0][0], each[0]) for each in short[1:]) and torch.equal(short[2][0], short[4][0])
    assert len(call_cache._KNOWN) == 1
    with pytest.raises(ValueError, match="dropout_seed"):
        tw.attention(*x, **options, dropout_seed=-1)


def test_dropout_of_drop_ins(stub, monkeypatch):
    """They give no seed, so each call draws one."""
    stub.dropout_p = 0.5
    x = [each.transpose(1, 2).requires_grad_() for each in qkv()]

    def results():
        torch.manual_seed(3)
        return [
            run(lambda *x, return_lse: sdpa.scaled_dot_product_attention(*x, dropout_p=0.5, is_causal=True), x, {}, False) for _ in "ab"
        ]

    results()
    with monkeypatch.context() as patched:
        patched.setattr(call_cache, "find", lambda *_: None)
        long = results()
    without_the_operators(monkeypatch, stub)
    monkeypatch.setattr(sdpa, "attention", None)
    short = results()
    assert all(torch.equal(a, b) for each in zip(short, long, strict=True) for a, b in zip(*each, strict=True))
    assert not torch.equal(short[0][0], short[1][0])


def test_an_output_with_heads_first(stub, monkeypatch):
    """As torch's operators want it where their query lies so: written there by the kernel of a cached call."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv())
    for x in ((q, k, v), tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))):
        long, short = (torch_flash._scaled_dot_product_flash_attention(*x, is_causal=True)[0] for _ in "ab")
        assert torch.equal(short, long) and short.is_contiguous() == long.is_contiguous() == x[0].is_contiguous()
    monkeypatch.setattr(torch_flash, "laid_out_as", lambda o, query: o)
    assert torch_flash._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0].is_contiguous()


def test_dropout_of_documents(stub, monkeypatch):
    stub.dropout_p, cu = 0.5, torch.tensor([0, 5, 12], dtype=torch.int32)
    options = {"causal": True, "dropout_p": 0.5, "dropout_seed": 4, "dropout_offset": 2}
    x = packed()
    long = run(tw.attention_varlen, (*x, cu, cu), options, True)
    without_the_operators(monkeypatch, stub)
    short = run(tw.attention_varlen, (*x, cu, cu), options, True)
    other, _ = tw.attention_varlen(*x, cu, cu, **options | {"dropout_seed": 5}, return_lse=True)
    assert all(map(torch.equal, short, long)) and not torch.equal(other, short[0])


def test_checkpointing_draws_the_same_again(stub):
    """Whichever way a pass goes: what is saved has one order."""
    stub.dropout_p, found = 0.5, []
    x, sink = [each.requires_grad_() for each in qkv()], torch.randn(3, dtype=BF16, requires_grad=True)

    def attend(*tensors):
        return tw.attention(*tensors, sink=sink, causal=True, dropout_p=0.5)

    for again in (lambda *tensors: attend(*tensors), lambda *tensors: checkpoint(attend, *tensors, use_reentrant=False)):
        call_cache.forget()
        for _ in range(2):
            torch.manual_seed(3)
            o = again(*x)
            found.append(torch.autograd.grad(o, x, torch.ones_like(o)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_bias_without_gradient_asks_for_no_kernel_of_its_own(stub, monkeypatch):
    compiled, asked = forward.jit.compiled, []
    monkeypatch.setattr(forward.jit, "compiled", lambda launch, *rest: asked.append(launch) or compiled(launch, *rest))
    x, bias = [each.requires_grad_() for each in qkv()], torch.randn(1, 3, 5, 5)
    for _ in range(3):
        tw.attention(*x, bias=bias, causal=True).sum().backward()
    assert bias_call.LAUNCH not in asked
    for _ in range(3):
        tw.attention(*x, bias=bias.requires_grad_(), causal=True).sum().backward()
    assert bias_call.LAUNCH in asked and bias.grad is not None


def test_a_bias_that_begins_between_two_pairs_is_copied(stub, monkeypatch):
    x = qkv(6)
    bias = torch.randn(1, 3, 6, 6, dtype=BF16)
    tw.attention(*x, bias=bias, causal=True)
    shifted = torch.cat((bias.flatten()[:1], bias.flatten()))[1:].view(bias.shape)
    assert shifted.data_ptr() % 4 == 2
    seen = []
    monkeypatch.setattr(stub, "forward", None)
    monkeypatch.setattr(stub, "call", lambda *given: seen.append(given[3].bias) or Stub.call(stub, *given))
    assert torch.equal(tw.attention(*x, bias=shifted, causal=True), tw.attention(*x, bias=bias, causal=True))
    assert all(each.data_ptr() % 4 == 0 for each in seen) and seen[1] is bias


def packed():
    return [torch.randn(12, 3, 64, dtype=BF16, requires_grad=True) for _ in range(3)]


def lengths(*ends, dtype=torch.int32):
    return torch.tensor([0, *ends], dtype=dtype)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_documents(stub, monkeypatch, return_lse, sink):
    """cu_seqlens are read at each call: other tensors, other values of the same, one tensor for both, int64."""
    options = {"sink": torch.randn(3, requires_grad=True)} if sink else {}
    cu = lengths(5, 12)

    def attend(q, k, v, **options):
        return tw.attention_varlen(q, k, v, *ends, causal=True, **options)

    ends = cu, cu
    run(attend, packed(), options, return_lse)
    for change in (lambda: cu, lambda: cu.copy_(lengths(3, 10)), lambda: lengths(1, 11)):
        changed = change()
        ends, x = (changed, changed), packed()
        with monkeypatch.context() as patched:
            without_the_operators(patched, stub)
            short = run(attend, x, options, return_lse)
        with monkeypatch.context() as patched:
            patched.setattr(call_cache, "find", lambda *_: None)
            long = run(attend, x, options, return_lse)
        assert short[0].shape == (12, 3, 64) and short[0].is_contiguous() and (not return_lse or short[1].shape == (3, 12))
        for a, b in zip(short, long, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2 if sink else 0, rtol=1e-2 if sink else 0)
    known = len(call_cache._KNOWN)
    ends = lengths(5, 12), lengths(7, 12)
    run(attend, packed(), options, return_lse)
    ends = ends[0].long(), ends[1]
    run(attend, packed(), options, return_lse)
    assert len(call_cache._KNOWN) == known + 2


def test_bad_documents_after_good_ones_get_their_error(stub):
    x, cu = packed(), lengths(5, 12)
    for _ in range(2):
        tw.attention_varlen(*x, cu, cu, causal=True)
    for bad in (lengths(7, 5), lengths(5, 13), lengths(5, 12).float(), [0, 5, 12], lengths(5), None):
        with pytest.raises(ValueError, match="cu_seqlens"):
            tw.attention_varlen(*x, cu, bad, causal=True)
    batched = [y.detach()[None] for y in x]
    for _ in range(2):
        tw.attention(*batched, causal=True)
    with pytest.raises(ValueError, match="3 dimensions"):
        tw.attention_varlen(*batched, None, None, causal=True)
    cu[1] = 13
    with pytest.raises(ShapeError, match="cu_seqlens"):
        tw.attention_varlen(*x, cu, cu, causal=True)


def test_documents_save_the_same_by_either_way(stub):
    """Checkpointing may recompute by another way than it came."""
    x, cu, seen = packed(), lengths(5, 12), []
    for turn in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t, turn=turn: seen.append((turn, t.shape, t.dtype)) or t, lambda t: t):
            tw.attention_varlen(*x, cu, cu, causal=True, sink=torch.zeros(3))
    half = len(seen) // 2
    assert half == 8 and [each[1:] for each in seen[:half]] == [each[1:] for each in seen[half:]]


def test_results_of_documents_may_be_changed_in_place(stub):
    x, cu = packed(), lengths(5, 12)
    long, short = (
        torch.autograd.grad(tw.attention_varlen(*x, cu, cu, causal=True) * 2.0, x, torch.ones(12, 3, 64, dtype=BF16)) for _ in range(2)
    )
    o = tw.attention_varlen(*x, cu, cu, causal=True)
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        torch.autograd.grad(o.mul_(2.0), x, torch.ones(12, 3, 64, dtype=BF16))
    assert all(map(torch.equal, long, short))


@pytest.mark.parametrize("seqlens", [(1, 9), (4, 9)], ids=str)
@pytest.mark.parametrize("heads_k", [1, 2])
def test_heads_that_are_packed_as_rows(stub, monkeypatch, seqlens, heads_k):
    seqlen_q, seqlen_k = seqlens
    stub.mask, options = Full(), {"mask": SlidingWindow(3, 0)} if seqlen_q == 1 else {}
    new = {"dtype": BF16, "requires_grad": True}

    def tensors():
        return [torch.randn(2, n, heads, 64, **new) for n, heads in ((seqlen_q, 4), (seqlen_k, heads_k), (seqlen_k, heads_k))]

    run(tw.attention, tensors(), options, True)
    x = tensors()
    for return_lse in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(call_cache, "find", lambda *_: None)
            with torch.no_grad():
                long = tw.attention(*x, **options, return_lse=True)
        with torch.no_grad():
            tw.attention(*tensors(), **options, return_lse=return_lse)
            with monkeypatch.context() as patched:
                without_the_operators(patched, stub)
                short = tw.attention(*x, **options, return_lse=return_lse)
        assert all(map(torch.equal, short if return_lse else (short,), long)) and (short[0] if return_lse else short).is_contiguous()
    monkeypatch.setattr(stub, "forward", None)
    short = run(tw.attention, x, options, True)
    assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[1])


def gradients_of(kernel, *scratch):
    """Bound gradients over `kernel`, with such scratch."""
    q, lse = torch.randn(1, 4, 1, 8, dtype=BF16), torch.zeros(1, 1, 4)
    call, none = Call(q=q, k=q, v=q, mask=Full(), scale=1.0), (None,) * (7 - len(scratch))
    launch = lambda given, gradients, scratch, *rest: kernel(scratch.lse.data_ptr())  # noqa: E731
    plan = SimpleNamespace(scratch=scratch + none, turns=[(None, ())], lends=False, config=SimpleNamespace(wide_keys=False))
    again = backward_bound.Bound(call, launch, plan, lambda has: (), (), None)
    return partial(again, q, q, q, q, lse, q, None, NO_EXTRAS, False)


SMALL = (2, 3), torch.float32


def test_scratch_of_gradients_is_kept_by_stream_and_not_captured(device):
    seen = []
    compute = gradients_of(seen.append, SMALL)
    for device.stream in (1, 2, 1, 2):
        compute()
    assert seen[0] == seen[2] != seen[1] == seen[3]
    device.captures = True
    compute()
    device.captures = False
    compute()
    assert seen[4] not in seen[:4] and seen[5] == seen[1]


def test_scratch_of_gradients_is_nobody_elses_while_kernels_are_launched(device):
    seen = []

    def kernel(scratch):
        seen.append(scratch)
        if len(seen) == 1:  # another thread, meanwhile
            compute()

    compute = gradients_of(kernel, SMALL)
    compute()
    assert len(set(seen)) == 2


def test_large_scratch_of_gradients_is_not_kept(device):
    kept = []
    for size in (backward_bound.KEPT_BYTES, backward_bound.KEPT_BYTES + 4):
        compute = gradients_of(lambda scratch: None, ((size // 4,), torch.float32))
        compute()
        kept.append(bool(compute.func.scratch_of))
    assert kept == [True, False]


class Counted(TorchDispatchMode):
    """The names of torch's operators, each of which takes the host 5 to 10 us on a GPU."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators(kind: str) -> Callable:
    """A call of that kind, with a gradient."""
    x, first = [each.requires_grad_() for each in qkv(8)], [each.transpose(1, 2).contiguous().requires_grad_() for each in qkv(8)]
    turned = [each.detach().transpose(1, 2).requires_grad_() for each in qkv(8)]
    chunk = [torch.randn(2, n, heads, 64, dtype=BF16, requires_grad=True) for n, heads in ((1, 4), (8, 2), (8, 2))]
    sink, cu = torch.randn(3, requires_grad=True), lengths(5, 12)
    words = torch.randn(3, dtype=BF16, requires_grad=True)
    bias = torch.randn(2, 3, 8, 8, dtype=BF16, requires_grad=True)
    fixed, slopes = bias.detach(), torch.rand(2, 3)
    documents, window = packed(), SlidingWindow(3, 0)
    return {
        "plain": lambda: tw.attention(*x, causal=True),
        "window": lambda: tw.attention(*x, mask=window),
        "bias": lambda: tw.attention(*x, bias=bias),
        "bias without gradient": lambda: tw.attention(*x, bias=fixed),
        "sink": lambda: tw.attention(*x, mask=window, sink=sink),
        "sink of 16 bits": lambda: tw.attention(*x, mask=window, sink=words),
        "slopes": lambda: tw.attention(*x, causal=True, alibi_slopes=slopes),
        "bias, sink, slopes": lambda: tw.attention(*x, bias=bias, sink=sink, alibi_slopes=slopes),
        "documents": lambda: tw.attention_varlen(*documents, cu, cu, causal=True),
        "documents, sink": lambda: tw.attention_varlen(*documents, cu, cu, causal=True, sink=sink),
        "packed heads": lambda: tw.attention(*chunk, causal=True),
        "heads first": lambda: sdpa.scaled_dot_product_attention(*first, is_causal=True),
        "heads first, tokens first in memory": lambda: sdpa.scaled_dot_product_attention(*turned, is_causal=True),
        "heads first, bias": lambda: sdpa.scaled_dot_product_attention(*first, bias),
    }[kind]


KINDS = {
    "plain": 2,
    "window": 2,
    "bias": 3,
    "bias without gradient": 2,
    "sink": 3,
    "sink of 16 bits": 3,
    "slopes": 2,
    "bias, sink, slopes": 4,
    "documents": 3,
    "documents, sink": 4,
    "packed heads": 2,
    "heads first": 2,
    "heads first, tokens first in memory": 2,
    "heads first, bias": 3,
}
"""How many compiled functions a backward pass calls: the main kernels, repairs where pairs are hidden, and one for each thing more."""


@pytest.mark.parametrize("kind", KINDS)
def test_torch_computes_nothing_of_a_bound_calls_gradients(stub, monkeypatch, kind):
    """But a kernel's copy of a sink of 16 bits, in fp32; nor are there more launches than are needed."""
    without_the_operators(monkeypatch, stub)
    launched, names = [], {"forward": [], "backward": []}
    monkeypatch.setattr(forward.jit, "compiled", lambda launch, *_: lambda *given: launched.append(launch))
    call = operators(kind)
    for _ in range(2):
        call().backward(torch.randn_like(call()))
    for way, found in names.items():
        method = getattr(bound.Bound, way)

        def counted(self, *given, method=method, found=found):
            with Counted(found):
                return method(self, *given)

        monkeypatch.setattr(bound.Bound, way, counted)
    o = call()
    launched.clear()
    o.backward(torch.randn_like(o))
    assert names == {"forward": ["_to_copy"] if kind == "sink of 16 bits" else [], "backward": []}
    assert len(launched) == KINDS[kind]


def _causal(q, k, v) -> Call:
    return Call(q=q, k=k, v=v, mask=Causal(), scale=q.shape[-1] ** -0.5)


NOTHING = (4, 0, 2, Full(), False), (4, 0, 2, Full(), True), (0, 5, 2, Full(), True), (1, 1, 4, Causal(offset=-70), False)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "heads_q", "mask", "with_sink"), NOTHING, ids=str)
def test_a_call_that_sees_nothing_launches_nothing(device, seqlen_q, seqlen_k, heads_q, mask, with_sink):
    """On a stream, where a bound call's operands are made once; packed heads are cut to the keys that their row sees."""
    q, k, v = (torch.randn(2, n, heads, 64, dtype=BF16) for n, heads in ((seqlen_q, heads_q), (seqlen_k, 2), (seqlen_k, 2)))
    sink = torch.randn(heads_q) if with_sink else None
    call = Call(q=q, k=k, v=v, mask=mask, scale=1.0, sink=sink)
    found = Hopper().bind(call)
    for o, lse in (found.results(call), found.forward(q, k, v, call.extras, True)) * 2:
        assert o.shape == q.shape and (o == 0).all()
        assert lse.shape == (2, heads_q, seqlen_q) and (lse == (sink[:, None] if with_sink else -math.inf)).all()
