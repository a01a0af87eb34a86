"""`python -m pytest tests/gpu` runs what needs a GPU, without `-m gpu`: naming this folder is asking for it."""

import faulthandler
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT, LONG = 120, 900  # seconds for a test, and for one that is marked slow


def pytest_configure(config):
    """Lift the default `-m 'not gpu'` where every argument is in this folder, and no -m was given with them."""
    paths = [Path(str(argument).partition("::")[0]).resolve() for argument in config.args]
    given = any(argument.startswith("-m") for argument in config.invocation_params.args)
    if not given and all(path == HERE or HERE in path.parents for path in paths):
        config.option.markexpr = "not slow"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A kernel that waits for ever ends its process, which names the test (pytest-xdist goes on with another process)."""
    faulthandler.dump_traceback_later(LONG if item.get_closest_marker("slow") else LIMIT, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
