"""What the DSL compiles for the host, run without a GPU: the launch function, whose kernels are handed to Python with their parameters.

It takes torch tensors of the CPU, and is told that they are on a GPU.
"""

import ctypes
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.sm90 import cache

NONE, INT, FLOAT, TENSOR, ARRAY = 0, 1, 3, 7, 71  # TVMFFITypeIndex
ON_GPU = 2  # kDLCUDA
CODES = {
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float8_e4m3fn: (10, 8),
}


CLUSTER = 4  # cudaLaunchAttributeClusterDimension


class Attribute(ctypes.Structure):
    """cudaLaunchAttribute."""

    _fields_ = [("id", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class Launch(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("number", ctypes.c_uint32),
    ]

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster, side by side."""
        found = [each.value[:3] for each in self.attributes[: self.number] if each.id == CLUSTER]
        if any(dims[1:] != [1, 1] for dims in found):
            raise NotImplementedError(f"clusters of {found}")
        return found[0][0] if found else 1


class Given(ctypes.Structure):
    """TVMFFIAny."""

    class Value(ctypes.Union):
        _fields_ = [("integer", ctypes.c_int64), ("number", ctypes.c_double), ("pointer", ctypes.c_void_p)]

    _fields_ = [("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", Value)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class Array(ctypes.Structure):
    """An object of type ffi.Array."""

    _fields_ = [("header", ctypes.c_uint8 * 24), ("data", ctypes.c_void_p), ("size", ctypes.c_int64)]


class Grid(NamedTuple):
    """A kernel to run: its name, (x, y, z) of the grid, threads of a block, bytes of shared memory, where its parameters lie, and how many blocks a
    cluster has.
    """

    kernel: str
    blocks: tuple[int, int, int]
    threads: int
    shared_bytes: int
    parameters: ctypes.Array
    cluster: int = 1
    row: int = 0  # threads of a block along x, where it has a second dimension


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(Launch), ctypes.POINTER(ctypes.c_void_p))


class Host:
    """A compiled launch function; `run` gets the grids of a call in order."""

    def __init__(self, objects: Path, folder: Path) -> None:
        """objects: what the DSL's object of a kernel exports, under the name of the cache's functions; folder: for the library."""
        library, source = folder / "kernel.so", Path(__file__).with_name("host.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-Wl,-Bsymbolic", source, objects, "-o", library], check=True)
        self._stand_in = ctypes.CDLL(str(library))
        self._function = getattr(self._stand_in, f"__tvm_ffi_{cache.FUNCTION}")

    def __call__(self, run: Callable[[Grid], None], *arguments) -> None:
        """Raises what `run` raises, or RuntimeError with what the launch function says about its arguments."""
        kept, values = [], (Given * len(arguments))()
        for value, argument in zip(values, arguments, strict=True):
            _fill(value, argument, kept)
        failures = []

        @CALLBACK
        def launch(kernel, config, parameters) -> int:
            try:
                launched = config.contents
                blocks, threads = tuple(launched.grid), math.prod(launched.block)
                run(Grid(kernel.decode(), blocks, threads, launched.shared_bytes, parameters, launched.cluster, launched.block[0]))
            except BaseException as failure:
                failures.append(failure)
            return len(failures)

        ctypes.c_void_p.in_dll(self._stand_in, "launch").value = ctypes.cast(launch, ctypes.c_void_p).value
        failed = self._function(None, values, len(arguments), ctypes.byref(Given()))
        if failures:
            raise failures[0]
        if failed:
            raise RuntimeError(self._said())

    def _said(self) -> str:
        """The last error."""
        return (ctypes.c_char * 4096).in_dll(self._stand_in, "message").value.decode()


def _fill(value: Given, argument, kept: list) -> None:
    if argument is None:
        value.type = NONE
    elif isinstance(argument, Tensor):
        code, bits = CODES[argument.dtype]
        n = argument.dim()
        shape, strides = (ctypes.c_int64 * n)(*argument.shape), (ctypes.c_int64 * n)(*argument.stride())
        described = DLTensor(argument.data_ptr(), ON_GPU, 0, n, code, bits, 1, shape, strides, 0)
        kept.append(described)
        value.type, value.value.pointer = TENSOR, ctypes.addressof(described)
    elif isinstance(argument, tuple):  # in place of an ffi.Array, whose header nobody reads
        elements = (Given * len(argument))()
        for element, part in zip(elements, argument, strict=True):
            _fill(element, part, kept)
        array = Array(data=ctypes.addressof(elements), size=len(argument))
        kept += [elements, array]
        value.type, value.value.pointer = ARRAY, ctypes.addressof(array)
    elif isinstance(argument, float):
        value.type, value.value.number = FLOAT, argument
    else:
        value.type, value.value.integer = INT, int(argument)
