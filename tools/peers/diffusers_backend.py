"""pytest plugin: diffusers' own tests of attention backends over the backend "tilewise", from a checkout that you name.

    python -m pip install pytest
    git clone --depth 1 https://github.com/huggingface/diffusers /path/to/diffusers
    cd /path/to/diffusers
    PYTHONPATH=src:/path/to/tilewise/tools/peers python -m pytest -p diffusers_backend tests/models/transformers -o addopts=

Their mixin tests each backend on a model: its output is close to that of torch's SDPA, set in either way, restored afterwards, and compiled. It is
mixed into the tests of two models; here every model's tests in the folder have it, at their own small sizes. docs/compat.md has the counts.
"""

import pytest
from cases import choose_backend, pytest_addoption, pytest_terminal_summary, select  # noqa: F401 (hooks)

WANTED = r"\[tilewise\]"
EXCLUDED = {  # what a case's id matches: why it is left out
    r"AnyFlowFAR": "it takes the backend flex alone",
    r"SDNQ": "its inputs fit a model that is downloaded",
    r"::TestOfBackend\w+::test_compile": "compiling is tested with the models for which diffusers tests it",
}


def pytest_configure(config):
    from tilewise.compat import diffusers as ours

    choose_backend(config)
    config.tilewise_handle = ours.register()


def pytest_unconfigure(config):
    config.tilewise_handle.remove()


def pytest_collectstart(collector):
    """Puts "tilewise" in the place of all backends, and the mixin into every model's tests."""
    if not isinstance(collector, pytest.Module):
        return
    from tests.models.testing_utils import attention

    from tilewise.compat.diffusers import NAME

    attention._ALL_BACKEND_PARAMS[:] = [pytest.param(attention.AttentionBackendName(NAME), id=NAME)]
    try:
        module = collector.obj
    except collector.CollectError:  # a package that it needs is not here; pytest says so when it collects
        return
    mixin = attention.AttentionBackendTesterMixin
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    for kind in classes:
        if kind.__name__.endswith("TesterConfig") and not any(issubclass(each, kind) and issubclass(each, mixin) for each in classes):
            setattr(
                module,
                f"TestOfBackend{kind.__name__}",
                type(f"TestOfBackend{kind.__name__}", (kind, mixin), {"__module__": module.__name__}),
            )


def pytest_collection_modifyitems(config, items):
    select(config, items, WANTED, EXCLUDED, lambda item: item.nodeid.partition("[")[0])
