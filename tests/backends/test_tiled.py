"""The portable backend: the conformance kit with tiles far smaller than the problem, what it skips, and what it costs in memory."""

import math
from dataclasses import replace

import pytest
import torch

from tilewise.backends.tiled import Tiled, parts
from tilewise.backends.tiled.parts import _band_predicate
from tilewise.backends.tiled.products import Care, accumulate, care
from tilewise.bench.memory import peak_extra_bytes
from tilewise.masks import Causal, Dense, Documents, Full, PerHead, SlidingWindow
from tilewise.masks.bands import Band
from tilewise.problem import Call
from tilewise.testing import conformance, tolerance
from tilewise.testing.cases import FULL, QUICK, Case, make, upstream

pytestmark = pytest.mark.usefixtures("expected_once")

SMALL = [case for case in QUICK if case.seqlen_q * case.seqlen_k < 100_000]  # with tiles of 32 x 16, larger ones only take longer


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


@pytest.mark.sampled(0.3)
@named(QUICK)
def test_cases(case):
    conformance.run_case(Tiled(), case)


@pytest.mark.sampled(0.3)
@named(SMALL)
def test_small_tiles(case):
    conformance.run_case(Tiled(32, 16), case)


@pytest.mark.sampled(0.4)
@named(SMALL[::3])
def test_hidden_values_do_not_leak(case):
    conformance.run_hidden(Tiled(32, 16), case)


@pytest.mark.sampled(0.4)
@named(SMALL[1::3])
def test_spoiled_key_reaches_those_who_see_it(case):
    conformance.run_spoiled(Tiled(32, 16), case)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(90, 3)], ids=repr)
def test_infinities_of_both_signs(mask):
    conformance.run_overflown(Tiled(32, 16), Case(seqlen_q=150, seqlen_k=150, mask=mask, dtype="bf16"))


@pytest.mark.sampled(0.4)
@named(SMALL[2::3])
def test_largest_scores(case):
    conformance.run_row_max(Tiled(32, 16), case)


@pytest.mark.parametrize("form", conformance.CLOSED_FORMS)
def test_closed_forms(form):
    conformance.CLOSED_FORMS[form](Tiled())


@pytest.mark.slow
@named(FULL)
def test_full(case):
    conformance.run_case(Tiled(), case)


def call_on(seqlen_q, seqlen_k, mask, heads_q=2, heads_k=2, dim=8, batch=1, **fields):
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(batch, n, h, dim, generator=g) for n, h in ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k)))
    return Call(q=q, k=k, v=v, mask=mask, scale=dim**-0.5, **fields)


def steps(call, backend):
    """(block, column range, whether a predicate is evaluated) of every step of the forward."""
    return [
        (block.start, step.start, step.stop, step.predicate is not None)
        for part in parts(call, backend.tile(call))
        for block in part.query_blocks(torch.float32)
        for step in block.steps
    ]


def test_tiles_without_pairs_are_never_visited():
    assert steps(call_on(8, 8, Causal()), Tiled(4, 4)) == [(0, 0, 4, True), (4, 0, 4, False), (4, 4, 8, True)]
    assert len(steps(call_on(64, 64, SlidingWindow(3, 0)), Tiled(4, 4))) == 16 + 15
    assert steps(call_on(8, 8, Dense(torch.zeros(8, 8, dtype=torch.bool))), Tiled(4, 4)) == []


def test_partial_tiles_are_cut_to_the_keys_that_someone_sees():
    mask = Documents((0, 3, 8), inner=Full())
    assert steps(call_on(8, 8, mask), Tiled(3, 8)) == [(0, 0, 3, True), (3, 3, 8, True), (6, 3, 8, True)]


def test_a_tile_of_several_bands_is_one_step():
    assert steps(call_on(16, 16, Documents((0, 4, 8, 12, 16), inner=Causal())), Tiled(16, 16)) == [(0, 0, 16, True)]


def test_equal_tiles_share_one_predicate():
    _band_predicate.cache_clear()
    backend = Tiled(16, 16)
    backend.forward(call_on(256, 256, Causal()))
    assert _band_predicate.cache_info().misses == 1


def test_heads_of_one_group_may_have_different_masks():
    mask = PerHead({(0, 1): Causal(), (1, 3): SlidingWindow(3, 1), (3, 6): Full()})  # groups of 3: the first is split, the second whole
    case = Case(heads_q=6, heads_k=2, seqlen_q=40, seqlen_k=40, mask=mask, head_dim=16)
    conformance.run_case(Tiled(16, 16), case)


