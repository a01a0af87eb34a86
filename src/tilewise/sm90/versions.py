"""The compiler's version that the tests run with. Another may do as well, so that it is named and not refused."""

import functools
import warnings
from importlib import metadata

DSL, TESTED = "nvidia-cutlass-dsl", "4.8.1"  # as the constraints on installation say


def untested() -> str:
    """A sentence where the DSL here is another than the one that the tests run with; empty where it is that one, or not there."""
    try:
        version = metadata.version(DSL)
    except metadata.PackageNotFoundError:
        return ""
    if version == TESTED:
        return ""
    return f"kernels are compiled by {DSL} {version}, and were tested with {TESTED}; should one fail: pip install {DSL}=={TESTED}"


@functools.cache
def warn_untested() -> None:
    """Once a process."""
    if found := untested():
        warnings.warn(found, RuntimeWarning, stacklevel=4)
