"""Strides of dimensions of size 1 mean nothing: whatever they are, kernels read the tensors where they lie, without a copy, and compute the same."""

from dataclasses import replace

import append_problems
import pytest
import torch
from append_problems import AppendCase
from decode_problems import DecodeCase, by_kernel, made, with_eight_bits
from emulator.backend import NEEDED, Emulated

from tilewise import ShapeError
from tilewise.backends.hopper.decode import bound
from tilewise.masks import Causal, Full
from tilewise.sm90 import jit
from tilewise.testing.cases import Case, make, upstream

pytestmark = NEEDED

ONE = dict(batch=1, heads_q=1, heads_k=1, dtype="bf16")
CASES = [
    Case(**ONE | dict(seqlen_q=150, seqlen_k=150, head_dim=128, mask=Causal())),
    Case(**ONE | dict(seqlen_q=70, seqlen_k=40, head_dim=64, bias="hq", dtype="fp16")),
    Case(**ONE | dict(seqlen_q=70, seqlen_k=1, head_dim=64, bias="hq", dtype="fp16")),
    Case(**ONE | dict(seqlen_q=1, seqlen_k=150, head_dim=128, mask=Full())),
]
ONE_HEAD = {"heads": (4, 1), "dims": (64, 64)}
DECODED = [  # the kernels of quick ones are test_decode.py's
    DecodeCase(lengths=(70, 1, 130), page=4, **ONE_HEAD),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            DecodeCase(lengths=(130,), **ONE_HEAD),
            DecodeCase(lengths=(130,), page=16, **ONE_HEAD),
            DecodeCase(lengths=(4, 0, 3), page=1, **ONE_HEAD),
            DecodeCase(lengths=(70, 9), queries=(1, 0), page=16, **ONE_HEAD),
            DecodeCase(lengths=(65, 0, 130), heads=(128, 1), page=64, dims=(576, 512), latent=True),
        )
    ),
]
APPENDED = [
    AppendCase(lengths=(5,), heads=1),
    pytest.param(AppendCase(lengths=(5, 0, 47, 78, -1), heads=1, page=16, rotary=64), marks=pytest.mark.slow),
    pytest.param(AppendCase(lengths=(5, 0, 47), heads=1, page=1, dtype=torch.float8_e4m3fn), marks=pytest.mark.slow),
]


def odd(x, step: int = 7):
    """x where it lies, with strides that are no multiples of 16 bytes wherever there is one entry."""
    return None if x is None else x.as_strided(x.shape, [step if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])


def changed(call, *names: str):
    return replace(call, **{name: odd(getattr(call, name)) for name in names})


@pytest.fixture(params=["as the DSL has them", "looked at"])
def seen(request, monkeypatch):
    """Where tensors lie that kernels got. A compiler may look at all strides: there must be no copy either."""
    found = set()
    compiled = Emulated.compiled

    def spied(self, *arguments):
        kernel = compiled(self, *arguments)

        def call(*given):
            tensors = jit.tensors_of(given)
            if request.param == "looked at" and not all(legal(x) for x in jit.tensors_of(given[:2]) if x.dim() == 4 and x.itemsize < 4):
                raise ValueError("Mismatched strides")
            found.update(x.data_ptr() for x in tensors)
            return kernel(*given)

        return call

    def legal(x):
        return not any(step * x.itemsize % jit.BYTES for step in x.stride()[:-1])

    monkeypatch.setattr(Emulated, "compiled", spied)
    return found


@pytest.fixture
def on_gpu(monkeypatch, seen):
    monkeypatch.setattr(bound, "_KEPT", {})
    with Emulated().on_gpu():
        yield seen


def lie_in(found: set, *tensors) -> bool:
    return {x.data_ptr() for x in tensors if x is not None} <= found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_attention(case, on_gpu):
    """Forward and backward, and both as a bound call."""
    call, backend, none = make(case, grad=True), Emulated(), (None,) * 6
    d_o, _ = upstream(case)
    other, d_o_too = changed(call, "q", "k", "v", "bias"), odd(d_o)
    want = backend.forward(call)
    wanted = backend.backward(call, *want, d_o, None)
    on_gpu.clear()
    o, lse = backend.forward(other)
    grads = backend.backward(other, odd(o), lse, d_o_too, None)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1]) and all(map(torch.equal, grads[:3], wanted[:3]))
    assert lie_in(on_gpu, other.q, other.k, other.v, o, d_o_too) and (call.bias is None or lie_in(on_gpu, other.bias))
    on_gpu.clear()
    again = backend.bind(other)
    o, lse = again.forward(other.q, other.k, other.v, (other.bias, *none[1:]), True)
    grads = again.backward(other.q, other.k, other.v, odd(o), lse, d_o_too, None, (other.bias, *none[1:]), False)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1]) and all(map(torch.equal, grads[:3], wanted[:3]))
    assert lie_in(on_gpu, other.q, other.k, other.v, o, d_o_too)


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_decode(case, on_gpu):
    check(made(case), on_gpu)


@pytest.mark.slow
def test_decode_of_eight_bits(on_gpu):
    kinds = torch.float8_e4m3fn, torch.float8_e4m3fn
    check(with_eight_bits(made(DecodeCase(lengths=(70, 1, 130), page=16, **ONE_HEAD)), kinds, ("token", "head"))[0], on_gpu)


def check(call, seen):
    """Nothing is copied."""
    other = changed(call, "q", "k_cache", "v_cache", "k_scale", "v_scale")
    want = by_kernel(call)
    seen.clear()
    assert all(map(torch.equal, by_kernel(other), want)) and lie_in(seen, other.q, other.k_cache, other.v_cache)


@pytest.mark.parametrize("case", APPENDED, ids=str)
def test_append(case, on_gpu, monkeypatch):
    call = append_problems.made(case)
    want = append_problems.by_torch(call, monkeypatch)
    assert Emulated().append(changed(call, "k_cache", "v_cache", "k", "v")) is not None
    assert append_problems.same(call.k_cache, want[0]) and append_problems.same(call.v_cache, want[1])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_pool_that_cannot_be_read_is_refused_and_never_copied(name, on_gpu):
    """Nor are new tokens written before; what is not paged is copied."""
    call = made(DecodeCase(lengths=(70, 1, 130), page=4, **ONE_HEAD))
    x = getattr(call, name)
    late = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    wide = torch.empty(*x.shape[:-1], 68, dtype=x.dtype)[..., :64]  # bytes of a token: 136
    for found, sentence in ((late, f"{name} has an address 2 bytes behind a multiple of 16"), (wide, f"{name} has strides")):
        other = replace(call, **{name: found.copy_(x)})
        for refused in (by_kernel, Emulated().check_decode):
            with pytest.raises(ShapeError, match=f"{sentence}.*with a page table it is read where it lies"):
                refused(other)
    plain = made(DecodeCase(lengths=(130,), **ONE_HEAD))
    x = getattr(plain, name)
    copied = replace(plain, **{name: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)})
    assert all(map(torch.equal, by_kernel(copied), by_kernel(plain)))