def test_lanes_are_taken_a_few_at_a_time(monkeypatch):
    monkeypatch.setitem(parts.__globals__["_PAIRS"], "cpu", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    call = call_on(24, 24, Causal(), heads_q=6, heads_k=3, batch=2)
    assert len(list(parts(call, (8, 8)))) == 6
    tolerance.check_outputs(call, *Tiled(8, 8).forward(call))


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf, 1e38])
def test_any_value_behind_the_mask_is_harmless(hidden):
    """Keys and values hidden from some rows of a tile and visible to others: only those may notice."""
    clean, dirty = (call_on(32, 32, Causal(), heads_q=2, heads_k=1) for _ in range(2))
    dirty.k[:, 20], dirty.v[:, 20] = hidden, hidden
    backend = Tiled(16, 16)
    (o, lse), (want, want_lse) = backend.forward(dirty), backend.forward(clean)
    assert torch.equal(o[:, :20], want[:, :20]) and torch.equal(lse[..., :20], want_lse[..., :20])
    d_o = torch.randn_like(o)
    d_o[:, 20:] = 0.0
    got = backend.backward(dirty, o, lse, d_o, None)
    assert torch.equal(got.q[:, :20], backend.backward(clean, want, want_lse, d_o, None).q[:, :20])


def test_products_leave_hidden_pairs_out():
    a, b = torch.rand(2, 3, 4), torch.rand(2, 4, 5)
    visible = torch.tensor([[True, False, True, True], [True, True, False, True], [True, False, False, True]])
    a.masked_fill_(~visible, 0.0)
    want = a @ b
    b[:, 1], b[0, 2, 3] = math.nan, math.inf  # key 1 is seen by row 1, key 2 by row 0
    out = torch.zeros(2, 3, 5)
    accumulate(out, a, b, visible)
    assert out[:, 1].isnan().all() and out[0, 0, 3] == math.inf
    out[:, 1] = want[:, 1]
    out[0, 0, 3] = want[0, 0, 3]
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    "fields,expected",
    [
        ({}, (False, False)),
        ({"q": 2e3}, (False, True)),
        ({"q": 2e3, "softcap": 30.0}, (False, False)),
        ({"k": 1e20}, (True, True)),
        ({"q": -math.inf}, (True, True)),
        ({"k": math.nan}, (True, True)),
        ({"v": math.nan}, (True, False)),
        ({"d_o": 1e20}, (True, False)),
        ({"scale": -1e4}, (False, True)),
        ({"scale": 1e30}, (True, True)),
        ({"bias": -1.0}, (False, False)),
        ({"bias": -1e30}, (False, True)),
        ({"bias": -math.inf}, (False, True)),
        ({"bias": 1e5}, (False, True)),
        ({"bias": 1e12}, (True, True)),
        ({"bias": math.nan}, (True, True)),
        ({"alibi_slopes": 1e4}, (False, True)),
    ],
    ids=str,
)
def test_care(fields, expected):
    """One extreme number in the named tensor of a call whose other numbers are ones."""
    shapes = {"q": (1, 4, 2, 8), "k": (1, 5, 2, 8), "v": (1, 5, 2, 8), "d_o": (1, 4, 2, 8), "bias": (1, 1, 1, 5)}
    shapes["alibi_slopes"] = (1, 2)
    tensors = {name: torch.ones(shape) for name, shape in shapes.items() if name in fields or name in ("q", "k", "v", "d_o")}
    for name, x in tensors.items():
        x.view(-1)[1] = fields.get(name, 1.0)
    d_o = tensors.pop("d_o")
    call = Call(mask=Full(), **{"scale": 1.0} | {name: x for name, x in fields.items() if name not in shapes} | tensors)
    assert care(call, d_o) == Care(*expected)
    assert care(replace(call, q=call.q[:0], k=call.k[:0])).steep <= expected[1]


def huge_bias(fill, dtype):
    """A bias of `fill` on half of the keys, on all keys of query 3 and on those below 40 of query 5."""
    bias, fill = torch.zeros(1, 1, 45, 70, dtype=dtype), max(fill, torch.finfo(dtype).min)
    bias[..., 35:], bias[:, :, 3], bias[:, :, 5, :40] = fill, fill, fill
    return bias


