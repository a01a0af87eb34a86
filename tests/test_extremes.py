"""Numbers at the ends of what fp32 holds: every backend computes what the formula says, or the call is refused."""

import pytest
import torch
from capped import held_at_the_cap

import tilewise as tw
from tilewise.backends.cpu import Cpu, native
from tilewise.backends.hopper import changes
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.masks import Causal, Full
from tilewise.problem import LEAST_SOFTCAP, Call
from tilewise.testing import tolerance

BACKENDS = {"tiled": Tiled(), "reference": Reference()} | {
    f"cpu {isa}": Cpu(isa) for isa in native.library().isas if native.problem() is None
}
TINY = (1e-20, 1e-30, 1e-37, 1e-38, 1e-40, 1e-45, 1e-300, 5e-324)


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def backend(request):
    return request.param


def inputs(seqlen_q=9, seqlen_k=21, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, seqlen_q, 2, 16, generator=generator), torch.randn(1, seqlen_k, 2, 16, generator=generator)
    q[:, 0] = 0.0  # scores of 0 times whatever factor
    return q.to(dtype), k.to(dtype)


def check(backend, call: Call, d_lse: bool = False):
    o, lse = backend.forward(call)
    tolerance.check_outputs(call, o, lse)
    generator = torch.Generator().manual_seed(4)
    d_o = torch.randn(o.shape, generator=generator).to(o.dtype)
    d_lse = torch.randn(lse.shape, generator=generator) if d_lse else None
    grads = backend.backward(call, o, lse, d_o, d_lse)
    assert all(x.isfinite().all() for x in grads if x is not None)
    return o, lse, grads, d_o, d_lse


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("softcap", TINY)
@pytest.mark.parametrize("seqlen_q", [1, 9, 70])
def test_a_softcap_that_fp32_cannot_hold_is_a_bound_still(softcap, seqlen_q, backend):
    q, k = inputs(seqlen_q)
    o, *_ = check(backend, Call(q=q, k=k, v=k, mask=Full(), scale=0.3, softcap=softcap, grad=True))
    torch.testing.assert_close(o, k.mean(1, keepdim=True).expand_as(o), atol=1e-6, rtol=0)
    check(backend, Call(q=q, k=k, v=k, mask=Causal(), scale=0.3, softcap=softcap, sink=torch.tensor([0.5, -1.0]), grad=True))


@pytest.mark.parametrize("softcap, scale", [(1e-30, 1e10), (1e-300, 1e30), (1.0, 1e35), (1e-10, -1e30)])
def test_a_scale_that_overflows_beside_its_softcap(softcap, scale, backend):
    q, k = inputs()
    check(backend, Call(q=q, k=k, v=k, mask=Causal(), scale=scale, softcap=softcap, grad=True))


def test_gradients_at_the_cap(backend):
    held_at_the_cap(backend, range(5, 17))


@pytest.mark.parametrize("backend", [Tiled(), Reference()], ids=lambda backend: type(backend).__name__)
def test_gradients_at_the_cap_in_fp64(backend):
    held_at_the_cap(backend, range(5), torch.float64)


def test_hopper_s_factors_of_any_softcap():
    class Capped:
        softcap, natural = True, True

    for softcap in TINY:
        inner, factor = changes.factors(Capped, 0.3, softcap)
        held = torch.tensor([inner, factor, changes.outer_log2(Capped, 0.3, softcap)], dtype=torch.float32)
        assert held.isfinite().all() and (held >= torch.finfo(torch.float32).tiny).all()
        assert factor == max(softcap, LEAST_SOFTCAP)
    assert changes.factors(Capped, -1e30, 5e-324) == (-changes.FLOAT_MAX, LEAST_SOFTCAP)


@pytest.mark.parametrize("scale", [0.0, 1e-300, -1e-300, 1e-46, 1e-38])
def test_a_scale_that_is_nothing_in_fp32(scale, backend):
    q, k = inputs()
    o, _, grads, *_ = check(backend, Call(q=q, k=k, v=k, mask=Full(), scale=scale, grad=True))
    torch.testing.assert_close(o, k.mean(1, keepdim=True).expand_as(o), atol=1e-6, rtol=0)
    assert grads.q.abs().max() < 1e-36


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("big", [1e4, 1e12, 1e15, 1e30, 3e38])
@pytest.mark.parametrize("scale", [0.25, 0.3])
@pytest.mark.parametrize("seqlen_q", [1, 9, 33])
@pytest.mark.parametrize("grad_of_lse", [False, True])
def test_a_sink_beside_which_the_scores_are_nothing(big, scale, seqlen_q, grad_of_lse, backend):
    q, k = inputs(seqlen_q)
    sink = torch.tensor([big, 0.0])
    call = Call(q=q, k=k, v=k, mask=Causal(), scale=scale, sink=sink, grad=True)
    o, lse, grads, d_o, d_lse = check(backend, call, grad_of_lse)
    assert (o[:, :, 0] == 0).all() and (lse[:, 0] == sink[0]).all()
    expected = 0.0 if d_lse is None else d_lse[:, 0].sum()  # the sink's probability is 1, and O is 0
    torch.testing.assert_close(grads.sink[0], torch.as_tensor(expected), rtol=1e-5, atol=1e-5)
    exact = Reference().backward_autograd(call, d_o, d_lse)
    torch.testing.assert_close(grads.sink.double(), exact.sink, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("small", [-1e15, -3e38, -torch.inf])
def test_a_sink_that_is_nothing_beside_the_scores(small, backend):
    q, k = inputs()
    call = Call(q=q, k=k, v=k, mask=Causal(), scale=0.3, sink=torch.tensor([small, small]), grad=True)
    *_, grads, _, _ = check(backend, call)
    assert (grads.sink == 0).all()


def test_a_scale_beyond_the_dtype_s_arithmetic_is_refused():
    q, k = inputs()
    for bad, given in ((1e300, q), (-3.5e38, q.bfloat16())):
        with pytest.raises(ValueError, match=r"scale must be a finite number in \[-3.40282e\+38, 3.40282e\+38\]"):
            tw.attention(given, k.to(given.dtype), k.to(given.dtype), scale=bad)
        with pytest.raises(ValueError, match="scale must be a finite number in"):
            tw.decode(given, k.to(given.dtype), k.to(given.dtype), scale=bad)
    wide = [x.double() for x in (q, k)]
    assert tw.attention(wide[0] * 1e-300, wide[1], wide[1], scale=1e300).isfinite().all()


@pytest.mark.parametrize("bad, softcap, over", [(1e-39, 0.0, ""), (-1e-300, 0.5, ""), (1e-9, 1e30, " over the softcap")])
def test_a_scale_that_may_be_taken_for_0_is_refused(bad, softcap, over):
    q, k = inputs()
    for call in (tw.attention, tw.decode):
        with pytest.raises(ValueError, match=f"scale{over} must be 0 or at least 1.17549e-38 in magnitude, got {bad:g}"):
            call(q, k, k, scale=bad, softcap=softcap)
        assert call(q, k, k, scale=0.0, softcap=softcap).isfinite().all()
    assert tw.attention(*(x.double() for x in (q, k, k)), scale=1e-39).isfinite().all()


@pytest.mark.parametrize("softcap, scale", [(1e30, 2e-8), (1e20, 1e-17)])
def test_the_least_scale_over_its_softcap(softcap, scale, backend):
    q, k = inputs()
    check(backend, Call(q=q * 1e9, k=k * 1e9, v=k, mask=Causal(), scale=scale, softcap=softcap, grad=True))
