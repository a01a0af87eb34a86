"""Prebuilt kernels without a GPU and without the DSL: their launch functions, with a stand-in for CUDA's driver."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import tvm_ffi.libinfo
from torch import Tensor

from emulator.backend import Emulated
from emulator.host import Host
from emulator.machine import Machine
from emulator.memory import Memory
from emulator.program import Program
from emulator.ptx import parse
from tilewise.sm90 import cache, jit


def driver(folder: Path) -> ctypes.CDLL:
    """The stand-in, loaded: from now on it is this process's libcuda.so.1."""
    library, source = folder / "libcuda.so.1", Path(__file__).with_name("driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


class Prebuilt(Host):
    """The launch function of an entry."""

    def __init__(self, entry: Path, stand_in: ctypes.CDLL) -> None:
        self._stand_in = stand_in
        self._function = getattr(ctypes.CDLL(str(entry)), f"__tvm_ffi_{cache.FUNCTION}")

    def _said(self) -> str:
        raised = ctypes.c_void_p()
        ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIErrorMoveFromRaised(ctypes.byref(raised))
        _, _, text, size = (ctypes.c_uint64 * 4).from_address(
            raised.value + 24
        )  # TVMFFIErrorCell: kind and message, behind the object's header
        return ctypes.string_at(text, size).decode()


class EmulatedPrebuilt(Emulated):
    """The Hopper backend with the entries of a package in place of a compiler; ptx: of the one kernel that it may need."""

    def __init__(self, stand_in: ctypes.CDLL, ptx: str) -> None:
        super().__init__()
        self.stand_in, self.used = stand_in, []
        self.programs = {name: Program(kernel) for name, kernel in parse(ptx).items()}

    def compiled(self, launch, arguments, config, options="") -> Callable:
        with mock.patch.object(jit, "build", None):
            path = cache.entry(launch, config, jit.arch())
        self.used.append(path)
        host = Prebuilt(path, self.stand_in)

        def call(*given: Tensor) -> None:
            machine = Machine(Memory(jit.tensors_of(given)), self.slots, self.pace, self.seed)
            with np.errstate(all="ignore"):
                host(lambda grid: machine.run(self.programs[grid.kernel], grid), *given)

        return call
