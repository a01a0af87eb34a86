"""The Hopper backend on a machine without a GPU: its kernels, compiled for one, are carried out from their PTX."""

import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from emulator.host import Host
from emulator.machine import Machine
from emulator.memory import Memory
from emulator.program import Program
from emulator.ptx import parse
from tilewise.backends import hopper as backend
from tilewise.backends.hopper import Hopper, gradients
from tilewise.hopper import compile as hopper


class Emulated(Hopper):
    """slots: thread blocks that run at a time."""

    def __init__(self, pace: str = "random", seed: int = 0, slots: int = 4) -> None:
        self.pace, self.seed, self.slots = pace, seed, slots

    def why_not(self, problem) -> list[str]:
        return []

    def forward(self, call):
        with self._on_gpu():
            return super().forward(call)

    def backward(self, *arguments, **named):
        with self._on_gpu():
            return super().backward(*arguments, **named)

    @contextmanager
    def _on_gpu(self):
        def compiled(launch, arguments, config):
            function, programs = translated(launch, arguments, config)

            def call(*given):
                memory = Memory([x for x in given if isinstance(x, Tensor)])
                gpu = Machine(memory, self.slots, self.pace, self.seed)
                with np.errstate(all="ignore"):
                    function(lambda grid: gpu.run(programs[grid.kernel], grid), *given)

            return call

        stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
        stand_ins = {
            (torch.cuda, "device"): lambda device: nullcontext(),
            (torch.cuda, "is_current_stream_capturing"): lambda: False,
            (torch.cuda, "current_stream"): lambda device=None: stream,
            (gradients, "_board"): lambda device: gradients.Board(self.slots, gradients.AGAIN[0][1]),
            (backend, "_multiprocessors"): lambda device: self.slots,
            (hopper, "compiled"): compiled,
        }
        with ExitStack() as patches:
            for (module, name), stand_in in stand_ins.items():
                patches.enter_context(mock.patch.object(module, name, stand_in))
            yield


@cache
def translated(launch, arguments, config):
    """(launch function, programs by kernel)."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = hopper.build(launch, arguments, config, f"--keep-ptx --dump-dir {folder}")
        programs = {name: Program(each) for name, each in parse(kernel.__ptx__).items()}
        return Host(kernel, Path(folder)), programs
