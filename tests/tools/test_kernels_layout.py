"""The folder for the `kernels` package: its files, what they hold, and, where that package is, that it loads them."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tilewise.compat import flash_attn

ROOT = Path(__file__).parents[2]
LOAD = """
import sys
from kernels import get_kernel
from tilewise.compat import flash_attn
found = get_kernel("kernels-community/flash-attn2", version=4)
assert found.flash_attn_func is flash_attn.flash_attn_func and "universal" not in found.__file__
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("layout")
    said = subprocess.run([sys.executable, ROOT / "tools/kernels_layout.py", place], capture_output=True, text=True, check=True).stdout
    assert said == f'LOCAL_KERNELS="kernels-community/flash-attn2={place}"\n'
    return place


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_functions_are_those_of_the_drop_in(folder, backend):
    place = folder / "build" / f"torch-{backend}"
    spec = importlib.util.spec_from_file_location("loaded_by_kernels", place / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {name for name, value in vars(flash_attn).items() if name.startswith("flash_attn") and inspect.isfunction(value)}
    assert functions == set(module.__all__) and all(getattr(module, name) is getattr(flash_attn, name) for name in functions)
    x = torch.randn(1, 5, 2, 8, dtype=torch.float32, device="cpu")
    assert module.flash_attn_func(x, x, x, causal=True).shape == x.shape
    about = json.loads((place / "metadata.json").read_text())
    assert about["backend"] == {"type": backend} and about["python-depends"] == [] and about["version"] == 2
    assert about["id"].isidentifier() and about["name"].replace("-", "_") == about["id"]


def test_kernels_loads_it(folder):
    if not any(metadata.distributions(name="kernels")):  # tools/kernels is a package of that name, too, where tools is on the path
        pytest.skip("kernels is not installed: pip install kernels")
    given = {"LOCAL_KERNELS": f"kernels-community/flash-attn2={folder}", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", LOAD], check=True, env=os.environ | given)
