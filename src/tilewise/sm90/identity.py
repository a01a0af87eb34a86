"""What a compiled kernel on disk is called, and what besides versions decides its code: of entries made here and elsewhere."""

import ctypes
import hashlib
import os
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

FUNCTION = "tilewise"  # the name of every entry's function
APART = tuple(f"CUTE_DSL_{name}" for name in ("ARCH", "KEEP", "DUMP_DIR", "LIBS"))  # these change no code, or are told otherwise


def name_of(launch: str, config, arch: str) -> str:
    """The name of that kernel's entry, the same with every version of everything."""
    values = [(each.name, repr(getattr(config, each.name))) for each in fields(config)]
    if odd := [name for name, value in values if " at 0x" in value]:
        raise TypeError(f"{type(config).__name__}.{odd[0]} has no lasting name, which a compiled kernel is found by")
    identity = repr((launch, _own_source(launch), type(config).__qualname__, values, arch))
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def settings() -> list[str]:
    """ "NAME=value" of the environment's variables for the DSL that may change the code of kernels."""
    return [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CUTE_DSL_") and name not in APART]


def driver() -> int | None:
    """The CUDA version, by its first number, that the driver supports; None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def _own_source(launch: str) -> str:
    """A digest of the launch function's module, where it is none of this package's."""
    module = launch.partition(":")[0]
    if module.startswith("tilewise."):
        return ""
    return hashlib.sha256(Path(find_spec(module).origin).read_bytes()).hexdigest()
