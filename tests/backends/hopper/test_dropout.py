"""Dropout in the Hopper backend, as far as no kernel runs: what it covers, what a launch gets, which configurations it has."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends import philox
from tilewise.backends.hopper import changes, coverage, packing, warmup
from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import config as backward
from tilewise.backends.hopper.backward import plan
from tilewise.backends.hopper.forward import config as forward
from tilewise.masks import Causal, Full
from tilewise.problem import Call, Dropout

SEES = ("full", "causal", "band", "varlen", "tiles")


def _call(p=0.25, seed=3, offset=0, dtype=torch.bfloat16, **fields):
    q = torch.zeros(2, 1, 4, 64, dtype=dtype)
    k = torch.zeros(2, 70, 2, 64, dtype=dtype)
    return Call(**dict(q=q, k=k, v=k, mask=Causal(), scale=0.5, grad=True, dropout=Dropout(p, seed, offset)) | fields)


def test_it_is_covered():
    assert coverage.refused(replace(_call().problem, device="cuda")) == []


def test_words_are_signed():
    draw = changes.draw(_call(0.75, seed=(0xDEADBEEF << 32) + 0x9ABCDEF0, offset=(1 << 32) - 2))
    low, high = (x % (1 << 32) for x in draw.keys[:2])
    assert (low, high, len(draw.keys)) == (0x9ABCDEF0, 0xDEADBEEF, 2 * philox.ROUNDS)
    assert (draw.offset, draw.threshold, draw.heads, draw.first, draw.rescale) == (-2, -(1 << 30), 4, 0, 4.0)
    assert all(-(1 << 31) <= x < 1 << 31 for x in draw.keys)


@pytest.mark.parametrize(("p", "threshold"), [(0.5, -(1 << 31)), (1 - 2**-40, -1), (1.0, -1), (2**-40, 0)])
def test_thresholds_at_the_ends(p, threshold):
    draw = changes.draw(_call(p))
    assert draw.threshold == threshold and draw.rest * draw.kept == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("p", "lift"), [(1e-9, 1.0), (0.49, 1.0), (0.5, 2.0), (0.9, 8.0), (0.999, 512.0), (1 - 2**-20, 1024.0), (1.0, 1.0)]
)
def test_dS_is_lifted_in_fp16_by_no_more_than_what_is_kept(p, lift):
    assert changes.draw(_call(p)).lift == 1.0
    call = _call(p, dtype=torch.float16)
    draw = changes.draw(call)
    assert draw.lift == lift <= draw.rescale and draw.rest == changes.rest(call) == draw.rescale / lift
    assert draw.kept == pytest.approx(lift * (1 - p if p < 1 else 1))


def test_without_dropout_there_is_nothing_to_draw():
    plain = _call(dropout=None)
    assert changes.draw(plain) is None and changes.rest(plain) == 1.0 and not changes.fields(plain)["dropout"]


def test_a_part_of_the_batch_draws_for_its_own_entries():
    changed = changes.changes(_call(), plan.config_of(_call()))
    assert gradients._of_batch(changed, slice(1, 2)).draw.first == 4


def test_heads_are_not_packed():
    """Their rows would be drawn as queries of one head."""
    assert packing.pack(_call(dropout=None)) is not None and packing.pack(_call()) is None


@pytest.mark.parametrize("changed", [{}, {"softcap": True}, {"bias": torch.float32, "alibi": True}], ids=str)
@pytest.mark.parametrize("dims", backward.TILES, ids=str)
def test_every_problem_has_a_configuration(dims, changed):
    for mask_kind in SEES:
        assert forward.configure(torch.bfloat16, *dims, mask_kind, 4096, 4096, dropout=True, **changed).dropout
        for few, seqlen in ((False, 1), (False, 8192), (True, 100)):
            config = backward.configure(torch.bfloat16, *dims, mask_kind, seqlen, few, dropout=True, **changed)
            assert config.dropout and not (config.lean or config.whole.delta_in)


def test_query_heads_are_not_apart():
    grouped = _call(q=torch.zeros(1, 40000, 16, 128, dtype=torch.bfloat16), k=torch.zeros(1, 40000, 2, 128, dtype=torch.bfloat16))
    grouped = replace(grouped, v=grouped.k)
    assert plan.config_of(replace(grouped, dropout=None)).block_per_q_head and not plan.config_of(grouped).block_per_q_head


def test_a_configuration_that_begins_at_delta_is_refused():
    with pytest.raises(ValueError, match="dropout comes between dP and delta"):
        backward.configure(torch.bfloat16, 128, 128, "full", dropout=True).but(delta_in=True)


def test_dQ_is_finished_where_a_warpgroup_has_64_columns_of_it():
    assert backward.configure(torch.bfloat16, 128, 128, "full", dropout=True).finishes
    with pytest.raises(ValueError, match="64 columns of a warpgroup"):
        backward.configure(torch.bfloat16, 64, 64, "full", dropout=True).but(finishes=True)


def test_it_can_be_warmed():
    cell = warmup.Cell(64, 64, torch.bfloat16, Full(), ("dropout",), grad=True)
    found = warmup.kernels([cell])
    assert found and all(kernel.config.dropout for kernel in found)
