"""Peak memory against calls whose peak is known.

Each peak is the median of three: a kernel that reclaims idle pages while a call runs spoils one measurement now and then.
"""

import subprocess
import sys
from statistics import median

import pytest
import torch

from tilewise.bench import memory
from tilewise.bench.memory import available_bytes, peak_extra_bytes

MB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a resettable high-water mark of the resident set")


def ones(megabytes):
    return torch.ones(megabytes * MB // 4)


def usual_peak(fn):
    return median(peak_extra_bytes(fn)[1] for _ in range(3))


@linux
def test_the_result_counts():
    ones(1)
    result, _ = peak_extra_bytes(lambda: ones(64))
    assert result.numel() * 4 == 64 * MB
    del result
    assert usual_peak(lambda: ones(64)) == pytest.approx(64 * MB, abs=3 * MB)


FREED_ON_THE_WAY = """
from statistics import median
import torch
from tilewise.bench.memory import peak_extra_bytes

def ones(megabytes):
    return torch.ones(megabytes * (1 << 18))

def peaks_at_192():
    for _ in range(3):
        (ones(96) + ones(48).sum()).sum()  # the 48 are gone when the result of + stands beside the first 96

peaks_at_192()
print(median(peak_extra_bytes(peaks_at_192)[1] for _ in range(3)))
"""


@linux
def test_what_is_freed_on_the_way_counts_and_what_is_reused_counts_once():
    # In a process of its own: in one that has run for long, a freed block may go back to a hole in the heap and keep its pages.
    done = subprocess.run([sys.executable, "-c", FREED_ON_THE_WAY], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(192 * MB, abs=4 * MB)


@linux
def test_memory_held_before_does_not_count_and_repeats_agree():
    held = ones(128)
    peaks = [usual_peak(lambda: ones(32)) for _ in range(3)]
    assert peaks == pytest.approx([32 * MB] * 3, abs=3 * MB)
    assert held[0] == 1


@linux
def test_a_call_that_allocates_nothing():
    assert usual_peak(lambda: None) < 2 * MB


@linux
def test_none_where_the_mark_cannot_be_reset(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    assert peak_extra_bytes(lambda: 7) == (7, None)


def test_none_on_other_devices():
    assert peak_extra_bytes(lambda: 7, "meta") == (7, None)


@linux
def test_the_thresholds_are_put_back_when_the_call_raises():
    with pytest.raises(ZeroDivisionError):
        peak_extra_bytes(lambda: 1 / 0)
    assert usual_peak(lambda: ones(32)) == pytest.approx(32 * MB, abs=3 * MB)  # and the lock is free


@linux
def test_available_memory_is_what_the_kernel_says(monkeypatch, tmp_path):
    assert available_bytes() > 16 * MB
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       5 kB\n")
    assert available_bytes() == 5 * 1024


def test_available_memory_is_unknown_without_meminfo(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    assert available_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    assert available_bytes() is None
