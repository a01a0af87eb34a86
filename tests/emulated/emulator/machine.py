"""A GPU for translated kernels: thread blocks, and what they ask of the copy engine.

Copy engine and tensor cores work at their own pace: what they are asked for happens at once ("eager"), as late as the kernel lets it ("lazy"), or
in between ("random"). Which warp goes on is drawn. A kernel whose results depend on any of that has a race.
"""

import ctypes
import random
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from emulator.arithmetic import u1
from emulator.cluster import Cluster
from emulator.host import Grid
from emulator.memory import Fault, Memory, TensorMap
from emulator.program import Program
from emulator.proxies import Proxies
from emulator.warp import LANES, Warp

SHARED_BASE = 1024
PARAMETERS = 0x7000_0000_0000_0000  # where parameters are, for who asks for their address
REGISTERS = 65536  # of a multiprocessor
PACES = ("eager", "lazy", "random")
PATIENCE = 300  # rounds in which nothing happens before it is called a deadlock


class Machine:
    """Runs grids one after another. slots: thread blocks at a time; fraction: as in `products.added`."""

    def __init__(self, memory: Memory, slots: int, pace: str, seed: int, fraction: int | None = None) -> None:
        self.memory, self.slots, self.pace, self.fraction = memory, slots, pace, fraction
        self.random = random.Random(seed)
        self.pending: list[Callable[[], None]] = []  # for the copy engine
        self.events = 0  # what others may have waited for
        self.ticks = 0  # of the clock

    def run(self, program: Program, grid: Grid) -> None:
        waiting, resident, quiet = deque(np.ndindex(*reversed(grid.blocks))), [], 0
        while waiting or resident:
            while waiting and (not resident or len(resident) + grid.cluster <= self.slots):
                cluster = Cluster(grid)
                for rank in range(grid.cluster):
                    cluster.blocks.append(Block(self, program, grid, tuple(reversed(waiting.popleft())), cluster, rank))
                resident += cluster.blocks
            before = self.events
            warps = [warp for block in resident for warp in block.warps]
            self.random.shuffle(warps)
            for warp in warps:
                warp.run()
                while self.pace == "random" and self.pending and self.random.random() < 0.3:
                    self.complete(self.random.choice(self.pending))
            resident = [block for block in resident if not block.over()]
            quiet = 0 if self.events > before else quiet + 1
            if quiet and self.pending:
                self.complete(self.random.choice(self.pending))
            elif quiet > PATIENCE:
                raise Fault(f"nothing happens any more: {[str(warp) for warp in warps if warp.at]}")
        while self.pending:
            self.complete(self.pending[0])

    def ask(self, job: Callable[[], None]) -> None:
        """The copy engine to do something, once, some time."""
        self.pending.append(job)
        if self.pace == "eager":
            self.complete(job)

    def complete(self, job: Callable[[], None]) -> None:
        self.pending.remove(job)
        self.events += 1
        job()


class Barrier:
    """An mbarrier (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier")."""

    def __init__(self, expected: int) -> None:
        self.expected = self.missing = expected
        self.bytes = self.phase = 0

    def change(self, arrivals: int, size: int) -> None:
        self.missing -= arrivals
        self.bytes += size
        if self.missing < 0:
            raise Fault(f"more than {self.expected} arrivals at a barrier in one phase")
        if self.missing == self.bytes == 0:
            self.phase ^= 1
            self.missing = self.expected


class Block:
    """A thread block and its shared memory, full of NaN at first."""

    def __init__(self, machine: Machine, program: Program, grid: Grid, place: tuple[int, int, int], cluster: Cluster, rank: int) -> None:
        self.machine, self.program, self.threads, self.place = machine, program, grid.threads, place
        self.row = grid.row or grid.threads
        self.cluster, self.rank, self.ended = cluster, np.full(32, rank, np.uint32), False
        self.index, self.grid = ([np.full(32, n, np.uint32) for n in numbers] for numbers in (place, grid.blocks))
        self.size, self.shared_base = SHARED_BASE + grid.shared_bytes, np.full(32, SHARED_BASE, np.uint32)
        self.shared = np.full(-(-self.size // 16) * 16, 0xFF, u1)
        self.views: dict[np.dtype, np.ndarray] = {}
        self.proxies = Proxies(len(self.shared), grid.threads)
        sizes = program.kernel.parameters
        self.parameters = {name: ctypes.string_at(grid.parameters[i], sizes[name]) for i, name in enumerate(sizes)}
        self.addresses = {name: np.full(32, PARAMETERS + (i << 12), np.uint64) for i, name in enumerate(sizes)}
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # of bar.sync: threads that are there, generation
        self.stores: list = []  # of copies.py
        self.warps = [Warp(self, first // len(LANES)) for first in range(0, grid.threads, len(LANES))]
        self.launched = REGISTERS // grid.threads // 8 * 8  # registers of a thread at first, at most
        self.registers = dict.fromkeys(self.warps, self.launched)  # and since setmaxnreg

    def over(self) -> bool:
        if any(warp.at for warp in self.warps):
            return False
        if sum(self.registers.values()) > self.launched * len(self.warps):
            raise Fault(
                f"warps ask for {sum(self.registers.values())} registers, and their launch has {self.launched} each: one waits for ever"
            )
        if any(store.data is None for store in self.stores):
            raise Fault("a thread block ended while the copy engine still read its shared memory")
        self.machine.events += 1
        self.ended = True
        return True

    def view(self, kind: np.dtype) -> np.ndarray:
        """Shared memory."""
        if kind not in self.views:
            self.views[kind] = self.shared.view(kind)
        return self.views[kind]

    def piece(self, address: int, size: int) -> np.ndarray:
        """Bytes of shared memory."""
        if not SHARED_BASE <= address <= address + size <= self.size:
            raise Fault(f"{size} bytes at {address - SHARED_BASE} are not in the {self.size - SHARED_BASE} bytes of shared memory")
        return self.shared[address : address + size]

    def set_up(self, address: int, expected: int) -> None:
        self.barriers[address] = Barrier(expected)

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise Fault(f"there is no barrier at {address - SHARED_BASE}")
        return self.barriers[address]

    def change(self, address: int, arrivals: int, size: int) -> None:
        """Of a barrier: threads that arrive, bytes that are expected, or are there."""
        self.machine.events += 1
        self.barrier(address).change(arrivals, size)

    def described(self, address: int) -> TensorMap:
        return TensorMap.of([*self.parameters.values()][address - PARAMETERS >> 12])
