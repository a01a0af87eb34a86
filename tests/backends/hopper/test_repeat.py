"""The short way to a kernel, with a kernel and streams that need no GPU."""

import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import tilewise as tw
from tilewise.backends.hopper import Hopper, repeat, short
from tilewise.backends.hopper.backward import plan as backward_plan
from tilewise.backends.hopper.backward import repeat as backward_repeat
from tilewise.backends.hopper.forward import call as forward
from tilewise.backends.hopper.forward import plan
from tilewise.backends.tables import keeping
from tilewise.backends.tiled import Tiled
from tilewise.masks import Causal, Full
from tilewise.problem import Call
from tilewise.runtime import operator, repeats

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


def qkv(seqlen=5, head_dim_v=64):
    return tuple(torch.randn(2, seqlen, 3, dim, dtype=BF16) for dim in (64, 64, head_dim_v))


def make(q, k, v, number=1.5):
    kernel = Kernel()
    call = Call(q=q, k=k, v=v, mask=Full(), scale=1.0)
    return repeat.Repeat(call, kernel, ((number,), (0.5,)), lambda: (torch.zeros(1, dtype=torch.int32),), None), kernel


@pytest.mark.parametrize("head_dim_v", [64, 40])
def test_outputs_and_numbers(device, head_dim_v):
    again, kernel = make(*qkv(head_dim_v=head_dim_v))
    for _ in range(2):
        q, k, v = qkv(head_dim_v=head_dim_v)
        o, lse = again.forward(q, k, v, True)
        assert torch.equal(o, q[..., :head_dim_v]) and o.dtype == BF16 and lse.shape == (2, 3, 5) and (lse == 1.5).all()
    assert kernel.calls[0][4:] == (1.5, 0.5) and len(kernel.calls) == 2


