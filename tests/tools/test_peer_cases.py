"""What the plugins for peers' tests share: which cases are left out and why, and that a seed draws the same sample."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = """
from cases import choose_backend, pytest_addoption, pytest_terminal_summary, select

def pytest_configure(config):
    choose_backend(config)

def pytest_collection_modifyitems(config, items):
    select(config, items, "test_(one|two)", {r"\\[7\\]": "it is seven"}, lambda item: item.function.__name__)
"""
FILE = """
import pytest

@pytest.mark.parametrize("n", range(10))
def test_one(n):
    assert n != 7

def test_two():
    import torch
    import tilewise as tw
    q = torch.randn(1, 5, 1, 16)
    tw.attention(q, q, q)
    tw.attention(q, q, q, backend="reference")

def test_three():
    raise AssertionError
"""


def run(folder: Path, *options: str) -> tuple[list[str], dict[str, int]]:
    """The cases that ran, and how many were left out for each reason."""
    path = os.pathsep.join([str(ROOT / "tools" / "peers"), str(folder), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(folder / "test_theirs.py"),
        "-p",
        "plugin",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "-v",
        *options,
    ]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}, cwd=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line.strip() for line in found.stdout.splitlines()]
    after = lines[next(n for n, line in enumerate(lines) if "cases left out" in line) :]
    left_out = {reason: int(count) for count, _, reason in (line.partition("  ") for line in after) if count.isdigit()}
    return [line.partition("::")[2].split()[0] for line in lines if "PASSED" in line], left_out


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "test_theirs.py").write_text(FILE)
    return tmp_path


def test_reasons_are_counted(folder):
    ran, left_out = run(folder)
    assert len(ran) == 10 and left_out == {"another subject": 1, "it is seven": 1}


@pytest.mark.parametrize(("name", "says"), [("tiled", "by tiled"), ("hopper", "it computes on Hopper GPUs, the tensors are on cpu")])
def test_a_backend_is_asked_first(folder, name, says):
    _, counts = run(folder, "--tilewise-backend", name)
    assert says in counts


def test_a_seed_draws_a_sample(folder):
    samples = [run(folder, "--tilewise-sample", "3", "--tilewise-seed", seed) for seed in ("4", "4", "5")]
    assert samples[0] == samples[1] != samples[2] and all(len(ran) == 4 for ran, _ in samples)
    assert samples[0][1] == {"another subject": 1, "it is seven": 1, "not in the sample": 6}
