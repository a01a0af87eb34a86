"""Workloads whose scores are changed: softcap, sink, bias, scale. Who can, computes them, gradients included; who cannot says why."""

import sys
import types
from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tilewise.bench.gate import Gate, sample_of, verify
from tilewise.bench.peers import FlashAttention, Flex, Naive, Sdpa, Tilewise, contender, known
from tilewise.bench.peers.flash_attention import VllmFlashAttention3
from tilewise.bench.peers.flex import score_mod_of
from tilewise.bench.peers.ladder import OnLadder
from tilewise.bench.runner import run
from tilewise.bench.sets import Workload, model_shapes
from tilewise.ladder import RUNGS
from tilewise.masks import Causal, Documents, Full, SlidingWindow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Workload(name="small", batch=2, seqlen_q=33, heads_q=4, heads_k=2, head_dim=16, direction="fwd+bwd")
CHANGES = [
    {"softcap": 2.0},
    {"sink": True},
    {"scale": 1.0},
    {"bias": "qk"},
    {"alibi": True},
    {"alibi": True, "sink": True},
    {"bias": "bk", "bias_grad": True},
    {"scale": 1.0, "bias": "hqk", "bias_grad": True},
    {"softcap": 3.0, "sink": True, "bias": "bhqk", "bias_grad": True},
]


