"""Which bytes of shared memory copy engine and tensor cores see as threads have left them (PTX ISA, "Proxies").

Between a thread's write and a read through the async proxy there has to be a fence.proxy.async: the writer's, or, once it knows of the write, that of
who asks for the read. Nothing fails without one in most runs on a GPU.
"""

import numpy as np

from emulator.memory import Fault

UNIT = 2  # bytes, which a thread writes at least
NOBODY = -1


class Proxies:
    def __init__(self, size: int, threads: int) -> None:
        self.now = 0
        self.fenced = np.zeros(threads, np.int64)  # when each thread did last
        self.writer = np.full(size // UNIT, NOBODY, np.int16)  # who wrote a unit and has not fenced since
        self.written = np.zeros(size // UNIT, np.int64)  # when

    def write(self, units: np.ndarray, threads: np.ndarray) -> None:
        """threads: as many as the last dimensions of `units`."""
        self.now += 1
        self.writer[units], self.written[units] = threads, self.now

    def fence(self, threads: np.ndarray) -> None:
        self.now += 1
        self.fenced[threads] = self.now
        own = np.zeros(len(self.fenced) + 1, bool)  # NOBODY has the last place
        own[threads] = True
        self.writer[own[self.writer]] = NOBODY

    def write_through(self, units: np.ndarray | slice) -> None:
        """By the copy engine itself."""
        self.writer[units] = NOBODY

    def read(self, units: np.ndarray | slice, fenced: int) -> None:
        """For a thread that had fenced last at `fenced` when it asked."""
        writers = self.writer[units]
        if (writers != NOBODY).any() and (self.written[units][writers != NOBODY] >= fenced).any():
            raise Fault("copy engine or tensor cores read what a thread wrote to shared memory, and there was no fence.proxy.async between")
