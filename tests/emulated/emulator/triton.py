"""Kernels that Triton compiled, run from their PTX: in place of its launcher, for tensors on the CPU."""

import ctypes
from collections.abc import Callable, Mapping

from torch import Tensor

from emulator.host import Grid
from emulator.machine import Machine
from emulator.memory import Memory
from emulator.program import Program
from emulator.ptx import parse
from tilewise.backends.triton.launch import Kernel, compiled
from tilewise.backends.triton.targets import Target

NUMBERS = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
SCRATCH = 2  # pointers that Triton adds behind the parameters
SLOTS = 4  # thread blocks at a time


def launcher(kernel: Kernel, target: Target, pace: str = "lazy", seed: int = 0) -> Callable[[int, Mapping[str, object]], None]:
    """As launch.launcher, for the PTX of `target`."""
    made = compiled(kernel, target)
    (program,) = (Program(each) for each in parse(made.asm["ptx"]).values())
    types, _ = kernel.signature()

    def launch(programs: int, arguments: Mapping[str, object]) -> None:
        given = [_parameter(kind, arguments.get(name)) for name, kind in types.items() if kind != "constexpr"]
        given += [ctypes.c_uint64(0)] * SCRATCH
        addresses = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        threads = 32 * made.metadata.num_warps
        Machine(Memory(tensors), SLOTS, pace, seed).run(
            program, Grid(kernel.name, (programs, 1, 1), threads, made.metadata.shared, addresses)
        )

    return launch


def _parameter(kind: str, value: object) -> ctypes._SimpleCData:
    if kind.startswith("*"):
        return ctypes.c_uint64(value.data_ptr() if isinstance(value, Tensor) else 0)
    return NUMBERS[kind](value or 0)
