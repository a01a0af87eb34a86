"""Distributions of inputs are what their names say, the same for the same seed, in every dtype, and part of a workload's identity."""

import math

import pytest
import torch

from tilewise.bench.sets import Workload, padded
from tilewise.bench.sets.distributions import DISTRIBUTIONS, FINITE_LIMIT, HIDDEN, NON_FINITE_LIMIT, TILE
from tilewise.masks import Causal

SIZES = {"name": "w", "batch": 2, "seqlen_q": 512, "heads_q": 2, "head_dim": 64, "direction": "bwd"}


def drawn(data, dtype=torch.float32, **other):
    made = Workload(**SIZES | other, dtype=dtype, data=data).inputs(3)
    return type(made)(*(x.detach() for x in made))


def scores(data, **other):
    x = drawn(data, **other)
    return torch.einsum("bihd,bjhd->bhij", x.q.double(), x.k.double()) / 8


@pytest.mark.parametrize("data", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_is_repeatable_and_finite_or_not_as_it_says(data, dtype):
    mask = padded(512) if data in HIDDEN else Causal()
    one, again = (drawn(data, dtype, mask=mask) for _ in range(2))
    assert all(x.dtype == dtype and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one, again, strict=True))
    finite = all(bool(x.isfinite().all()) for x in one)
    assert finite == DISTRIBUTIONS[data].finite
    assert DISTRIBUTIONS[data].limit == (FINITE_LIMIT if finite else NON_FINITE_LIMIT)


def test_the_distribution_is_part_of_the_case_unless_it_is_normal():
    normal, other = Workload(**SIZES), Workload(**SIZES, data="q x64")
    assert "data" not in normal.case and other.case == {**normal.case, "data": "q x64"}
    assert other.id == normal.id + ", q x64" and normal.finite and other.finite
    with pytest.raises(ValueError, match="data is 'odd'; it must be one of normal, outliers"):
        Workload(**SIZES, data="odd")


def test_outliers_are_those_of_the_paper():
    x = drawn("outliers", batch=16).q
    assert x.var().item() == pytest.approx(1 + 100 * 0.001, abs=0.03)
    assert (x.abs() > 6).float().mean().item() == pytest.approx(0.001 * math.erfc(6 / math.sqrt(202)), rel=0.15)


def test_heavy_tails():
    normal = drawn("normal").q
    assert drawn("student t").q.abs().median().item() == pytest.approx(0.816, abs=0.02)  # of t with 2 degrees of freedom
    assert drawn("cauchy").q.abs().median().item() == pytest.approx(1.0, abs=0.03)
    assert torch.equal(drawn("log-normal").q, normal.exp())
    assert drawn("cauchy", torch.float16, batch=16).q.abs().max() == torch.finfo(torch.float16).max


def test_scales_and_channels():
    normal = drawn("normal")
    assert torch.equal(drawn("q x16").q, 16 * normal.q) and torch.equal(drawn("q x16").k, normal.k)
    first = drawn("first key x12").k
    assert torch.equal(first[:, 0], 12 * normal.k[:, 0]) and torch.equal(first[:, 1:], normal.k[:, 1:])
    assert (drawn("massive channels").q / normal.q).amax((0, 1, 2)).sort().values[-3:].round().tolist() == [1, 50, 50]


def test_keys_along_the_sequence():
    growing, shrinking, late = (drawn(data).k.norm(dim=-1).mean((0, 2)) / 8 for data in ("growing keys", "shrinking keys", "late jump"))
    assert growing[0] < 1.5 and growing[-1] > 12 and shrinking[0] > 12 and shrinking[-1] < 1.5
    assert late[-8:].min() > 12 and late[:-8].max() < 1.5
    tops = scores("rising tiles").unflatten(-1, (-1, TILE)).amax(-1)
    assert (tops[..., 1:] > tops[..., :-1]).all() and (scores("falling tiles") == scores("rising tiles").flip(-1)).all()


def test_each_query_has_one_huge_score_that_every_mask_shows():
    s = scores("huge scores")
    visible = s.masked_fill(~torch.ones(512, 512, dtype=torch.bool).tril() | torch.ones(512, 512, dtype=torch.bool).tril(-64), -math.inf)
    assert (visible.amax(-1) > 25).double().mean() > 0.98 and s.median().abs() < 1  # a key that several queries share serves none as well


def test_signs_and_constants():
    tiles = scores("alternating signs").unflatten(-1, (-1, TILE)).mean((0, 1, 2, 4))
    assert tiles.tolist() == pytest.approx([16, -16, 16, -16], abs=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert (scores("constant", dtype=dtype) == 8).all()


def test_the_smallest_and_the_largest():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert all(0 < x.abs().max() < torch.finfo(dtype).smallest_normal for x in drawn("tiny", dtype))
    half = drawn("largest scores", torch.float16)
    assert half.q.abs().min() > 3e4 and half.k.abs().max() > 6e4 and drawn("largest values", torch.float16).v.abs().min() > 3e4
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e20 < scores("largest scores", dtype=dtype).abs().max() < torch.finfo(torch.float32).max / 64


def test_what_is_not_finite_is_where_it_should_be():
    for data in ("nan in v", "inf in v"):
        bad = ~drawn(data, batch=8).v.isfinite()
        rows = bad.any(-1)
        assert rows.any(1).all() and rows.float().mean() < 0.006 and bad[rows].float().mean() == 0.25
    last = drawn("nan in last keys")
    assert last.k[:, -8:].isnan().all() and last.k[:, :-8].isfinite().all() and last.v[:, -8:].isnan().all() and last.q.isfinite().all()
    end = padded(512).cu_seqlens_q[-1]
    hidden = drawn("hidden inf", mask=padded(512))
    assert all(x[:, :end].isfinite().all() and x[:, end:].isinf().all() for x in hidden)
    backward, forward = drawn("overflown", torch.float16), drawn("overflown", torch.float16, direction="fwd")
    assert backward.d_o.isinf().float().mean().item() == pytest.approx(0.1, abs=0.01) and backward.q.isfinite().all()
    assert forward.q.isinf().any() and forward.d_o.isfinite().all()


@pytest.mark.parametrize("data", ["huge scores", "rising tiles", "late jump", "constant", "massive channels"])
def test_other_shapes(data):
    x = Workload(
        name="w", batch=1, seqlen_q=5, seqlen_k=9, heads_q=4, heads_k=2, head_dim=3, head_dim_v=2, data=data, dtype=torch.bfloat16
    ).inputs(0)
    assert x.k.shape == (1, 9, 2, 3) and all(each.isfinite().all() for each in x)
    assert Workload(name="w", batch=1, seqlen_q=9, seqlen_k=1, heads_q=1, head_dim=1, data=data).inputs(0).q.shape == (1, 9, 1, 1)
