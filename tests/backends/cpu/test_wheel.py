"""The wheel: built here, installed into an empty environment, and used there without a compiler in sight."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
USE = """
import math, torch, tilewise
from tilewise.backends.cpu import Cpu
q, k, v = (torch.randn(1, 200, 2, 64) for _ in range(3))
o = tilewise.attention(q, k, v, causal=True, backend="cpu")
wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
assert (o - wanted).abs().max() < 1e-5
print(Cpu().describe())
"""


WITHOUT = """
import torch, tilewise
q = torch.randn(1, 50, 2, 16)
print(tilewise.explain(q, q, q))
assert tilewise.attention(q, q, q).isfinite().all()
"""


def _run(*command: str | Path, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "tools" / "wheel.py").exists() or sys.platform != "linux", reason="needs the repository, on Linux")
def test_the_wheel_works_in_an_empty_environment(tmp_path):
    builder, user = tmp_path / "builder", tmp_path / "user"
    for place in (builder, user):
        _run(sys.executable, "-m", "venv", place)
    _run(builder / "bin" / "python", ROOT / "tools" / "wheel.py", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "py3-none-manylinux2014_" in wheel.name
    _run(user / "bin" / "python", "-m", "pip", "install", "-q", wheel)
    bare = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    assert "torch threads" in _run(user / "bin" / "python", "-c", USE, env=bare, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists() or sys.platform != "linux", reason="needs the repository, on Linux")
def test_without_a_compiler_it_installs_and_says_what_is_missing(tmp_path):
    tools, place = tmp_path / "bin", tmp_path / "installed"
    tools.mkdir()
    for tool in ("git", "env", "uname", "sh"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    bare = {"PATH": str(tools), "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++", "HOME": str(tmp_path)}
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", place, ROOT, env=bare)
    path = f"{place}{os.pathsep}{sysconfig.get_path('purelib')}"  # and without `site`, whose hooks would find an editable tilewise first
    said = _run(sys.executable, "-S", "-c", WITHOUT, env={**bare, "PYTHONPATH": path}, cwd=tmp_path)
    assert said.startswith("backend: tiled") and "its compiled kernel is not installed, or is older than its sources: reinstall" in said
