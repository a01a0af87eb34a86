"""What a run takes where it is not told, by the device it is on."""

from pathlib import Path

import pytest
import torch

from tilewise.demo import job, place
from tilewise.demo.numbers import verdict
from tilewise.demo.page import render


def test_what_is_given_counts_and_the_rest_is_by_device():
    given = job.options(torch.device("cpu"), steps=3, batch=None, seqlens=(64,), out=Path("page.html"))
    assert (given.steps, given.batch, given.context, given.seqlens, given.out) == (3, 2, 1024, (64,), Path("page.html"))
    assert given.place == place.CPU


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "bf16"), ((7, 5), "fp32")])
def test_a_gpu_is_taken_where_there_is_one(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    taken = job.options()
    assert (taken.place.device.type, taken.place.name, taken.place.clock) == ("cuda", name, "events")
    assert taken.batch > 2 and max(taken.seqlens) > 8192


def test_a_gpu_of_amd_s_has_bf16_whatever_its_capability(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert place.place_of().name == "bf16"


def test_page_says_which_precision(make_report, make_training, make_sweep):
    gpu = place.Place(torch.device("cuda"), torch.bfloat16)
    training, sweep = make_training(off_by=5e-3), make_sweep()
    assert not training.same and "DISAGREE" in verdict(training)
    training, sweep = (type(each)(**{**vars(each), "place": gpu}) for each in (training, sweep))
    page = render(make_report(training=training, sweep=sweep))
    assert training.same and "relative; 0.05 is allowed" in page
    for expected in ("bf16 with weights in fp32, AdamW", "Causal, bf16, batch 1", "allocator above the level", "two events on the GPU"):
        assert expected in page, expected
