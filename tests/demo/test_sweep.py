"""The sweep measures what it says: its yardstick is the full formula, errors are found, and what is left out is said."""

import math

import pytest
import torch

from tilewise.demo import sweep as module
from tilewise.demo.model import GPTConfig, sdpa_attention, tilewise_attention
from tilewise.demo.place import Place
from tilewise.demo.sweep import Yardstick, make_inputs, naive_attention, sweep

SMALL = GPTConfig(head_dim=16)
BOTH = {"tilewise": tilewise_attention, "SDPA": sdpa_attention}


def test_naive_formula_agrees_with_sdpa():
    q, k, v, _ = make_inputs(70, SMALL)
    torch.testing.assert_close(naive_attention(q, k, v), sdpa_attention(q, k, v))


def test_yardstick_is_the_full_computation_for_its_rows():
    inputs = make_inputs(300, SMALL)
    yardstick = Yardstick(inputs)
    leaves = [x.detach().double().requires_grad_() for x in inputs[:3]]
    o = naive_attention(*leaves)
    d_q, d_k, d_v = torch.autograd.grad(o, leaves, yardstick.d_o.double())
    assert 100 < len(yardstick.rows) < 300
    for got, want in zip(yardstick.exact, (o[:, yardstick.rows], d_q[:, yardstick.rows], d_k, d_v), strict=True):
        torch.testing.assert_close(got, want.detach())


def test_errors_are_small_for_the_right_formula_and_found_in_a_wrong_one():
    yardstick = Yardstick(make_inputs(200, SMALL))
    assert max(yardstick.errors(yardstick.measure(tilewise_attention))) < 1e-5
    wrong_scale = yardstick.measure(lambda q, k, v: tilewise_attention(1.01 * q, k, v))
    assert min(yardstick.errors(wrong_scale)) > 1e-3
    not_a_number = yardstick.measure(lambda q, k, v: sdpa_attention(q, k, v) * math.nan)
    assert all(math.isnan(error) for error in yardstick.errors(not_a_number))


@pytest.mark.slow
def test_sweep_has_a_point_for_each_contender_and_length(monkeypatch):
    monkeypatch.setattr(module, "TIMING_BUDGET_S", 0.01)
    seen = []
    result = sweep(BOTH, (128, 64), SMALL, on_point=seen.append)
    assert seen == [64, 128] and result.names == ["tilewise", "SDPA", "naive"] and result.omitted == ()
    for name in result.names:
        assert [point.seqlen for point in result.of(name)] == [64, 128]
        for point in result.of(name):
            assert point.forward_ms > 0 and point.both_ms > 0 and point.error_o < 1e-5 and point.error_grad < 1e-4


def test_half_precision_has_errors_of_its_own_size(monkeypatch):
    monkeypatch.setattr(module, "TIMING_BUDGET_S", 0.01)
    result = sweep(BOTH, (64,), SMALL, place=Place(torch.device("cpu"), torch.bfloat16))
    assert result.place.name == "bf16" and result.names == ["tilewise", "SDPA", "naive"]
    assert all(1e-4 < point.error_o < 3e-2 and 1e-4 < point.error_grad < 3e-1 for point in result.points)


@pytest.mark.slow
def test_naive_formula_stops_at_the_limit_and_says_so(monkeypatch):
    monkeypatch.setattr(module, "TIMING_BUDGET_S", 0.01)
    monkeypatch.setattr(module, "NAIVE_LIMIT_BYTES", 4 * 4 * 64 * 64)
    result = sweep(BOTH, (64, 128), SMALL)
    assert [point.seqlen for point in result.of("naive")] == [64]
    assert result.omitted == ("naive formula at 128 tokens: not run, one score matrix would take 0 MiB (limit 0 MiB).",)


def test_lengths_that_would_pass_the_deadline_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "TIMING_BUDGET_S", 0.01)
    result = sweep(BOTH, (64, 128), SMALL, deadline=-math.inf)
    assert result.points == ()
    assert result.omitted == tuple(f"{seqlen} tokens: left out, the time budget was spent." for seqlen in (64, 128))
