"""lab/instruments/stalls.py on a made-up page of Nsight Compute's: cut where warps may wait, samples and reasons added up."""

import importlib
from pathlib import Path

import pytest

HEADER = ["Address", "Source", "# Samples", "Instructions Executed", "stall_wait", "stall_long_sb", "stall_wait (Not Issued)"]
CODE = [
    ("LDC R1, c[0x0][0x28]", 1, 1, 0),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R152", 2, 2, 0),
    ("@!P0 BRA 0x7f00", 60, 0, 60),
    ("WARPGROUP.ARRIVE", 1, 1, 0),
    ("HGMMA.64x64x16.F32.BF16 R152, gdesc[UR8], RZ, !UPT", 20, 5, ""),
    ("BAR.SYNC.DEFER_BLOCKING 0x5, 0x100", 16, 16, 0),
]


@pytest.fixture
def stalls(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/instruments")
    return importlib.import_module("stalls")


def page(*kernels):
    """The page of kernels whose samples are these times those of CODE."""
    lines = []
    for number, factor in enumerate(kernels):
        lines += [["Kernel Name", f"kernel_{number}"], HEADER]
        lines += [[hex(16 * i), source, factor * total, 1, wait, long, 99] for i, (source, total, wait, long) in enumerate(CODE)]
    return "\n".join(",".join(f'"{value}"' for value in line) for line in lines)


def test_parts(stalls):
    ((name, parts),) = stalls.kernels(page(1))
    assert name == "kernel_0" and [part.cut.split()[0] for part in parts] == [
        "LDC",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "WARPGROUP.ARRIVE",
        "BAR.SYNC.DEFER_BLOCKING",
    ]
    assert [(part.instructions, part.samples) for part in parts] == [(1, 1), (2, 62), (2, 21), (1, 16)]
    assert parts[1].why == {"wait": 2, "long_sb": 60}


def test_what_is_shown(stalls, capsys, tmp_path):
    (tmp_path / "page.csv").write_text(page(1000, 1))
    assert stalls.main(["read", str(tmp_path / "page.csv")]) == 0
    shown = capsys.readouterr().out
    assert "kernel_0: 100,000 samples" in shown and "kernel_1" not in shown
    assert "62.0%" in shown and "long_sb" in shown


def test_a_kernel_that_was_not_sampled(stalls, capsys, tmp_path):
    short = '"Kernel Name","kernel_short"\n"Address","Source"\n"0x0","EXIT"\n'
    (tmp_path / "page.csv").write_text(short + page(1000))
    assert stalls.main(["read", str(tmp_path / "page.csv")]) == 0
    assert "kernel_short" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no samples"):
        stalls.show(short)


def test_a_page_of_something_else(stalls):
    with pytest.raises(SystemExit, match="holds no kernel"):
        stalls.kernels("==PROF== Disconnected")
