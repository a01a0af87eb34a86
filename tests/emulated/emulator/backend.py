"""The Hopper backend on a machine without a GPU: its kernels, compiled for one, are carried out from their PTX."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from emulator.host import Host
from emulator.kept import kept
from emulator.machine import Machine
from emulator.memory import Memory
from emulator.program import Program
from emulator.ptx import parse
from tilewise.backends.hopper import Hopper, short
from tilewise.backends.hopper.backward import plan as backward_plan
from tilewise.backends.hopper.decode import call as decode
from tilewise.backends.hopper.forward import plan as forward_plan
from tilewise.sm90 import jit

NEEDED = [
    pytest.mark.skipif(bool(jit.why_no_compiler()), reason="; ".join(jit.why_no_compiler())),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]
"""Marks of tests that compile kernels and run their launch functions."""


class Emulated(Hopper):
    """pace, seed, fraction: as in `Machine`; slots: multiprocessors; change: what is done to kernels' PTX, to see whether it is noticed."""

    def __init__(
        self, pace: str = "random", seed: int = 0, slots: int = 4, change: Callable[[str], str] = str, fraction: int | None = None
    ) -> None:
        self.pace, self.seed, self.slots, self.change, self.fraction = pace, seed, slots, change, fraction

    def why_not(self, problem) -> list[str]:
        return []

    def forward(self, call):
        with self.on_gpu():
            return super().forward(call)

    def backward(self, *arguments, **named):
        with self.on_gpu():
            return super().backward(*arguments, **named)

    def bind_decode(self, call):
        with self.on_gpu():
            bound = decode.bind(call)

        def run(*given, **options):
            with self.on_gpu():
                return bound(*given, **options)

        return bound and run

    def compiled(self, launch, arguments, config, options="") -> Callable:
        """In place of `tilewise.sm90.jit.compiled`."""
        host, programs = translated(launch, arguments, config, self.change)

        def call(*given) -> None:
            machine = Machine(Memory(jit.tensors_of(given)), self.slots, self.pace, self.seed, self.fraction)
            with np.errstate(all="ignore"):
                host(lambda grid: machine.run(programs[grid.kernel], grid), *given)

        return call

    @contextmanager
    def on_gpu(self) -> Iterator[None]:
        """Tensors of the CPU count as a GPU's, and kernels are emulated."""
        stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
        stand_ins = {
            (torch.cuda, "device"): lambda device: nullcontext(),
            (torch.cuda, "is_current_stream_capturing"): lambda: False,
            (torch.cuda, "current_stream"): lambda device=None: stream,
            (backward_plan, "gpu_of"): lambda device: backward_plan.Gpu(self.slots, backward_plan.AGAIN[0][1]),
            (forward_plan, "num_sms"): lambda device: self.slots,
            (jit, "compiled"): self.compiled,
            (short, "current_device"): lambda: None,
            (short, "current_stream"): lambda device: 0,
            (short, "capturing"): lambda: False,
            (short, "as_operand"): lambda bundle, on_gpu: bundle,
        }
        with ExitStack() as patches:
            for (module, name), stand_in in stand_ins.items():
                patches.enter_context(mock.patch.object(module, name, stand_in))
            yield


@cache
def built(launch, arguments, config) -> tuple[Host, str]:
    """The launch function, and the kernels' PTX."""
    with tempfile.TemporaryDirectory() as folder:
        objects, ptx = kept(launch, arguments, config, Path(folder))
        return Host(objects, Path(folder)), ptx.read_text()


@cache
def translated(launch, arguments, config, change) -> tuple[Host, dict[str, Program]]:
    host, text = built(launch, arguments, config)
    return host, {name: Program(kernel) for name, kernel in parse(change(text)).items()}
