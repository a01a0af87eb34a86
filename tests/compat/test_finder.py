"""Installing under the peers' names and taking it back: modules, metadata, finders as before; real packages refused, namespaces shared; status."""

import importlib
import importlib.util
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tilewise import compat
from tilewise.compat import _finder, flash_attn, flash_attn_3, flash_attn_cute
from tilewise.errors import UnsupportedError

NAMES = ("flash_attn", "flash_attn_3", "flash_attn_cute", "sageattention")
DISTRIBUTIONS = ("flash-attn", "flash-attn-3", "flash-attn-4", "sageattention")
TOP_LEVELS = ("flash_attn", "flash_attn_2_cuda", "flash_attn_3", "flash_attn_interface", "sageattention")
INSIDE = {  # what programs import from inside the peers: ring attention, sequence parallelism, trainers, Transformer Engine, models of the hub
    "flash_attn.flash_attn_interface": (
        "_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward, _wrapped_flash_attn_forward, "
        "FlashAttnFunc, FlashAttnVarlenFunc, FlashAttnVarlenQKVPackedFunc, maybe_contiguous, flash_attn_gpu, flash_attn_varlen_func"
    ),
    "flash_attn.bert_padding": (
        "IndexFirstAxis, IndexPutFirstAxis, index_first_axis, index_put_first_axis, index_first_axis_residual, pad_input, unpad_input"
    ),
    "flash_attn.layers.rotary": "ApplyRotaryEmb, RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_func, apply_rotary_emb_torch, rotate_half",
    "flash_attn.ops.triton.rotary": "apply_rotary",
    "flash_attn_2_cuda": "fwd, bwd, varlen_fwd, varlen_bwd, fwd_kvcache",
    "flash_attn_interface": "_flash_attn_forward, _flash_attn_backward, flash_attn_func, flash_attn_combine, FlashAttnFunc, maybe_contiguous",
    "flash_attn_3.flash_attn_interface": "_flash_attn_forward, _flash_attn_backward, flash_attn_varlen_func, flash_attn_with_kvcache",
    "flash_attn_3": "__version__",
}


def state():
    """What installing may touch."""
    peers = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in TOP_LEVELS}
    found = [each.version for name in DISTRIBUTIONS for each in metadata.distributions(name=name)]  # of all distributions takes a second
    operators = set(torch._C._dispatch_get_all_op_names())
    return peers, list(sys.meta_path), list(sys.path_hooks), found, compat.status(), operators


