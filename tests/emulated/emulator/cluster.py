"""Thread blocks that reach each other's shared memory (PTX ISA, "Cluster of Cooperative Thread Arrays", "barrier.cluster", "mapa")."""

import numpy as np

from emulator.host import Grid
from emulator.memory import Fault

RANK = 24  # from which bit on an address of shared memory says whose of a cluster it is: 1 + its rank, or 0, the thread's own


class Cluster:
    """Thread blocks that reach each other's shared memory, and a barrier for all of their threads."""

    def __init__(self, grid: Grid) -> None:
        self.blocks: list = []
        self.threads = grid.cluster * grid.threads
        self.there = self.generation = 0

    def arrive(self, threads: int) -> None:
        self.there += threads
        if self.there == self.threads:
            self.there, self.generation = 0, self.generation + 1

    def of(self, address: int, block) -> tuple:
        """Whose shared memory an address is in, and where, for a thread of `block`."""
        found = self.blocks[rank - 1] if (rank := address >> RANK) else block
        if found.ended:
            raise Fault("shared memory of a thread block that has ended")
        return found, address & (1 << RANK) - 1


def address_of(addresses: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Of the same places in another block's shared memory."""
    return addresses | rank + np.uint32(1) << np.uint32(RANK)
