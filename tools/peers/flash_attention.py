"""pytest plugin: flash-attention's own tests over `tilewise.compat.flash_attn`, from a checkout that you name; none of its code is here.

    python -m pip install pytest einops
    git clone https://github.com/Dao-AILab/flash-attention /path/to/flash-attention
    PYTHONPATH=tools/peers python -m pytest -p flash_attention /path/to/flash-attention/tests/test_flash_attn.py \\
        -c /dev/null --rootdir /path/to/flash-attention/tests -o addopts= --tilewise-device cpu --tilewise-sample 40 --tilewise-seed 0

The third generation's are /path/to/flash-attention/hopper/test_flash_attn.py and test_torch_compile_and_export.py, with that folder for --rootdir.

It installs the drop-ins as `flash_attn` and `flash_attn_interface` before the file is collected, and names what the file imports beside the public
functions. Of its half million cases it takes, of every test function, `--tilewise-sample` by seed, without those that EXCLUDED names, each for the
reason that is given there and printed at the end. On `--tilewise-device cpu` it also

- reads "cuda" as "cpu" in the file's text, leaves what `.cuda()` is called of where it is, and calls the device one of compute capability 9.0;
- leaves out cases with more than `--tilewise-longest` positions, for the file's fp32 reference takes their whole score matrices.

`--tilewise-backend triton` has that backend compute (cases.py).

Lengths beyond a page table are clamped on a GPU, without waiting for it; the test that wants an error for them runs with TILEWISE_CHECK=1.

Do not run it in the checkout's own folder, whose flash_attn would then be found first. docs/compat.md has the counts.
"""

import ast
import random
import re
import sys
from collections import Counter

import pytest
import torch
from cases import backend_option, backend_summary, choose_backend

EXCLUDED = {  # what a case's id or name matches: why it is left out
    r"\[0\.17-|-0\.17-|-0\.17\]": "dropout_p 0.17: it reads S_dmask, which is the whole score matrix",
    r"test_flash3_bw_compatibility": "it asks for the schemas of the compiled extension",
    r"test_flash_attn_generator_arg_must_be_none": "it calls the compiled extension `flash_attn_2_cuda` itself",
}

EIGHT_BIT_CACHES = "caches of 8 bits: their rotary tables are in 8 bits, which are refused, as are chunks with left padding there"


def pytest_addoption(parser):
    group = parser.getgroup("tilewise")
    group.addoption("--tilewise-device", default="cuda", choices=("cuda", "cpu"), help="where the tests run")
    group.addoption("--tilewise-sample", type=int, default=40, help="cases of each test function; 0 for all")
    group.addoption("--tilewise-seed", type=int, default=0, help="which cases")
    backend_option(group)
    group.addoption("--tilewise-longest", type=int, default=520, help="positions of the longest case on a CPU")


def pytest_configure(config):
    from tilewise import compat

    choose_backend(config)
    compat.install("flash_attn", "flash_attn_3")
    import flash_attn.flash_attn_interface as interface
    import flash_attn_interface  # noqa: F401 (before the file's own folder, which has another, is searched)

    interface.USE_TRITON_ROCM = False
    interface._get_block_size_n = lambda *_: 64  # of S_dmask's layout alone
    config.tilewise_left_out, config.tilewise_none = Counter(), set()
    if config.getoption("--tilewise-device") == "cpu":
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_properties = lambda *_: type("Properties", (), {"total_memory": 80 * 2**30})
        torch.cuda.synchronize = lambda *_: None
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self


@pytest.fixture(autouse=True)
def lengths_are_looked_at(request, monkeypatch):
    if "block_table_bounds" in request.node.name:
        monkeypatch.setenv("TILEWISE_CHECK", "1")


def pytest_unconfigure():
    from tilewise import compat

    compat.uninstall()


class OnCpu(pytest.Module):
    """A test file in which "cuda" is "cpu"."""

    def _getobj(self):
        tree = ast.parse(self.path.read_text(), str(self.path))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value == "cuda":
                node.value = "cpu"
        from _pytest.assertion.rewrite import rewrite_asserts

        source = self.path.read_bytes()
        rewrite_asserts(tree, source, str(self.path), self.config)
        module = type(pytest)(self.path.stem)
        module.__file__ = str(self.path)
        sys.path.insert(0, str(self.path.parent))  # for its helpers
        exec(compile(tree, str(self.path), "exec"), vars(module))
        return module


def pytest_pycollect_makemodule(module_path, parent):
    if parent.config.getoption("--tilewise-device") == "cpu":
        return OnCpu.from_parent(parent, path=module_path)
    return None


def _why_not(name: str, values: dict, longest: int | None) -> str | None:
    """Why a case is left out, None where it is not."""
    reason = next((why for pattern, why in EXCLUDED.items() if re.search(pattern, name)), None)
    if reason is None and "kvcache" in name and values.get("dtype") is torch.float8_e4m3fn:
        reason = EIGHT_BIT_CACHES if values.get("rotary_fraction") or values.get("has_leftpad") else None
    if reason is None and longest and any(isinstance(n, int) and n > longest for key, n in values.items() if key.startswith("seqlen")):
        reason = f"more than {longest} positions, on a CPU"
    return reason


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """The sample is drawn from parameters, before half a million tests are made of them (which takes minutes)."""
    config, name = metafunc.config, metafunc.function.__name__
    longest = config.getoption("--tilewise-longest") if config.getoption("--tilewise-device") == "cpu" else None
    kept = []
    for case in metafunc._calls:
        reason = _why_not(f"{name}[{case.id}]", case.params, longest)
        if reason is None:
            kept.append(case)
        else:
            config.tilewise_left_out[reason] += 1
    size, draw = config.getoption("--tilewise-sample"), random.Random(f"{config.getoption('--tilewise-seed')} {name}")
    if size and len(kept) > size:
        config.tilewise_left_out["not in the sample"] += len(kept) - size
        kept = draw.sample(kept, size)
    if metafunc._calls and not kept:
        config.tilewise_none.add(name)
    metafunc._calls[:] = kept or metafunc._calls[:1]


def pytest_collection_modifyitems(config, items):
    """What is left out of tests without parameters, and of those with no case left."""
    for item in [item for item in items if not hasattr(item, "callspec") and _why_not(item.name, {}, None)]:
        config.tilewise_left_out[_why_not(item.name, {}, None)] += 1
        items.remove(item)
    items[:] = [item for item in items if item.originalname not in config.tilewise_none]


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("cases left out")
    for reason, count in sorted(config.tilewise_left_out.items()):
        terminalreporter.write_line(f"{count:8d}  {reason}")
    backend_summary(terminalreporter, config)
