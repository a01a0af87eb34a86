"""Settings of every test: the compiler of kernels is told what to keep before anything can import it; one thread a worker (pytest runs one worker a
core), and where a test asks for more, they sleep while they wait; hypothesis without deadlines on a shared machine.
"""

import os
import sys
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read with torch: threads that wait would spin on the cores of other workers

import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ("expected_once", "one_kernel", "sampled")

os.environ.setdefault("TILEWISE_HELPERS", "0")  # workers of the suite keep all cores busy
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is first imported, by whichever test comes first
if not torch.cuda.is_available() and "cutlass" not in sys.modules:  # there the tests look into what is compiled
    _kept = tempfile.TemporaryDirectory(prefix="tilewise-compile-")  # lives as long as this module does
    os.environ.update(CUTE_DSL_KEEP="cubin", CUTE_DSL_DUMP_DIR=_kept.name, TILEWISE_CACHE="0")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

settings.register_profile(
    "tilewise", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], derandomize=True
)
settings.load_profile("tilewise")
