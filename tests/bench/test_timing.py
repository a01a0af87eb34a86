"""Timing against calls that take known times."""

import gc
import time

import pytest
import torch

from tilewise.bench import timing
from tilewise.bench.timing import MOST_ROUNDS, Ceiling, Stats, _event_sampler, ceiling, interleave


def test_statistics():
    stats = Stats.of([float(n) for n in range(100, -1, -1)])
    assert stats == Stats(median=50.0, p10=10.0, p90=90.0, best=0.0, samples=101)
    assert Stats.of([3.0]) == Stats(3.0, 3.0, 3.0, 3.0, 1)


def test_a_sleep_is_timed_and_the_order_of_calls_rotates():
    order = []

    def sleeper(name, seconds):
        def call():
            order.append(name)
            time.sleep(seconds)

        return call

    timed = interleave({"short": sleeper("short", 0.002), "long": sleeper("long", 0.006)}, budget_s=0.05)
    assert 0.002 <= timed["short"].median < timed["long"].median
    assert timed["long"].median >= 0.006
    assert timed["short"].samples == timed["long"].samples >= 3
    calls = order[4:]  # after one call each to warm up and one each to find how often to repeat it
    assert calls[:4] == ["short", "long", "long", "short"]


def test_short_calls_are_repeated_within_a_sample():
    calls = []
    timed = interleave({"tick": lambda: calls.append(1)}, budget_s=0.01)
    assert len(calls) > 10 * timed["tick"].samples
    assert timed["tick"].median < 1e-4


def test_three_rounds_at_least_and_a_limit():
    assert interleave({"slow": lambda: time.sleep(0.01)}, budget_s=0.0)["slow"].samples == 3
    assert interleave({"nap": lambda: time.sleep(0.001)}, budget_s=60.0)["nap"].samples == MOST_ROUNDS
    assert interleave({}, budget_s=1.0) == {}


def test_the_collector_is_off_while_timing_and_on_afterwards():
    seen = []
    interleave({"look": lambda: seen.append(gc.isenabled())}, budget_s=0.0)
    assert seen[-1] is False and gc.isenabled()

    def fails_once_timed():
        if not gc.isenabled():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave({"fails": fails_once_timed}, budget_s=0.0)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("late", "taken", "kept"),
    [
        ([False] * 8, 3, [2, 3, 4]),
        ([False, True, False, True, True, False], 6, [2, 4, 7]),
        ([True] * 8, 6, [5, 6, 7]),  # it waits for the GPU: after four attempts it is taken as it is
        ([True] * 4 + [False, True, False], 7, [5, 6, 8]),
    ],
    ids=["never", "at times", "always", "at first"],
)
def test_a_sample_without_a_head_start_is_taken_again(monkeypatch, late, taken, kept):
    calls, lateness = [], iter(late)

    class Event:
        def __init__(self, **_):
            self.time = 0

        def record(self):
            self.time = len(calls)

        def query(self):
            return next(lateness)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            assert end.time == self.time + 1
            return end.time * 1e3

    for name, fake in {"Event": Event, "_sleep": lambda cycles: None, "synchronize": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    sample = _event_sampler(lambda: calls.append(1), torch.device("cpu"), flush=True)
    assert [sample() for _ in range(3)] == kept and len(calls) == 1 + taken


def test_what_is_timed_first_waits_where_memory_was_given_back(monkeypatch):
    """Once for each time that more of it was."""
    freed, rested = iter([0, 3, 3, 4]), []
    fakes = {"memory_stats": lambda device: {"num_device_free": next(freed)}, "synchronize": lambda device: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "_FREED", {})
    monkeypatch.setattr(timing.time, "sleep", rested.append)
    waited = []
    for _ in range(4):
        timing._rest(torch.device("cuda"))
        waited.append(len(rested))
    assert waited == [0, 1, 1, 2] and rested[0] == timing.REST_S


def test_clocks_that_do_not_exist_here():
    with pytest.raises(ValueError, match="clock is 'sundial'; it must be one of wall, events, graph"):
        interleave({}, budget_s=0, clock="sundial")
    with pytest.raises(ValueError, match="clock 'events' needs a CUDA device, and this is cpu; use clock='wall'"):
        interleave({}, budget_s=0, clock="events")


def test_share_of_the_ceiling():
    roof = Ceiling(matmul=100.0, copy=10.0)
    assert roof.share(flops=200, moved_bytes=1, seconds=4.0) == 0.5
    assert roof.share(flops=1, moved_bytes=20, seconds=4.0) == 0.5


def test_the_ceiling_is_measured_once_and_is_plausible():
    roof = ceiling("cpu", torch.float32)
    assert 1e9 < roof.matmul < 1e14 and 1e8 < roof.copy < 1e13
    start = time.perf_counter()
    assert ceiling("cpu", torch.float32) is roof
    assert time.perf_counter() - start < 0.05
