"""The rungs in 8 bits: number for number what their operands make in fp64 with P rounded tile by tile, and what sums of 13 bits do to them."""

import math
from unittest import mock

import pytest
import torch
from emulator.backend import NEEDED, Emulated

from tilewise.ladder import RUNGS
from tilewise.ladder.operands import Operands
from tilewise.ladder.rung import Rung
from tilewise.sm90.key_order import ORDER
from tilewise.testing import eight_bits

pytestmark = NEEDED

TILE_N = 128


def draw(*shape, mean=0.0, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) + mean).bfloat16()


def run(rung, q, k, v, causal, fraction=None):
    with Emulated(fraction=fraction).on_gpu(), mock.patch.multiple(Rung, reasons=lambda *_: []):
        return rung.run(q, k, v, causal, 0.1)


def scores_and_values(rung, q, k, v):
    """What the operands stand for, fp64: scores (heads, queries, keys); V as it is multiplied, its scale, its centre; what LSE lacks."""
    (q8, k8, v8), others = rung.operands(q, k, v, 0.1)
    seqlen, tokens = k.shape[1], torch.tensor([16 * group + token for group in range(v8.shape[2] // 16) for token in ORDER])
    products, values = q8.double() @ k8.double().mT, v8.double()[:, :, tokens.argsort()][:, :, :seqlen].mT
    if rung.name == "k7":
        return products * (others[0] * math.log(2)), values, others[1], 0.0, torch.zeros(q.shape[:2])
    rows, keys, channels = (x.double() for x in others)
    per_key = keys.repeat_interleave(TILE_N, 1)[:, None, :seqlen]
    return products * (rows[:, 0, :, None] * math.log(2)) * per_key, values, channels[:, :1], channels[:, 1:], rows[:, 1]


def emulated(rung, q, k, v, causal):
    """O and LSE by online softmax in fp64, from the last tile of keys to the first; only P is rounded, relative to the maximum so far."""
    s, values, scale, centre, shift = scores_and_values(rung, q, k, v)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    m, l, o = torch.full(s.shape[:2], -math.inf).double()[..., None], 0.0, torch.zeros(values.shape, dtype=torch.float64)
    for start in reversed(range(0, s.shape[2], TILE_N)):
        tile = s[:, :, start : start + TILE_N]
        before, m = m, torch.maximum(m, tile.amax(2, keepdim=True))
        base = m.masked_fill(m == -math.inf, 0.0)
        p, rescale = (tile - base).exp(), (before - base).exp()
        l, o = l * rescale + p.sum(2, keepdim=True), o * rescale + eight_bits.rounded(p, 1 / 256) @ values[:, start : start + TILE_N]
    return o / l * scale + centre, (m + l.log())[..., 0] + shift


@pytest.mark.parametrize(
    ("name", "head_dim", "seqlen", "causal"),
    [("k7", 128, 150, False), ("k7", 64, 200, True), ("k8", 128, 150, False), ("k8", 64, 200, True)],
)
def test_number_for_number(name, head_dim, seqlen, causal):
    """But for a number of P that lies between two of e4m3 and falls to the other side; O to an ulp of bf16. K and V far from 0."""
    q, k, v = draw(2, seqlen, head_dim), draw(2, seqlen, head_dim, mean=2.0, seed=1), draw(2, seqlen, head_dim, mean=3.0, seed=2)
    o, lse = run(RUNGS[name], q, k, v, causal)
    want_o, want_lse = emulated(RUNGS[name], q, k, v, causal)
    torch.testing.assert_close(lse.double(), want_lse, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(o.double(), want_o, rtol=2.0**-8, atol=2e-3)
    assert float((o.double() - want_o).square().mean().sqrt()) < 2.0**-9 * float(want_o.square().mean().sqrt())


def test_keys_in_their_usual_order_would_be_noticed():
    q, k, v = draw(1, 32, 64), draw(1, 32, 64, seed=1), draw(1, 32, 64, seed=2)
    (q8, k8, v8), others = RUNGS["k7"].operands(q, k, v, 0.1)
    in_order = v8.view(torch.uint8)[:, :, torch.tensor(ORDER * 2).view(2, 16).add(torch.tensor([[0], [16]])).flatten().argsort()].view(
        v8.dtype
    )
    with Emulated().on_gpu(), mock.patch.multiple(Rung, reasons=lambda *_: []):
        o, _ = RUNGS["k7"].run(q, k, v, False, 0.1, operands=Operands((q8, k8, in_order.contiguous()), others))
    want, _ = emulated(RUNGS["k7"], q, k, v, False)
    assert float((o.double() - want).abs().mean()) > 0.1


def test_sums_of_thirteen_bits():
    """300 keys whose V has a mean of 10: K7 loses a part of each product to the sum so far, K8 has neither the mean nor so long a sum."""
    q, k, v = draw(1, 300, 64), draw(1, 300, 64, seed=1), draw(1, 300, 64, mean=10.0, seed=2)
    lost = {}
    for name in ("k7", "k8"):
        exact, cut = (run(RUNGS[name], q, k, v, False, fraction)[0].double() for fraction in (None, 13))
        lost[name] = float(((exact - cut) / exact).mean())
    assert lost["k7"] > 2e-3 and abs(lost["k8"]) < 5e-5
