"""The tolerance of kernels in 8 bits, and the sums of tensor cores."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends import reference
from tilewise.masks import Causal
from tilewise.testing import eight_bits
from tilewise.testing.cases import Case, make

CALL = make(Case(batch=1, seqlen_q=300, seqlen_k=300, heads_q=2, heads_k=2, head_dim=64, mask=Causal(), dtype="bf16"))


def test_rounded():
    assert eight_bits.rounded(torch.tensor([1.0, 1.06, 1.07, 500.0, -1e9, 2.0**-10, 3 * 2.0**-11])).tolist() == [
        *(1.0, 1.0, 1.125, 448.0, -448.0, 0.0, 2.0**-9)
    ]
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert ((eight_bits.by_one_scale(x) - x).abs() <= x.abs() / 16 + 1e-5).all() and not eight_bits.by_one_scale(torch.zeros(3)).any()


def test_what_is_rounded_once_passes_and_what_is_coarser_does_not():
    o, lse = eight_bits.naive(CALL)
    assert 0.3 < eight_bits.check_outputs(CALL, o.bfloat16(), lse.float()) < 0.6
    exact_o, exact_lse = reference.eager(CALL)
    assert eight_bits.check_outputs(CALL, exact_o.bfloat16(), exact_lse.float()) < 0.2
    with pytest.raises(AssertionError, match="^o"):
        eight_bits.check_outputs(CALL, (exact_o + 3 * (o - exact_o)).bfloat16(), exact_lse.float())
    with pytest.raises(AssertionError, match="^lse"):
        eight_bits.check_outputs(CALL, o.bfloat16(), (exact_lse + 0.3).float())
    shifted = replace(CALL, q=CALL.q.roll(1, 1))
    with pytest.raises(AssertionError):
        eight_bits.check_outputs(
            CALL, *(x.to(dtype) for x, dtype in zip(eight_bits.naive(shifted), (torch.bfloat16, torch.float32), strict=True))
        )


def test_a_sink_is_in_the_denominator():
    """Of rows without keys, too."""
    call = replace(CALL, q=torch.cat((CALL.q, CALL.q[:, :20]), 1), sink=torch.tensor([0.5, 30.0]))
    o, lse = eight_bits.naive(call)
    assert 0.3 < eight_bits.check_outputs(call, o.bfloat16(), lse.float()) < 0.6
    assert not o[:, :20].any() and torch.equal(lse[0, :, :20], call.sink[:, None].double().expand(2, 20))
    without = eight_bits.naive(replace(call, sink=None))
    with pytest.raises(AssertionError, match="^(o|lse)"):
        eight_bits.check_outputs(call, without[0].bfloat16(), without[1].float())


def test_products_are_cut_off_at_thirteen_bits():
    """Numbers that fit are exact; of 1 and 31 numbers below its thirteenth bit only the 1 is left, and what cancels is not."""
    p, v = torch.ones(1, 64, dtype=torch.float64), torch.zeros(64, 3, dtype=torch.float64)
    v[:, 0] = 2.0
    v[0, 1], v[1:32, 1] = 1.0, 2.0**-14
    v[0, 2], v[32:, 2] = 1.0, -(2.0**-13)
    assert eight_bits.summed(p, v).tolist() == [[128.0, 1.0, 1.0 - 32 * 2.0**-13]]


def test_where_tensor_cores_alone_are_a_hundred_times_worse():
    """16k keys and a V whose channels have means: 32 products are small beside the sum so far, and lose what is behind its thirteenth bit. Added up
    tile by tile in fp32, or without the means, they do not. What is left in each case is mostly the rounding of V.
    """
    generator = torch.Generator().manual_seed(0)
    scores, v, means = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((8, 16384), (16384, 16), (16,)))
    p = (scores - scores.amax(1, keepdim=True)).exp()
    l, weights = p.sum(1, keepdim=True), eight_bits.rounded(256 * p)

    def rms_error(v, tile, centre):
        unit = float((v - centre).abs().max()) / 448
        v8 = eight_bits.rounded((v - centre) / unit)
        o = sum(eight_bits.summed(a, b) for a, b in zip(weights.split(tile, 1), v8.split(tile, 0), strict=True))
        return float((o * (unit / 256) / l + centre - p @ v / l).square().mean().sqrt())

    never, promoted = (rms_error(v + means, tile, torch.zeros(16, dtype=torch.float64)) for tile in (16384, 128))
    centred = rms_error(v + means, 16384, (v + means).mean(0))
    assert never > 80 * promoted and promoted > 2 * centred
