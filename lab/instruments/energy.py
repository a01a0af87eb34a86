"""What a call draws: the clock that the board settles at, its power, and joules a call. `python lab/instruments/energy.py` on a Hopper GPU.

Calls of the contenders of a workload again and again, in turns; workloads are chosen as in counters.py, rows go where its rows of calls go.
"""

import argparse
import math
import sys
import time
from ctypes import CDLL, byref, c_uint, c_ulonglong, c_void_p
from pathlib import Path

from counters import CELLS, calls_of, described, keep, prepared, require_hopper, table_of_calls, with_workloads

TURNS, SETTLE_S, BATCH_S = 2, 0.15, 0.03  # of a contender; until the board's clock has settled; of calls, after which one looks at it


class Gpu:
    """What NVIDIA's management library tells of the GPU that torch uses; it is only read."""

    def __init__(self) -> None:
        import torch

        self.library, self.handle = CDLL("libnvidia-ml.so.1"), c_void_p()
        self._call("nvmlInit_v2")
        if torch.cuda.device_count() == 1:
            self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(0), byref(self.handle))
        else:
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), byref(self.handle))

    def _call(self, name: str, *arguments) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name} failed with NVML's error {code}")

    def read(self, name: str, kind, *arguments) -> int:
        value = kind()
        self._call(name, self.handle, *arguments, byref(value))
        return value.value

    def clock_mhz(self) -> int:
        return self.read("nvmlDeviceGetClockInfo", c_uint, c_uint(1))  # of the multiprocessors

    def joules(self) -> float:
        return self.read("nvmlDeviceGetTotalEnergyConsumption", c_ulonglong) * 1e-3

    def throttled(self) -> int:
        """Bits of why the clock is not higher; 4: the power limit."""
        return self.read("nvmlDeviceGetCurrentClocksThrottleReasons", c_ulonglong)


def measure_energy(chosen: list[tuple], arguments) -> int:
    """Rows of clock, power and energy: the contenders of a workload in turns, each for --seconds after SETTLE_S, without a pause between calls."""
    from tilewise.bench.provenance import provenance

    board, environment, written = Gpu(), provenance("cuda"), []
    for workload in dict.fromkeys(workload for workload, _ in chosen):
        impls = [impl for other, impl in chosen if other is workload]
        launches = {impl.name: prepared(None, workload, impl) for impl in impls}
        turns = [(name, keep_busy(launches[name], board, arguments.seconds)) for _ in range(TURNS) for name in launches]
        for impl in impls:
            mine = [found for name, found in turns if name == impl.name]
            time_s = sum(each["seconds"] for each in mine) / sum(each["calls"] for each in mine)
            watts = sum(each["watts"] for each in mine) / len(mine)
            clocks = [clock for each in mine for clock in each["clocks"]]
            row = {
                **described((workload, impl)),
                "flops": workload.flops,
                "time_us": 1e6 * time_s,
                "clock_mhz": sum(clocks) / len(clocks),
                "watts": watts,
                "joules": watts * time_s,
                "turns": [{key: value for key, value in each.items() if key != "clocks"} for each in mine],
                "environment": environment,
            }
            written.append(row)
            keep([row], arguments.out)
    print("\n".join(table_of_calls(written)))
    return 0


def keep_busy(launch, board: Gpu, seconds: float) -> dict:
    """Call again and again; from SETTLE_S on, for `seconds`, count calls, look at the clock and read the meter, which moves in steps."""
    import torch

    def batch(calls: int) -> torch.cuda.Event:
        for _ in range(calls):
            launch()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    first, second = batch(1), batch(3)
    torch.cuda.synchronize()
    calls = max(1, round(BATCH_S / (first.elapsed_time(second) * 1e-3 / 3)))
    begin, queued = time.perf_counter(), [batch(calls), batch(calls)]  # so that the GPU never waits
    clocks, throttled, ends, meter = [], 0, [], []
    while not ends or ends[-1] - begin < SETTLE_S + seconds:
        queued.append(batch(calls))
        while not queued[0].query():
            time.sleep(BATCH_S / 100)
        queued, now = queued[1:], time.perf_counter()
        if now - begin > SETTLE_S:
            ends.append(now)
            clocks.append(board.clock_mhz())
            throttled |= board.throttled()
            joules = board.joules()
            if not meter or joules != meter[-1][1]:
                meter.append((now, joules))
    steps = meter[1:] if len(meter) > 2 else meter  # where the first was read, it had not moved
    elapsed = steps[-1][0] - steps[0][0]
    found = {
        "calls": calls * (len(ends) - 1),
        "seconds": ends[-1] - ends[0],
        "watts": (steps[-1][1] - steps[0][1]) / elapsed if elapsed else math.nan,
        "clocks": clocks,
        "throttled": throttled,
    }
    torch.cuda.synchronize()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with_workloads(parser)
    parser.add_argument("--out", type=Path, default=CELLS)
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring in each of TURNS turns (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        chosen = calls_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    require_hopper()
    return measure_energy(chosen, arguments)


if __name__ == "__main__":
    sys.exit(main())
