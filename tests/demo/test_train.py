"""Two trainings that compute the same agree at every step; one that does not is found out."""

import math

import pytest
import torch

from tilewise.demo.model import GPTConfig, sdpa_attention, tilewise_attention
from tilewise.demo.place import CPU, Place
from tilewise.demo.train import Curve, TrainConfig, Training, train

SMALL = GPTConfig(layers=1, context=64)
HALF = Place(torch.device("cpu"), torch.bfloat16)
CONFIG = TrainConfig(steps=6, batch=1, warmup=2)


def training_of(*losses):
    curves = tuple(Curve(name=f"curve {n}", losses=list(each), seconds=[0.1] * len(each)) for n, each in enumerate(losses))
    return Training(model=SMALL, config=CONFIG, parameters=1, curves=curves)


def test_tilewise_and_sdpa_train_alike():
    seen = []
    training = train(
        {"tilewise": tilewise_attention, "SDPA": sdpa_attention}, SMALL, CONFIG, on_step=lambda step, losses: seen.append((step, losses))
    )
    assert training.same and training.steps == 6 and max(training.differences) < 1e-5
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1][1] == [curve.losses[-1] for curve in training.curves]
    for curve in training.curves:
        assert math.isclose(curve.losses[0], math.log(256), rel_tol=0.05)
        assert curve.losses[-1] < curve.losses[0] and curve.held_out < curve.losses[0]
        assert len(curve.seconds) == 6 and curve.median_ms > 0


def sees_the_future(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def test_a_wrong_attention_is_found_out():
    training = train({"tilewise": sees_the_future, "SDPA": sdpa_attention}, SMALL, CONFIG)
    assert not training.same and training.worst > CPU.same_loss


def test_half_precision_trains_alike_too():
    """As on a GPU: attention gets bf16, weights stay in fp32."""
    seen = set()

    def ours(q, k, v):
        seen.update(x.dtype for x in (q, k, v))
        return tilewise_attention(q, k, v)

    training = train({"tilewise": ours, "SDPA": sdpa_attention}, SMALL, CONFIG, place=HALF)
    assert training.same and seen == {torch.bfloat16} and training.place == HALF
    assert all(curve.losses[-1] < curve.losses[0] for curve in training.curves)


AGREEMENT = [([2.0, 1.0], True), ([2.0, 1.0009], True), ([2.0, 1.0011], False), ([math.nan, 1.0], False), ([2.0, math.inf], False)]


@pytest.mark.parametrize(("ours", "same"), AGREEMENT)
def test_same_looks_at_every_step(ours, same):
    assert training_of(ours, [2.0, 1.0]).same is same
    assert training_of([2.0, 1.0], ours).same is same


def test_the_first_losses_agree_more_closely():
    """Their weights are equal; what comes after is noise that training has magnified."""
    place = {"place": HALF, "model": SMALL, "config": CONFIG, "parameters": 1}
    for first, last, same in ((2.0, 1.04, True), (2.001, 1.04, True), (2.01, 1.0, False), (2.0, 1.06, False)):
        curves = tuple(Curve(name=name, losses=losses) for name, losses in (("tilewise", [first, last]), ("SDPA", [2.0, 1.0])))
        assert Training(curves=curves, **place).same is same


def test_deadline_ends_the_training_after_two_steps():
    training = train({"tilewise": sdpa_attention, "SDPA": sdpa_attention}, SMALL, CONFIG, deadline=-math.inf)
    assert training.steps == 2


def test_rate_warms_up_and_comes_down():
    config = TrainConfig(steps=100, warmup=10, peak_rate=1.0)
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) > 0.95
    assert rates.index(max(rates)) in (9, 10) and rates[-1] == pytest.approx(0.1, abs=0.01)


def test_models_write_after_held_out_text_and_less_where_there_was_no_time():
    whole = train({"tilewise": tilewise_attention, "SDPA": sdpa_attention}, SMALL, CONFIG)
    assert len(whole.prompt.encode()) >= 60 and whole.curves[0].written == whole.curves[1].written and not whole.ended_early
    cut = train({"tilewise": tilewise_attention}, SMALL, CONFIG, deadline=-math.inf)
    assert cut.ended_early and cut.steps == 2 and 0 < len(cut.curves[0].written) <= 40 < len(whole.curves[0].written)
