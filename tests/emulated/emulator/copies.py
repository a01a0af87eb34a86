"""What warps ask of the copy engine: boxes of tensors and stretches of bytes, between global and shared memory (PTX ISA, "cp.async.bulk")."""

from functools import partial
from itertools import chain

import numpy as np

from emulator.arithmetic import f4, lanes_of, u1
from emulator.memory import Fault, TensorMap, swizzled
from emulator.proxies import UNIT

BYTES = 16  # in multiples of which it moves what is no tensor's


class Store:
    """From shared to global memory, in two steps: it may read much earlier than it writes."""

    def __init__(self, machine, read, write) -> None:
        self.machine, self._read, self._write, self.data = machine, read, write, None

    def __call__(self) -> None:
        self.read()
        self._write(self.data)

    def read(self) -> None:
        if self.data is None:
            self.data = self._read()

    def finish(self) -> None:
        if self in self.machine.pending:
            self.machine.complete(self)


class Copies:
    """Methods of a warp. Every lane that takes part asks for a copy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[int, list[list[Store]]] = {}  # of a lane; the last one is open
        self.fetches: list[list] = [[]]  # of the warp's threads themselves (cp.async), in groups; the last one is open

    def load_box(self, m, to, described, corner, barrier, everyone):
        """everyone: a bit for each block of the cluster that gets it."""
        for lane in lanes_of(m):
            box, at = self.block.described(int(described[lane])), tuple(int(x[lane]) for x in corner)
            blocks = self.block.cluster.blocks
            for block in [self.block] if everyone is None else [x for i, x in enumerate(blocks) if everyone[lane] >> i & 1]:
                self.machine.ask(partial(self._load_box, block, box, at, int(to[lane]), int(barrier[lane])))

    def _load_box(self, block, box: TensorMap, corner: tuple[int, ...], to: int, barrier: int) -> None:
        if block.ended:
            raise Fault("the copy engine writes to shared memory of a thread block that has ended")
        data = np.zeros((box.bytes // box.row, box.row), u1)
        for row, (address, first, n) in zip(data, box.rows(corner), strict=True):
            if n:
                row[first : first + n] = self.machine.memory.bytes(address, n)
        block.piece(to, box.bytes)
        block.shared[places := _places(to, box)] = data.ravel()
        block.proxies.write_through(places // UNIT)
        block.change(barrier, 0, -box.bytes)

    def store_box(self, m, source, described, corner):
        for lane in lanes_of(m):
            box, at = self.block.described(int(described[lane])), tuple(int(x[lane]) for x in corner)
            self._store(lane, partial(self._read_box, box, int(source[lane]), self.fenced(lane)), partial(self._write_box, box, at))

    def _read_box(self, box: TensorMap, source: int, fenced: int) -> np.ndarray:
        self.block.piece(source, box.bytes)
        self.block.proxies.read((places := _places(source, box)) // UNIT, fenced)
        return self.block.shared[places].reshape(-1, box.row)

    def _write_box(self, box: TensorMap, corner: tuple[int, ...], data: np.ndarray) -> None:
        for row, (address, first, n) in zip(data, box.rows(corner), strict=True):
            if n:
                self.machine.memory.bytes(address, n)[:] = row[first : first + n]

    def load_bytes(self, m, to, source, size, barrier):
        for lane in lanes_of(m):
            self.machine.ask(partial(self._load_bytes, *(int(x[lane]) for x in (to, source, size, barrier))))

    def _load_bytes(self, to: int, source: int, size: int, barrier: int) -> None:
        _aligned(to, source, size)
        self.block.piece(to, size)[:] = self.machine.memory.bytes(source, size)
        self.block.proxies.write_through(slice(to // UNIT, (to + size) // UNIT))
        self.block.change(barrier, 0, -size)

    def store_bytes(self, m, to, source, size, adds):
        for lane in lanes_of(m):
            target, place, n = (int(x[lane]) for x in (to, source, size))
            _aligned(target, place, n)
            self._store(lane, partial(self._read_bytes, place, n, self.fenced(lane)), partial(self._write_bytes, target, adds))

    def _read_bytes(self, place: int, n: int, fenced: int) -> np.ndarray:
        self.block.proxies.read(slice(place // UNIT, (place + n) // UNIT), fenced)
        return self.block.piece(place, n).copy()

    def _write_bytes(self, target: int, adds: bool, data: np.ndarray) -> None:
        memory = self.machine.memory.bytes(target, len(data))
        memory[:] = (memory.view(f4) + data.view(f4)).view(u1) if adds else data

    def _store(self, lane: int, read, write) -> None:
        store = Store(self.machine, read, write)
        self.groups.setdefault(lane, [[]])[-1].append(store)
        self.block.stores.append(store)
        self.machine.ask(store)

    def commit(self, m):
        for lane, groups in self.groups.items():
            if m is None or m[lane]:
                groups.append([])

    def wait(self, m, left, read):
        """Until at most `left` groups of a lane are not done, or not read."""
        for lane, groups in self.groups.items():
            if m is None or m[lane]:
                for store in chain(*groups[: max(0, len(groups) - 1 - left)]):
                    store.read() if read else store.finish()

    def fetch(self, to, source, m, n, size):
        """n bytes for each lane, those behind the first `size` 0; they may come as late as they are waited for."""
        given = partial(self._fetch, to, source, m, n, size)
        self.fetches[-1].append(given)
        if self.machine.pace == "eager":
            self.fetches[-1].pop()()

    def _fetch(self, to, source, m, n, size) -> None:
        self.machine.events += 1
        for lane in lanes_of(m):
            place, there = int(to[lane]), int(size[lane])
            data = np.zeros(n, u1)
            if there:
                data[:there] = self.machine.memory.bytes(int(source[lane]), there)
            self.block.piece(place, n)[:] = data
            self.block.proxies.write(np.arange(place // UNIT, -(-(place + n) // UNIT)), self.thread[lane : lane + 1])

    def commit_fetches(self):
        self.fetches.append([])

    def wait_fetches(self, left):
        """Until at most `left` groups are not there."""
        while len(self.fetches) - 1 > left:
            for fetch in self.fetches.pop(0):
                fetch()


def _places(address: int, box: TensorMap) -> np.ndarray:
    """Of a box's bytes in shared memory."""
    return swizzled(address + np.arange(box.bytes), box.swizzled_bytes)


def _aligned(*numbers: int) -> None:
    if any(number % BYTES for number in numbers):
        raise Fault(f"the copy engine moves multiples of {BYTES} bytes between multiples of them, and was given {numbers}")