@pytest.fixture(autouse=True)
def as_before():
    before = state()
    assert not before[0], "a test before this one left a peer's module behind"
    yield
    compat.uninstall()
    assert state() == before
    for name in TOP_LEVELS:
        assert importlib.util.find_spec(name) is None


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    """A folder on sys.path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in TOP_LEVELS]:
        del sys.modules[name]
    monkeypatch.undo()
    importlib.invalidate_caches()


def write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def test_flash_attn():
    assert importlib.util.find_spec("flash_attn") is None
    compat.install("flash_attn")
    compat.install("flash_attn")
    spec = importlib.util.find_spec("flash_attn")
    assert spec is not None and "flash_attn" not in sys.modules, "asking imports nothing"
    import flash_attn as peer
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, flash_attn_varlen_func  # noqa: F401
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # noqa: F401
    from flash_attn.ops.triton.rotary import apply_rotary  # noqa: F401

    assert all(getattr(peer, name) is getattr(flash_attn, name) for name in flash_attn.__all__ if name.startswith("flash_attn_"))
    exec("from flash_attn import *", taken := {})
    assert taken["flash_attn_func"] is flash_attn.flash_attn_func and set(peer.__all__) <= set(vars(peer))
    assert peer.__version__ == metadata.version("flash-attn") == metadata.version("flash_attn") == "2.8.4+tilewise"
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert metadata.metadata("flash-attn")["Name"] == "flash-attn" and metadata.distribution("flash-attn").files is None
    assert "flash-attn" in [each.metadata["Name"] for each in metadata.distributions()]
    assert importlib.util.find_spec("flash_attn.cute") is None and importlib.util.find_spec("flash_attn_interface") is None


def test_the_others():
    compat.install("flash_attn_3", "flash_attn_cute")
    import flash_attn.cute
    import flash_attn_interface

    assert flash_attn.cute.flash_attn_func is flash_attn_cute.flash_attn_func
    assert flash_attn_interface.flash_attn_combine is flash_attn_3.flash_attn_combine
    assert not hasattr(flash_attn, "flash_attn_func") and importlib.util.find_spec("flash_attn.bert_padding") is None
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn-4"]
    assert metadata.packages_distributions()["flash_attn_interface"] == ["flash_attn_3"]


@pytest.mark.parametrize("module", INSIDE)
def test_names_from_inside(module):
    compat.install("flash_attn", "flash_attn_3")
    found = importlib.import_module(module)
    missing = [name for name in INSIDE[module].split(", ") if not hasattr(found, name)]
    assert not missing
    assert found.__spec__.loader is _finder.FINDER and module in sys.modules


def test_einops_by_way_of_bert_padding():
    pytest.importorskip("einops")
    compat.install("flash_attn")
    from einops import rearrange as theirs
    from flash_attn.bert_padding import rearrange

    assert rearrange is theirs and not hasattr(importlib.import_module("flash_attn.bert_padding"), "nothing")


def test_who_looks_for_flash_attn_3():
    compat.install("flash_attn_3")
    found = metadata.packages_distributions()
    assert found["flash_attn_3"] == found["flash_attn_interface"] == ["flash_attn_3"]
    assert importlib.util.find_spec("flash_attn_3") and metadata.version("flash-attn-3") == "3.0.0+tilewise"
    import flash_attn_3
    import flash_attn_interface

    assert flash_attn_3.flash_attn_interface._flash_attn_forward is flash_attn_interface._flash_attn_forward


@pytest.mark.parametrize("name, path", [("flash_attn", "flash_attn_2_cuda"), ("flash_attn_3", "flash_attn_3")])
def test_half_of_a_real_one_is_refused(somewhere, name, path):
    write(somewhere / path / "__init__.py", "real = True")
    with pytest.raises(UnsupportedError, match=rf"a real {path} is there"):
        compat.install(name)


def test_one_name_shared_by_two():
    compat.install("flash_attn_cute")
    import flash_attn.cute

    compat.install("flash_attn")
    import flash_attn
    import flash_attn.cute

    assert flash_attn.flash_attn_func and flash_attn.cute.flash_attn_varlen_func
    compat.uninstall("flash_attn_cute")
    import flash_attn

    assert flash_attn.flash_attn_func and not hasattr(flash_attn, "cute")
    assert importlib.util.find_spec("flash_attn.cute") is None


@pytest.mark.parametrize(
    "name, path", [("flash_attn", "flash_attn"), ("flash_attn_3", "flash_attn_interface"), ("sageattention", "sageattention")]
)
@pytest.mark.parametrize("imported", [False, True])
def test_a_real_one_is_refused(somewhere, name, path, imported):
    write(somewhere / path / "__init__.py", "real = True")
    if imported:
        importlib.import_module(path)
    before = dict(sys.modules), list(sys.meta_path)
    with pytest.raises(
        UnsupportedError, match=rf"a real {path} is there .*which is not replaced; uninstall .* from tilewise.compat import {name}"
    ):
        compat.install(name)
    assert (dict(sys.modules), list(sys.meta_path)) == before, "asking imported or changed something"
    (status,) = [each for each in compat.status() if each.name == name]
    assert status.importable and not status.installed


def test_all_of_a_call_are_installed_or_none(somewhere):
    write(somewhere / "flash_attn_interface" / "__init__.py", "real = True")
    compat.install("flash_attn_cute")
    with pytest.raises(UnsupportedError, match="a real flash_attn_interface is there"):
        compat.install("flash_attn_cute", "flash_attn", "flash_attn_3")
    assert [each.name for each in compat.status() if each.installed] == ["flash_attn_cute"]


def test_a_real_one_that_comes_later_wins(somewhere):
    compat.install("flash_attn")
    write(somewhere / "flash_attn" / "__init__.py", "real = True")
    importlib.invalidate_caches()
    import flash_attn

    assert flash_attn.real


def test_a_module_without_a_spec_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", type(sys)("flash_attn_interface"))
    with pytest.raises(UnsupportedError, match=r"a real flash_attn_interface is there \(sys.modules\)"):
        compat.install("flash_attn_3")
    monkeypatch.undo()


@pytest.mark.parametrize("when", ["never", "before", "during"])
def test_the_namespace_of_the_fourth_is_kept(somewhere, when):
    """Its wheel has flash_attn/cute and no flash_attn/__init__.py: flash_attn becomes ours, flash_attn.cute stays theirs, and all is in the end."""
    write(somewhere / "flash_attn" / "cute" / "__init__.py", "theirs = True")
    if when == "before":
        import flash_attn.cute

        namespace = flash_attn
    with pytest.raises(UnsupportedError, match=r"a real flash_attn.cute is there"):
        compat.install("flash_attn_cute")
    compat.install("flash_attn")
    if when == "during":
        import flash_attn.cute
    if when != "never":
        import flash_attn
        from flash_attn.cute import theirs

        assert theirs and flash_attn.cute.theirs and flash_attn.flash_attn_func and flash_attn.__version__ == "2.8.4+tilewise"
        from flash_attn.bert_padding import unpad_input  # noqa: F401
    compat.uninstall("flash_attn")
    if when == "before":
        assert sys.modules["flash_attn"] is namespace
    import flash_attn.cute

    assert flash_attn.cute.theirs and not hasattr(flash_attn, "flash_attn_func") and not hasattr(flash_attn, "bert_padding")
    assert not [name for name in sys.modules if name.startswith("flash_attn") and "cute" not in name and name != "flash_attn"]


def test_cute_beside_a_real_second(somewhere):
    write(somewhere / "flash_attn" / "__init__.py", "real = True")
    compat.install("flash_attn_cute")
    import flash_attn.cute

    assert flash_attn.real and flash_attn.cute.flash_attn_func is flash_attn_cute.flash_attn_func
    compat.uninstall("flash_attn_cute")
    assert flash_attn.real and not hasattr(flash_attn, "cute")


def test_names():
    with pytest.raises(
        ValueError, match="compat.install takes one or more names of flash_attn, flash_attn_3, flash_attn_cute, sageattention, got none"
    ):
        compat.install()
    with pytest.raises(ValueError, match="compat.install takes names of flash_attn, .*, got 'flash-attn'"):
        compat.install("flash_attn", "flash-attn")
    assert not _finder.installed("flash_attn"), "names are checked before any is installed"
    with pytest.raises(ValueError, match=r"got 'transformers'; use transformers by tilewise.compat.transformers.register\(\)"):
        compat.uninstall("transformers")
    compat.uninstall("flash_attn")


def test_every_way_to_use_it_names_what_there_is():
    """What doctor prints is to be copied."""
    code = r"""
        import importlib, re
        from tilewise import compat
        for each in compat.status():
            for module, name in re.findall(r"tilewise\.compat\.(\w+)(?:\.| import )(\w+)", each.use):
                if each.importable or module not in ("transformers", "diffusers"):
                    print(module, name, callable(getattr(importlib.import_module(f"tilewise.compat.{module}"), name)))
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    assert {"sdpa patch True", "flex flex_attention True"} <= set(out.splitlines()) and "False" not in out
    assert not any("import transformers" in each.use or "import diffusers" in each.use for each in compat.status()), "it hides the real one"


