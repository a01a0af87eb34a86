"""Traces from made-up events: spans, clocks, roles, files and pictures; no GPU and no DSL."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from tilewise.cli import tracing as command
from tilewise.ladder import tracing, tracing_picture
from tilewise.ladder.tracing import Case, Trace
from tilewise.sm90.phases import SLOTS, WARPS, Phase

CASE = Case(rung="k6:turns", seqlen=256, head_dim=128, causal=False, heads=2, device="made up", cost=0.021)
GHZ = 1.5
TILES = 40


def write(events, block, warp, stamps, multiprocessor=7):
    events[block, warp, 0] = multiprocessor, Phase.PLACE
    for slot, (clock, phase) in enumerate(stamps, start=1):
        events[block, warp, slot] = np.array(clock).astype(np.int64).astype(np.int32), phase
    if stamps[-1][1] == Phase.END:
        events[block, warp, len(stamps) + 1] = int(stamps[-1][0] / GHZ) % 2**31, Phase.TIME


def consumer(begin):
    stamps = [(begin, Phase.START)]
    for tile in range(TILES):
        at = begin + 1000 + 2000 * tile
        stamps += [(at, Phase.WAIT), (at + 100, Phase.SCORES), (at + 700, Phase.SOFTMAX), (at + 1500, Phase.OUTPUT)]
    at = begin + 1000 + 2000 * TILES
    return [*stamps, (at, Phase.STORE), (at + 500, Phase.END)]


def producer(begin):
    stamps = [(begin + 50, Phase.START)]
    for tile in range(TILES):
        stamps += [(begin + 200 + 2000 * tile, Phase.EMPTY), (begin + 900 + 2000 * tile, Phase.LOAD)]
    return [*stamps, (begin + 1000 + 2000 * TILES, Phase.END)]


@pytest.fixture
def trace():
    """Two blocks of a producer and two consumers; the clock wraps around during the first."""
    events = np.zeros((2, WARPS, SLOTS, 2), np.int32)
    for block, begin in enumerate(((1 << 32) - 20_000, (1 << 32) + 70_000)):
        write(events, block, 0, producer(begin))
        write(events, block, 1, [(begin, Phase.START)])  # an idle warp
        for warp in range(4, 12):
            write(events, block, warp, consumer(begin + 300 * (warp // 8)))
    return Trace(CASE, np.array([[0, 0], [1, 1]]), events)


def test_spans_follow_one_another_through_the_clock_s_wrap(trace):
    mine = [span for span in trace.spans if (span.block, span.warp) == (0, 8)]
    assert mine[0].start == 300 and mine[-1].phase == Phase.STORE and mine[-1].end == 300 + 1500 + 2000 * TILES
    assert all(before.end == after.start for before, after in pairwise(mine))
    assert [span.phase for span in mine[1:5]] == [Phase.WAIT, Phase.SCORES, Phase.SOFTMAX, Phase.OUTPUT]
    assert {span.warp for span in trace.spans} == {0, *range(4, 12)}  # the idle warp has no phase that ends
    assert min(span.start for span in trace.spans if span.block == 1) == 90_000


def test_the_clock_is_measured(trace):
    assert trace.ghz == pytest.approx(GHZ, rel=1e-3)
    assert trace.us(3000) == pytest.approx(2.0, rel=1e-3)


def test_a_clock_that_cannot_be_measured_is_assumed(trace):
    events = trace.events.copy()
    events[events[..., 1] == Phase.TIME] = 0
    assert Trace(CASE, trace.blocks, events).ghz == tracing.ASSUMED_GHZ
    assert Trace(CASE, trace.blocks[:1], trace.events[:1]).ghz == tracing.ASSUMED_GHZ  # all end at nearly the same time


def test_roles(trace):
    assert [trace.role(warp) for warp in (0, 4, 11)] == ["warp 0, producer", "warp 4, consumer 0", "warp 11, consumer 1"]
    alone = np.zeros((1, WARPS, SLOTS, 2), np.int32)
    for warp in range(2):
        write(alone, 0, warp, [(0, Phase.START), *([(5, Phase.EMPTY), (6, Phase.LOAD)] if warp == 0 else []), *consumer(10)[1:]])
    together = Trace(replace(CASE, rung="k3_2"), np.array([[0, 0]]), alone)
    assert [together.role(warp) for warp in range(2)] == ["warp 0, loads and computes", "warp 1"]


def test_full_slots_end_in_no_phase():
    events = np.zeros((1, WARPS, SLOTS, 2), np.int32)
    write(events, 0, 0, [(100 * slot, Phase.SCORES if slot else Phase.START) for slot in range(SLOTS - 1)])
    spans = Trace(CASE, np.array([[0, 0]]), events).spans
    assert len(spans) == SLOTS - 2 and spans[-1].end == 100 * (SLOTS - 2)


def test_chrome_s_format(trace, tmp_path):
    with gzip.open(trace.save(tmp_path / "t.json.gz")) as file:
        saved = json.load(file)
    assert saved == json.loads(trace.save(tmp_path / "t.json").read_text())
    named = {(row["pid"], row.get("tid")): row["args"]["name"] for row in saved["traceEvents"] if row["name"].endswith("_name")}
    assert named[1, None] == "block 1 of head 1" and named[0, 4] == "warp 4, consumer 0"
    events = [row for row in saved["traceEvents"] if row["ph"] == "X"]
    assert len(events) == len(trace.spans) and {row["pid"] for row in events} == {0, 1}
    first = next(row for row in events if row["pid"] == 0 and row["tid"] == 4 and row["cat"] == "scores")
    assert first["name"] == "S = Q Kᵀ" and first["args"] == {"clocks": 600}
    assert first["ts"] == pytest.approx(1100 / GHZ / 1e3, rel=1e-3) and first["dur"] == pytest.approx(600 / GHZ / 1e3, rel=1e-3)
    assert saved["otherData"]["rung"] == "k6:turns"


def test_saved_events_come_back(trace, tmp_path):
    again = Trace.load(trace.save(tmp_path / f"{CASE.name}.npz"))
    assert again.case == CASE and again.spans == trace.spans and (again.blocks == trace.blocks).all()
    assert CASE.name == "trace-k6-turns-s256-d128-full"


def test_the_picture_has_a_lane_for_each_role_and_both_stretches(trace, tmp_path):
    assert tracing_picture.period(trace) == 2000
    assert tracing_picture.beginning(trace)[1] == pytest.approx(15 * GHZ * 1e3, rel=1e-3)
    start, end = tracing_picture.steady(trace)
    assert end - start == 6000 and 30_000 < start < 50_000
    svg = tracing_picture.draw(trace, tmp_path / "t.svg").read_text()
    words = {"".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"warp 0, producer", "warp 4, consumer 0", "warp 8, consumer 1", "the beginning", "steady state", "softmax"} <= words
    assert any(word.endswith("1.50 GHz; stamps cost 2.1 % of the time") for word in words)
    assert not {"warp 5, consumer 0", "waits for its turn"} & words
    assert svg == tracing_picture.draw(trace, tmp_path / "t2.svg").read_text()


def test_only_what_can_be_written_or_drawn(trace, tmp_path):
    with pytest.raises(ValueError, match="it must end in .npz, .json"):
        trace.save(tmp_path / "t.txt")
    with pytest.raises(ValueError, match="nothing to draw"):
        tracing_picture.draw(Trace(CASE, trace.blocks, np.zeros_like(trace.events)), tmp_path / "t.svg")


def test_kept_are_the_first_blocks_of_one_multiprocessor():
    events = torch.zeros(12, WARPS, SLOTS, 2, dtype=torch.int32)
    for block in range(12):
        events[block, 0, 0] = torch.tensor([block % 3, Phase.PLACE])
        events[block, 0, 1] = torch.tensor([1000 - 10 * block, Phase.START])
    places, kept = tracing.keep(events, m_blocks=4, count=3)
    assert kept[:, 0, 1, 0].tolist() == [910, 940, 970] and places.tolist() == [[1, 2], [2, 1], [3, 0]]


def test_command_line(trace, tmp_path, capsys):
    saved = trace.save(tmp_path / "earlier.npz")
    assert command.main([str(saved), "--out", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"{CASE.name}.{end}" for end in ("json.gz", "npz", "svg")]
    assert command.main(["k9"]) == 2 and "no rung is called 'k9'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("name, rung", [("k5", "k5"), ("k6:turns", "k6_1")])
def test_without_a_gpu_a_sentence(name, rung, capsys, tmp_path):
    assert command.main([name, "--out", str(tmp_path)]) == 2
    assert f"{rung} cannot run this" in capsys.readouterr().err
