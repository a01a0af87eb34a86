"""The tool that measures the host's time of drop-ins: what its numbers say, on a clock that stands still, and that its cases run."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools" / "gpu" / "host_time.py"
SPEC = importlib.util.spec_from_file_location("host_time", PATH)
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)


class Clock:
    """Seconds, which only calls spend."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.order = 0.0, []
        monkeypatch.setattr(tool.time, "perf_counter", lambda: self.now)

    def call(self, name, spend):
        def run():
            self.order.append(name)
            self.now += spend() * 1e-6

        return run


def test_neighbours_are_compared(monkeypatch):
    """Both grow slower by the same amount, from 100 to 180 us, and each is now and then far too late."""
    clock, spent = Clock(monkeypatch), {"a": 0, "b": 0}

    def spend(name, above, late):
        def us():
            spent[name] += 1
            return 100 + 2 * spent[name] + above + (1000 if spent[name] % late == 0 else 0)

        return us

    row = tool.alternating(clock.call("b", spend("b", 12, 9)), clock.call("a", spend("a", 0, 7)), 40)
    assert row["above_us"] == pytest.approx(12, abs=0.1) and row["spread_us"] < 0.1 and row["within"]
    assert row["us"] - row["of_us"] == pytest.approx(12, abs=3) and clock.order[:4] == ["a", "b", "b", "a"]
    assert not tool.alternating(clock.call("b", lambda: 216), clock.call("a", lambda: 200), 8)["within"]
    assert tool.alternating(clock.call("b", lambda: 1029), clock.call("a", lambda: 1000), 8)["within"]


def test_a_case_alone(monkeypatch):
    clock = Clock(monkeypatch)
    assert tool.alternating(clock.call("a", lambda: 5), None, 4) == {"us": 5.0} and clock.order == ["a"] * 4


@pytest.mark.parametrize("kind", tool.PASSES)
def test_the_cases_run(kind):
    rows = list(tool.rows("cpu", 2, [kind], ["attention", "flash", "sdpa", "sink", "registry"]))
    assert len(rows) > 8 and not [row for row in rows if "error" in row]
    assert all({"of_us", "above_us", "spread_us", "within"} <= row.keys() for row in rows if "of" in row)
