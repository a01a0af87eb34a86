"""pytest plugin: torch's own SDPA tests over `tilewise.compat.sdpa`, from a checkout that you name.

    python -m pip install pytest expecttest
    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch /path/to/pytorch
    cd /path/to/pytorch/test
    PYTHONPATH=/path/to/tilewise/tools/peers python -m pytest -p torch_sdpa test_transformers.py \\
        -o addopts= --tilewise-by function --tilewise-sample 100 --tilewise-seed 0

`--tilewise-by function` puts the function in the place of torch's before the file imports it, `operator` replaces torch's CPU kernel under it, which
torch chooses as before. The tests are made for CPUs alone, whatever devices the file asks for. docs/compat.md has the counts.
"""

import functools
import re

from cases import choose_backend, pytest_terminal_summary, select  # noqa: F401 (a hook)
from cases import pytest_addoption as shared_options

WANTED = r"::(TestSDPA|TestSDPACpuOnly|TestSDPAFailureModes|TestAttnBias|TestTransformers)\w*::.*(sdp|attention|attn|causal|masked)"
EXCLUDED = {  # what a case's id matches: why it is left out
    r"TestSDPA(Cuda|Xpu)Only": "kernels of other devices",
    r"TestSDPAFailureModes": "which kernels of torch's refuse what",
    r"(fused_sdp_choice|priority_order|dispatch_fails|backends_set_to_math)": "which kernel torch chooses",
    r"dropout_p_0_[1-9]": "the expected numbers are those of torch's generator",
    r"(nested|Nested)": "nested tensors, which are refused",
    r"(fastpath|script)": "torch's own fused encoder layer, and TorchScript",
}


def pytest_addoption(parser):
    shared_options(parser)
    parser.getgroup("tilewise").addoption("--tilewise-by", default="function", choices=("function", "operator"), help="what is replaced")


def pytest_configure(config):
    from torch.testing._internal import common_device_type as devices

    from tilewise.compat import sdpa

    choose_backend(config)
    instantiate = devices.instantiate_device_type_tests

    @functools.wraps(instantiate)
    def on_cpu(test_class, scope, except_for=None, only_for=None, **options):
        return instantiate(test_class, scope, only_for=("cpu",))

    devices.instantiate_device_type_tests = on_cpu
    config.tilewise_handle = sdpa.patch() if config.getoption("--tilewise-by") == "function" else sdpa.override_cpu()


def pytest_unconfigure(config):
    config.tilewise_handle.remove()


def pytest_collection_modifyitems(config, items):
    select(config, items, WANTED, EXCLUDED, lambda item: re.sub(r"_(cpu|bfloat16|float\d+|\d+|True|False|batch_size).*", "", item.name))
