"""`python -m pytest tests/gpu` runs what needs a GPU, without `-m gpu`: naming this folder is asking for it."""

import faulthandler
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIMIT, LONG = 240, 900  # seconds for a test, and for one that is marked slow
KEPT = 1 << 30  # bytes that a worker may keep from one test to the next: the others use the same memory


def pytest_configure(config):
    """Lift the default `-m 'not gpu'` where all arguments are in this folder, and no -m is with them."""
    paths = [Path(str(argument).partition("::")[0]).resolve() for argument in config.args]
    given = any(argument.startswith("-m") for argument in config.invocation_params.args)
    if not given and all(path == HERE or HERE in path.parents for path in paths):
        config.option.markexpr = "not slow"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Spread pytest-xdist's workers over the GPUs: each has all of them, for tests of several, and its own one first. In a worker it would be too
    late: torch asks the driver which GPUs there are when it is asked whether there is one.
    """
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    for own, spec in enumerate(specs if len(gpus) > 1 else []):
        spec.env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[(own + i) % len(gpus)] for i in range(len(gpus)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A kernel that waits for ever ends its process, which names the test (pytest-xdist goes on with another process)."""
    faulthandler.dump_traceback_later(LONG if item.get_closest_marker("slow") else LIMIT, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report):
    """Say at once why a test failed: a time limit may end the run before the summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}:\n{report.longreprtext[-4000:]}", flush=True)


@pytest.fixture(autouse=True)
def _leave_memory():
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