def test_strided_inputs_give_contiguous_outputs(device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    again, _ = make(q, k, v)
    o, _ = again.forward(q, k, v, False)
    assert o.is_contiguous() and torch.equal(o, q)


def test_what_begins_between_two_multiples_of_16_bytes_is_copied(device):
    again, kernel = make(*qkv())
    q = torch.randn(2 * 5 * 3 * 64 + 1, dtype=BF16)[1:].view(2, 5, 3, 64)
    _, k, v = qkv()
    assert torch.equal(again.forward(q, k, v, False)[0], q) and kernel.calls[0][0] is not q


def test_an_lse_that_is_wanted_is_the_callers(device):
    again, _ = make(*qkv())
    first, second = (again.forward(*qkv(), True)[1] for _ in range(2))
    unwanted = [again.forward(*qkv(), False)[1] for _ in range(2)]
    assert first.data_ptr() != second.data_ptr() and unwanted[0] is unwanted[1]
    assert unwanted[0].data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_a_large_lse_is_not_kept(device, monkeypatch):
    monkeypatch.setattr(repeat, "KEPT_BYTES", 2 * 3 * 5 * 4 - 1)
    again, _ = make(*qkv())
    first, second = (again.forward(*qkv(), False)[1] for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_each_stream_has_its_own(device):
    again, kernel = make(*qkv())
    for device.stream in (1, 2, 1, 2, 2):
        again.forward(*qkv(), False)
    counters = [call[3] for call in kernel.calls]
    assert counters[0] is counters[2] and counters[1] is counters[3] is counters[4] and counters[0] is not counters[1]
    assert [int(counter) for counter in counters[:2]] == [2, 3] and kernel.calls[0][2] is not kernel.calls[1][2]


def test_a_captured_call_has_its_own(device):
    again, kernel = make(*qkv())
    again.forward(*qkv(), False)
    device.captures = True
    for _ in range(2):
        again.forward(*qkv(), False)
    device.captures = False
    again.forward(*qkv(), False)
    eager, first, second, after = ((call[2].data_ptr(), call[3].data_ptr()) for call in kernel.calls)
    assert eager == after and not {*eager} & {*first, *second} and not {*first} & {*second}
    assert keeping._OF_GRAPHS[id(again.rest)] is again.rest  # a mask's tables, where it has some


def test_another_device_is_entered(device):
    again, _ = make(*qkv())
    again.forward(*qkv(), False)
    assert not device.entered
    device.current = 3
    q, k, v = qkv()
    assert torch.equal(again.forward(q, k, v, False)[0], q) and device.entered == [None] and device.current == 3


def test_nothing_of_the_first_call_is_held(device):
    import weakref

    q, k, v = qkv()
    again, _ = make(q, k, v)
    held = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    assert again and not any(ref() is not None for ref in held)


class Stub(Hopper):
    """The backend on a CPU: its kernels and its long way back are those of the portable backend."""

    def __init__(self) -> None:
        self.forwards, self.backwards = 0, 0

    def why_not(self, problem):
        return []

    def backward(self, call, *given, **options):
        self.backwards += 1
        return Tiled().backward(call, *given, **options)


@pytest.fixture
def stub(device, monkeypatch):
    """The only backend there is; its kernels take a causal call."""
    backend = Stub()

    def backward(given, gradients, scratch, *rest):
        assert given.dO.stride(-1) == 1 and scratch.turns.dtype == torch.int32
        backend.backwards += 1
        q, k, v, o, lse, d_o, _ = given
        for mine, right in zip(gradients, Tiled().backward(_causal(q, k, v), o, lse, d_o, None)[:3], strict=True):
            mine.copy_(right)

    def kernel(tensors, work, *rest):
        q, k, v, o, lse = tensors
        backend.forwards += 1
        for mine, right in zip((o, lse), Tiled().forward(_causal(q, k, v)), strict=True):
            mine.copy_(right)

    monkeypatch.setattr(forward, "_counter", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    monkeypatch.setattr(backward_plan, "board_of", lambda device: backward_plan.Board(132, 0))
    monkeypatch.setattr(forward.jit, "compiled", lambda launch, *_: kernel if launch == forward.LAUNCH else backward)
    monkeypatch.setattr(repeats, "choose", lambda problem, name: backend)
    monkeypatch.setattr(operator, "choose", lambda problem, name: backend)
    repeats.forget()
    yield backend
    repeats.forget()


def test_calls_like_one_before_take_it(stub, monkeypatch):
    first, second = qkv(), qkv()
    tw.attention(*first, causal=True)
    monkeypatch.setattr(stub, "forward", None)  # the long way
    torch.testing.assert_close(tw.attention(*second, causal=True), Tiled().forward(_causal(*second))[0], atol=0, rtol=0)
    assert stub.forwards == 2


def test_gradients_after_the_short_way(stub, monkeypatch):
    results, x = [], [each.requires_grad_() for each in qkv()]
    for turn in range(3):
        if turn == 1:  # the long ways
            monkeypatch.setattr(stub, "forward", None)
            monkeypatch.setattr(stub, "backward", None)
        o = tw.attention(*x, causal=True)
        results.append((o, *torch.autograd.grad(o, x, torch.ones_like(o))))
    assert stub.forwards == stub.backwards == 3 and len(repeats._KNOWN) == 1
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


def gradients_of(kernel, *scratch):
    """The short way back over `kernel`, with such scratch."""
    q, lse = torch.randn(1, 4, 1, 8, dtype=BF16), torch.zeros(1, 1, 4)
    call, none = Call(q=q, k=q, v=q, mask=Full(), scale=1.0), (None,) * (6 - len(scratch))
    again = backward_repeat.Repeat(call, lambda given, gradients, scratch, *rest: kernel(scratch.lse.data_ptr()), scratch + none, None, ())
    return partial(again, q, q, q, q, lse, q)


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
    for size in (backward_repeat.KEPT_BYTES, backward_repeat.KEPT_BYTES + 4):
        compute = gradients_of(lambda scratch: None, ((size // 4,), torch.float32))
        compute()
        kept.append(bool(compute.func.kept))
    assert kept == [True, False]


def _causal(q, k, v) -> Call:
    return Call(q=q, k=k, v=v, mask=Causal(), scale=q.shape[-1] ** -0.5)
