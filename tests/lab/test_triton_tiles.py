"""lab/instruments/triton_tiles.py without a GPU: groups, and what tiles take by the compiler."""

import re
from pathlib import Path

import pytest

from tilewise.backends.triton.config import Config
from tilewise.backends.triton.targets import Target

pytest.importorskip("triton")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/instruments")
    import triton_tiles

    return triton_tiles


def test_groups(tool):
    softcap, alibi = tool.jobs_of("bwd: 64 softcap, 128 ALiBi: dkdv=32,64,4,4 dq=64,64,4,3,168 | dq=64,64,4,2")
    assert [job.tiles for job in softcap] == ["", "dkdv=32,64,4,4 dq=64,64,4,3,168", "dq=64,64,4,2"]
    assert softcap[1].chosen == {"dkdv": Config(32, 64, 4, 4), "dq": Config(64, 64, 4, 3, registers=168)} and not softcap[0].chosen
    assert {job.workload.softcap for job in softcap} == {30.0} and all(job.workload.alibi for job in alibi)
    assert {(job.workload.head_dim, job.workload.direction) for job in softcap + alibi} == {(64, "bwd"), (128, "bwd")}


def test_what_tiles_take(tool):
    said = tool.compile_all(tool.Job("fwd", "64 window", "forward=64,32,4,2"), Target("sm_90"))
    assert re.fullmatch(r"forward: \d+ registers, 0 bytes of stack, \d+ of shared memory", said)
    assert tool.compile_all(tool.Job("fwd", "128 full", "forward=128,128,8,4"), Target("sm_90")).startswith("not ")
