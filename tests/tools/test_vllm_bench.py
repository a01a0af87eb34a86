"""tools/gpu/vllm_bench.py with an engine that is not vLLM: what it leaves out, what a step is, and what differs first."""

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def bench(monkeypatch):
    for folder in ("tools", "tools/gpu"):
        monkeypatch.syspath_prepend(Path(__file__).parents[2] / folder)
    return importlib.import_module("vllm_bench")


class Engine:
    """Every sequence gets a token a step, and a step takes what the clock says."""

    def __init__(self, clock):
        self.clock, self.llm_engine = clock, self
        self.steps = 0

    def step(self):
        self.clock[0] += 0.002 if self.steps > 2 else 1.0  # the first ones read the prompts
        self.steps += 1


def test_a_step_is_one_with_every_sequence_and_prompts_are_their_own(bench, monkeypatch):
    asked, clock = [], [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def generated(llm, prompts, tokens, logprobs=None):
        asked.append([tuple(each["prompt_token_ids"]) for each in prompts])
        llm.steps = 0
        for _ in range(tokens):
            llm.llm_engine.step()
        return None, 7.002

    monkeypatch.setattr(bench, "generated", generated)
    options = Namespace(lengths=[40, 300], sequences=[1, 3], new=[10], cached=[0, 30], busy=False)
    engine = Engine(clock)
    small, several, alone, left_out = bench.decode(engine, 600, options)
    assert [each["ms"] for each in (small, several, alone)] == pytest.approx([2.0] * 3)
    assert (left_out["sequences"], left_out["length"]) == (3, 300) and "600" in left_out["left_out"]
    assert len(asked) == 6 and {len(each) for each in asked[2]} == {40} and len(set(asked[2])) == 3 and asked[2] == asked[3]
    asked.clear()
    first, behind = bench.prefill(engine, 400, options)
    assert first["cached"] == 0 and behind["tokens_per_s"] == pytest.approx(10 / 7.002)
    assert len(asked[4][0]) == 30 and all(each[0][:30] == asked[4][0] for each in asked[5:]) and len({each[0] for each in asked[5:]}) == 4


def test_a_traced_step_is_of_the_long_run_less_the_short_one(bench, monkeypatch):
    """Each run has a prompt's kernel of 1 ms, and in each step two kernels of 30 and 20 us, the second launched 5 us before the first ends."""
    asked = []

    class Traced:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def events(self):
            steps = [(1000 * i, name, start, length) for i in range(asked[-1]) for name, start, length in (("a", 0, 30), ("b", 25, 20))]
            spans = [("prompt", -2000, 1000), *((name, at + start, length) for at, name, start, length in steps)]
            return [_event(*span) for span in spans] + [_event("on the host", 0, 1e6, torch.autograd.DeviceType.CPU)]

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Traced())
    monkeypatch.setattr(bench, "generated", lambda llm, prompts, tokens: asked.append(tokens))
    found = bench.busy(None, [])
    assert asked == [bench.FIRST, bench.TOKENS] and found["busy_ms"] == pytest.approx(0.045)
    assert found["kernels_us"] == pytest.approx({"a": 30.0, "b": 20.0, "prompt": 0.0})


def _event(name, start, length, where=torch.autograd.DeviceType.CUDA):
    return SimpleNamespace(
        name=name, device_type=where, time_range=SimpleNamespace(start=start, end=start + length, elapsed_us=lambda: length)
    )


def test_what_is_said_is_compared_up_to_the_first_difference(bench, monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(bench, "keep", lambda row, options: kept.append(row))
    said = {"A.eager": [[(5, -1.0), (6, -2.0)], [(1, -1.0)]], "B.graphs": [[(5, -1.25), (7, -9.0)], [(1, -1.125)]]}
    for name, tokens in said.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(tokens))
    options = Namespace(model="llama", backends="A,B", ways="eager,graphs", dtype="bfloat16")
    bench.compare(tmp_path, "A", "eager", options)
    bench.compare(tmp_path, "B", "graphs", options)
    assert [(row["backend"], row["way"], row["tokens"], row["before_the_first_difference"]) for row in kept] == [
        ("A", "eager", 3, 3),
        ("B", "graphs", 3, 2),
    ]
    assert [row["largest_difference_of_logprobs"] for row in kept] == [0.0, 0.25]