def test_status_looks_up_and_imports_nothing():
    code = """
        import sys
        from tilewise import compat
        before = set(sys.modules)
        for each in compat.status():
            print(each.name, each.importable, each.version, each.tested)
        compat.install("flash_attn")
        assert [each.name for each in compat.status() if each.installed] == ["flash_attn"]
        assert not [each for each in compat.status() if each.name == "flash_attn" and each.importable], "importable means a real one"
        heavy = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not heavy & {"transformers", "diffusers", "xformers", "flash_attn", "flash_attn_interface"}, heavy
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    rest = compat.status()[len(NAMES) :]
    names = [line.split()[0] for line in out.splitlines()]
    files = {path.stem for path in Path(compat.__file__).parent.glob("[a-z]*.py")}
    assert set(NAMES) <= set(names) <= files, "those that have a file"
    assert all(
        str(importlib.util.find_spec(each.module) is not None) == line.split()[1]
        for each, line in zip(rest, out.splitlines()[len(NAMES) :], strict=True)
    )


@pytest.mark.slow
def test_transformers_takes_it_for_flash_attention_2():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    code = """
        import torch
        torch.cuda.is_available = lambda: True
        from tilewise import compat
        compat.install("flash_attn")
        from transformers.utils import import_utils
        assert import_utils.is_flash_attn_2_available()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
