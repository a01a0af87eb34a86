"""ComfyUI's node: found by a folder of one file, set on a model, called as ComfyUI calls attention, and what it hands back to ComfyUI."""

import importlib.util
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.compat import _paying, comfyui
from tilewise.machine import once

FOLDER = Path(__file__).parents[2] / "examples" / "comfyui" / "tilewise"


class Model:
    """What ComfyUI's model patcher is to a node."""

    def __init__(self, options):
        self.model_options = options

    def clone(self):
        return Model({name: dict(value) for name, value in self.model_options.items()})


def theirs(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """As ComfyUI's function over torch's."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return o if skip_output_reshape else o.transpose(1, 2).flatten(2)


@pytest.fixture
def node(tmp_path):
    """The node as ComfyUI loads it: the folder that ships, copied to custom_nodes, imported by its path as a module of that name."""
    copied = shutil.copytree(FOLDER, tmp_path / "custom_nodes" / "tilewise", ignore=shutil.ignore_patterns("__pycache__"))
    assert [path.name for path in copied.iterdir()] == ["__init__.py"]
    name = str(copied).replace(".", "_x_")  # such that it is no name of an installed package
    spec = importlib.util.spec_from_file_location(name, copied / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS.keys() == module.NODE_DISPLAY_NAME_MAPPINGS.keys() == {"TilewiseAttention"}
    yield module.NODE_CLASS_MAPPINGS["TilewiseAttention"]
    del sys.modules[name]


def attention_of(node, precision):
    before = Model({"transformer_options": {"patches": 1}})
    (patched,) = getattr(node(), node.FUNCTION)(before, precision)
    assert before.model_options == {"transformer_options": {"patches": 1}} and patched.model_options["transformer_options"]["patches"] == 1
    return patched.model_options["transformer_options"]["optimized_attention_override"]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


MASKS = {"none": None, "pairs": (30, 40), "batch": (2, 30, 40), "heads": (2, 1, 30, 40)}


@pytest.mark.parametrize("kind", ["bool", "numbers"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("split_out", [False, True])
@pytest.mark.parametrize("split_in", [False, True])
def test_called_as_comfyui_calls(node, split_in, split_out, shape, kind):
    assert node.INPUT_TYPES()["required"]["precision"][0] == ["int8", "fp8", "int8_qk", "16 bits"] and node.RETURN_TYPES == ("MODEL",)
    attend = attention_of(node, "int8")
    q, k, v = (normal(2, 4, n, 16, seed=n) if split_in else normal(2, n, 64, seed=n) for n in (30, 40, 40))
    mask = None if shape is None else normal(*shape, seed=5)
    mask = mask > -0.5 if kind == "bool" and mask is not None else mask
    options = {"mask": mask, "attn_precision": torch.float32, "skip_reshape": split_in, "skip_output_reshape": split_out}

    def never(*args, **kwargs):
        raise AssertionError("ComfyUI's own")

    got = attend(never, q, k, v, 4, **options, transformer_options={"block_index": 3})
    torch.testing.assert_close(got, theirs(q, k, v, 4, **options), atol=1e-5, rtol=1e-5)


def test_precisions(node, monkeypatch):
    monkeypatch.setattr(_paying, "_kernel", lambda *args: True)
    q, k, v = (normal(1, n, 256, seed=seed, dtype=torch.bfloat16) for seed, n in enumerate((5, 2100, 2100)))
    split = [x.unflatten(-1, (2, 128)) for x in (q, k, v)]
    for name in ("int8", "int8_qk", "fp8", "16 bits"):
        want = tw.attention(*split, precision=None if name == "16 bits" else name).flatten(2)
        assert torch.equal(attention_of(node, name)(theirs, q, k, v, 2), want)
        assert torch.equal(attention_of(node, name)(theirs, q, k, v, 2, low_precision_attention=False), tw.attention(*split).flatten(2))


def test_what_it_does_not_know_is_comfyuis(node):
    attend, q = attention_of(node, "int8"), normal(1, 30, 64)
    once._said.clear()
    with pytest.warns(RuntimeWarning, match="tilewise in ComfyUI: novel is not known; ComfyUI's own attention computes such calls"):
        assert torch.equal(attend(theirs, q, q, q, 4, novel=1), theirs(q, q, q, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        attend(theirs, q, q, q, 4, novel=1)


def test_it_imports_nothing_of_comfyui():
    assert not [name for name in sys.modules if name.partition(".")[0] == "comfy"] and comfyui.NODE_DISPLAY_NAME_MAPPINGS
