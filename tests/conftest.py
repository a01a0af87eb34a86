"""Settings of every test: one thread a worker (pytest runs one worker a core), and where a test asks for more, they sleep while they wait; the
architecture that the DSL compiles for where there is no GPU, and hypothesis without deadlines on a shared machine.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read with torch: threads that wait would spin on the cores of other workers

import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the DSL is first imported, by whichever test comes first
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

settings.register_profile(
    "tilewise", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], derandomize=True
)
settings.load_profile("tilewise")
