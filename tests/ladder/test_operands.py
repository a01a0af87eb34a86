"""Q, K and V in e4m3 with their scales: what they stand for, put together again, and that no score changes but by rounding."""

import math

import pytest
import torch

from tilewise.ladder import operands
from tilewise.sm90.key_order import ORDER

STEP = 2.0**-4  # of e4m3's normal numbers, relative, at most


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float32).bfloat16()


def untransposed(v_t, seqlen):
    """(heads, head_dim, places) in fp64 as (heads, seqlen, head_dim)."""
    tokens = torch.tensor([16 * group + token for group in range(v_t.shape[2] // 16) for token in ORDER])
    return v_t.double()[:, :, tokens.argsort()][:, :, :seqlen].mT


def close(found, x, unit):
    """To a step of e4m3, or to half its smallest number."""
    assert ((found - x.double()).abs() <= STEP * x.double().abs() + unit * 2.0**-10).all()


def test_rounded():
    x = torch.tensor([[448.0, 1.0, -0.25, 0.0], [0.0, 0.0, 0.0, 0.0], [1e-30, -2e-30, 0.0, 5e-31]])
    found, scale = operands.rounded(x, 1)
    assert found.dtype == torch.float8_e4m3fn and scale.tolist()[:2] == [[1.0], [1.0]]
    assert found[2].double().tolist() == [224.0, -448.0, 0.0, 112.0]
    assert torch.equal(found[0].float(), x[0]) and not found[1].double().any()


@pytest.mark.parametrize("seqlen", [1, 17, 130])
def test_one_scale_a_tensor(seqlen):
    q, k, v = (draw(2, seqlen, 64, seed=i) for i in range(3))
    (q8, k8, v8), (scale_log2, scale_v) = operands.per_tensor(q, k, v, 0.5)
    units = [float(x.abs().max()) / 448 for x in (q, k, v)]
    for found, x, unit in ((q8, q, units[0]), (k8, k, units[1])):
        close(found.double() * unit, x, unit)
    close(untransposed(v8, seqlen) * scale_v, v, units[2])
    assert scale_log2 * math.log(2) == pytest.approx(0.5 * units[0] * units[1]) and scale_v == pytest.approx(units[2])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_turned_products_are_the_same(head_dim):
    q, k = (draw(3, 20, head_dim, seed=i).double() for i in range(2))
    torch.testing.assert_close(operands.turned(q) @ operands.turned(k).mT, q @ k.mT)
    one = torch.zeros(head_dim, dtype=torch.float64)
    one[5] = 1.0
    torch.testing.assert_close(operands.turned(one).abs(), torch.full_like(one, head_dim**-0.5))  # what stood out is in all numbers alike


@pytest.mark.parametrize("seqlen", [1, 130, 300])
def test_incoherent(seqlen):
    """The kernel's scores and its shift are those of q and k, its V is v. K and V far from 0: rounding is of what is left of them."""
    q, k, v = draw(2, seqlen, 64), draw(2, seqlen, 64, seed=1) + 30, draw(2, seqlen, 64, seed=2) - 20
    (q8, k8, v8), (rows, keys, channels) = operands.incoherent(q, k, v, 0.125)
    assert rows.shape == (2, 2, seqlen) and keys.shape == (2, -(-seqlen // 128)) and channels.shape == (2, 2, 64)
    per_key = keys.repeat_interleave(128, 1)[:, None, :seqlen].double()
    scores = (q8.double() @ k8.double().mT) * (rows[:, 0, :, None].double() * math.log(2)) * per_key + rows[:, 1, :, None].double()
    want = 0.125 * q.double() @ k.double().mT
    sizes = 0.125 * q.double().norm(dim=2)[..., None] * (k.double() - k.double().mean(1, keepdim=True)).norm(dim=2)[:, None]
    assert ((scores - want).abs() <= 2 * STEP * sizes + 2e-5 * want.abs() + 1e-6).all()
    centred = v.double() - v.double().mean(1, keepdim=True)
    found = untransposed(v8, seqlen) * channels[:, 0, None].double() + channels[:, 1, None].double()
    assert ((found - v.double()).abs() <= STEP * centred.abs() + channels[:, 0, None] * 2.0**-10 + 2e-6 * v.double().abs()).all()
