"""A part of a call on Hopper, whole tiles of queries, has the bits of its rows in the whole call: what several GPUs stand on."""

import pytest
import torch
from emulator.backend import NEEDED, Emulated

import tilewise as tw
from tilewise.backends.hopper.backward import plan, tables
from tilewise.masks import Part
from tilewise.problem import Call

pytestmark = NEEDED

N = 300
ROWS = ((0, 128), (256, N))
MASKS = [
    tw.Causal(),
    pytest.param(tw.SlidingWindow(70, 0) | tw.FirstKeys(5), marks=pytest.mark.slow),
    pytest.param(tw.Documents([0, 100, 280, N], inner=tw.Causal()), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dim", [64, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (128, 256))])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_rows_have_the_bits_of_the_whole_call(mask, dim):
    generator = torch.Generator().manual_seed(1)
    q, k, v, d_o = (torch.randn(1, N, heads, dim, generator=generator).bfloat16() for heads in (2, 1, 1, 2))
    places = torch.cat([torch.arange(*rows) for rows in ROWS])

    def results(q, d_o, rows):
        backend = Emulated()
        call = Call(q=q, k=k, v=v, mask=Part(mask, N, rows), scale=0.125, grad=True)
        o, lse = backend.forward(call)
        return o, lse.transpose(1, 2), backend.backward(call, o, lse, d_o, None).q

    whole, ours = results(q, d_o, ((0, N),)), results(q[:, places], d_o[:, places], ROWS)
    for name, x, y in zip(("o", "lse", "dq"), ours, whole, strict=True):
        assert torch.equal(x, y[:, places]), name


@pytest.mark.slow
def test_dq_has_the_same_bits_whichever_way_blocks_walk(monkeypatch):
    """Turns are by the blocks' numbers, up or down the tiles of queries."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, d_o = (torch.randn(1, 520, heads, 64, generator=generator).bfloat16() for heads in (2, 1, 1, 2))

    def gradients(up):
        monkeypatch.setattr(tables, "_upwards", lambda *_: up)
        backend, mask = Emulated(), tw.PrefixTree((-1, 0, 1, 0), (150, 120, 100, 150))
        call = Call(q=q, k=k, v=v, mask=mask, scale=0.125, grad=True)
        plane, *_ = mask.planes(520, 520, 1, 2)
        plane.region.memo.clear()  # its tables
        found = backend.backward(call, *backend.forward(call), d_o, None)
        walks = tables.visits_of((plane,), 1, 2, plan.config_of(call), torch.device("cpu"))
        first = walks.visits[slice(*walks.spans[0, 0].tolist()), 0].tolist()
        assert first == sorted(first, reverse=not up) and len(first) > 1
        return found

    up, down = gradients(True), gradients(False)
    assert torch.equal(up.q, down.q)
    for one, other in zip(up[1:3], down[1:3], strict=True):
        assert (one - other).abs().max() <= 2**-7 * one.abs().max()
