"""32 threads: their way through a program, what they read and write, and how they wait for each other and for other warps."""

import numpy as np

from emulator.arithmetic import lanes_of, pair, u1, u2, u4
from emulator.cluster import address_of
from emulator.copies import Copies
from emulator.memory import Fault
from emulator.products import Products
from emulator.program import Stretch
from emulator.proxies import UNIT

LANES = np.arange(32, dtype=np.uint32)
ROW, COLUMN = LANES // 4, LANES % 4 * 2  # of an 8 x 8 matrix's two numbers that a lane has
MOST_STRETCHES = 400  # of a warp before others have their turn


class Warp(Copies, Products):
    """Threads that are at the same place go on together, those at the earliest place first. m is None where all 32 do what a method is asked for."""

    def __init__(self, block, number: int) -> None:
        super().__init__()
        self.block, self.number, self.machine = block, number, block.machine
        self.lane, self.thread = LANES, LANES + np.uint32(len(LANES) * number)
        self.place = divmod(self.thread, np.uint32(block.row))  # (y, x) in the block
        kinds = block.program.kernel.registers.values()
        blank = {kind: np.zeros(len(LANES), kind) for kind in set(kinds)}
        self.registers = [blank[kind] for kind in kinds]
        self.left = self.thread < block.threads  # those that have not ended
        self.at: dict[int, np.ndarray] = {0: self.left}  # who is where
        self.may_go = True
        self.waits_for: int | None = None  # the generation of a named barrier
        self.cluster_waits_for = 0  # likewise

    def __str__(self) -> str:
        stretches = (self.block.program.stretches[place] for place in self.at)
        return f"block {self.block.place}, warp {self.number}: {[str(each.instructions[0]) if each.instructions else '' for each in stretches]}"

    @property
    def clock(self) -> np.ndarray:
        """Of all warps: how often it was read."""
        self.machine.ticks += 1
        return np.full(len(LANES), self.machine.ticks, np.uint32)

    def run(self) -> None:
        """Until nobody can go on, or for a while."""
        if self.machine.pace == "random" and self.machine.random.random() < 0.5:
            self.next_product()
        for _ in range(MOST_STRETCHES):
            if not any(place in self.at and self._step(place) for place in sorted(self.at)):
                return

    def _step(self, place: int) -> bool:
        """Whether the threads there have come further, and need not let others go first."""
        stretch, lanes = self.block.program.stretches[place], self.at[place]
        if stretch.kind in ("together", "wait") and not (lanes == self.left).all():
            return False
        self.may_go = True
        try:
            if lanes.all():
                stretch.whole(self.registers, None, self)
            else:
                stretch.partly(self.registers, lanes, self)
        except Exception as failure:
            failure.add_note(f"{self}, in {'; '.join(map(str, stretch.instructions))[:1500]}")
            raise
        if self.may_go or stretch.kind != "wait":
            del self.at[place]
            self._go_on(stretch, lanes)
        return self.may_go or stretch.kind not in ("wait", "poll")

    def _go_on(self, stretch: Stretch, lanes: np.ndarray) -> None:
        if stretch.ends:
            self.left = self.left & ~lanes
            self.machine.events += 1
        elif stretch.target is None:
            self._arrive_at(stretch.number + 1, lanes)
        elif stretch.guard is None:
            self._arrive_at(stretch.target, lanes)
        else:
            jump = lanes & (self.registers[stretch.guard] ^ stretch.negated)
            self._arrive_at(stretch.target, jump)
            self._arrive_at(stretch.number + 1, lanes & ~jump)

    def _arrive_at(self, place: int, lanes: np.ndarray) -> None:
        if lanes.any():
            self.at[place] = self.at[place] | lanes if place in self.at else lanes

    # Memory

    def parameter(self, name, offset, kind, n):
        return np.repeat(np.frombuffer(self.block.parameters[name], kind, n, offset)[:, None], len(LANES), 1)

    def load_global(self, addresses, m, kind, n):
        self.may_go = False  # where it is a poll
        given = addresses if m is None else addresses[m]
        found = np.zeros((n, len(given)), kind)
        for which, view, where in self.machine.memory.at(given, kind, n):
            for i in range(n):
                found[i, which] = view[where + i]
        return _spread(found, m)

    def store_global(self, addresses, m, kind, values):
        self.machine.events += 1
        given = addresses if m is None else addresses[m]
        for which, view, where in self.machine.memory.at(given, kind, len(values)):
            for i, x in enumerate(values):
                view[where + i] = (x if m is None else x[m])[which]

    def add_global(self, addresses, m, kind, x):
        """What was there, for each lane."""
        return self._update_global(addresses, m, kind, lambda before, lane: before + x[lane])

    def count_global(self, addresses, m, kind, most):
        """Likewise, one more, or 0 behind `most`."""
        return self._update_global(addresses, m, kind, lambda before, lane: before + kind.type(1) if before < most[lane] else kind.type(0))

    def swap_global(self, addresses, m, kind, compared, swapped):
        return self._update_global(addresses, m, kind, lambda before, lane: swapped[lane] if before == compared[lane] else before)

    def _update_global(self, addresses, m, kind, after):
        self.machine.events += 1
        before = np.zeros(len(LANES), kind)
        for lane in lanes_of(m):
            ((_, view, (where,)),) = self.machine.memory.at(addresses[lane : lane + 1], kind, 1)
            before[lane] = view[where]
            view[where] = after(before[lane], lane)
        return before

    def _shared(self, addresses, kind, n):
        """(view, index of the first number of each)."""
        size = n * kind.itemsize
        if int(addresses.min()) < self.block.shared_base[0] or int(addresses.max()) + size > self.block.size:
            raise Fault(f"{size} bytes each at {addresses.astype(int) - int(self.block.shared_base[0])} are not all in shared memory")
        if (addresses & np.uint32(size - 1)).any():
            raise Fault(f"{addresses} are not all multiples of the {size} bytes that are accessed")
        return self.block.view(kind), addresses // np.uint32(kind.itemsize)

    def load_shared(self, addresses, m, kind, n):
        view, where = self._shared(addresses if m is None else addresses[m], kind, n)
        return _spread(np.stack([view[where + np.uint32(i)] for i in range(n)]), m)

    def or_shared(self, addresses, m, x):
        """What was there. Each lane has an address of its own."""
        before = self.load_shared(addresses, m, x.dtype, 1)[0]
        self.store_shared(addresses, m, x.dtype, (before | x,))
        return before

    def store_shared(self, addresses, m, kind, values):
        self.machine.events += 1
        view, where = self._shared(addresses if m is None else addresses[m], kind, len(values))
        for i, x in enumerate(values):
            view[where + np.uint32(i)] = x if m is None else x[m]
        units = np.arange(-(-len(values) * kind.itemsize // UNIT), dtype=np.uint32)[:, None]
        self.block.proxies.write(where * kind.itemsize // UNIT + units, self.thread if m is None else self.thread[m])

    def store_cluster(self, addresses, m, kind, values):
        """To shared memory of a block of the cluster."""
        self.machine.events += 1
        for lane in lanes_of(m):
            block, address = self.block.cluster.of(int(addresses[lane]), self.block)
            block.piece(address, len(values) * kind.itemsize)[:] = np.stack([x[lane] for x in values]).view(u1)

    def _matrices(self, addresses, n):
        """(view, indices (n, 8, 8)): lanes 8 i and following have the addresses of matrix i's rows."""
        view, where = self._shared(addresses[: 8 * n], u2, 8)
        return view, where.reshape(n, 8, 1) + np.arange(8, dtype=np.uint32)

    def load_matrices(self, addresses, n, transposed):
        view, where = self._matrices(addresses, n)
        found = view[where].swapaxes(1, 2) if transposed else view[where]
        return [pair(x[ROW, COLUMN], x[ROW, COLUMN + 1]) for x in found]

    def store_matrices(self, addresses, values, transposed):
        view, where = self._matrices(addresses, len(values))
        for x, places in zip(values, where, strict=True):
            places = places.T if transposed else places
            view[places] = np.ascontiguousarray(x).view(u2).reshape(8, 8)
            self.block.proxies.write(places, self.thread.repeat(2).reshape(8, 8))

    def transpose(self, x):
        """An 8 x 8 matrix; movmatrix."""
        found = np.ascontiguousarray(x).view(u2).reshape(8, 8).T
        return pair(found[ROW, COLUMN], found[ROW, COLUMN + 1])

    # Other lanes

    def any(self, p, m):
        return np.full(len(LANES), (p if m is None else p[m]).any())

    def all(self, p, m):
        return np.full(len(LANES), (p if m is None else p[m]).all())

    def ballot(self, p, m):
        return np.full(len(LANES), sum(1 << lane for lane in lanes_of(p if m is None else p & m)), u4)

    def reduce(self, x, m, how):
        return np.full(
            len(LANES), {"max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce}[how](x if m is None else x[m]), x.dtype
        )

    def elect(self, m):
        leader = lanes_of(m)[0]
        return np.full(len(LANES), leader, u4), leader == LANES

    # Proxies

    def fence(self, m):
        self.block.proxies.fence(self.thread if m is None else self.thread[m])

    def fenced(self, lane) -> int:
        """When it did."""
        return int(self.block.proxies.fenced[self.thread[lane]])

    # Barriers

    def barrier(self, which, count, waits):
        """bar.sync and bar.arrive; asked again as long as it has to wait."""
        state, count = self.block.named[int(which[0])], self.block.threads if count is None else int(count[0])
        if self.waits_for is None:
            self.machine.events += 1
            generation = state[1]
            state[0] += len(LANES)
            if state[0] == count:
                state[:] = 0, generation + 1
            self.waits_for = generation if waits else None
        if waits:
            self.may_go = state[1] != self.waits_for
            self.waits_for = None if self.may_go else self.waits_for

    def arrive_of_cluster(self):
        self.machine.events += 1
        self.cluster_waits_for = self.block.cluster.generation
        self.block.cluster.arrive(len(LANES))

    def wait_of_cluster(self):
        self.may_go = self.block.cluster.generation != self.cluster_waits_for

    def address_in_cluster(self, addresses, rank):
        return address_of(addresses, rank)

    def init(self, addresses, m, count):
        for lane in lanes_of(m):
            self.block.set_up(int(addresses[lane]), int(count[lane]))

    def arrive(self, addresses, m, count, expects):
        """expects: one arrival, and so many bytes are to come."""
        for lane in lanes_of(m):
            block, address = self.block.cluster.of(int(addresses[lane]), self.block)
            block.change(address, *((1, int(count[lane])) if expects else (int(count[lane]), 0)))

    def passed(self, addresses, m, parity):
        found = np.ones(len(LANES), bool)
        for lane in lanes_of(m):
            found[lane] = self.block.barrier(int(addresses[lane])).phase != parity[lane] & 1
        self.may_go = bool(found.all())
        return found


def _spread(found: np.ndarray, m) -> np.ndarray:
    """(n, lanes that take part) as (n, 32)."""
    if m is None:
        return found
    spread = np.zeros((len(found), len(LANES)), found.dtype)
    spread[:, m] = found
    return spread
