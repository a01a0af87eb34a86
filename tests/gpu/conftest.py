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
    """Spread pytest-xdist's workers over the GPUs; lift the default `-m 'not gpu'` where all arguments are in this folder, and no -m is with them."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker and gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:  # all of them, for tests of several GPUs, and its own one first
        own = int(worker.removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((own + i) % gpus) for i in range(gpus))
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


def pytest_runtest_logreport(report):
    """Say at once why a test failed: a time limit may end the run before the summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}:\n{report.longreprtext[-4000:]}", flush=True)


@pytest.fixture(autouse=True)
def _leave_memory():
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