@pytest.mark.parametrize("mask", [Full(), SlidingWindow(5, 0)], ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_contenders_that_can_pass_the_gate(changes, mask):
    workload = replace(SMALL, mask=mask, **changes)
    able = [impl for impl in (Tilewise(), Tilewise("reference"), Sdpa(), Sdpa("math"), Naive()) if not impl.why_not(workload, CPU)]
    assert len(able) == (3 if {"softcap", "sink"} & changes.keys() else 5)
    for impl in able:
        assert verify(impl.prepare(workload, CPU), workload, 0, CPU) < 1e-5


def without(name):
    """The formula that leaves out one of the changes, or halves the gradient of what is learnt."""

    def attend(q, k, v, **extras):
        changed = replace(SMALL, **{**COMPLETE, **({"softcap": 0.0} if name == "softcap" else {"scale": None} if name == "scale" else {})})
        given = {key: x * 0.5 + x.detach() * 0.5 if name == f"d{key}" else x for key, x in extras.items()}
        if name in given:
            given[name] = given[name] * 0.0 - (1e4 if name == "sink" else 0.0)
        return Naive().prepare(changed, CPU)(q, k, v, **given)

    return attend


COMPLETE = {"scale": 1.0, "softcap": 2.0, "sink": True, "bias": "hqk", "bias_grad": True}


@pytest.mark.parametrize("fault", ["softcap", "sink", "bias", "scale", "dsink", "dbias"])
@pytest.mark.parametrize("largest", [1 << 22, 33 * 33, 12 * 33 * 2], ids=["everything", "a head", "some rows"])
def test_the_gate_sees_every_change_and_every_gradient(monkeypatch, fault, largest):
    monkeypatch.setattr("tilewise.bench.gate.sample_of", lambda workload: sample_of(workload, largest))
    workload = replace(SMALL, **COMPLETE)
    assert verify(without("nothing"), workload, 0, CPU) < 1e-5
    with pytest.raises(AssertionError, match=f"^{fault}" if fault.startswith("d") else "^o"):
        verify(without(fault), workload, 0, CPU)


@pytest.mark.parametrize("bias", ["k", "bk", "hk", "qk", "bqk", "bhqk"])
def test_samples_of_biases_have_the_gradients_of_the_sample(monkeypatch, bias):
    monkeypatch.setattr("tilewise.bench.gate.sample_of", lambda workload: sample_of(workload, 12 * 33 * 2))
    workload = replace(SMALL, mask=Causal(), bias=bias, bias_grad=True, sink=True)
    gate = Gate(workload, 0, CPU)
    assert not gate.whole
    gate.verify(Naive().prepare(workload, CPU))


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_alibi_of_a_sample_is_that_of_its_rows(monkeypatch, mask):
    """And what has other slopes, or none, is found out."""
    monkeypatch.setattr("tilewise.bench.gate.sample_of", lambda workload: sample_of(workload, 12 * 40 * 2))
    workload = replace(SMALL, mask=mask, seqlen_k=40, alibi=True)
    gate = Gate(workload, 0, CPU)
    assert not gate.whole and gate.verify(Tilewise().prepare(workload, CPU)) < 1e-5
    for wrong in ({}, {"alibi_slopes": torch.tensor([0.25, 0.0625, 0.015625, 0.0])}):
        with pytest.raises(AssertionError, match="^o"):
            gate.verify(lambda q, k, v, wrong=wrong, **_: tw.attention(q, k, v, mask=mask, **wrong))
    assert workload.slopes == [0.25, 0.0625, 0.015625, 0.00390625] and workload.id.endswith(", ALiBi") and workload.case["alibi"] == 1


def test_extras_are_drawn_apart_and_take_the_gradients_that_are_wanted():
    workload = replace(SMALL, **COMPLETE)
    extras = workload.extras(3)
    assert {name: tuple(x.shape) for name, x in extras.items()} == {"bias": (1, 4, 33, 33), "sink": (4,)}
    assert all(x.requires_grad for x in extras.values())
    assert not any(x.requires_grad for x in replace(workload, direction="fwd").extras(3).values())
    assert not replace(workload, bias_grad=False).extras(3)["bias"].requires_grad
    assert torch.equal(workload.extras(3)["bias"], extras["bias"]) and not torch.equal(workload.extras(4)["bias"], extras["bias"])
    assert SMALL.extras(3) == {}
    plain, scaled = SMALL.inputs(3), workload.inputs(3)
    assert torch.equal(scaled.q, plain.q * 0.25) and torch.equal(scaled.k, plain.k)  # so that scores are of one size


def test_cases_name_what_changes_scores_and_old_cases_stay_as_they_were():
    assert not {"scale", "softcap", "sink", "bias", "alibi"} & SMALL.case.keys()
    workload = replace(SMALL, **COMPLETE)
    assert workload.changes == {"scale": 1.0, "softcap": 2.0, "sink": 1, "bias": "hqk with gradient"}
    assert workload.case == {**SMALL.case, **workload.changes}
    assert workload.id.endswith(", scale 1, softcap 2, sink, bias hqk with gradient")
    bias_bytes = 4 * 33 * 33 * 4
    times = {"fwd": 1, "bwd": 2, "fwd+bwd": 3}
    for direction, count in times.items():
        one = replace(workload, direction=direction)
        assert one.bytes - replace(SMALL, direction=direction).bytes == count * bias_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bias": "kq"}, "bias is 'kq'; it must be None or axes out of 'bhqk', in this order and with k, as in 'hqk'"),
        ({"bias": "hq"}, "bias is 'hq'"),
        ({"bias": ""}, "bias is ''"),
        ({"alibi": True, "bias": "qk"}, "alibi is True and bias is 'qk'; give one of them"),
        ({"bias_grad": True}, "bias_grad is True and bias is None; give the axes of the bias"),
        ({"sink": True, "data": "outliers"}, "data is 'outliers', rms is False, and scores are changed by sink; that takes data='normal'"),
        ({"softcap": 1.0, "rms": True}, "rms is True, and scores are changed by softcap"),
    ],
)
def test_workloads_that_make_no_sense(fields, message):
    with pytest.raises(ValueError) as error:
        replace(SMALL, **fields)
    assert message in str(error.value)


