"""The rungs in 8 bits on a Hopper GPU, where a tolerance says little: numbers that are exact in e4m3, equal and dominating keys, values and keys far
from 0, long sums, outliers. The cases of every rung are in test_ladder.py.
"""

import math

import pytest
import torch

from tilewise.ladder import RUNGS
from tilewise.sm90.jit import why_not_here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

DEVICE = "cuda"
rungs = pytest.mark.parametrize("rung", [rung for rung in RUNGS.values() if rung.in_eight_bits], ids=lambda rung: rung.name)


def draw(*shape, mean=0.0, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float32, device=DEVICE) + mean).bfloat16()


def exact(q, k, v, rows, scale):
    """O and LSE of some rows in fp64."""
    scores = scale * q[:, rows].double() @ k.double().mT
    return scores.softmax(2) @ v.double(), scores.logsumexp(2)


@rungs
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen", [15, 16, 17, 100, 128])
def test_equal_keys_give_the_mean(rung, seqlen, head_dim):
    """Q is 0, so P is 256; V is -2, -1, 0, 1 or 2, and has the same mean in all channels, so that all of it is exact in e4m3 and no sum needs more
    than 13 bits.
    """
    v = (torch.arange(2 * seqlen, dtype=torch.int64, device=DEVICE) * 7 % 5 - 2).view(2, seqlen, 1).expand(2, seqlen, head_dim).bfloat16()
    o, lse = rung.run(torch.zeros_like(v), draw(2, seqlen, head_dim), v, False, 0.1)
    mean = v.double().mean(1, keepdim=True).expand_as(v)
    step = 2.0**-8 if rung.name == "k7" else 2.0**-4  # K8 centres V, which leaves fractions to be rounded
    torch.testing.assert_close(o.double(), mean, rtol=2.0**-8, atol=step / 2)
    torch.testing.assert_close(lse.double(), torch.full_like(lse, math.log(seqlen)).double(), rtol=1e-6, atol=1e-6)


@rungs
def test_a_key_that_dominates(rung):
    """Query i has all its weight on key 7 i: O is that key's V, to e4m3."""
    seqlen = 300
    k = draw(1, seqlen, 128)
    wanted = torch.arange(seqlen, dtype=torch.int64, device=DEVICE) * 7 % seqlen
    v = draw(1, seqlen, 128, seed=1)
    o, _ = rung.run((4 * k[:, wanted]).contiguous(), k, v, False, 1.0)
    unit = float(v.abs().max()) / 448
    assert ((o.double() - v[:, wanted].double()).abs() <= 0.08 * v[:, wanted].double().abs() + unit * 2.0**-8 + 0.03).all()


@rungs
def test_keys_with_much_in_common(rung):
    """30 in every channel of K shifts a row's scores alike; LSE has it."""
    q, k, v = draw(2, 500, 128), draw(2, 500, 128, mean=30.0, seed=1), draw(2, 500, 128, seed=2)
    o, lse = rung.run(q, k, v, False, 0.09)
    want_o, want_lse = exact(q, k, v, slice(None), 0.09)
    if rung.name == "k7":  # whose Q and K are rounded with their means
        assert (lse.double() - want_lse).abs().max() < 0.04 * want_lse.abs().max()
    else:
        assert (lse.double() - want_lse).abs().max() < 0.05
        assert (o.double() - want_o).square().mean().sqrt() < 0.1 * want_o.square().mean().sqrt()


def test_sums_over_64k_values_with_a_mean():
    """K8 is right to an ulp of bf16, whatever tensor cores lose of long sums."""
    seqlen, rows = 65536, torch.tensor([0, 1, 127, 40_000, 65_535], dtype=torch.int64, device=DEVICE)
    q, k, v = draw(1, seqlen, 64), draw(1, seqlen, 64, seed=1), draw(1, seqlen, 64, mean=10.0, seed=2)
    o, _ = RUNGS["k8"].run(q, k, v, False, 0.125)
    want, _ = exact(q, k, v, rows, 0.125)
    assert (o[:, rows].double() - want).abs().max() <= 2.0**-8 * want.abs().max()


def test_outliers():
    """One number in a thousand ten times as large: K8's error is at most two thirds of K7's."""

    def with_outliers(seed):
        there = torch.rand(16, 2048, 128, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=torch.float32, device=DEVICE) < 1e-3
        return draw(16, 2048, 128, seed=seed) + 10 * draw(16, 2048, 128, seed=seed + 10) * there

    q, k, v = map(with_outliers, range(3))
    want, _ = exact(q, k, v, slice(None), 128**-0.5)
    k7, k8 = (float((RUNGS[name](q, k, v).double() - want).square().mean().sqrt()) for name in ("k7", "k8"))
    assert k8 < k7 / 1.5
