"""The mark of tests of the Triton backend."""

import pytest
import torch

from tilewise.backends.triton import targets

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
REFUSED = "no GPU" if CAPABILITY is None else targets.why_not(CAPABILITY)
NEEDS_TRITON = [pytest.mark.gpu, pytest.mark.skipif(bool(REFUSED), reason=REFUSED)]
