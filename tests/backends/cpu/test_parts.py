"""A part of a call has the bits of its rows in the whole one, whatever instruction set runs; dropout drops what it would drop there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.backends.cpu import Cpu
from tilewise.backends.cpu.native import library
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.masks import Part
from tilewise.problem import Call, Dropout
from tilewise.testing.strategies import band_masks

BLOCK = 96
ISAS = library().isas if not Cpu().why_not(Call(q=(x := torch.zeros(1, 1, 1, 1)), k=x, v=x, mask=tw.Full(), scale=1.0).problem) else ()


def results(backend, q, k, v, d_o, mask, **options) -> list[torch.Tensor]:
    """O, LSE and dQ, with the queries along dimension 1."""
    call = Call(q=q, k=k, v=v, mask=mask, scale=0.2, grad=True, **options)
    if call.dropout is not None and isinstance(mask, Part):
        call = Call(q=q, k=k, v=v, mask=mask, scale=0.2, grad=True, dropout=call.dropout._replace(part=mask))
    o, lse, *_ = backend.forward(call)
    return [o, lse.transpose(1, 2), backend.backward(call, o, lse, d_o, None).q]


def drawn(n: int, n_k: int, dtype: torch.dtype, heads: tuple[int, int] = (2, 1), dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = (1, n, heads[0], dim), (1, n_k, heads[1], dim), (1, n_k, heads[1], dim), (1, n, heads[0], dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@st.composite
def parts(draw):
    n, n_k = draw(st.integers(1, 420)), draw(st.integers(1, 420))
    blocks = -(-n // BLOCK)
    chosen = sorted(draw(st.sets(st.integers(0, blocks - 1), min_size=1)))
    rows = tuple((block * BLOCK, min((block + 1) * BLOCK, n)) for block in chosen)
    return n, n_k, draw(band_masks(n, n_k)), rows, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))


@pytest.mark.parametrize("isa", ["auto", *ISAS])
@settings(max_examples=25)
@given(parts())
def test_rows_have_the_bits_of_the_whole_call(isa, part):
    n, n_k, mask, rows, dtype = part
    q, k, v, d_o = drawn(n, n_k, dtype)
    places = torch.cat([torch.arange(*each) for each in rows])
    whole = results(Cpu(isa), q, k, v, d_o, Part(mask, n, ((0, n),)))
    ours = results(Cpu(isa), q[:, places], k, v, d_o[:, places], Part(mask, n, rows))
    for name, x, y in zip(("o", "lse", "dq"), ours, whole, strict=True):
        assert torch.equal(x, y[:, places]), name


@pytest.mark.parametrize("backend", [Cpu(), Tiled(), Reference()], ids=lambda backend: backend.name)
def test_dropout_drops_what_the_whole_call_would(backend):
    n, dropout = 300, Dropout(0.4, 77, 3)
    q, k, v, d_o = drawn(n, n, torch.float32, heads=(6, 2))
    rows, heads = ((96, 192), (288, 300)), (3, 6, 6)
    places = torch.cat([torch.arange(*each) for each in rows])
    whole = results(backend, q, k, v, d_o, tw.Causal(), dropout=dropout)
    mine = q[:, places, 3:], k[:, :, 1:], v[:, :, 1:], d_o[:, places, 3:]
    ours = results(backend, *mine, Part(tw.Causal(), n, rows, heads), dropout=dropout)
    for x, y in zip(ours, whole, strict=True):
        torch.testing.assert_close(x, y[:, places, 3:], rtol=2e-6, atol=2e-6)
    unmoved = results(backend, *mine, Part(tw.Causal(), n, rows), dropout=dropout)
    assert not torch.allclose(unmoved[0], ours[0])


def test_kernels_that_count_by_their_own_call_say_so():
    from tilewise.backends.hopper import coverage

    q, k, v, _ = drawn(200, 200, torch.bfloat16)
    part = Part(tw.Causal(), 200, ((0, 96),))
    call = Call(q=q[:, :96], k=k, v=v, mask=part, scale=1.0, dropout=Dropout(0.1, 1, 1, part))
    assert call.problem.dropout_of_part and not Cpu().why_not(call.problem)
    from dataclasses import replace

    assert any("not those of a larger call" in reason for reason in coverage.refused(replace(call.problem, device="cuda")))