@pytest.mark.parametrize("fill", [-1e4, -1e10, -1e20, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sink", [False, True])
def test_huge_biases_mask_as_in_the_formula(fill, dtype, sink):
    case = Case(seqlen_q=45, seqlen_k=70, head_dim=32, dtype=dtype, sink=sink, lse_grad=True)
    call, (d_o, d_lse) = make(case), upstream(case)
    call = replace(call, bias=huge_bias(fill, call.q.dtype))
    o, lse = Tiled(32, 16).forward(call)
    tolerance.check_outputs(call, o, lse)
    assert lse.isfinite().all()
    grads = Tiled(32, 16).backward(call, o, lse, d_o, d_lse, bias_grad=True)
    assert all(g.isfinite().all() for g in grads if g is not None)


@pytest.mark.parametrize("shift", [-1e10, 1e12, -1e20, 1e30])
def test_a_huge_constant_bias_leaves_everything_finite(shift):
    case = Case(seqlen_q=45, seqlen_k=70, mask=Causal())
    call, (d_o, _) = make(case), upstream(case)
    call = replace(call, bias=torch.full((1, 1, 1, 70), shift))
    o, lse = Tiled(32, 16).forward(call)
    tolerance.check_outputs(call, o, lse)
    grads = Tiled(32, 16).backward(call, o, lse, d_o, None, bias_grad=True)
    assert all(g.isfinite().all() for g in (*grads[:3], grads.bias))


@pytest.mark.parametrize("scale", [1e9, -1e12, 1e30])
def test_a_huge_scale_picks_the_best_key(scale):
    case = Case(seqlen_q=45, seqlen_k=70, mask=Causal(), scale=scale)
    call, (d_o, _) = make(case), upstream(case)
    o, lse = Tiled(32, 16).forward(call)
    tolerance.check_outputs(call, o, lse)
    grads = Tiled(32, 16).backward(call, o, lse, d_o, None)
    assert all(g.isfinite().all() for g in grads[:3])


def test_only_minus_infinity_hides():
    call = make(Case(seqlen_q=4, seqlen_k=6, sink=False))
    bias = torch.full((1, 1, 4, 6), torch.finfo(torch.float32).min)
    bias[:, :, 2], bias[..., :2] = -math.inf, -math.inf
    o, lse = Tiled().forward(replace(call, bias=bias))
    assert (o[:, 2] == 0.0).all() and (lse[..., 2] == -math.inf).all()
    mean = call.v[:, 2:].mean(dim=1, keepdim=True).repeat_interleave(call.group, dim=2)
    torch.testing.assert_close(o[:, (0, 1, 3)], mean.expand(-1, 3, -1, -1))


def test_predicate_follows_the_orientation():
    _, _, rows = _band_predicate((Band(0, 4, 0, 6, -1, 2),), 4, 6, False, torch.float32, torch.device("cpu"))
    _, _, columns = _band_predicate((Band(0, 6, 0, 4, -2, 1),), 6, 4, True, torch.float32, torch.device("cpu"))
    assert torch.equal(rows.visible, columns.visible)
    assert torch.equal(rows.hide == 0.0, rows.visible)


def test_why_not():
    call = call_on(4, 4, Full())
    assert Tiled().why_not(call.problem) == []
    odd = replace(call, q=call.q.to(torch.float8_e5m2))
    assert "float8_e5m2" in Tiled().why_not(odd.problem)[0]
    eight = replace(call, precision="int8", bias=torch.zeros(1, 1, 1, 4))
    assert Tiled().why_not(eight.problem) == ["in 8 bits it has no bias"]


def test_two_runs_are_identical():
    case = Case(mask=Causal(), dropout=0.2, softcap=2.0)
    call, (d_o, d_lse) = make(case), upstream(case)
    runs = []
    for _ in range(2):
        o, lse = Tiled().forward(call)
        runs.append((o, lse, *Tiled().backward(call, o, lse, d_o, d_lse)[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_memory_is_linear_in_the_length():
    """Forward and backward of 1 x 16,384 x 8 x 64 in fp32; a window keeps the time short and allocates what a dense mask does."""
    call = call_on(16_384, 16_384, SlidingWindow(255, 0), heads_q=8, heads_k=8, dim=64)
    d_o = torch.randn_like(call.q)

    def step():
        o, lse = Tiled().forward(call)
        return Tiled().backward(call, o, lse, d_o, None)

    _, peak = peak_extra_bytes(step)
    if peak is None:
        pytest.skip("the peak of this process's memory cannot be read on this system")
    assert peak < 600e6
