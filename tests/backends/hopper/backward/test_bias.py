"""The gradient of a bias on Hopper, as far as the host goes: shapes, parts and sums, with a stand-in for the kernel."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends.hopper import Hopper, changes
from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import plan
from tilewise.backends.hopper.backward.bias import call as bias_gradient
from tilewise.backends.hopper.operands import Given, Scratch
from tilewise.masks import Causal, Full
from tilewise.problem import LEAST_SOFTCAP, Call

SHAPES = [(b, h, q, 70) for b in (1, 3) for h in (1, 4) for q in (1, 50)]


def _call(shape, dtype=torch.bfloat16, **fields):
    q, k = (torch.zeros(3, length, heads, 64, dtype=torch.bfloat16) for length, heads in ((50, 4), (70, 2)))
    return Call(q=q, k=k, v=k, mask=Causal(), scale=0.1, grad=True, bias=torch.zeros(shape, dtype=dtype), **fields)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_kernel_leaves_is_summed_up(shape, parts, dtype, monkeypatch):
    call, given = _call(shape, dtype), []

    def compiled(launch, arguments, config):
        def kernel(v, d_o, tensors, band, changed):
            sums = tensors.dB
            sums.copy_(torch.randint(-4, 5, sums.shape))  # small whole numbers: any order gives the same
            given.append((config, sums.clone()))

        return kernel

    monkeypatch.setattr(bias_gradient.jit, "compiled", compiled)
    monkeypatch.setattr(bias_gradient, "parts_of", lambda *_: parts)
    statistics = torch.zeros(2, 3, 4, 64)
    read, scratch = Given(call.q, call.k, call.v, None, None, call.q, None), Scratch(*statistics, *(None,) * 5)
    found = bias_gradient.bind(call, 132)(read, scratch, changes.changes(call, bias_gradient.config_of(call, True, True)))
    ((config, sums),) = given
    by_rows = shape[2] == 50
    assert config.rows == by_rows and config.whole == (parts == 1)
    assert sums.dtype == (dtype if config.whole else torch.float32)
    assert sums.shape == (parts, *shape)
    assert found.shape == call.bias.shape and found.dtype == dtype
    assert torch.equal(found.float(), sums.float().sum(0))


def test_parts_occupy_the_machine_and_no_more():
    assert bias_gradient.parts_of(_call((3, 4, 1, 70)), 132) == 1  # one head's one tile of queries cannot be cut
    assert bias_gradient.parts_of(_call((1, 4, 1, 70)), 132) == 3
    call = _call((1, 1, 50, 70))
    assert bias_gradient.parts_of(call, 132) == 9  # twelve heads of all batch entries, one tile: nine find room
    assert bias_gradient.parts_of(call, 3) == 6
    assert bias_gradient.parts_of(_call((3, 4, 50, 70)), 132) == 1


def test_parts_find_room_where_dQ_in_fp32_was():
    q = torch.zeros(1, 256, 8, 64, dtype=torch.bfloat16)
    for dtype, parts in (torch.float32, 2), (torch.bfloat16, 1):  # of the latter's the sum is in fp32, too
        call = Call(q=q, k=q, v=q, mask=Full(), scale=0.1, grad=True, bias=torch.zeros(1, 1, 256, 256, dtype=dtype))
        assert bias_gradient.parts_of(call, 132) == parts
        assert bias_gradient.bytes_of_sums(call, 132) == 4 * (parts > 1) * parts * 256 * 256 <= 4 * q.numel()


def test_a_problem_s_changes_are_covered():
    problem = _call((1, 1, 50, 70), softcap=2.0, alibi_slopes=torch.ones(1, 4), sink=torch.ones(4)).problem
    assert gradients.why_not(problem) == []
    assert gradients.why_not(replace(problem, dropout=True)) == []


def test_the_kernels_of_a_call():
    call = _call((1, 1, 50, 70), softcap=2.0)
    names = [launch for launch, *_ in Hopper().kernels(call)]
    assert names.count(gradients.LAUNCH) == 1 and names.count(bias_gradient.LAUNCH) == 4
    (config,) = (config for launch, _, config in Hopper().kernels(call) if launch == gradients.LAUNCH)
    assert config.softcap and config.bias is torch.bfloat16 and config.natural and not config.alibi


def test_explain_says_what_a_bias_costs():
    call = _call((1, 1, 50, 70))
    assert "S and dP once more; then, with dQ's memory free again, its sums take 0.1 MB" in gradients.lines(call)[1]
    assert gradients.lines(_call((3, 4, 50, 70)))[1].endswith("once more") and len(gradients.lines(replace(call, bias=None))) == 1


def test_a_plain_call_s_configuration_knows_of_nothing_else():
    q = torch.zeros(1, 50, 4, 64, dtype=torch.bfloat16)
    config = plan.config_of(Call(q=q, k=q, v=q, mask=Full(), scale=0.1, sink=torch.zeros(4), grad=True))
    assert not config.modified and config.bias is None
    assert changes.factors(config, 0.1, 0.0) == (None, None)


def test_factors_are_finite():
    call = _call((1, 1, 50, 70), softcap=1e-300)
    inner, factor = changes.factors(plan.config_of(call), 0.1, 1e-300)
    assert inner == 0.1 / LEAST_SOFTCAP and factor == LEAST_SOFTCAP
    inner, _ = changes.factors(plan.config_of(call), -1e30, 1e-300)
    assert inner == -changes.FLOAT_MAX