def test_why_not(monkeypatch):
    """Who has what: FlashAttention-4 sinks in both directions, FlashAttention-2 and 3 softcaps, SDPA biases, its flash kernel none."""
    monkeypatch.setattr(contender, "available_bytes", lambda device: None)
    bf16 = replace(SMALL, dtype=torch.bfloat16)
    capped, sunk = replace(bf16, softcap=50.0), replace(bf16, sink=True)
    biased, fixed = replace(bf16, bias="hqk", bias_grad=True), replace(bf16, bias="hqk")
    lacking = {
        name: [why for cell in (capped, sunk, biased, fixed) for why in known()[name].why_not(cell, CUDA) if why.startswith("it has no")]
        for name in ("fa2", "fa3", "fa4", "sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "naive", "flex")
    }
    assert lacking["fa4"] == ["it has no bias"] * 2 and lacking["fa3"] == lacking["fa2"] == ["it has no sink", *lacking["fa4"]]
    assert lacking["sdpa:cudnn"] == lacking["sdpa:efficient"] == ["it has no softcap", "it has no sink"]
    assert lacking["sdpa:flash"] == ["it has no softcap", "it has no sink", "it has no bias", "it has no bias"]
    assert lacking["naive"] == lacking["flex"] == []
    assert "it has no bias" in VllmFlashAttention3().why_not(replace(fixed, direction="fwd"), CUDA)
    sloped = {
        name: known()[name].why_not(replace(bf16, alibi=True), CUDA)
        for name in ("sdpa:efficient", "sdpa:flash", "fa2", "fa3", "naive", "flex")
    }
    assert [name for name, why in sloped.items() if "it has no ALiBi" in why] == ["sdpa:flash", "fa3"]
    rung = OnLadder(RUNGS["k5"])
    assert "it has no softcap" in rung.why_not(capped, CUDA)
    assert rung.why_not(replace(SMALL, scale=2.0), CUDA)[-1] == "the ladder has the usual scale only"
    packed = replace(sunk, batch=1, mask=Documents([0, 10, 33], inner=Causal()))
    assert known()["sdpa:padded"].why_not(packed, CPU) == ["it has no sink"]
    assert "FlexAttention returns no LSE on a CPU, which a sink is worked in by" in Flex().why_not(replace(sunk, direction="fwd"), CPU)


@pytest.mark.parametrize("changes", CHANGES[:1] + CHANGES[3:], ids=str)
def test_score_mods_say_what_the_formula_says(changes):
    workload = replace(SMALL, **{"softcap": 0.0, **changes})
    bias, score = workload.extras(0).get("bias"), torch.randn(2, 4, 33, 33)
    slopes = workload.extras(0).get("alibi_slopes")
    score_mod = score_mod_of(workload, bias, slopes)
    if bias is None and slopes is None and not workload.softcap:
        assert score_mod is None
        return
    want = score if not workload.softcap else workload.softcap * torch.tanh(score / workload.softcap)
    want = want if bias is None else want + bias
    want = want if slopes is None else want + workload.alibi_bias(torch.arange(33))
    b, h, i, j = (torch.arange(n).view([-1 if axis == place else 1 for axis in range(4)]) for place, n in enumerate(score.shape))
    torch.testing.assert_close(score_mod(score, b, h, i, j).expand(score.shape), want)


def test_flash_attention_is_given_softcap_scale_and_sink_by_its_names(monkeypatch):
    asked = []

    def flash_attn_func(q, k, v, *, learnable_sink=None, **options):
        asked.append(options)
        workload = replace(SMALL, scale=options["softmax_scale"], softcap=options["softcap"], sink=learnable_sink is not None)
        return Naive().prepare(workload, CPU)(q, k, v, **({} if learnable_sink is None else {"sink": learnable_sink}))

    monkeypatch.setitem(sys.modules, "pretend_flash", types.SimpleNamespace(flash_attn_func=flash_attn_func, __spec__=object()))
    workload = replace(SMALL, scale=1.0, softcap=2.0, sink=True)
    fa = FlashAttention("fa9", "pretend_flash", None, ("scale", "softcap", "sink"))
    assert verify(fa.prepare(workload, CPU), workload, 0, CPU) < 1e-5
    assert asked == [{"causal": False, "softmax_scale": 1.0, "softcap": 2.0}]


def test_rows_of_changed_scores_are_timed():
    rows = run(
        [replace(SMALL, direction=direction, **COMPLETE) for direction in ("fwd", "bwd")], [Tilewise(), Naive(), Sdpa()], budget_s=0.0
    )
    assert [row.passed for row in rows] == [True, True, None] * 2
    assert all(row.median_s > 0 for row in rows if row.passed) and rows[2].reason == "it has no softcap; it has no sink"


def test_models_have_what_their_configurations_say():
    by_name = {each.name: each for each in model_shapes(direction="bwd")}
    assert len(by_name) >= 40
    assert by_name["Gemma-2-9B-window"].softcap == 50.0 and by_name["Gemma-2-9B-window"].mask == SlidingWindow(4095, 0)
    assert by_name["gpt-oss-20b-window"].sink and by_name["gpt-oss-20b-window"].mask == SlidingWindow(127, 0)
    t5 = by_name["T5-XXL-encoder"]
    assert (t5.scale, t5.bias_shape, t5.bias_grad) == (1.0, (1, 64, 512, 512), True)
    assert by_name["AlphaFold2-triangle"].bias_shape == (1, 4, 384, 384)
    assert by_name["Gemma-2-27B-full"].softmax_scale == pytest.approx(1 / 12)
    assert {each.batch for each in by_name.values()} >= {1, 64}
