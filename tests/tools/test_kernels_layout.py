"""The folders for the `kernels` package: their files, what they hold, and, where that package is, that it loads them."""

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

import tilewise as tw
from tilewise.compat import flash_attn

ROOT = Path(__file__).parents[2]
LOAD = """
import sys
from kernels import get_kernel
from tilewise.compat import flash_attn
found = get_kernel("kernels-community/flash-attn2", version=4)
assert found.flash_attn_func is flash_attn.flash_attn_func and "universal" not in found.__file__
found = get_kernel("tilewise/attention", version=1)
from tilewise.compat import transformers
assert found.flash_attn_forward is transformers.attention and found.supports_flash_attn
"""
ATTENTION = "tilewise/attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("layout")
    said = subprocess.run([sys.executable, ROOT / "tools/kernels_layout.py", place], capture_output=True, text=True, check=True).stdout
    assert said == f'LOCAL_KERNELS="kernels-community/flash-attn2={place}/flash-attn2:{ATTENTION}={place}/attention"\n'
    return place


def loaded(place: Path):
    """As `kernels` loads it: by its path, under a name of its own."""
    spec = importlib.util.spec_from_file_location("loaded_by_kernels", place / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_functions_are_those_of_the_drop_in(folder, backend):
    place = folder / "flash-attn2" / "build" / f"torch-{backend}"
    module = loaded(place)
    functions = {name for name, value in vars(flash_attn).items() if name.startswith("flash_attn") and inspect.isfunction(value)}
    assert functions == set(module.__all__) and all(getattr(module, name) is getattr(flash_attn, name) for name in functions)
    x = torch.randn(1, 5, 2, 8, dtype=torch.float32, device="cpu")
    assert module.flash_attn_func(x, x, x, causal=True).shape == x.shape
    assert json.loads((place / "metadata.json").read_text())["version"] == 2


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["flash-attn2", "attention"])
def test_metadata(folder, name, backend):
    about = json.loads((folder / name / "build" / f"torch-{backend}" / "metadata.json").read_text())
    assert about["backend"] == {"type": backend} and about["python-depends"] == []
    assert about["id"].isidentifier() and about["name"].replace("-", "_") == about["id"]


def test_transformers_takes_the_attention_by_its_name(folder, monkeypatch):
    """As transformers 5.24 loads a kernel, with a stand-in for `kernels`: masks keep their structure, whatever is padded, in prompts and steps."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, Gemma2Config
    from transformers.integrations import hub_kernels

    from tilewise.compat import transformers

    asked = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(
        hub_kernels, "get_kernel", lambda name, **others: asked.append(name) or loaded(folder / "attention" / "build" / "torch-cpu")
    )
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, head_dim=16, vocab_size=97, sliding_window=8)).eval()
    tokens, padding = torch.randint(1, 97, (2, 40)), torch.ones(2, 40, dtype=torch.int64)
    padding[0, :7] = 0
    model.set_attn_implementation("eager")
    expected = model(tokens, attention_mask=padding).logits
    generated = model.generate(tokens, attention_mask=padding, max_new_tokens=4, do_sample=False)
    try:
        model.set_attn_implementation(ATTENTION)
        assert asked == [ATTENTION] and model.config._attn_implementation == ATTENTION
        given, kernel = [], transformers.ALL_ATTENTION_FUNCTIONS[ATTENTION]
        monkeypatch.setitem(
            transformers.ALL_ATTENTION_FUNCTIONS._local_mapping,
            ATTENTION,
            lambda *args, **kwargs: given.append(args[4]) or kernel(*args, **kwargs),
        )
        found = model(tokens, attention_mask=padding).logits
        assert len(given) == 2 and all(isinstance(mask, transformers.Pairs) and mask.masks for mask in given)
        assert any(isinstance(each, tw.SlidingWindow) or "Slid" in repr(each) for mask in given for each in mask.masks)
        torch.testing.assert_close(found * padding[..., None], expected * padding[..., None], atol=1e-5, rtol=1e-5)
        assert torch.equal(model.generate(tokens, attention_mask=padding, max_new_tokens=4, do_sample=False), generated)
    finally:
        monkeypatch.undo()
        transformers.unregister(ATTENTION)
    assert ATTENTION not in transformers.ALL_ATTENTION_FUNCTIONS._local_mapping
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(ATTENTION, None)  # transformers' own


def test_kernels_loads_it(folder):
    if not any(metadata.distributions(name="kernels")):  # tools/kernels is a package of that name, too, where tools is on the path
        pytest.skip("kernels is not installed: pip install kernels")
    replaced = f"kernels-community/flash-attn2={folder}/flash-attn2:{ATTENTION}={folder}/attention"
    subprocess.run([sys.executable, "-c", LOAD], check=True, env=os.environ | {"LOCAL_KERNELS": replaced, "HF_HUB_OFFLINE": "1"})
