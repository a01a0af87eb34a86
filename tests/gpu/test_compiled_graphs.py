"""torch.compile(mode="reduce-overhead"), which replays CUDA graphs: what reads values on the host is left out of them, and reads them each time."""

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal
from tilewise.problem import Call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STEPS = 5  # the first ones warm up and record


def tensors(*shape, dtype, grad=False):
    return [torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=grad) for _ in range(3)]


def close(got, want, dtype):
    torch.testing.assert_close(got.float(), want.float(), atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", (False, True))
def test_a_mask_that_changes(dtype, grad):
    """Made within the program, and given from outside, always in the same memory."""

    def run(q, k, v, allowed, seen):
        return tw.attention(q * 1, k * 1, v * 1, mask=tw.Dense(seen & (allowed > 0))) * 1

    torch.compiler.reset()
    compiled, static = torch.compile(run, mode="reduce-overhead", fullgraph=True), torch.zeros(70, 70, dtype=torch.bool, device="cuda")
    for n in range(STEPS):
        q, k, v = tensors(2, 70, 4, 64, dtype=dtype, grad=grad)
        static.copy_(torch.rand(70, 70, device="cuda") < 0.2 + 0.1 * n)
        static.fill_diagonal_(True)
        allowed = torch.ones(70, 70, device="cuda").tril(n)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(q, k, v, allowed, static)
        want = run(q, k, v, allowed, static.clone())
        close(got, want, dtype)
        if grad:
            for x, y in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (got, want)), strict=True):
                close(x, y, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lengths_that_change(dtype):
    def run(q, k, v, lengths):
        return tw.decode(q * 1, k, v, cache_seqlens=lengths + 1) * 1

    torch.compiler.reset()
    compiled = torch.compile(run, mode="reduce-overhead", fullgraph=True)
    (q, *_), (_, k, v) = tensors(2, 1, 4, 64, dtype=dtype), tensors(2, 90, 2, 64, dtype=dtype)
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    for n in range(STEPS):
        lengths.copy_(torch.tensor([n, 80 - 7 * n]))
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(q, k, v, lengths), run(q, k, v, lengths.clone()), dtype)


@pytest.mark.parametrize(("dim", "options"), [(20, {}), (64, {"mask": tw.ChunkedCausal(16)}), (64, {"check": True})], ids=str)
def test_what_decode_cuts_or_checks_on_the_host(dim, options):
    """With a token that is appended."""

    def run(q, k, v, new, lengths):
        return tw.decode(q * 1, k, v, k=new, v=new, cache_seqlens=lengths + 1, **options) * 1

    torch.compiler.reset()
    compiled = torch.compile(run, mode="reduce-overhead", fullgraph=True)
    (q, *_), (_, k, v), (new, *_) = (tensors(2, n, 4, dim, dtype=torch.bfloat16) for n in (1, 90, 1))
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    for n in range(STEPS):
        lengths.copy_(torch.tensor([n, 80 - 7 * n]))
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(q, k, v, new, lengths), run(q, k.clone(), v.clone(), new, lengths.clone()), torch.bfloat16)


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("appended", [False, True])
def test_latent_heads(backend, appended):
    """MLA's decode: 576 of K, of which the first 512 are V in the same memory, and a token that is appended."""
    if refused := tw.runtime.dispatch.named("triton").why_not_decode(latent_problem()) if backend else []:
        pytest.skip("; ".join(refused))

    def run(q, cache, new, lengths):
        given = {"k": new, "v": new[..., :512]} if appended else {}
        return tw.decode(q * 1, cache, cache[..., :512], cache_seqlens=lengths + 1, scale=192**-0.5, backend=backend, **given) * 1

    torch.compiler.reset()
    compiled = torch.compile(run, mode="reduce-overhead", fullgraph=True)
    cache, other = (torch.randn(2, 90, 1, 576, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    other.copy_(cache)
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    for n in range(STEPS):
        q, new = (torch.randn(2, 1, heads, 576, dtype=torch.bfloat16, device="cuda") for heads in (16, 1))
        lengths.copy_(torch.tensor([n, 80 - 7 * n]))
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(q, cache, new, lengths), run(q, other, new, lengths.clone()), torch.bfloat16)
        assert torch.equal(cache, other)


def latent_problem():
    """What a backend is asked about."""
    q, k = (torch.empty(2, 1, heads, 576, dtype=torch.bfloat16, device="meta") for heads in (16, 1))
    problem = Call(q=q, k=k, v=k[..., :512], mask=Causal(), scale=1.0).problem
    return replace(problem, device="cuda", capability=torch.cuda.get_device_capability())


def test_structure_is_in_the_graph():
    """And dropout is drawn anew."""

    def run(q, k, v, p=0.0):
        return tw.attention(q * 1, k * 1, v * 1, causal=True, dropout_p=p) * 1

    torch.compiler.reset()
    compiled, dropped = (torch.compile(each, mode="reduce-overhead", fullgraph=True) for each in (run, lambda *x: run(*x, 0.5)))
    before = None
    for _ in range(STEPS):
        q, k, v = tensors(2, 70, 4, 64, dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(q, k, v), run(q, k, v), torch.bfloat16)
    for _ in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        o = dropped(q, k, v).clone()
        assert before is None or not torch.equal(o, before)
        before = o


def test_what_a_capture_cannot_hold():
    q, k, v = tensors(1, 20, 2, 64, dtype=torch.float64)
    x, y, z = tensors(1, 20, 2, 64, dtype=torch.bfloat16)
    seen, other = (torch.rand(20, 20, device="cuda") < 0.5 for _ in range(2))
    tw.attention(x, y, z, mask=tw.Dense(other))  # its kernel is there
    for call in (lambda: tw.attention(q, k, v), lambda: tw.attention(x, y, z, mask=tw.Dense(seen))):
        with pytest.raises(UnsupportedError, match="reads values on the host"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    torch.cuda.synchronize()
